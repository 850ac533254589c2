"""Which of the sampled groups a step trains on: agreed by all ranks, as only leaders hold groups.

Over-sampling keeps the groups that were complete first (scheduler.py).  DAPO's dynamic sampling
replaces groups with equal rewards, whose advantages are 0.  Prompt i of a draw belongs to
data-parallel replica i % dp_size, before and after.
Shapes: P prompts of a draw over all replicas, n = P / dp of one replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_rl.batch.advantage import is_uniform
from megatron_rl.records import Prompt, RolloutGroup

Draw = Callable[[int], tuple[list[Prompt], list[RolloutGroup]]]
"""Number of prompts over all replicas -> those prompts and, on a leader, the scored groups of its
replica, else [].
"""


def divide_prompts(
    prompts: Sequence[Prompt],
    flags: Sequence[bool] | None,
    *,
    dp_rank: int,
    dp_size: int,
    device: torch.device,
) -> tuple[list[list[Prompt]], list[list[Prompt]]]:
    """(prompts whose flag is set, the others), each as one list per replica.

    flags: for the n prompts of this replica on its leader, None on other ranks.  Collective over
    all ranks.
    """
    found = torch.zeros(dp_size, len(prompts) // dp_size, dtype=torch.int32, device=device)
    if flags is not None:
        found[dp_rank] = torch.tensor(flags, dtype=torch.int32)
    dist.all_reduce(found)  # only leaders contribute: the sum has every flag once
    chosen: list[list[Prompt]] = [[] for _ in range(dp_size)]
    others: list[list[Prompt]] = [[] for _ in range(dp_size)]
    for replica, row in enumerate(found.tolist()):
        for prompt, is_chosen in zip(prompts[replica::dp_size], row, strict=True):
            (chosen if is_chosen else others)[replica].append(prompt)
    return chosen, others


def interleave(rows: Sequence[Sequence[Prompt]]) -> list[Prompt]:
    """One list of the prompts of all replicas, which must have equally many: inverse of
    prompts[replica::dp_size].
    """
    return [prompt for one_of_each in zip(*rows, strict=True) for prompt in one_of_each]


@dataclass(frozen=True)
class Refilled:
    """prompts and groups as `Draw` returns them; rounds: draws after the first; sampled: groups
    over all replicas and draws.
    """

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
    """Replace groups with equal rewards by new draws until every replica has its share of others,
    at most `max_rounds` times.

    What is still missing then is filled with groups of equal rewards: their advantage is 0, and
    rollout/zero_advantage_groups_frac shows them.  Collective over all ranks.
    """
    share = len(prompts) // dp_size
    kept: list[list[Prompt]] = [[] for _ in range(dp_size)]
    uniform: list[list[Prompt]] = [[] for _ in range(dp_size)]
    my_kept: list[RolloutGroup] = []
    my_uniform: list[RolloutGroup] = []
    rounds = sampled = 0
    while True:
        sampled += len(prompts)
        flags = [not is_uniform(group) for group in groups] if is_leader else None
        divided = divide_prompts(prompts, flags, dp_rank=dp_rank, dp_size=dp_size, device=device)
        for replica, (good, rest) in enumerate(zip(*divided, strict=True)):
            kept[replica] += good
            uniform[replica] += rest
        for group, is_kept in zip(groups, flags or (), strict=True):
            # same order as `kept` and `uniform` of this replica
            (my_kept if is_kept else my_uniform).append(group)
        # all replicas draw equally many, as many as the worst one needs: a draw is collective
        missing = share - min(map(len, kept))
        if missing <= 0 or rounds == max_rounds:
            break
        rounds += 1
        prompts, groups = draw(missing * dp_size)
    chosen = [(good + rest)[:share] for good, rest in zip(kept, uniform, strict=True)]
    return Refilled(interleave(chosen), (my_kept + my_uniform)[:share], rounds, sampled)
