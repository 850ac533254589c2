"""lora.shared_pairs: one A and B for the routed experts of a layer and projection, against the
referee of adapters, whose gradients are sums over all experts; copies on all ranks are bit-equal.
"""

from pathlib import Path

import pytest

from tests.dist.launch import run_ranks
from tests.dist.test_checkpoint import change_layout, run_parts
from tests.dist.test_lora import RANK, Case, check_cases
from tests.tiny import random_checkpoint

QUICK = [
    Case("qwen3_moe", "ep2", "minirl", "R3"),
    Case("qwen3_moe", "tp2-ep2", "minirl", "R2"),
    Case("qwen2_moe", "tp2", "minirl", "none"),
    Case("olmoe", "dp2", "minirl", "R3"),
]
WIDE = [
    Case("qwen3_moe", "ep2-dp2", "minirl", "R3"),
    Case("qwen3_moe", "tp2-ep2-etp2", "minirl", "R2"),
    Case("qwen2_moe", "tp2-pp2-ep2", "minirl", "none"),
    Case("qwen3_moe", "tp2-ep4-allgather", "minirl", "none"),
    Case("deepseek_v3", "tp2-dp2", "minirl", "R3"),
    Case("qwen3_moe", "cp2-pp2-vp2", "minirl", "R3"),
]


def test_a_pair_of_all_experts_trains_as_the_referee(tmp_path: Path) -> None:
    check_cases(tmp_path, 2, QUICK, shared=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_pair_trains_as_the_referee_on_four_ranks(tmp_path: Path) -> None:
    check_cases(tmp_path, 4, WIDE, shared=True)


def test_a_pair_loads_into_other_layouts(tmp_path: Path) -> None:
    """Split over expert-tensor ranks, whole on tensor ranks, on one rank, on expert ranks."""
    checkpoint = random_checkpoint(tmp_path / "moe", vocab_size=61)
    lora = {"rank": RANK, "targets": ["all", "lm_head"], "shared_pairs": True}
    targets = [{"tp": 2, "ep": 2, "etp": 1}, {"ep": 2}, {"pp": 2}]
    for name, distributed in (("plain", False), ("scattered", True)):
        optim = {"distributed": distributed}
        part = (change_layout, checkpoint, tmp_path / name, optim, {"tp": 2}, targets, lora)
        run_ranks(run_parts, 2, part)
