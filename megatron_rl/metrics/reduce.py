"""One step's metrics: counted locally without a host sync, reduced over the job once.

A mean is (sum, count) per name: the reduced value is sum over ranks / count over ranks, so ranks may have counted
different numbers of tokens, or nothing at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.metrics.histogram import HISTOGRAMS, WIDTH, Histogram, describe

Number: TypeAlias = float | Tensor
"""A Python number or a 0-d tensor on the rank's device."""


class MetricSums:
    """Accumulates on this rank; `reduce` ends the step.  Tensors stay on their device until then."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Number, Number]] = {}
        self._maxima: dict[str, Number] = {}
        self._totals: dict[str, float] = {}
        self._spreads: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}

    def add(self, name: str, total: Number, count: Number = 1.0) -> None:
        """Add `total`, a sum over `count` things, to the mean `name`."""
        old_total, old_count = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = old_total + exact(total), old_count + exact(count)

    def add_total(self, name: str, total: float) -> None:
        """Add `total` to the plain sum `name`, reduced by adding over ranks."""
        self._totals[name] = self._totals.get(name, 0.0) + total

    def add_max(self, name: str, value: Number) -> None:
        """Raise the maximum `name` to `value`.  NaN wins, so that it is seen."""
        value = exact(value)
        if name in self._maxima:
            old = torch.as_tensor(self._maxima[name], dtype=torch.float64)
            value = torch.maximum(old.to(value.device) if isinstance(value, Tensor) else old, torch.as_tensor(value))
        self._maxima[name] = value

    def add_histogram(self, name: str, spread: Histogram, groups: Sequence[str] = ("",)) -> None:
        """Add row i of `spread` to group `groups[i]` of `name`, one of SPREADS; "" is the whole.

        Reported as NAME_STATISTIC and NAME_STATISTIC/GROUP.
        """
        for key, sums, largest in zip([(name, group) for group in groups], spread.sums, spread.largest, strict=True):
            if key in self._spreads:
                old_sums, old_largest = self._spreads[key]
                sums, largest = old_sums + sums, torch.maximum(old_largest, largest)
            self._spreads[key] = sums, largest

    def reduce(self, group: dist.ProcessGroup | None, device: torch.device | str) -> dict[str, float]:
        """Every name that any rank of `group` counted -> its value, the same on all ranks.  Collective.

        One sum and one maximum all-reduce, in float64.  NaN where nothing was counted.  `group` None: this rank alone.
        """
        mine: list[list[Any]] = [sorted(self._sums), sorted(self._totals), sorted(self._maxima), sorted(self._spreads)]
        mean_names, total_names, max_names, spread_names = mine if group is None else union_of_names(mine, group)
        pairs = [value for name in mean_names for value in self._sums.get(name, (0.0, 0.0))]
        nothing = torch.zeros(WIDTH, dtype=torch.float64, device=device), torch.zeros((), device=device)
        spreads = [self._spreads.get(name, nothing) for name in spread_names]
        sums = stack(pairs + [self._totals.get(name, 0.0) for name in total_names], device)
        sums = torch.cat([sums, *(table.to(device) for table, _ in spreads)])
        maxima = stack(
            [self._maxima.get(name, -math.inf) for name in max_names] + [most for _, most in spreads], device
        )
        if group is not None:
            dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=group)
            maxima = reduce_maxima(maxima, group)
        sums, maxima = sums.cpu(), maxima.cpu()
        added, counts = sums[: len(pairs)].view(-1, 2).unbind(1)
        means = torch.where(counts != 0, added / counts, math.nan)
        num_scalars = len(pairs) + len(total_names)
        values = torch.cat([means, sums[len(pairs) : num_scalars], maxima[: len(max_names)]]).tolist()
        scalars = dict(zip([*mean_names, *total_names, *max_names], values, strict=True))
        return scalars | histograms_of(spread_names, sums[num_scalars:].view(-1, WIDTH), maxima[len(max_names) :])


def reduce_maxima(maxima: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The largest over the ranks, element by element; NaN wins, which MAX alone does not promise."""
    is_nan = maxima.isnan().double()
    both = torch.cat([is_nan, maxima.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)])
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    is_nan, maxima = both.chunk(2)
    return torch.where(is_nan > 0, math.nan, maxima)


def histograms_of(names: Sequence[tuple[str, str]], sums: Tensor, largest: Tensor) -> dict[str, float]:
    """NAME_STATISTIC[/GROUP] -> value, of the statistics that SPREADS names."""
    found = {statistic: values.tolist() for statistic, values in describe(sums, largest).items()}
    return {
        f"{name}_{statistic}{'/' if group else ''}{group}": found[statistic][row]
        for row, (name, group) in enumerate(names)
        for statistic in HISTOGRAMS[name]
    }


def exact(value: Number) -> Number:
    """float64, which adds token counts of long runs exactly."""
    return value.detach().double() if isinstance(value, Tensor) else float(value)


def stack(values: list[Number], device: torch.device | str) -> Tensor:
    """float64 [n] on `device`."""
    if not values:
        return torch.zeros(0, dtype=torch.float64, device=device)
    return torch.stack([torch.as_tensor(value, dtype=torch.float64, device=device) for value in values])


def union_of_names(names: list[list[Any]], group: dist.ProcessGroup) -> list[list[Any]]:
    """What any rank counted, kind by kind, in the same order on all: only leaders count rewards, only the last stage ratios."""
    everyone: list[list[list[Any]]] = [names] * dist.get_world_size(group)
    dist.all_gather_object(everyone, names, group=group)
    return [sorted({name for rank in everyone for name in rank[kind]}) for kind in range(len(names))]
