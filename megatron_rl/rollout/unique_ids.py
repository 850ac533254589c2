"""Unique ids for the rollouts of one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_rl.records import Rollout, RolloutGroup


def with_unique_ids(groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """Rename the rollouts Q/K of a prompt that was drawn again in the same step to Q#2/K, the third
    time to Q#3/K, and so on.

    Files hold lines and tensors by id: of two equal ids the first would be lost.
    """
    used: set[str] = set()
    unique = []
    for group in groups:
        rollouts, times = group.rollouts, 1
        while not used.isdisjoint(ids_of(rollouts)):
            times += 1
            parts = [rollout.id.rpartition("/") for rollout in group.rollouts]
            names = [f"{prompt}#{times}/{k}" for prompt, _, k in parts]
            rollouts = tuple(
                rollout.named(name) for rollout, name in zip(rollouts, names, strict=True)
            )
        used.update(ids_of(rollouts))
        unique.append(replace(group, rollouts=rollouts))
    return unique


def ids_of(rollouts: Sequence[Rollout]) -> list[str]:
    """Return the ids of all sequences of the rollouts."""
    return [sequence.id for rollout in rollouts for sequence in rollout.sequences]
