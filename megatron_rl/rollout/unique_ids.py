"""Ids of the rollouts of one step, none of which may come twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_rl.records import Rollout, RolloutGroup


def with_unique_ids(groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """For a prompt drawn again in the same step the rollout ids Q/K become Q#2/K, the third time
    Q#3/K, and so on.

    Tensors and lines are found by id: of two equal ones the first would be lost.
    """
    taken: set[str] = set()
    unique = []
    for group in groups:
        rollouts, times = group.rollouts, 1
        while not taken.isdisjoint(ids_of(rollouts)):
            times += 1
            parts = [rollout.id.rpartition("/") for rollout in group.rollouts]
            names = [f"{prompt}#{times}/{k}" for prompt, _, k in parts]
            rollouts = tuple(
                rollout.named(name) for rollout, name in zip(rollouts, names, strict=True)
            )
        taken.update(ids_of(rollouts))
        unique.append(replace(group, rollouts=rollouts))
    return unique


def ids_of(rollouts: Sequence[Rollout]) -> list[str]:
    """Of all their sequences."""
    return [sequence.id for rollout in rollouts for sequence in rollout.sequences]
