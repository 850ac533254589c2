"""The angle between the gradients of consecutive updates: a gauge of staleness (GAC, arXiv
2603.01501).

    cos = <g_k, g_(k-1)> / (|g_k| |g_(k-1)|)

over all trained parameters, before clipping.  Updates on stale samples push the same way again and
again, and their cosine stays high.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor


class GradientCosine:
    """It keeps this rank's part of the last gradient, in its dtype: 4 bytes a parameter, with the
    distributed optimizer 4 bytes a parameter of this rank's shard.
    """

    def __init__(self, optimizers: Sequence[MegatronOptimizer], device: torch.device) -> None:
        """optimizers: core's, of this rank."""
        self._optimizers, self._device = optimizers, device
        self._is_first = True
        self.last: list[Tensor] = []
        """The gradient of the last call."""

    @torch.no_grad()
    def measure(self) -> float | None:
        """Return the cosine of the prepared gradient and the one of the call before; None in the
        first call.  Collective: one all-reduce of three numbers for each of core's optimizers.

        core leaves out copies: shared parameters, and those that every tensor rank holds.
        """
        grads = [optimizer.get_main_grads_for_grad_norm() for optimizer in self._optimizers]
        if self._is_first:
            self.last += [grad.clone() for part in grads for grad in part]
            self._is_first = False
            return None
        last, total = iter(self.last), [0.0, 0.0, 0.0]
        for optimizer, part in zip(self._optimizers, grads, strict=True):
            sums = torch.zeros(3, dtype=torch.float64, device=self._device)
            for now in part:
                before = next(last)
                sums += torch.stack([dot(now, before), dot(now, now), dot(before, before)])
                before.copy_(now)
            dist.all_reduce(sums, group=optimizer.get_grad_stats_parallel_group())
            total = [a + b for a, b in zip(total, sums.tolist(), strict=True)]
        product, *squares = total
        return product / math.sqrt(math.prod(squares))


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of two tensors, summed in float64."""
    return torch.dot(a.flatten().double(), b.flatten().double())
