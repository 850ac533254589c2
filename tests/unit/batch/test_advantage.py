import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.batch.advantage import group_advantages, with_advantages
from megatron_rl.config import AdvantageConfig
from megatron_rl.records import Prompt, RolloutGroup

rewards_lists = st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=16)


@given(rewards_lists)
def test_mean_centred_against_a_loop(rewards):
    got = group_advantages(np.array(rewards), "mean")
    for value, reward in zip(got, rewards, strict=True):
        assert value == pytest.approx(reward - sum(rewards) / len(rewards), abs=1e-5)


@given(rewards_lists)
def test_leave_one_out_is_scaled_mean_centred(rewards):
    """paper.md identity (e): RLOO = G / (G - 1) * mean-centred."""
    got = group_advantages(np.array(rewards), "leave_one_out")
    for i, value in enumerate(got):
        others = rewards[:i] + rewards[i + 1 :]
        assert value == pytest.approx(rewards[i] - sum(others) / len(others), abs=1e-4)


def test_std_uses_the_population_deviation():
    got = group_advantages(np.array([0.0, 1.0]), "std")
    np.testing.assert_allclose(got, [-1, 1], atol=1e-5)


def test_equal_rewards_give_zero_not_nan():
    for kind in ("mean", "std", "leave_one_out"):
        assert (group_advantages(np.ones(4), kind) == 0).all()


def test_bad_reward_names_the_prompt():
    prompt = Prompt("q7", "?", (1,), "1")
    group = RolloutGroup(prompt, (None, None), rewards=np.array([0.0, np.nan]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="q7.*not finite"):
        with_advantages([group], AdvantageConfig())
    with pytest.raises(ValueError, match="q7.*one reward per response"):
        with_advantages([RolloutGroup(prompt, (None,))], AdvantageConfig())  # type: ignore[arg-type]
