"""Advantages A(x, y) of a group of responses to one prompt.  Shapes: G responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_rl.config import AdvantageConfig
from megatron_rl.records import RolloutGroup

STD_EPS = 1e-6


def with_advantages(groups: Sequence[RolloutGroup], config: AdvantageConfig) -> list[RolloutGroup]:
    """Fill `advantages` of every group from its `rewards`.  Raises ValueError on a missing or non-finite reward."""
    return [replace(group, advantages=group_advantages(checked_rewards(group), config.kind)) for group in groups]


def group_advantages(rewards: np.ndarray, kind: str) -> np.ndarray:
    """Advantages float32 [G] of one group's rewards [G].

    mean            A_i = R_i - mean(R)                      MiniRL, arXiv 2512.01374 Eq. 7 (own sample included, no std)
    std             A_i = (R_i - mean(R)) / (std(R) + 1e-6)  GRPO (population std)
    leave_one_out   A_i = R_i - mean of the other G - 1      RLOO = G / (G - 1) times the mean-centred one
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    centred = rewards - rewards.mean()
    if kind == "mean":
        result = centred
    elif kind == "std":
        result = centred / (rewards.std() + STD_EPS)
    elif kind == "leave_one_out":
        result = centred * len(rewards) / (len(rewards) - 1)
    else:
        raise ValueError(f"advantage.kind = {kind!r} is unknown; use mean, std or leave_one_out")
    return result.astype(np.float32)


def checked_rewards(group: RolloutGroup) -> np.ndarray:
    if group.rewards is None or len(group.rewards) != len(group.rollouts):
        raise ValueError(f"prompt {group.prompt.id}: needs one reward per response before advantages")
    if not np.isfinite(group.rewards).all():
        raise ValueError(f"prompt {group.prompt.id}: reward is not finite: {group.rewards.tolist()}")
    return group.rewards if group.penalties is None else group.rewards + group.penalties
