"""Counts of the entries of LEFT_OUT: the numbers of one step, and of a complete run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megatron_rl.metrics.left_out import LeftOut, entry_of

if TYPE_CHECKING:  # it loads torch
    from megatron_rl.records.packed import StepResult


@dataclass(frozen=True)
class Count:
    """The number of events of one entry in a step or a run."""

    entry: LeftOut
    amount: float
    value: float
    """The metric itself, as last reported."""

    @property
    def line(self) -> str:
        """The text in the step line."""
        return (
            self.entry.line.format(percent=100 * self.value)
            or f"{self.entry.label} {self.amount:.0f}"
        )


def totals_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that count since the first start of the run."""
    return {
        name: value
        for name, value in metrics.items()
        if (entry := entry_of(name)) and entry.per == "run"
    }


def counts_of_step(metrics: Mapping[str, float], totals: Mapping[str, float]) -> list[Count]:
    """Return the counts of one step that are not 0, the worst first.

    totals: the metrics that count since the start, after the step before.
    """
    counts = []
    for name, value in metrics.items():
        if entry := entry_of(name):
            before = totals.get(name, 0.0) if entry.per == "run" else 0.0
            counts.append(Count(entry, float(entry.added(np.array([value - before]), 1)[0]), value))
    return in_order(counts)


def counts_of_run(results: Sequence[StepResult]) -> list[Count]:
    """Return the counts of all steps that are not 0, the worst first.

    The count of a total since the start is its last value, any other the sum over the steps.
    """
    columns: dict[str, list[float]] = {}
    for result in results:
        for name, value in result.metrics.items():
            if value == value:  # not NaN
                columns.setdefault(name, []).append(value)
    counts = []
    for name, values in columns.items():
        if entry := entry_of(name):
            amount = values[-1] if entry.per == "run" else entry.added(np.array(values), 1).sum()
            counts.append(Count(entry, float(amount), values[-1]))
    return in_order(counts)


def in_order(counts: Sequence[Count]) -> list[Count]:
    """Return the counts to show: entries with their own text in the step line first, then by level
    and amount.  Base entries and counts of 0 are left out.
    """
    order = ("bad", "watch", "normal", "same")
    shown = [count for count in counts if count.amount > 0 and count.entry.level in order]

    def rank(count: Count) -> tuple[bool, int, float, str]:
        return (
            not count.entry.line,
            order.index(count.entry.level),
            -count.amount,
            count.entry.metric,
        )

    return sorted(shown, key=rank)
