"""A and B of each adapter, as servers with slots get them, are those of the merged export in every
layout.
"""

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.plan.adapter_sizes import sent_parameters
from megatron_rl.weights.hf.adapter_export import export_adapters
from megatron_rl.weights.hf.export import on_rank_0
from megatron_rl.weights.hf.peft_folder import ROOT
from tests.dist.launch import run_ranks
from tests.tiny import random_checkpoint

LORA = {"rank": 4, "alpha": 12.0, "targets": ["attention"]}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("adapter_export") / "base")


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {"ep": 2}])
def test_base_plus_b_a_is_the_merged_export(base, layout):
    (difference, num_tensors, num_values, computed), _ = run_ranks(compare, 2, base, layout)
    assert difference < 1e-6 and num_tensors == 2 * 16 and num_values == computed


def compare(base, layout):
    """Largest difference, tensors and their values, the planner's number of values; on rank 0."""
    from tests.dist.engines import make_engine

    engine = make_engine(base, parallel=layout, lora=LORA)
    for adapter in engine.adapters.all:
        # the same on ranks that hold a copy
        torch.manual_seed(sum(adapter.entry.name.encode()))
        adapter.b.data.copy_(torch.randn(adapter.b.shape))
    stream = export_adapters(engine.chunks, engine.spec, engine.parallel, engine.cfg.lora)
    rank, device = engine.parallel.rank, engine.parallel.device
    sent = {name: t for name, t in on_rank_0(stream, rank, device) if t is not None}
    merged = {name: t.clone() for name, t in engine.export() if t is not None}
    engine.parallel.destroy()
    if rank:
        return None
    expected = load_file(base / "model.safetensors")
    for name, weight in expected.items():
        module = ROOT + name.removesuffix(".weight")
        if (a := sent.get(f"{module}.lora_A.weight")) is not None:
            weight += 3.0 * sent[f"{module}.lora_B.weight"] @ a
    difference = max(float((merged[name] - expected[name]).abs().max()) for name in expected)
    num_values = sum(t.numel() for t in sent.values())
    return difference, len(sent), num_values, sent_parameters(engine.spec, engine.cfg.lora)
