"""Sums over complete sequences, also where context parallelism spreads the tokens of a sequence
over several ranks.

Shapes: T packed tokens of one micro-batch on this rank, B sequences of the micro-batch.  A sequence
is never in two micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """The sequence of every token of a micro-batch."""

    ids: Int[Tensor, " T"]
    """The number of the token's sequence, 0 .. count - 1; -1 on pads."""
    count: int
    """B, the same on all ranks of `group`."""
    lengths: Int[Tensor, " T"]
    """|y| of the token's response, over all ranks and all its sequences, at least 1."""
    group: dist.ProcessGroup | None = None
    """The context-parallel ranks with the same sequences; None: all tokens are on this rank."""
    kept_lengths: Int[Tensor, " T"] | None = None
    """n_i of kept_mean (loss/kept.py), over all sequences of the response."""

    @classmethod
    def of(cls, ids: Int[Tensor, " T"], loss_mask: Bool[Tensor, " T"]) -> Sequences:
        """Make the record from ids alone, where this rank has every token and every sequence is one
        response: |y| is the number of its tokens in `loss_mask`.
        """
        count = int(ids.max()) + 1 if ids.numel() else 0
        # the lengths of this record are not read by `sum`
        lengths = cls(ids, count, torch.ones_like(ids)).sum(loss_mask.double())
        return cls(ids, count, lengths.clamp(min=1).long())

    def sum(self, values: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
        """Return, at every token, the sum of `values` over its sequence; 0 on pads.

        It carries no gradient, and is added in float64, so that the order of tokens and ranks does
        not change the float32 result.  Collective over `group`.
        """
        # index_add_ needs a valid index for pads too: one slot more, whose sum is dropped
        slots = torch.where(self.ids < 0, self.count, self.ids)
        sums = torch.zeros(self.count + 1, dtype=torch.float64, device=values.device)
        sums.index_add_(0, slots, values.detach().double())
        sums = sum_over_group(sums, self.group)
        sums[self.count] = 0.0
        return sums[slots].to(values.dtype)

    def mean(self, values: Float[Tensor, " T"], mask: Bool[Tensor, " T"]) -> Float[Tensor, " T"]:
        """Return, at every token, the mean of `values` over the tokens of its sequence in `mask`; 0
        where there are none.
        """
        total = self.sum(torch.where(mask, values, 0.0))
        return total / self.sum(mask.to(values.dtype)).clamp(min=1)


def sum_over_group(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the sum of `values` over the ranks of `group`; None: of this rank alone."""
    if group is not None and group.size() > 1:
        # all_reduce works in place, and callers keep their values
        values = values.clone()
        dist.all_reduce(values, group=group)
    return values
