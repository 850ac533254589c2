from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.batch.advantage import group_advantages, is_uniform, whiten, with_advantages
from megatron_rl.records import Prompt, Rollout, RolloutGroup

rewards_lists = st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=16)
PROMPT = Prompt("q7", "?", (1,), "1")


def group_of(rewards, lengths=None):
    """A group with these rewards and response lengths."""
    rollouts = [
        Rollout(
            f"r{i}",
            np.zeros(1 + n, np.int64),
            1,
            np.zeros(n, np.float32),
            None,
            "stop",
            np.zeros(n, np.int32),
        )
        for i, n in enumerate(lengths or [1] * len(rewards))
    ]
    return RolloutGroup(PROMPT, tuple(rollouts), np.array(rewards, np.float32))


def advantages(groups, kind):
    return [group.advantages for group in with_advantages(groups, kind)]


@given(rewards_lists)
def test_mean_centred_against_a_loop(rewards):
    (got,) = advantages([group_of(rewards)], "mean")
    assert got.dtype == np.float32
    for value, reward in zip(got, rewards, strict=True):
        assert value == pytest.approx(reward - sum(rewards) / len(rewards), abs=1e-5)


def test_a_reward_alone_is_its_advantage():
    got = group_advantages(np.array([0.5, np.nan, -2.0]), "reward")
    assert got.tolist() == [0.5, 0.0, -2.0]
    assert group_advantages(np.array([1.0]), "reward").tolist() == [1.0]


@given(rewards_lists)
def test_leave_one_out_against_a_loop(rewards):
    got = group_advantages(np.array(rewards, np.float64), "leave_one_out")
    for i, value in enumerate(got):
        others = rewards[:i] + rewards[i + 1 :]
        assert value == pytest.approx(rewards[i] - sum(others) / len(others), abs=1e-12)


def test_std_uses_the_population_deviation():
    np.testing.assert_allclose(advantages([group_of([0.0, 1.0])], "std")[0], [-1, 1], atol=1e-5)


def test_batch_whitened_against_a_loop_over_tokens():
    """Every response token is one sample; centred: of R - its group's mean."""
    rewards, lengths = [[0.0, 1.0, 1.0], [3.0, -2.0]], [[4, 1, 7], [2, 30]]
    groups = [group_of(r, n) for r, n in zip(rewards, lengths, strict=True)]
    for kind in ("batch_whitened", "centred_batch_whitened"):
        values = [
            [r - (sum(group) / len(group) if kind.startswith("centred") else 0.0) for r in group]
            for group in rewards
        ]
        tokens = [
            v
            for group, ns in zip(values, lengths, strict=True)
            for v, n in zip(group, ns, strict=True)
            for _ in range(n)
        ]
        mean = sum(tokens) / len(tokens)
        std = (sum((v - mean) ** 2 for v in tokens) / len(tokens)) ** 0.5
        for got, group in zip(advantages(groups, kind), values, strict=True):
            np.testing.assert_allclose(got, [(v - mean) / (std + 1e-6) for v in group], rtol=1e-6)


def test_length_weighted_against_a_loop():
    """OPO: the baseline is the mean reward of a token, not of a response."""
    rewards, lengths = [1.0, 0.0, 0.5], [3, 10, 7]
    (got,) = advantages([group_of(rewards, lengths=lengths)], "length_weighted")
    baseline = (1.0 * 3 + 0.0 * 10 + 0.5 * 7) / (3 + 10 + 7)
    np.testing.assert_allclose(got, [r - baseline for r in rewards], rtol=1e-6)
    (same,) = advantages([group_of(rewards, lengths=[4, 4, 4])], "length_weighted")
    np.testing.assert_allclose(same, [0.5, -0.5, 0.0], atol=1e-7)  # equal lengths: mean-centred


def test_rescaled_mean_makes_up_for_groups_that_teach_nothing():
    """GPG: three groups, one of them with equal rewards, so 3/2 of the mean-centred ones."""
    groups = [group_of([1.0, 0.0]), group_of([1.0, 1.0]), group_of([0.0, 0.5])]
    first, second, third = advantages(groups, "rescaled_mean")
    np.testing.assert_allclose(first, [0.75, -0.75], rtol=1e-6)
    np.testing.assert_allclose(second, [0.0, 0.0], atol=0)
    np.testing.assert_allclose(third, [-0.375, 0.375], rtol=1e-6)


def scored(parts, missing=()):
    """A group whose rollouts report rewards by name; their sum is the reward that is not read."""
    group = group_of([sum(values) for values in zip(*parts.values(), strict=True)])
    rollouts = tuple(
        replace(
            rollout,
            reward_metrics={
                name: values[i] for name, values in parts.items() if (i, name) not in missing
            },
        )
        for i, rollout in enumerate(group.rollouts)
    )
    return replace(group, rollouts=rollouts)


def test_each_reward_is_normalised_before_they_are_added():
    """GDPO against a loop: two groups, of different spread; a reward that is the same for all adds
    nothing.
    """
    parts = [
        {"correct": [1.0, 0.0, 0.0], "format": [0.1, 0.1, 0.0], "same": [5.0, 5.0, 5.0]},
        {"correct": [0.0, 1.0, 1.0], "format": [0.0, 0.2, 0.1], "same": [2.0, 2.0, 2.0]},
    ]
    weights = {"correct": 1.0, "format": 0.5, "same": 3.0}
    sums = []
    for group in parts:
        total = [0.0, 0.0, 0.0]
        for name, values in group.items():
            mean = sum(values) / 3
            std = (sum((v - mean) ** 2 for v in values) / 3) ** 0.5
            total = [
                t + weights[name] * (v - mean) / (std + 1e-6)
                for t, v in zip(total, values, strict=True)
            ]
        sums += total
    mean = sum(sums) / 6
    std = (sum((v - mean) ** 2 for v in sums) / 6) ** 0.5
    got = with_advantages([scored(group) for group in parts], "per_reward", reward_weights=weights)
    found = np.concatenate([group.advantages for group in got])
    np.testing.assert_allclose(found, [(v - mean) / (std + 1e-6) for v in sums], rtol=1e-5)


def test_a_response_without_a_named_reward_is_an_error_and_one_that_was_not_scored_is_left_out():
    parts = {"correct": [1.0, 0.0], "format": [0.0, 1.0]}
    with pytest.raises(
        ValueError, match=r"q7.*no metric 'format' of advantage.rewards, only \['correct'\]"
    ):
        with_advantages(
            [scored(parts, {(1, "format")})],
            "per_reward",
            reward_weights={"correct": 1.0, "format": 1.0},
        )
    three = {"correct": [1.0, 0.0, 0.5], "format": [0.0, 0.3, 1.0]}
    group = scored(
        {name: [*values, 9.0] for name, values in three.items()}, {(3, "correct"), (3, "format")}
    )
    group = replace(group, rewards=np.array([*group.rewards[:3], np.nan], np.float32))
    weights = {"correct": 1.0, "format": 1.0}
    (found,) = with_advantages([group], "per_reward", reward_weights=weights)
    (expected,) = with_advantages([scored(three)], "per_reward", reward_weights=weights)
    np.testing.assert_allclose(found.advantages, [*expected.advantages, 0.0], rtol=1e-6)


def test_whitening_large_rewards_is_exact():
    (got,) = advantages([group_of([2.0**20, 2.0**20 + 2])], "batch_whitened")
    np.testing.assert_allclose(got, [-1, 1], atol=1e-5)


@pytest.mark.parametrize(
    "kind",
    [
        "mean",
        "std",
        "leave_one_out",
        "length_weighted",
        "rescaled_mean",
        "batch_whitened",
        "centred_batch_whitened",
    ],
)
def test_equal_rewards_give_zero_not_nan(kind):
    for values in advantages([group_of([0.1] * 4), group_of([0.1] * 4)], kind):
        np.testing.assert_allclose(values, 0.0, atol=1e-7)


def test_equal_named_rewards_give_exactly_zero():
    """Metrics are float64: the mean of three 0.1 is not 0.1, and a gradient that is not exactly 0
    is a step of Adam.
    """
    parts = [
        {"correct": [0.1] * 3, "format": [0.2] * 3},
        {"correct": [0.7] * 3, "format": [0.3] * 3},
    ]
    found = with_advantages(
        [scored(group) for group in parts],
        "per_reward",
        reward_weights={"correct": 1.0, "format": 1.0},
    )
    assert [group.advantages.tolist() for group in found] == [[0.0] * 3] * 2


def test_bad_reward_names_the_prompt():
    with pytest.raises(ValueError, match="q7.*not finite"):
        with_advantages([group_of([0.0, np.inf])], "mean")


@pytest.mark.parametrize(
    "kind",
    [
        "mean",
        "std",
        "leave_one_out",
        "length_weighted",
        "rescaled_mean",
        "batch_whitened",
        "centred_batch_whitened",
    ],
)
def test_a_response_without_a_reward_does_not_count(kind):
    rewards, lengths = [1.0, np.nan, 0.0, 0.5], [3, 50, 4, 5]
    given, left = group_of(rewards, lengths=lengths), group_of([1.0, 0.0, 0.5], lengths=[3, 4, 5])
    (found, _), (expected, _) = (
        with_advantages([group, group_of([0.0, 1.0])], kind) for group in (given, left)
    )
    np.testing.assert_allclose(found.advantages[[0, 2, 3]], expected.advantages, rtol=1e-6)
    assert found.advantages[1] == 0
    for rewards in ([np.nan, np.nan], [np.nan, 1.0]):
        (alone,) = with_advantages([group_of(rewards)], "leave_one_out")
        assert is_uniform(alone) and alone.advantages.tolist() == [0, 0]
    assert not is_uniform(found)
    with pytest.raises(ValueError, match="q7.*one reward per response"):
        with_advantages([RolloutGroup(PROMPT, (None,))], "mean")  # type: ignore[arg-type]


def test_advantages_of_a_group_of_known_values():
    assert group_advantages(np.array([1.0, np.nan, 0.0]), "mean").tolist() == [0.5, 0.0, -0.5]
    np.testing.assert_allclose(
        group_advantages(np.array([0.0, 2e-6]), "std"), [-0.5, 0.5], rtol=1e-6
    )
    assert [part.tolist() for part in whiten([np.array([3.0])], [np.array([1.0])], None)] == [
        [0.0]
    ], "a single token"
    with pytest.raises(ValueError, match="batch_whitened.* is not computed within a group"):
        group_advantages(np.array([0.0, 1.0]), "batch_whitened")
