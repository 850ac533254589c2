"""The distribution of a quantity over tokens or responses: count, moments, largest and a histogram,
which all add over ranks.

Quantiles come from a fixed histogram of abs(x): 64 bins per decade from 1e-9 to 1e9.  A quantile is
within 1.9 % of that of the sample, and 0 below the range.  The rest is exact.
Shapes: n values, g groups (each value is in one), W columns.
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
}
"""Every such quantity and what is reported of it, as NAME_STATISTIC.

Mean and std are of x, the rest of abs(x).
"""

QUANTILES = {"median": 0.5, "p95": 0.95, "p99": 0.99}
BINS_PER_DECADE, LOWEST, DECADES = 64, -9, 18
MOMENTS = 3  # count, sum of x, sum of x^2
WIDTH = MOMENTS + BINS_PER_DECADE * DECADES + 2  # W: a bin below the range and one above it


@dataclass(frozen=True)
class Histogram:
    """sums float64 [g, W] add over ranks and calls, largest float64 [g] (0 where nothing was
    counted) by maximum.
    """

    sums: Float[Tensor, "g W"]
    largest: Float[Tensor, " g"]

    def together(self) -> Histogram:
        """All groups as one."""
        return Histogram(self.sums.sum(0, keepdim=True), self.largest.amax(0, keepdim=True))


def tabulate(
    values: Float[Tensor, " n"],
    mask: Bool[Tensor, " n"],
    groups: Integer[Tensor, " n"],
    num_groups: int,
) -> Histogram:
    """The distribution of the `values` under `mask`, which must be finite, in each of groups
    0..num_groups - 1.  Never waits for the device."""
    values = torch.where(mask, values.detach().double(), 0.0)
    groups = groups.long()
    member = (groups == torch.arange(num_groups, device=groups.device)[:, None]) & mask
    moments = member.double() @ torch.stack(
        [torch.ones_like(values), values, values.square()], dim=1
    )
    num_bins = WIDTH - MOMENTS
    place = ((values.abs().log10() - LOWEST) * BINS_PER_DECADE).floor() + 1
    # log10(0) is -inf: 0 is in the lowest bin
    cell = groups * num_bins + place.clamp(0, num_bins - 1).long()
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
    """Statistic -> its value per group, NaN where nothing was counted."""
    count, total, squares = sums[:, :MOMENTS].unbind(1)
    mean = total / count
    found = {
        "mean": mean,
        "std": (squares / count - mean.square()).clamp(min=0).sqrt(),
        "max": largest,
    }
    for name, fraction in QUANTILES.items():
        found[name] = quantile(sums[:, MOMENTS:], largest, fraction)
    return {name: torch.where(count > 0, value, math.nan) for name, value in found.items()}


def quantile(
    histogram: Float[Tensor, "g b"], largest: Float[Tensor, " g"], fraction: float
) -> Float[Tensor, " g"]:
    """The middle (by logarithm) of the bin that holds the smallest value with at least `fraction`
    of all at or below it.
    """
    below = histogram.cumsum(1)
    bin_ = (below < fraction * below[:, -1:]).sum(1)
    middle = 10 ** ((bin_.double() - 0.5) / BINS_PER_DECADE + LOWEST)
    middle = torch.where(bin_ == histogram.shape[1] - 1, math.inf, middle)  # above the range
    return torch.where(bin_ == 0, 0.0, torch.minimum(middle, largest))
