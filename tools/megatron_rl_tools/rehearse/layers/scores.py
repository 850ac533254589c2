"""The cost of attention: which scores are computed, and the tensors of one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl_tools.rehearse.layers.costs import kernel


@dataclass(frozen=True)
class Scores:
    """lengths: tokens of every sequence, over all context ranks."""

    lengths: Sequence[int]
    is_causal: bool
    window: tuple[int, int] | None = None
    """(keys before a query, keys after it) that it sees beside its own; -1: all."""

    def pairs(self) -> int:
        """Return the number of (query, key) pairs."""
        return sum(self._pairs(length) for length in self.lengths)

    def _pairs(self, length: int) -> int:
        left, right = self.window or (-1, -1)
        if self.is_causal:
            right = 0
        return length * length - beyond(length, left) - beyond(length, right)

    def tile(self, cp_size: int, section: str) -> int:
        """Return the pairs of one step of the ring on one of `cp_size` ranks.

        A rank has two chunks of every sequence; "diagonal": its keys, "lower": keys of an earlier
        rank, of which the first chunk counts, "upper": keys of a later one, for the second chunk
        of queries.
        """
        total = 0
        for length in self.lengths:
            chunk = length // (2 * cp_size)
            whole = 2 * chunk
            if section == "diagonal":
                total += whole * (whole + 1) // 2
            else:
                total += chunk * whole if section in ("lower", "upper") else whole * whole
        return total


def beyond(length: int, reach: int) -> int:
    """Return the pairs on one side that are farther than `reach`."""
    outside = length - 1 - reach if reach >= 0 else 0
    return outside * (outside + 1) // 2 if outside > 0 else 0


def attend(q: Tensor, k: Tensor, v: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
    """Return (output, float32 logsumexp of every query and head) of one kernel."""
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    logsumexp = q.new_empty(*q.shape[:-1], 1, dtype=torch.float32)
    flops = 2 * pairs * q.shape[-2] * (q.shape[-1] + v.shape[-1])
    kernel("attention", q, k, v, out, logsumexp, kind="attention", flops=flops)
    return out, logsumexp


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, pairs: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v: five products, of which three have q's head size."""
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    flops = 2 * pairs * q.shape[-2] * (3 * q.shape[-1] + 2 * v.shape[-1])
    kernel(
        "attention backward", grad, q, k, v, out, logsumexp, dq, dk, dv, kind="attention",
        flops=flops,
    )  # fmt: skip
    return dq, dk, dv
