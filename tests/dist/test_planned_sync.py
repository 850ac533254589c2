"""The planner's weight sync is the one that ranks do: as many sources, and each sends the bytes
that the planner counts.
"""

import pytest
import torch

from megatron_rl.config import load_config
from megatron_rl.models.families import make_spec
from megatron_rl.models.spec import load_hf_config
from megatron_rl.plan.grid import weight_sources
from megatron_rl.plan.hardware import HARDWARE, Assumptions
from megatron_rl.plan.training_time import TrainingModel
from tests.dist.launch import build, run_ranks
from tests.tiny import random_checkpoint

CASES = [
    ({"pp": 2, "ep": 2}, 16),
    ({"pp": 2, "ep": 2}, 2),
    ({"ep": 4}, 16),
    ({"tp": 2, "ep": 2, "etp": 1}, 16),
]
"""A layout of four ranks, and rollout.weight_sync_sources."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("tiny") / "model", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def sent(checkpoint):
    """Of each case, the bytes that each rank sends."""
    return list(zip(*run_ranks(exported, 4, checkpoint, CASES), strict=True))


def exported(checkpoint, cases) -> list[int]:
    """On a rank: for each case the bytes of the tensors of which it is the source."""
    from megatron_rl.weights.hf.export import export_planned, few_sources, forwarded, plan_export

    sizes = []
    for layout, most in cases:
        chunks, spec, _, parallel = build(checkpoint, dtype="bfloat16", **layout)
        plan = plan_export(chunks, spec, parallel)
        planned = export_planned(plan, chunks, spec, parallel)
        stream = forwarded(planned, few_sources(plan, most), parallel.rank, torch.device("cpu"))
        sizes.append(sum(each.tensor.nbytes for each in stream if each.tensor is not None))
        parallel.destroy()
    return sizes


@pytest.mark.parametrize("case", range(len(CASES)), ids=[str(case) for case in CASES])
def test_the_planner_counts_the_bytes_that_each_source_sends(case, checkpoint, sent):
    layout, most = CASES[case]
    sections = {
        "model": {"path": "unused"},
        "data": {"train": "unused"},
        "rollout": {"urls": ["http://a:1"], "weight_sync_sources": most},
        "parallel": layout,
    }
    spec = make_spec(load_hf_config(checkpoint))
    cfg = load_config(None, [], sections)
    planned, sources = (
        TrainingModel(spec, cfg, 4, HARDWARE["cpu"], Assumptions()),
        weight_sources(cfg),
    )
    sizes = [size for size in sent[case] if size]
    assert len(sizes) == sources == min(most, layout.get("pp", 1) * layout["ep"])
    assert sum(sizes) == planned.sync_bytes
    assert max(sizes) <= 1.1 * planned.sync_bytes / sources
