"""Metrics of a step with episodes of several sequences: per episode, or per token of all of them."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_rl.batch.advantage import with_advantages
from megatron_rl.metrics.reduce import MetricSums
from megatron_rl.records import Prompt, RolloutGroup
from megatron_rl.rollout.missing_routes import count_missing_routes
from megatron_rl.trainer.rollout_metrics import count_episodes, count_groups, derived
from tests.unit.batch.rollouts import make_rollout, make_tree


def test_an_episode_counts_once_and_all_its_tokens_count():
    tree, plain = make_tree("p/0", seed=1), make_rollout("p/1", 3, 5, seed=2)
    group = RolloutGroup(Prompt("p", "", (1,), ""), (tree, plain), np.array([1.0, 0.0], np.float32))
    sums = MetricSums()
    count_groups(sums, [group], version=4)
    count_episodes(sums, [group])
    ages = 4 - np.concatenate([each.policy_versions for each in (*tree.sequences, plain)])
    expected = {
        "rollout/response_length_mean": (19 + 5) / 2,
        "rollout/response_length_max": 19,
        "rollout/sequences_mean": (3 + 1) / 2,
        "rollout/sequences_max": 3,
        "rollout/turns_mean": 2,
        "rollout/environment_length_mean": 0,
        "rollout/staleness_mean": ages.mean(),
        "rollout/mixed_versions_frac": (tree.is_mixed + plain.is_mixed) / 2,
        "perf/step_tokens": sum(len(each.tokens) for each in (*tree.sequences, plain)),
    }
    found = sums.reduce(None, "cpu")
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_rewards_that_are_not_known_have_no_spread():
    """With reward.on_error = drop."""
    group = RolloutGroup(Prompt("p", "", (1,), ""), (make_rollout("p/0", 3, 5),), np.array([np.nan], np.float32))
    sums = MetricSums()
    count_groups(sums, [group], version=4)
    found = derived(sums.reduce(None, "cpu"))
    assert np.isnan(found["rollout/reward_mean"]) and np.isnan(found["rollout/reward_std"])
    assert found["rollout/unscored_frac"] == 1


@pytest.mark.parametrize(
    "rewards, kind, taught_nothing, is_zero",
    [
        ([(1, 1), (0, 0)], "mean", 1, 0), ([(1, 1), (0, 0)], "batch_whitened", 0, 0), ([(0, 0), (0, 0)], "mean", 1, 1),
        ([(1, 1), (0, 1)], "mean", 0, 0), ([(-1, 1), (0, 0)], "mean", 0, 0), ([(np.nan, 0), (0, 0)], "mean", 1, 1),
        ([(np.nan, np.nan), (np.nan, np.nan)], "mean", 1, None),
    ],
)  # fmt: skip
def test_a_step_that_taught_nothing_and_one_whose_rewards_are_all_0(rewards, kind, taught_nothing, is_zero):
    """From the advantages: whitened over the batch, groups of equal rewards teach, too."""
    groups = [
        RolloutGroup(
            Prompt(f"p{k}", "", (1,), ""), (make_rollout(f"p{k}/0", 3, 5), make_rollout(f"p{k}/1", 3, 4)), both
        )
        for k, both in enumerate(np.array(rewards, np.float32))
    ]
    sums = MetricSums()
    count_groups(sums, with_advantages(groups, kind), version=4)
    found = derived(sums.reduce(None, "cpu"))
    assert (found["rollout/zero_advantages"], found.get("rollout/zero_rewards")) == (taught_nothing, is_zero)
    assert "rollout/advantage_max" not in found


def test_missing_rows_of_all_sequences_are_counted():
    tree = make_tree("p/0")
    first, second = tree.earlier
    missing = np.arange(len(second.tokens) - 1) == 9  # predicts a token that this sequence sampled
    tree = replace(tree, earlier=(first, replace(second, missing_routes=missing)))
    counts = count_missing_routes([RolloutGroup(Prompt("p", "", (1,), ""), (tree,))])
    assert (counts.missing_response_rows, counts.response_rows, counts.samples) == (1, 19, 3)
    assert counts.prompt_rows == sum(len(each.tokens) - 1 for each in tree.sequences) - 19
