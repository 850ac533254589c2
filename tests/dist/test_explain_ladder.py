"""The ladder with a real engine on one rank; transformers in place of the server, which
tests/e2e/test_explain_servers.py has.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.dist.launch import run_ranks

CASES = {
    "healthy": ("", ""),
    "rope theta": ("rope_theta", "rope_theta = 1e+06, the trainer with 10000"),
    "gate normalisation": ("gate_normalisation", "norm_topk_prob"),
    "temperature": ("temperature", "temperature 1, the trainer's of 0.7"),
    "one wrong tensor": ("layer", "before the router of MoE layer 2"),
    "swapped experts": ("layer", "before the router of MoE layer 2"),
    "tied head": ("after_the_routers", "the output head"),
    "routes of the row before": ("routes_shifted", "row j has the experts of row j -1"),
}
"""Case -> the verdict, and what its cause must name."""


def sampled(checkpoint, temperature):
    """Rollouts of random tokens with log-probs and routes of transformers, as a server returns
    them.
    """
    import torch

    from megatron_rl.records import Rollout
    from megatron_rl_tools.explain_mismatch.referee import ask_referee

    rng, length = np.random.default_rng(0), 20
    rollouts = [
        Rollout(
            id=f"s{number}", tokens=rng.integers(0, 64, 40 + 10 * number),
            prompt_length=20 + 10 * number,
            rollout_logprobs=np.zeros(length, np.float32), routed_experts=None,
            finish_reason="length",
            policy_versions=np.zeros(length, np.int32),
        )
        for number in range(6)
    ]  # fmt: skip
    found = ask_referee(
        checkpoint, rollouts, dtype=torch.float32, device="cpu", temperature=temperature
    )
    return [
        replace(
            each,
            rollout_logprobs=own.logprobs,
            routed_experts=own.routes.astype(np.uint8),
            routes_digest=None,
        )
        for each, own in zip(rollouts, found, strict=True)
    ]


def explain_all(folder):
    """Name of the case -> (verdict, cause, share)."""
    from megatron_rl.distributed import make_parallel
    from megatron_rl_tools.explain_mismatch.explain_mismatch import explain_config
    from megatron_rl_tools.explain_mismatch.ladder import Ladder
    from megatron_rl_tools.explain_mismatch.trainer_side import TrainerSide
    from tests.mismatch import faults
    from tests.tiny import random_checkpoint

    served = faults.Served("", random_checkpoint(Path(folder) / "served"), Path(folder))
    good = sampled(served.checkpoint, 1.0)
    shifted = [
        replace(r, routed_experts=np.roll(r.routed_experts, 1, axis=0), routes_digest=None)
        for r in good
    ]
    trainers = {
        "rope theta": served.variant("rope", **faults.rope(1e4)),
        "gate normalisation": served.variant("gate", norm_topk_prob=False),
        "one wrong tensor": served.variant("tensor", faults.wrong_tensor),
        "swapped experts": served.variant("experts", faults.swapped_experts),
        "tied head": served.variant("head", faults.tied_head),
    }
    found = {}
    for name in CASES:
        temperature = 0.7 if name == "temperature" else 1.0
        model = trainers.get(name, served.checkpoint)
        args = SimpleNamespace(
            model=model, device="cpu", dtype="float32", config=None, temperature=temperature
        )
        cfg = explain_config(args, longest=100)
        parallel = make_parallel(cfg.parallel, device="cpu", timeout_minutes=5)
        rollouts = shifted if name == "routes of the row before" else good
        ladder = Ladder(
            TrainerSide(cfg, parallel),
            rollouts,
            is_refereed=name == "healthy",
            log=lambda line: None,
        )
        verdicts = [(each.name, each.cause, each.share) for each in ladder.climb().verdicts]
        found[name] = verdicts[0] if verdicts else ("", "", None)
        parallel.destroy()
    return found


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    (found,) = run_ranks(explain_all, 1, tmp_path_factory.mktemp("explain"))
    return found


@pytest.mark.parametrize("case", CASES)
def test_the_ladder_names_the_cause(case, verdicts):
    name, cause, share = verdicts[case]
    assert name == CASES[case][0] and CASES[case][1] in cause, (name, cause)
    if name in ("rope_theta", "gate_normalisation", "temperature", "routes_shifted"):
        assert share > 0.95
