"""Metrics of a step with episodes of several sequences: per episode, or per token of all of
them.
"""

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


def with_versions(rollout, versions):
    return replace(rollout, policy_versions=np.array(versions, np.int32))


def test_shares_of_tokens_by_age():
    """Of all tokens of all sequences: neither a mean over responses nor over groups; ages 0, 1, and
    all from 2 on.
    """
    group = RolloutGroup(
        Prompt("p", "", (1,), ""),
        (
            with_versions(make_rollout("p/0", 3, 4), [4, 6, 7, 7]).with_episode(
                earlier=(with_versions(make_rollout("p/0/0", 3, 5), [1, 4, 5, 6, 6]),)
            ),
            with_versions(make_rollout("p/1", 3, 2), [7, 7]),
        ),
        np.zeros(2, np.float32),
    )
    alone = RolloutGroup(
        group.prompt, (with_versions(make_rollout("q/0", 3, 1), [5]),), np.zeros(1, np.float32)
    )
    sums = MetricSums()
    count_groups(sums, [group, alone], version=7)
    found = sums.reduce(None, "cpu")
    expected = {"0": 4 / 12, "1": 3 / 12, "2_up": 5 / 12}
    assert {k: found[f"rollout/staleness_{k}_frac"] for k in expected} == pytest.approx(expected)
    assert found["rollout/staleness_max"] == 6


def test_a_response_is_truncated_where_its_last_sequence_was_cut():
    """Of 5 responses in two groups 3, whatever an earlier sequence of an episode ended with."""
    cut, stop = [
        replace(make_rollout("p/0", 3, 5), finish_reason=reason) for reason in ("length", "stop")
    ]
    tree = make_tree("p/1")
    earlier_cut = tree.with_episode(
        earlier=(replace(tree.episode.earlier[0], finish_reason="length"), tree.episode.earlier[1])
    )
    groups = [
        RolloutGroup(Prompt("p", "", (1,), ""), rollouts, np.zeros(len(rollouts), np.float32))
        for rollouts in ((cut, stop, earlier_cut, replace(tree, finish_reason="length")), (cut,))
    ]
    sums = MetricSums()
    count_groups(sums, groups, version=4)
    assert sums.reduce(None, "cpu")["rollout/truncated_frac"] == pytest.approx(3 / 5)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [([2.0] * 5, 1.0), ([1.0, 1.0, 1.0, 5.0], 4 / 7), ([0.0, 3.0, 0.0], 1 / 3), ([0.0], 0.0)],
)
def test_the_effective_sample_size_is_a_share_of_the_tokens(weights, expected):
    """1 of equal weights, whatever they are; 1/n where one of n tokens has all the weight."""
    n = len(weights)
    means = {
        "train/is_weight_mean": sum(weights) / n,
        "train/is_weight_square_mean": sum(w**2 for w in weights) / n,
    }
    found = derived(means)
    assert (
        found["train/ess"] == pytest.approx(expected) and "train/is_weight_square_mean" not in found
    )


def test_rewards_that_are_not_known_have_no_spread():
    """With reward.on_error = drop."""
    group = RolloutGroup(
        Prompt("p", "", (1,), ""), (make_rollout("p/0", 3, 5),), np.array([np.nan], np.float32)
    )
    sums = MetricSums()
    count_groups(sums, [group], version=4)
    found = derived(sums.reduce(None, "cpu"))
    assert np.isnan(found["rollout/reward_mean"]) and np.isnan(found["rollout/reward_std"])
    assert found["rollout/unscored_frac"] == 1


@pytest.mark.parametrize(
    "rewards, kind, taught_nothing, is_zero",
    [
        ([(1, 1), (0, 0)], "mean", 1, 0), ([(1, 1), (0, 0)], "batch_whitened", 0, 0), ([(0, 0),
        (0, 0)], "mean", 1, 1),
        ([(1, 1), (0, 1)], "mean", 0, 0), ([(-1, 1), (0, 0)], "mean", 0, 0), ([(np.nan, 0), (0, 0)],
        "mean", 1, 1),
        ([(np.nan, np.nan), (np.nan, np.nan)], "mean", 1, None),
        ([(0, 0.5, 1), (0, 0)], "mean", 0, 0),  # the advantage of the second response is 0
    ],
)  # fmt: skip
def test_a_step_that_taught_nothing_and_one_whose_rewards_are_all_0(
    rewards, kind, taught_nothing, is_zero
):
    """From the advantages: whitened over the batch, groups of equal rewards teach, too."""
    groups = [
        RolloutGroup(
            Prompt(f"p{k}", "", (1,), ""),
            tuple(make_rollout(f"p{k}/{n}", 3, 5 - n) for n in range(len(every))),
            np.array(every, np.float32),
        )
        for k, every in enumerate(rewards)
    ]
    sums = MetricSums()
    count_groups(sums, with_advantages(groups, kind), version=4)
    found = derived(sums.reduce(None, "cpu"))
    assert (found["rollout/zero_advantages"], found.get("rollout/zero_rewards")) == (
        taught_nothing,
        is_zero,
    )
    assert "rollout/advantage_max" not in found


def test_missing_rows_of_all_sequences_are_counted():
    tree = make_tree("p/0")
    first, second = tree.episode.earlier
    missing = np.arange(len(second.tokens) - 1) == 9  # predicts a token that this sequence sampled
    tree = tree.with_episode(earlier=(first, replace(second, missing_routes=missing)))
    counts = count_missing_routes([RolloutGroup(Prompt("p", "", (1,), ""), (tree,))])
    assert (counts.missing_response_rows, counts.response_rows, counts.samples) == (1, 19, 3)
    assert counts.prompt_rows == sum(len(each.tokens) - 1 for each in tree.sequences) - 19
