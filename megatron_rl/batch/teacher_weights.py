"""The weight beta of every response's teacher in a step.

Shapes: G responses of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_rl.config import Config
from megatron_rl.records import Rollout, RolloutGroup


def with_teacher_weights(
    groups: Sequence[RolloutGroup], cfg: Config, step: int
) -> list[RolloutGroup]:
    """Fill `teacher_weights` of every group, float32 [G]: beta of its source's teacher in `step`,
    which counts from 0; 0 where the source has no teacher, and with teach = failures where the
    reward is not below data.pass_reward.  Without teachers the groups are unchanged.

    Raises ValueError where a response that is taught was not scored by its teacher.
    """
    if not cfg.teachers.with_servers:
        return list(groups)
    return [replace(group, teacher_weights=teacher_weights(group, cfg, step)) for group in groups]


def teacher_weights(group: RolloutGroup, cfg: Config, step: int) -> np.ndarray:
    """Return float32 [G], see `with_teacher_weights`."""
    name = cfg.teachers.name_for(group.prompt.source)
    if not name:
        return np.zeros(len(group.rollouts), np.float32)
    for rollout in group.rollouts:
        if not rollout.is_taught:
            raise ValueError(
                f"rollout {rollout.id}: teachers.{name} has not scored it: no token is trained on"
                " without the log-prob of its teacher"
            )
        check_top(rollout, name, cfg.loss.teacher_top_k)
    teacher = cfg.teachers.with_servers[name]
    is_taught = np.ones(len(group.rollouts), bool)
    if teacher.teach == "failures":
        # no reward (NaN): the response is left out of the loss anyway
        is_taught = np.asarray(group.rewards) < cfg.data.pass_reward
    return np.where(is_taught, teacher.beta_at(step), 0.0).astype(np.float32)


def check_top(rollout: Rollout, name: str, top_k: int) -> None:
    """Raise ValueError unless teacher `name` named `top_k` tokens in every place of `rollout`; 0:
    the loss reads none.
    """
    for sequence in rollout.sequences if top_k else ():
        sizes = () if sequence.teacher_top is None else sequence.teacher_top.sets.sizes
        if len(sizes) != sequence.response_length or (np.asarray(sizes) != top_k).any():
            raise ValueError(
                f"rollout {sequence.id}: loss.teacher_top_k = {top_k}, and teachers.{name} scored"
                " it for another one; continue with the settings that it was sampled with"
            )
