"""Selection of the groups that a step trains on, agreed by all ranks: only leaders have groups.

Over-sampling keeps the groups that were complete first (scheduler.py).  DAPO's dynamic sampling
replaces groups with equal rewards, whose advantages are 0.  Prompt i of a draw belongs to
data-parallel replica i % dp_size, before and after the selection.
Shapes: P prompts of a draw over all replicas, n = P / dp of one replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_rl.batch.advantage import is_uniform
from megatron_rl.distributed import Parallel
from megatron_rl.records import Prompt, RolloutGroup, without_routes

Draw = Callable[[int], tuple[list[Prompt], list[RolloutGroup]]]
"""Number of prompts over all replicas -> those prompts, and on a leader the scored groups of its
replica, on other ranks [].
"""


@dataclass(frozen=True)
class Replica:
    """The data-parallel replica of this rank."""

    rank: int
    size: int
    """Number of replicas."""
    device: torch.device
    """Device of the collectives."""


def replica_of(parallel: Parallel) -> Replica:
    return Replica(parallel.dp_rank, parallel.dp_size, parallel.device)


def divide_prompts(
    prompts: Sequence[Prompt], flags: Sequence[bool] | None, replica: Replica
) -> tuple[list[list[Prompt]], list[list[Prompt]]]:
    """Return (prompts whose flag is set, the others), each as one list per replica.

    flags: [n], those of this replica's prompts on its leader, None on other ranks.  Collective over
    all ranks.
    """
    size = replica.size
    shape = (size, len(prompts) // size)
    table = torch.zeros(shape, dtype=torch.int32, device=replica.device)
    if flags is not None:
        table[replica.rank] = torch.tensor(flags, dtype=torch.int32)
    dist.all_reduce(table)  # only leaders contribute: the sum has every flag once
    chosen: list[list[Prompt]] = [[] for _ in range(size)]
    others: list[list[Prompt]] = [[] for _ in range(size)]
    for rank, row in enumerate(table.tolist()):
        for prompt, is_chosen in zip(prompts[rank::size], row, strict=True):
            (chosen if is_chosen else others)[rank].append(prompt)
    return chosen, others


def interleave(rows: Sequence[Sequence[Prompt]]) -> list[Prompt]:
    """Return one list of the prompts of all replicas, which must have equally many: the inverse of
    prompts[replica::dp_size].
    """
    return [prompt for column in zip(*rows, strict=True) for prompt in column]


@dataclass(frozen=True)
class Refilled:
    """The groups of a step after dynamic sampling."""

    prompts: list[Prompt]
    """Prompts of all replicas, as `Draw` returns them."""
    groups: list[RolloutGroup]
    """Groups of this replica on its leader, as `Draw` returns them."""
    rounds: int
    """Number of draws after the first."""
    sampled: int
    """Number of groups that were sampled, over all replicas and draws."""


def refill(
    prompts: Sequence[Prompt],
    groups: Sequence[RolloutGroup],
    draw: Draw,
    replica: Replica,
    *,
    is_leader: bool,
    max_rounds: int,
    can_draw: Callable[[int], bool] = lambda count: True,
) -> Refilled:
    """Replace groups with equal rewards by new draws until every replica has its share of others,
    at most `max_rounds` times.

    is_leader: this rank has the groups of its replica.
    can_draw: number of prompts over all replicas -> whether the data has so many left.
    Groups that are still missing then are groups of equal rewards: their advantage is 0, and
    rollout/zero_advantage_groups_frac counts them.  Collective over all ranks.
    """
    share = len(prompts) // replica.size
    kept: list[list[Prompt]] = [[] for _ in range(replica.size)]
    uniform: list[list[Prompt]] = [[] for _ in range(replica.size)]
    my_kept: list[RolloutGroup] = []
    my_uniform: list[RolloutGroup] = []
    rounds = sampled = 0
    while True:
        sampled += len(prompts)
        plain = without_routes(groups)
        flags = [not is_uniform(group) for group in plain] if is_leader else None
        divided = divide_prompts(prompts, flags, replica)
        for rank, (mixed, equal) in enumerate(zip(*divided, strict=True)):
            kept[rank] += mixed
            uniform[rank] += equal
        for group, is_kept in zip(groups, flags or (), strict=True):
            # in the order of this replica's `kept` and `uniform`
            (my_kept if is_kept else my_uniform).append(group)
        # a draw is collective: all replicas draw as many as the one that needs most
        missing = share - min(map(len, kept))
        if missing <= 0 or rounds == max_rounds or not can_draw(missing * replica.size):
            break
        rounds += 1
        prompts, groups = draw(missing * replica.size)
    chosen = [(mixed + equal)[:share] for mixed, equal in zip(kept, uniform, strict=True)]
    return Refilled(interleave(chosen), (my_kept + my_uniform)[:share], rounds, sampled)
