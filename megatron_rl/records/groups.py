"""The responses to one prompt, with what the stages add to them.

Shapes: G responses of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_rl.records.rollouts import Prompt, Rollout


@dataclass(frozen=True)
class RolloutGroup:
    """The G responses to one prompt.  Stages fill in the arrays."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    rewards: np.ndarray | None = None
    """float32 [G], without `penalties`; those of the reward function include reward.format_penalty
    in training.  NaN where a response has none (reward.on_error = drop, or a failure in
    evaluation)."""
    advantages: np.ndarray | None = None
    """float32 [G]."""
    penalties: np.ndarray | None = None
    """float32 [G], penalties for length, added to the rewards where advantages are made."""
    teacher_weights: np.ndarray | None = None
    """float32 [G], beta of every response, 0 where its teacher does not teach it; None: no run with
    teachers."""


def without_routes(groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """Return the groups without expert ids.

    Stages that read none of them work on these: rewards, penalties, advantages, names, metrics and
    lines of files.  `with_routes` follows before the groups are trained on.
    """
    return [
        replace(group, rollouts=tuple(rollout.without_routes for rollout in group.rollouts))
        for group in groups
    ]


def with_routes(
    groups: Sequence[RolloutGroup], sampled: Sequence[RolloutGroup]
) -> list[RolloutGroup]:
    """Return the groups with the expert ids of `sampled`, from which without_routes made them."""
    return [
        replace(
            group,
            rollouts=tuple(
                rollout.with_routes_of(other)
                for rollout, other in zip(group.rollouts, origin.rollouts, strict=True)
            ),
        )
        for group, origin in zip(groups, sampled, strict=True)
    ]
