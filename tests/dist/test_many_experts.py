"""More than 256 experts: their ids are int16, which neither gloo nor NCCL sends.

Real ranks, top-8 of 384 experts.
"""

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.dist.launch import run_ranks
from tests.saved_run import make_material, make_step, sections

EXPERTS = {"num_experts": 384, "top_k": 8}
LAYERS = 1  # core makes a module of every expert
LAYOUTS = {"dp2": {}, "tp2 ep2": {"tp": 2, "ep": 2, "etp": 1}}
VOCABULARY = 64


def groups_with_a_missing_route():
    first, *others = make_step(0, VOCABULARY, layers=LAYERS, **EXPERTS)
    rollout = first.rollouts[0]
    missing = np.zeros(len(rollout.tokens) - 1, bool)
    missing[-1] = True
    return [
        replace(first, rollouts=(replace(rollout, missing_routes=missing), *first.rollouts[1:])),
        *others,
    ]


def share_and_train(material, work):
    """On a rank: check what `share_groups` gives, then train a step in every layout."""
    import torch.distributed as dist

    from megatron_rl.batch.transfer import share_groups
    from megatron_rl.config import load_config
    from megatron_rl.distributed.node_ranks import NodeRanks
    from megatron_rl.train import train

    dist.init_process_group("gloo")
    groups = groups_with_a_missing_route()
    shared = share_groups(
        groups if dist.get_rank() == 0 else None,
        [group.prompt for group in groups],
        NodeRanks(dist.group.WORLD, (0, 0), None),
    )
    for group, got in zip(groups, shared, strict=True):
        assert got.prompt == group.prompt and (got.rewards == group.rewards).all()
        for rollout, other in zip(group.rollouts, got.rollouts, strict=True):
            assert other.routed_experts.dtype == np.int16 and other.routed_experts.max() > 255
            for name in (
                "tokens",
                "rollout_logprobs",
                "routed_experts",
                "policy_versions",
                "missing_routes",
                "routes_digest",
            ):
                np.testing.assert_array_equal(
                    getattr(other, name), getattr(rollout, name), err_msg=name
                )
    for name, layout in LAYOUTS.items():
        more = {
            "parallel": layout,
            "replay": {"mode": "R3", "measure": True},
            "checkpoint": {"export_hf": False},
        }
        train(
            load_config(None, [], sections(material, work / name, steps=1, **more)),
            material / "live",
        )
    dist.destroy_process_group()


@pytest.mark.slow
def test_384_experts_are_shared_and_replayed(tmp_path):
    shape = {"layers": LAYERS, "experts": EXPERTS["num_experts"], "top_k": EXPERTS["top_k"]}
    material = make_material(tmp_path / "material", steps=1, **shape)
    run_ranks(share_and_train, 2, material, tmp_path)
    runs = {
        name: json.loads((tmp_path / name / "run/metrics.jsonl").read_text().splitlines()[0])
        for name in LAYOUTS
    }
    for name, row in runs.items():
        assert row["routing/replayed_mismatch"] == 0 and row["routing/router_mismatch"] > 0.99, name
        for metric in (
            "train/loss",
            "optim/grad_norm",
            "train/logratio_abs_mean",
            "routing/expert_overlap",
        ):
            assert row[metric] == pytest.approx(runs["dp2"][metric], rel=1e-4), (name, metric)
    assert runs["dp2"]["optim/grad_norm"] > 0
