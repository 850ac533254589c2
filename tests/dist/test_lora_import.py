"""lora.path in every kind of layout: each rank takes its shards of a PEFT adapter."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.config.sections import LoraConfig
from megatron_rl.models.families import make_spec
from megatron_rl.models.spec import load_hf_config
from megatron_rl.weights.hf.mapping import to_hf, to_mcore
from megatron_rl.weights.hf.peft_folder import Factors, write_peft
from megatron_rl.weights.hf.targets import adapted
from tests.dist.launch import run_ranks
from tests.families import family_checkpoint

LORA = LoraConfig(rank=3, alpha=6.0, targets=("all", "embedding", "lm_head"))
LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2}, {"tp": 2, "ep": 2, "etp": 1}, {"ep": 2}, {"pp": 2, "vp": 2}, {"cp": 2}, {},
]  # fmt: skip


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3"])
def test_an_adapter_is_the_same_in_every_layout(family: str, tmp_path: Path) -> None:
    base = family_checkpoint(tmp_path / "base", family, num_hidden_layers=4)
    spec, generator = make_spec(load_hf_config(base)), torch.Generator().manual_seed(1)
    expected, factors = load_file(base / "model.safetensors"), {}
    for entry in adapted(spec, LORA.targets):
        rows, width = sum(shape[0] for _, shape in entry.hf), entry.hf[0][1][1]
        a, b = (torch.randn(size, generator=generator) * 0.2 for size in ((3, width), (rows, 3)))
        factors[entry.name] = Factors(a, b)
        weight = to_mcore(entry, [expected[name] for name in entry.hf_names], spec, 0, 1)
        expected |= dict(to_hf(entry, [weight + LORA.scale * (b @ a)], spec))
    write_peft(tmp_path / "peft", factors, spec, LORA, base=base, metadata={})
    run_ranks(compare_exports, 2, base, tmp_path / "peft", expected)


def base_is_latent(base: Path) -> bool:
    """Latent attention is refused under context parallelism."""
    return make_spec(load_hf_config(base)).is_mla


def compare_exports(base: Path, folder: Path, expected: dict[str, torch.Tensor]) -> None:
    import torch.distributed as dist

    from tests.dist.engines import make_engine

    dist.init_process_group("gloo")
    for parallel in LAYOUTS:
        if "cp" in parallel and base_is_latent(base):
            continue
        lora = {key: getattr(LORA, key) for key in ("rank", "alpha", "targets")}
        lora["path"] = str(folder)
        engine = make_engine(base, parallel=parallel, lora=lora, replay="none", measure=False)
        merged = {name: tensor.clone() for name, tensor in engine.export() if tensor is not None}
        if dist.get_rank() == 0:
            assert merged.keys() == expected.keys()
            for name, tensor in merged.items():
                assert torch.allclose(tensor, expected[name], rtol=0, atol=1e-6), (parallel, name)
        engine.parallel.destroy()
    dist.destroy_process_group()
