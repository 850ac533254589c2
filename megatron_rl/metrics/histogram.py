"""The distribution of a quantity over tokens or responses: count, moments and a histogram, which
add over ranks, and the largest value.

Quantiles come from a fixed histogram of abs(x): 64 bins per decade from 1e-9 to 1e9.  A quantile is
within 1.9 % of the quantile of the sample, and 0 below the range.  Everything else is exact.
Shapes: n values, g groups (every value is in one), b bins, W columns (moments and bins).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

HISTOGRAMS = {
    "logratio/train_infer": ("mean", "std", "p99", "max"),
    "logratio/staleness": ("mean", "std", "p99", "max"),
    "first_order/total": ("median", "p95", "max"),
    "first_order/train_infer": ("median", "p95", "max"),
    "first_order/staleness": ("median", "p95", "max"),
    "rollout/request_seconds": ("median", "p95", "max"),
    "rollout/environment_seconds": ("mean", "p95", "max"),
    "teacher/request_seconds": ("median", "p95", "max"),
}
"""Quantity -> the statistics of it that are reported, as NAME_STATISTIC.

Mean and std are statistics of x, all others of abs(x).
"""

QUANTILES = {"median": 0.5, "p95": 0.95, "p99": 0.99}
BINS_PER_DECADE, LOWEST, DECADES = 64, -9, 18
MOMENTS = 3
"""The first columns: count, sum of x, sum of x^2."""
WIDTH = MOMENTS + BINS_PER_DECADE * DECADES + 2
"""W: moments, a bin below the range, the bins of the range and a bin above it."""


@dataclass(frozen=True)
class Histogram:
    """The distribution in each of g groups."""

    sums: Float[Tensor, "g W"]
    """Moments and bin counts, float64; they add over calls and ranks."""
    largest: Float[Tensor, " g"]
    """The largest abs(x), float64, 0 where nothing was counted; combined by maximum."""

    def together(self) -> Histogram:
        """Return the distribution of all groups together."""
        return Histogram(self.sums.sum(0, keepdim=True), self.largest.amax(0, keepdim=True))


def tabulate(
    values: Float[Tensor, " n"],
    mask: Bool[Tensor, " n"],
    groups: Integer[Tensor, " n"],
    num_groups: int,
) -> Histogram:
    """Return the distribution of the `values` in `mask`, which must be finite, in each of the
    groups 0 .. num_groups - 1.  It does not wait for the device.
    """
    values = torch.where(mask, values.detach().double(), 0.0)
    groups = groups.long()
    member = (groups == torch.arange(num_groups, device=groups.device)[:, None]) & mask
    moments = member.double() @ torch.stack(
        [torch.ones_like(values), values, values.square()], dim=1
    )
    num_bins = WIDTH - MOMENTS
    bin_ = ((values.abs().log10() - LOWEST) * BINS_PER_DECADE).floor() + 1
    # log10(0) is -inf: the clamp puts 0 into the lowest bin
    cell = groups * num_bins + bin_.clamp(0, num_bins - 1).long()
    counts = values.new_zeros(num_groups * num_bins).index_add_(0, cell, mask.double())
    largest = (
        torch.where(member, values.abs(), 0.0).amax(1)
        if len(values)
        else values.new_zeros(num_groups)
    )
    return Histogram(torch.cat([moments, counts.view(num_groups, num_bins)], dim=1), largest)


def describe_histogram(
    sums: Float[Tensor, "g W"], largest: Float[Tensor, " g"]
) -> dict[str, Float[Tensor, " g"]]:
    """Return {statistic: its value per group}, NaN where nothing was counted."""
    count, total, squares = sums[:, :MOMENTS].unbind(1)
    mean = total / count
    # rounding may make the difference negative
    std = (squares / count - mean.square()).clamp(min=0).sqrt()
    statistics = {"mean": mean, "std": std, "max": largest}
    for name, fraction in QUANTILES.items():
        statistics[name] = quantile(sums[:, MOMENTS:], largest, fraction)
    return {name: torch.where(count > 0, value, math.nan) for name, value in statistics.items()}


def quantile(
    histogram: Float[Tensor, "g b"], largest: Float[Tensor, " g"], fraction: float
) -> Float[Tensor, " g"]:
    """Return, per group, the middle (by logarithm) of the bin of the smallest value that at least
    `fraction` of all values do not exceed.
    """
    below = histogram.cumsum(1)
    bin_ = (below < fraction * below[:, -1:]).sum(1)
    middle = 10 ** ((bin_.double() - 0.5) / BINS_PER_DECADE + LOWEST)
    middle = torch.where(bin_ == histogram.shape[1] - 1, math.inf, middle)  # above the range
    return torch.where(bin_ == 0, 0.0, torch.minimum(middle, largest))
