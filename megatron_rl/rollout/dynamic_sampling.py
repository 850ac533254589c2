"""DAPO's dynamic sampling: a group whose responses all score alike teaches nothing, so sample another prompt in its place.

Every rank knows every prompt, only leaders hold groups, and each replica must end with as many groups as it began with.
Shapes: P prompts of a draw over all replicas, n = P / dp of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.batch.advantage import is_uniform
from megatron_rl.records import Prompt, RolloutGroup

Draw = Callable[[int], tuple[list[Prompt], list[RolloutGroup]]]
"""Number of prompts over all replicas -> those prompts and, on a leader, the scored groups of its share, else []."""


@dataclass(frozen=True)
class Refilled:
    """prompts and groups as `Draw` gives them; rounds: draws after the first; sampled: groups over all replicas and draws."""

    prompts: list[Prompt]
    groups: list[RolloutGroup]
    rounds: int
    sampled: int


def refill(
    prompts: Sequence[Prompt],
    groups: Sequence[RolloutGroup],
    draw: Draw,
    *,
    max_rounds: int,
    dp_rank: int,
    dp_size: int,
    is_leader: bool,
    device: torch.device,
) -> Refilled:
    """Replace groups with equal rewards by new draws until every replica has its share of others, at most `max_rounds` times.

    What is still missing then is filled with groups of equal rewards: their advantage is 0, and
    rollout/zero_advantage_groups_frac shows them.  Prompt i of a draw belongs to replica i % dp_size, before and after.
    Collective over all ranks.
    """
    share = len(prompts) // dp_size
    kept: list[list[Prompt]] = [[] for _ in range(dp_size)]
    uniform: list[list[Prompt]] = [[] for _ in range(dp_size)]
    my_kept: list[RolloutGroup] = []
    my_dull: list[RolloutGroup] = []
    rounds = sampled = 0
    while True:
        sampled += len(prompts)
        informative = agree_informative(groups, len(prompts) // dp_size, dp_rank, dp_size, is_leader, device)
        for replica, keep in enumerate(informative):
            for prompt, good in zip(prompts[replica::dp_size], keep, strict=True):
                (kept if good else uniform)[replica].append(prompt)
        for group, good in zip(groups, informative[dp_rank] if is_leader else (), strict=True):
            (my_kept if good else my_dull).append(group)
        missing = share - min(len(found) for found in kept)
        if missing <= 0 or rounds == max_rounds:
            break
        rounds += 1
        prompts, groups = draw(missing * dp_size)
    chosen = [(good + rest)[:share] for good, rest in zip(kept, uniform, strict=True)]
    together = [prompt for one_of_each in zip(*chosen, strict=True) for prompt in one_of_each]
    return Refilled(together, (my_kept + my_dull)[:share], rounds, sampled)


def agree_informative(
    groups: Sequence[RolloutGroup], count: int, dp_rank: int, dp_size: int, is_leader: bool, device: torch.device
) -> np.ndarray:
    """bool [dp, n]: which groups of every replica have rewards that differ; the leaders tell, all ranks know."""
    flags = torch.zeros(dp_size, count, dtype=torch.int32, device=device)
    if is_leader:
        flags[dp_rank] = torch.tensor([int(not is_uniform(group)) for group in groups])
    dist.all_reduce(flags)
    return flags.bool().cpu().numpy()
