"""Over-sampling: every replica's leader kept the groups that were complete first; this tells all ranks which prompts those are,
and which were left.

Shapes: P prompts sampled over all replicas, n = P / dp of one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_rl.records import Prompt


def kept_prompts(
    prompts: Sequence[Prompt],
    kept: Sequence[Prompt] | None,
    *,
    share: int,
    dp_rank: int,
    dp_size: int,
    device: torch.device,
) -> tuple[list[Prompt], list[Prompt]]:
    """The share x dp_size prompts that are trained on, and the others; prompt i belongs to replica i % dp_size, in all lists.

    prompts: all that were sampled, the same on every rank.  kept: on a leader, those of its replica that it has groups
    of, in order; elsewhere None.  Collective over all ranks.
    """
    flags = torch.zeros(dp_size, len(prompts) // dp_size, dtype=torch.int32, device=device)
    if kept is not None:
        flags[dp_rank] = torch.tensor(marks(prompts[dp_rank::dp_size], kept))
    dist.all_reduce(flags)
    chosen, others = (
        [
            [prompt for prompt, is_kept in zip(prompts[replica::dp_size], row, strict=True) if is_kept == wanted]
            for replica, row in enumerate(flags.tolist())
        ]
        for wanted in (1, 0)
    )
    assert all(len(mine) == share for mine in chosen), "a replica kept another number of groups than its share"
    return interleaved(chosen), interleaved(others)


def interleaved(rows: Sequence[Sequence[Prompt]]) -> list[Prompt]:
    """The prompts of all replicas, one of each in turn."""
    return [prompt for one_of_each in zip(*rows, strict=True) for prompt in one_of_each]


def marks(mine: Sequence[Prompt], kept: Sequence[Prompt]) -> list[int]:
    """1 for each of `mine` that is the next of `kept`, else 0; `kept` is a subsequence of `mine`."""
    found, rest = [], list(kept)
    for prompt in mine:
        is_next = bool(rest) and rest[0] is prompt
        found.append(int(is_next))
        if is_next:
            rest.pop(0)
    assert not rest, "a group belongs to none of the replica's prompts"
    return found
