"""Sums over complete responses, also where context parallelism spreads a response's tokens over
several ranks.

Shapes: T packed tokens of one micro-batch on this rank, B sequences of the micro-batch.  A sequence
never spans micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """Which response each token belongs to."""

    ids: Int[Tensor, " T"]  # 0 .. count - 1; -1 on pads
    count: int  # B, the same on all ranks of `group`
    lengths: Int[Tensor, " T"]  # |y| of the token's own response over all ranks, at least 1
    group: dist.ProcessGroup | None = None
    """Context-parallel ranks with the same sequences; None: all tokens are here."""
    kept_lengths: Int[Tensor, " T"] | None = None
    """n_i of kept_mean (loss/kept.py), of all the response's sequences."""

    @classmethod
    def of(cls, ids: Int[Tensor, " T"], loss_mask: Bool[Tensor, " T"]) -> Sequences:
        """From ids alone, where this rank has every token: |y| counts the response's tokens in
        `loss_mask`.
        """
        count = int(ids.max()) + 1 if ids.numel() else 0
        lengths = cls(ids, count, torch.ones_like(ids)).sum(loss_mask.double())
        return cls(ids, count, lengths.clamp(min=1).long())

    def sum(self, values: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
        """At every token, the sum of `values` over its response; 0 on pads.  No gradient.
        Collective over `group`.

        Summed in float64, so that the order of tokens and ranks does not show in float32.
        """
        slots = torch.where(self.ids < 0, self.count, self.ids)
        sums = torch.zeros(self.count + 1, dtype=torch.float64, device=values.device)
        sums.index_add_(0, slots, values.detach().double())
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(sums, group=self.group)
        sums[self.count] = 0.0  # the slot that collected the pads
        return sums[slots].to(values.dtype)

    def mean(self, values: Float[Tensor, " T"], mask: Bool[Tensor, " T"]) -> Float[Tensor, " T"]:
        """At every token, the mean of `values` over its response's tokens in `mask` (0 where it has
        none).
        """
        total = self.sum(torch.where(mask, values, 0.0))
        return total / self.sum(mask.to(values.dtype)).clamp(min=1)
