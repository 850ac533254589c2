"""One step's metrics: counted locally without a device sync, reduced over the job once.

A mean is (sum, count) per name: the reduced value is sum over ranks / count over ranks, so ranks
may count different numbers of tokens, or none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.metrics.histogram import HISTOGRAMS, WIDTH, Histogram, describe_histogram

T = TypeVar("T")
Number: TypeAlias = float | Tensor
"""A Python number or a 0-d tensor on the rank's device."""


class MetricSums:
    """The metrics of one step on this rank: `add*` accumulates them, `reduce` ends the step.

    Tensors stay on their device until `reduce`.
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Number, Number]] = {}
        self._maxima: dict[str, Number] = {}
        self._totals: dict[str, float] = {}
        self._histograms: dict[str, tuple[Tensor, Tensor]] = {}
        """ "NAME GROUP" -> (sums [W], largest []), a row of a Histogram."""

    def add(self, name: str, total: Number, count: Number = 1.0) -> None:
        """Add `total`, a sum over `count` items, to the mean `name`."""
        old_total, old_count = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = old_total + exact(total), old_count + exact(count)

    def add_total(self, name: str, total: float) -> None:
        """Add `total` to the plain sum `name`, reduced by adding over ranks."""
        self._totals[name] = self._totals.get(name, 0.0) + total

    def add_max(self, name: str, value: Number) -> None:
        """Raise the maximum `name` to `value`.  NaN counts as the largest, to be visible."""
        value = exact(value)
        if name in self._maxima:
            # torch.maximum returns NaN where one value is NaN; Python's max does not
            old = torch.as_tensor(self._maxima[name], dtype=torch.float64)
            value = torch.maximum(
                old.to(value.device) if isinstance(value, Tensor) else old, torch.as_tensor(value)
            )
        self._maxima[name] = value

    def add_histogram(self, name: str, histogram: Histogram, groups: Sequence[str] = ("",)) -> None:
        """Add row i of the histogram to group `groups[i]` of `name`, a key of HISTOGRAMS.

        It is reported as NAME_STATISTIC/GROUP; the group "" is everything, reported as
        NAME_STATISTIC.
        """
        for group, sums, largest in zip(groups, histogram.sums, histogram.largest, strict=True):
            key = f"{name} {group}"
            if key in self._histograms:
                old_sums, old_largest = self._histograms[key]
                sums, largest = old_sums + sums, torch.maximum(old_largest, largest)
            self._histograms[key] = sums, largest

    def merge(self, other: MetricSums) -> None:
        """Add everything that `other` counted."""
        for name, (total, count) in other._sums.items():
            self.add(name, total, count)
        for name, total in other._totals.items():
            self.add_total(name, total)
        for name, value in other._maxima.items():
            self.add_max(name, value)
        for key, (table, largest) in other._histograms.items():
            name, _, group = key.partition(" ")
            self.add_histogram(name, Histogram(table.unsqueeze(0), largest.unsqueeze(0)), (group,))

    def renamed(self, name_of: Callable[[str], str | None]) -> MetricSums:
        """Return these metrics under the names that `name_of` gives, without those whose name is
        None.
        """
        kept = MetricSums()
        kept._sums = renamed_keys(self._sums, name_of)
        kept._totals = renamed_keys(self._totals, name_of)
        kept._maxima = renamed_keys(self._maxima, name_of)
        kept._histograms = renamed_keys(self._histograms, name_of)
        return kept

    def mean(self, name: str, group: dist.ProcessGroup | None, device: torch.device | str) -> float:
        """Return one mean over the ranks of `group`, NaN where nothing was counted.  Collective."""
        pair = stack(list(self._sums.get(name, (0.0, 0.0))), device)
        if group is not None:
            dist.all_reduce(pair, group=group)
        total, count = pair.tolist()  # waits for the device
        return total / count if count else math.nan

    def reduce(
        self, group: dist.ProcessGroup | None, device: torch.device | str
    ) -> dict[str, float]:
        """Return {name: value} for every name that any rank of `group` counted, the same on all
        ranks.

        Collective: one sum and one maximum all-reduce, in float64.  A value is NaN where nothing
        was counted.  group: None for this rank alone.
        """
        names = [
            sorted(kind) for kind in (self._sums, self._totals, self._maxima, self._histograms)
        ]
        if group is not None:
            names = union_of_names(names, group)
        mean_names, total_names, max_names, keys = names
        pairs = [value for name in mean_names for value in self._sums.get(name, (0.0, 0.0))]
        totals: list[Number] = [self._totals.get(name, 0.0) for name in total_names]
        empty_table = torch.zeros(WIDTH, dtype=torch.float64, device=device)
        empty = empty_table, torch.zeros((), device=device)
        histograms = [self._histograms.get(key, empty) for key in keys]
        # one tensor of everything that adds over ranks, and one of everything with a maximum
        sums = torch.cat(
            [stack(pairs + totals, device), *(table.to(device) for table, _ in histograms)]
        )
        # -inf changes no maximum of the ranks that counted
        largest = [self._maxima.get(name, -math.inf) for name in max_names]
        maxima = stack(largest + [value for _, value in histograms], device)
        if group is not None:
            dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=group)
            maxima = reduce_maxima(maxima, group)
        sums, maxima = sums.cpu(), maxima.cpu()  # the step's only wait for the device
        pair_sums, total_sums, tables = sums.split([len(pairs), len(totals), len(keys) * WIDTH])
        added, counts = pair_sums.view(-1, 2).unbind(1)
        means = torch.where(counts != 0, added / counts, math.nan)
        values = torch.cat([means, total_sums, maxima[: len(max_names)]]).tolist()
        scalars = dict(zip([*mean_names, *total_names, *max_names], values, strict=True))
        return scalars | statistics_of(keys, tables.view(-1, WIDTH), maxima[len(max_names) :])


def renamed_keys(values: dict[str, T], name_of: Callable[[str], str | None]) -> dict[str, T]:
    return {new: value for name, value in values.items() if (new := name_of(name)) is not None}


def reduce_maxima(maxima: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the element-wise maximum over the ranks of `group`.  NaN counts as the largest, which
    ReduceOp.MAX does not guarantee.
    """
    # NaN travels as a flag, which has a maximum, and as -inf, which changes none
    is_nan = maxima.isnan().double()
    both = torch.cat([is_nan, maxima.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)])
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    is_nan, maxima = both.chunk(2)
    return torch.where(is_nan > 0, math.nan, maxima)


def statistics_of(keys: Sequence[str], sums: Tensor, largest: Tensor) -> dict[str, float]:
    """Return {NAME_STATISTIC[/GROUP]: value} for the statistics in HISTOGRAMS."""
    columns = {
        statistic: values.tolist()
        for statistic, values in describe_histogram(sums, largest).items()
    }
    metrics = {}
    for row, key in enumerate(keys):
        name, _, group = key.partition(" ")
        for statistic in HISTOGRAMS[name]:
            metrics[f"{name}_{statistic}/{group}".removesuffix("/")] = columns[statistic][row]
    return metrics


def exact(value: Number) -> Number:
    """Return the number in float64, which adds token counts of long runs exactly."""
    return value.detach().double() if isinstance(value, Tensor) else float(value)


def stack(values: list[Number], device: torch.device | str) -> Tensor:
    """Return float64 [n] on `device`."""
    if not values:
        return torch.zeros(0, dtype=torch.float64, device=device)
    return torch.stack(
        [torch.as_tensor(value, dtype=torch.float64, device=device) for value in values]
    )


def union_of_names(names: list[list[str]], group: dist.ProcessGroup) -> list[list[str]]:
    """Return the names that any rank of `group` counted, kind by kind, in the same order on all.

    Ranks count different names: only leaders count rewards, only last stages ratios.  Collective.
    """
    by_rank: list[list[list[str]]] = [names] * dist.get_world_size(group)
    dist.all_gather_object(by_rank, names, group=group)
    return [sorted({name for rank in by_rank for name in rank[kind]}) for kind in range(len(names))]
