"""Evaluation within a run on real ranks: two replicas of two, whose leaders alone hold groups,
agree on the same numbers.
"""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_rl.config import EvalConfig
from megatron_rl.evaluate import evaluate
from megatron_rl.metrics.accuracy import pass_at
from megatron_rl.records import Prompt, RolloutGroup
from tests.dist.launch import run_ranks
from tests.unit.batch.rollouts import make_rollout

SAMPLES, PROMPTS = 3, 5


def rewards_of(name: str) -> np.ndarray:
    return np.random.default_rng(int(name)).integers(0, 2, SAMPLES).astype(np.float32)


def own_metrics(rollout, prompt_id):
    """One that every sample has, and one of a single prompt, which only one replica has."""
    odd = {"odd": 3.0} if prompt_id == "1" else {}
    return replace(rollout, reward_metrics={"number": float(prompt_id)}, metrics=odd)


def evaluate_on_a_rank() -> dict[str, float]:
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    dp_rank, is_leader = rank // 2, rank % 2 == 0
    asked = []

    def sample_and_score(prompts):
        asked.extend(prompt.id for prompt in prompts)
        rollouts = [make_rollout(f"x/{k}", 1, 2 + k, routes=False) for k in range(SAMPLES)]
        groups = [
            RolloutGroup(p, tuple(own_metrics(r, p.id) for r in rollouts), rewards_of(p.id))
            for p in prompts
        ]
        return groups if is_leader else []

    sets = {
        "a": [Prompt(str(n), "", (1,), "") for n in range(PROMPTS + 3)],
        "one": [Prompt("77", "", (1,), "")],
    }
    config = EvalConfig(samples=SAMPLES, pass_at=(2,), max_prompts=PROMPTS)
    metrics = evaluate(
        sets, config, 0.0, sample_and_score, dp_rank=dp_rank, dp_size=2, device=torch.device("cpu")
    )
    dist.destroy_process_group()
    assert asked == [str(n) for n in range(dp_rank, PROMPTS, 2)] + (["77"] if dp_rank == 0 else [])
    return metrics


@pytest.mark.slow
def test_every_rank_gets_the_numbers_of_all_replicas():
    found = run_ranks(evaluate_on_a_rank, 4)
    assert all(metrics == found[0] for metrics in found)
    rewards = np.array([rewards_of(str(n)) for n in range(PROMPTS)], np.float64)
    assert found[0]["eval/a/avg@3"] == pytest.approx(rewards.mean())
    assert found[0]["eval/a/pass@2"] == pytest.approx(pass_at(rewards, 2).value)
    assert found[0]["eval/a/pass@3"] == pytest.approx(rewards.max(axis=1).mean())
    assert found[0]["eval/a/response_length_mean"] == 3 and found[0][
        "eval/one/avg@3"
    ] == pytest.approx(rewards_of("77").mean())
    assert found[0]["eval/a/reward/number"] == 2.0 and found[0]["eval/a/episode/odd"] == 3.0
    assert found[0]["eval/one/reward/number"] == 77.0 and "eval/one/episode/odd" not in found[0]
