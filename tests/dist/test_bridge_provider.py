"""model.provider = bridge on real ranks (float32): the native provider's numbers, transformers'
logits, checkpoints.

They need Megatron-Bridge: make test-bridge.
"""

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.bridge_families import (
    BOTH,
    BRIDGE_ONLY,
    DELTA_NET_LIMIT,
    DELTA_NETS,
    bridge_checkpoint,
    needs_bridge,
)
from tests.dist.launch import run_ranks
from tests.dist.test_model import LENGTHS, run_packed, run_padded
from tests.families import FAMILIES, LIMIT, Reference, check_same, family_checkpoint, reference

pytestmark = [needs_bridge, pytest.mark.slow]

HAS_TE = importlib.util.find_spec("transformer_engine") is not None
STAGES = {"pp": 2, "layers_per_stage": [1, 2]}
# OLMoE under tp is refused: a tensor rank has only some of the heads that its norm is over
AGREE = [
    *(
        ("qwen3_moe", layout)
        for layout in ({"tp": 2}, STAGES, {"ep": 2}, {"tp": 2, "ep": 2, "etp": 1})
    ),
    *(("olmoe", layout) for layout in (STAGES, {"ep": 2})),
    *(("deepseek_v3", layout) for layout in ({"tp": 2}, STAGES, {"ep": 2})),
]
LOGITS: list[tuple[str, dict[str, Any]]] = [
    (name, {}) for name in (*BOTH, *BRIDGE_ONLY, *DELTA_NETS)
]
LOGITS_OF_TWO = [
    *(
        (name, layout)
        for name in BRIDGE_ONLY
        for layout in ({"tp": 2}, {"ep": 2}, STAGES)
        if name != "gpt_oss"
    ),
    *(("gpt_oss", layout) for layout in ({"tp": 2, "etp": 1, "ep": 2}, {"ep": 2}, {"pp": 2})),
]
LOGITS_OF_TWO += [
    (name, layout) for name in DELTA_NETS for layout in ({"tp": 2}, {"ep": 2}, {"pp": 2})
]
LOGITS_OF_TWO = [case for case in LOGITS_OF_TWO if case != ("minimax_m2", {"tp": 2})]  # as OLMoE


def test_both_providers_give_the_same_logprobs_routes_and_gradients(tmp_path: Path) -> None:
    for name in {name for name, _ in AGREE}:
        bridge_checkpoint(tmp_path / name, name)
    run_ranks(check_agreement, 2, tmp_path, AGREE, timeout=900)


def check_agreement(root: Path, cases: list[tuple[str, dict[str, Any]]]) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    for name, layout in cases:
        found = {
            provider: replayed_update(root / name, provider, layout)
            for provider in ("native", "bridge")
        }
        native, bridge = found["native"], found["bridge"]
        what = f"{name} {layout}"
        assert all(a.equal(b) for a, b in zip(native["routes"], bridge["routes"], strict=True)), (
            what
        )
        for a, b in zip(native["logprobs"], bridge["logprobs"], strict=True):
            assert torch.allclose(a, b, atol=1e-5), (what, (a - b).abs().max())
        assert native["gradients"].keys() == bridge["gradients"].keys(), what
        largest = max(
            (float(each.abs().max()) for each in native["gradients"].values()), default=1.0
        )
        differ = {
            key: float((each - bridge["gradients"][key]).abs().max()) / largest
            for key, each in native["gradients"].items()
        }
        worst = max(differ, key=lambda key: differ[key], default="")
        print(f"{what}: gradients differ by {differ.get(worst, 0):.2g} of the largest, {worst}")
        assert not differ or differ[worst] < 1e-4, (what, worst, differ[worst])


def replayed_update(path: Path, provider: str, layout: dict[str, Any]) -> dict[str, Any]:
    """Live routes of every micro-batch; then R3's log-probs, and the gradients of an update under
    their HF names.
    """
    from megatron_rl.engine.optim import StepOutcome
    from megatron_rl.metrics.reduce import MetricSums
    from tests.dist.engines import make_engine, random_batch

    engine = make_engine(path, parallel=layout, model={"provider": provider})
    spec, sums = engine.spec, MetricSums()
    assert engine.manager.layers or not spec.moe_layers or layout.get("pp")
    batch = random_batch(
        engine, num_experts=spec.num_experts, top_k=spec.top_k, layers=len(spec.moe_layers)
    )
    live = engine.old_logprobs(batch, sums, replay="R2")
    old = engine.old_logprobs(batch, sums, replay="R3")

    def keep_gradients() -> StepOutcome:
        for chunk in engine.chunks:
            for parameter in chunk.parameters():
                parameter.data.copy_(parameter.main_grad)
        return StepOutcome(0.0, 0.0, skipped=False)

    engine.optimizer.step = keep_gradients
    engine.update(batch, old, sums, replay="R3")
    gradients = {
        name: tensor.clone()
        for name, tensor in engine.export()
        if tensor is not None and "bias" not in name
    }
    engine.parallel.destroy()
    return {"routes": live.recorded, "logprobs": old.logprobs, "gradients": gradients}


def test_logits_and_routes_of_transformers_on_one_rank(tmp_path: Path) -> None:
    run_ranks(check_logits, 1, tmp_path, LOGITS, timeout=900)


def test_logits_and_routes_of_transformers_on_two_ranks(tmp_path: Path) -> None:
    run_ranks(check_logits, 2, tmp_path, LOGITS_OF_TWO, timeout=900)


def check_logits(root: Path, cases: list[tuple[str, dict[str, Any]]]) -> None:
    """Packed and padded logits, routes, and every tensor back bit by bit."""
    from safetensors.torch import load_file

    for name, layout in cases:
        provider, parallel = open_provider(root / f"{name}{parallel_rank()}", name, layout)
        path = provider.model.path
        expected: Reference = reference(path, LENGTHS)
        chunks = provider.build()
        provider.load(chunks)
        logits, maps = run_packed(
            chunks, provider.core_config, parallel, torch.cat(expected.sequences)
        )
        limit = DELTA_NET_LIMIT if name in DELTA_NETS else LIMIT
        check_same(
            logits, maps, expected, slice(None), provider.spec, f"{name} {layout} packed", limit
        )
        tokens = torch.cat(expected.sequences)
        logits, maps = run_padded(
            chunks, provider.core_config, parallel, tokens[:16], tokens[40:56]
        )
        check_same(
            logits,
            maps,
            expected,
            [*range(16), *range(40, 56)],
            provider.spec,
            f"{name} {layout} padded",
            limit,
        )
        exported, original = exported_by(provider, chunks), load_file(path / "model.safetensors")
        assert exported.keys() == original.keys(), (name, layout)
        if parallel.rank == 0:
            different = [key for key, tensor in original.items() if not tensor.equal(exported[key])]
            assert not different, f"{name} {layout}: {different[:3]}"
        parallel.destroy()


def test_what_would_be_wrong_is_refused(tmp_path: Path) -> None:
    family_checkpoint(tmp_path / "dense_between", "qwen3_moe", mlp_only_layers=[1])
    for name in ("olmoe", "minimax_m2", "gpt_oss"):
        bridge_checkpoint(tmp_path / name, name)
    run_ranks(check_refused, 2, tmp_path, timeout=600)


def check_refused(root: Path) -> None:
    from megatron.core import parallel_state

    from megatron_rl.models.spec import ModelError
    from megatron_rl.weights.hf.files import CheckpointError

    for name in ("olmoe", "minimax_m2"):
        provider, parallel = open_provider(root / name, name, {"tp": 2})
        with pytest.raises(
            ModelError, match=r"parallel\.tp = 2: .* normalises queries over all heads"
        ):
            provider.build()
        parallel.destroy()
    with pytest.raises(
        ModelError,
        match="megatron-core refuses these settings for GptOssForCausalLM: Bias in Moe .* ETP",
    ):
        open_provider(root / "gpt_oss", "gpt_oss", {"tp": 2})
    parallel_state.destroy_model_parallel()
    provider, parallel = open_provider(root / "dense_between", "", {"ep": 2})
    with pytest.raises(
        CheckpointError, match=r"decoder\.layers\.1\.mlp.* were not filled .* by Megatron-Bridge"
    ):
        provider.load(provider.build())
    parallel.destroy()


def test_replay_of_transformers_routes_trains_what_only_bridge_knows(tmp_path: Path) -> None:
    """R3 gives transformers' log-probs, an update moves every tensor, and full recompute makes the
    same update.
    """
    run_ranks(check_replay, 1, tmp_path, timeout=900)


def check_replay(root: Path) -> None:
    from tests.unit.engine.test_families import check_recompute, check_replay_of_transformers_routes

    for name in (*BRIDGE_ONLY, *DELTA_NETS):
        _, parallel = open_provider(root / name, name, {})
        limit = DELTA_NET_LIMIT if name in DELTA_NETS else 1e-5
        check_replay_of_transformers_routes(root / name, parallel, "bridge", limit)
        check_recompute(root / name, parallel, "full", "bridge")
        print(f"{name}: replayed")
        parallel.destroy()


@pytest.mark.skipif(not HAS_TE, reason="TransformerEngine is not installed here")
def test_with_the_layers_of_transformer_engine(tmp_path: Path) -> None:
    """Constructed without a GPU, in bfloat16: every router has the hook, every tensor comes back
    bit by bit.
    """
    for name in (*BOTH, *BRIDGE_ONLY):
        bridge_checkpoint(tmp_path / name, name, dtype=torch.bfloat16)
    run_ranks(check_te, 1, tmp_path, timeout=900)


def check_te(root: Path) -> None:
    from unittest import mock

    from safetensors.torch import load_file

    from megatron_rl.config import ModelConfig, ParallelConfig
    from megatron_rl.distributed import make_parallel
    from megatron_rl.engine import bridge, model
    from megatron_rl.engine.provider import provider_spec
    from megatron_rl.engine.routers import check_routers
    from megatron_rl.replay.compatibility import check_compatibility

    # TransformerEngine asks CUDA about the device while layers are made; nothing is computed
    hopper = SimpleNamespace(
        major=9, minor=0, name="H100", multi_processor_count=132, total_memory=80 << 30
    )
    model.uses_transformer_engine = bridge.uses_transformer_engine = lambda *_: True
    parallel = make_parallel(ParallelConfig(), device="cpu", timeout_minutes=5)
    for name in (*BOTH, *BRIDGE_ONLY):
        settings = ModelConfig(path=root / name, provider="bridge")
        # as a run does first: it must not choose the layers of the CPU
        provider_spec(settings, parallel.device)
        provider = bridge.BridgeProvider(settings, ParallelConfig(), parallel, {})
        mode = "R3" if provider.spec.moe_layers else "none"
        check_compatibility(provider.core_config, mode=mode, core_version="0.19.2")
        with (
            mock.patch("torch.cuda.is_available", lambda: True),
            mock.patch("torch.cuda.get_device_capability", lambda *_: (9, 0)),
            mock.patch("torch.cuda.get_device_properties", lambda *_: hopper),
        ):
            chunks = provider.build()
        kinds = {type(module).__module__.partition(".")[0] for module in chunks[0].modules()}
        assert "transformer_engine" in kinds, kinds
        check_routers(chunks, provider.spec.moe_layers)
        provider.load(chunks)
        assert same_tensors(
            load_file(root / name / "model.safetensors"), exported_by(provider, chunks)
        ), name
        print(f"{name}: with TransformerEngine's layers")
    parallel.destroy()


def exported_by(provider: Any, chunks: list[Any]) -> dict[str, Any]:
    """Name -> tensor; None off rank 0."""
    return {each.name: each.tensor for each in provider.export(chunks, 1)}


def parallel_rank() -> int:
    import os

    return int(os.environ["RANK"])


def open_provider(path: Path, name: str, layout: dict[str, Any]) -> tuple[Any, Any]:
    """On a rank: (provider, parallel) of a checkpoint that every rank writes for itself, the same
    one.
    """
    import torch.distributed as dist

    from megatron_rl.config import ModelConfig, ParallelConfig
    from megatron_rl.distributed import make_parallel
    from megatron_rl.engine.provider import make_provider

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    if not path.exists():
        bridge_checkpoint(path, name)
    sizes = ParallelConfig(**layout)
    parallel = make_parallel(sizes, device="cpu", timeout_minutes=5)
    model = ModelConfig(path=path, dtype="float32", provider="bridge")
    return make_provider(model, sizes, parallel, {}), parallel


def test_a_dense_model_trains_without_replay(tmp_path: Path) -> None:
    bridge_checkpoint(tmp_path / "qwen3", "qwen3")
    native, bridge = run_ranks(check_dense, 1, tmp_path / "qwen3", timeout=600)[0]
    assert native == pytest.approx(bridge, rel=1e-4)


def check_dense(path: Path) -> list[float]:
    """The gradient norm of an update, by both providers; replay is refused for a model without
    experts.
    """
    import torch.distributed as dist

    from megatron_rl.replay.compatibility import ReplayIncompatible
    from tests.dist.engines import make_engine, random_batch
    from tests.dist.test_engine import one_update

    dist.init_process_group("gloo")
    norms = []
    for provider in ("native", "bridge"):
        with pytest.raises(
            ReplayIncompatible, match="replay.mode = R3: the model has no MoE layer"
        ):
            make_engine(path, model={"provider": provider})
        parallel_state_destroy()
        engine = make_engine(path, model={"provider": provider}, replay="none", measure=False)
        norms.append(one_update(engine, random_batch(engine, layers=0))["optim/grad_norm"])
        engine.parallel.destroy()
    return norms


def parallel_state_destroy() -> None:
    """Forget the groups of an engine that was refused."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


def test_a_resumed_run_is_bit_identical(tmp_path: Path) -> None:
    from tests.dist.test_checkpoint import run_parts, save_and_resume
    from tests.tiny import random_checkpoint

    bridge = {"provider": "bridge"}
    layouts = {
        "tp": ({"tp": 2}, {}, bridge, {}, 1),
        "ep": ({"ep": 2}, {"distributed": True}, bridge, {}, 1),
    }
    checkpoint = random_checkpoint(tmp_path / "moe")
    # has layers that tensor ranks have whole
    latent = bridge_checkpoint(tmp_path / "deepseek_v3", "deepseek_v3")
    parts = [
        (save_and_resume, checkpoint, tmp_path / "saved", layouts),
        (save_and_resume, latent, tmp_path / "saved_latent", {"tp": layouts["tp"]}),
    ]
    run_ranks(run_parts, 2, *parts, timeout=900)


def test_the_converter_works_on_what_only_bridge_knows(tmp_path: Path) -> None:
    for name in CONVERTED:
        bridge_checkpoint(tmp_path / name / "hf", name, dtype=torch.bfloat16)
    run_ranks(check_conversion, 1, tmp_path, timeout=900)


CONVERTED = ("gpt_oss", "bailing")


def check_conversion(root: Path) -> None:
    """HF -> torch_dist -> HF is bit-exact; what training saves is read by the same command."""
    from megatron.core import dist_checkpointing
    from safetensors.torch import load_file

    from megatron_rl_tools.convert.convert_hf import main

    for name in CONVERTED:
        hf, saved, back = root / name / "hf", root / name / "megatron", root / name / "back"
        assert (
            main(["hf-to-megatron", "--hf", str(hf), "--out", str(saved), "--backend", "bridge"])
            == 0
        )
        to_hf = ["megatron-to-hf", "--config", str(hf), "--backend", "bridge"]
        assert main([*to_hf, "--megatron", str(saved), "--out", str(back)]) == 0
        assert same_tensors(load_file(hf / "model.safetensors"), load_folder(back)), name
        provider, parallel = open_provider(hf, name, {})
        chunks = provider.build()
        provider.load(chunks)
        trained = root / name / "trained"
        trained.mkdir()
        dist_checkpointing.save({"model0": chunks[0].sharded_state_dict()}, str(trained))
        parallel.destroy()
        assert (
            main([*to_hf, "--megatron", str(trained), "--out", str(root / name / "from_run")]) == 0
        )
        assert same_tensors(
            load_file(hf / "model.safetensors"), load_folder(root / name / "from_run")
        ), name


def load_folder(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {
        name: tensor
        for file in path.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def same_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        tensor.equal(other[name]) for name, tensor in one.items()
    )


def test_families_are_sorted() -> None:
    assert set(BOTH) <= set(FAMILIES) and not set(BRIDGE_ONLY) & set(FAMILIES)
