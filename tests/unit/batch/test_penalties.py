from dataclasses import replace

import numpy as np
import pytest

from megatron_rl.batch.advantage import is_uniform, with_advantages
from megatron_rl.batch.penalties import overlong_penalty, with_penalties
from megatron_rl.config import (
    BatchConfig,
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    RolloutConfig,
    load_config,
)
from megatron_rl.records import Prompt, RolloutGroup
from tests.unit.batch.rollouts import make_rollout


def config(cache, limit):
    return Config(
        model=ModelConfig(path="m"),
        data=DataConfig(train="d"),
        rollout=RolloutConfig(max_response_tokens=limit),
        batch=BatchConfig(overlong_cache=cache),
    )


def group_of(*lengths):
    rollouts = tuple(make_rollout(f"p/{k}", 2, n) for k, n in enumerate(lengths))
    return RolloutGroup(
        Prompt("p", "", (1, 2), ""), rollouts, np.array([1.0, 0.0, 1.0, 1.0], np.float32)
    )


def test_penalty_is_the_papers_at_its_limits():
    """DAPO: 20,480 tokens of which the last 4,096 have a penalty."""
    lengths = np.array([1, 16384, 16385, 18432, 20479, 20480])
    expected = [0, 0, -1 / 4096, -0.5, -4095 / 4096, -1]
    np.testing.assert_allclose(overlong_penalty(lengths, 20480, 4096), expected, rtol=1e-6)


def test_advantages_use_reward_plus_penalty_and_rewards_are_unchanged():
    (group,) = with_penalties([group_of(2, 5, 9, 10)], config(4, 10))
    np.testing.assert_allclose(group.penalties, [0, 0, -0.75, -1])
    np.testing.assert_array_equal(group.rewards, [1, 0, 1, 1])
    (group,) = with_advantages([group], "mean")
    shaped = np.array([1, 0, 0.25, 0])
    np.testing.assert_allclose(group.advantages, shaped - shaped.mean(), rtol=1e-6)


def test_penalties_make_equal_rewards_differ():
    """Such a group has an advantage: rollout/zero_advantage_groups_frac must not count it."""
    equal = replace(group_of(2, 5, 9, 10), rewards=np.full(4, 0.1, np.float32))
    assert is_uniform(equal) and not is_uniform(group_of(2, 5, 9, 10))
    (shaped,) = with_penalties([equal], config(4, 10))
    assert not is_uniform(shaped)
    (inside,) = with_penalties(
        [replace(group_of(2, 3, 4, 5), rewards=equal.rewards)], config(4, 10)
    )
    assert is_uniform(inside)


def test_without_settings_groups_are_unchanged():
    group = group_of(2, 5, 9, 10)
    assert with_penalties([group], config(0, 10)) == [group]
    (same,) = with_advantages([replace(group, penalties=None)], "mean")
    np.testing.assert_allclose(same.advantages, group.rewards - group.rewards.mean())


def test_a_cache_longer_than_a_response_is_refused():
    with pytest.raises(
        ConfigError, match=r"batch.overlong_cache = 20 .*max_response_tokens = 10.*lower it"
    ):
        load_config(
            None,
            [],
            {
                "model": {"path": "m"},
                "data": {"train": "d"},
                "rollout": {"max_response_tokens": 10},
                "batch": {"overlong_cache": 20},
            },
        )


def test_the_price_of_a_token_adds_to_the_overlong_penalty():
    cfg = config(4, 10)
    cfg = cfg.model_copy(update={"batch": BatchConfig(overlong_cache=4, length_penalty=0.5)})
    (group,) = with_penalties([group_of(2, 5, 9, 10)], cfg)
    np.testing.assert_allclose(group.penalties, [-0.1, -0.25, -0.45 - 0.75, -0.5 - 1], rtol=1e-6)
    assert group.penalties.dtype == np.float32
    (group,) = with_penalties(
        [group], cfg.model_copy(update={"batch": BatchConfig(length_penalty=0.5)})
    )
    np.testing.assert_allclose(group.penalties, [-0.1, -0.25, -0.45, -0.5], rtol=1e-6)


def test_a_response_above_the_limit_costs_no_more_than_one_at_it():
    assert overlong_penalty(np.array([20481, 30000]), 20480, 4096).tolist() == [-1, -1]
