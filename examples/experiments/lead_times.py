"""Lead times and false alarms of rules that say that a run will collapse, from results/cells to
lead_times.md:

    python -m examples.experiments.lead_times paper_tiny [--results DIR]

A rule gives an alarm at the first step s > `first` at which its metric was, in `consecutive` steps,
beyond a bound: a value, or a factor times its median over the run's own first steps.  Collapse:
analyse.Run.collapse_step.
    detected     the alarm of a run that collapses comes at least one step before the collapse; the
                 lead is that many steps
    false alarm  a run that does not collapse has one at any step
Every run that collapses counts.  Of the others only those count in which the rule can fire: the
runs of a line (one configuration) in which the metric moves.  Staleness is exactly 0 on policy, so
these runs cannot have a false alarm of it, and with them in the denominator any bound would look
good. The best rule of a set (decided before it was computed): of the rules with false alarms in at
most MOST_FALSE of the runs that do not collapse, the one that detects most; then the largest median
lead; then the fewest false alarms.
    Among so many rules the best one looks better than it is.  So it is also chosen without the runs
of a seed and tried on them, for every seed: "held out".  A rule is taken into the run's health line
if, held out, the choice among all metrics detects at least LEAST_DETECTED of the collapses with
false alarms in at most MOST_FALSE of the others.

Shapes: a metric is [steps].
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from examples.experiments.analyse import Run, load
from examples.experiments.experiment import ANALYSED, load_experiment
from examples.experiments.health_counts import health_table

MOST_FALSE, LEAST_DETECTED = 0.1, 0.5
FIRST_STEPS = (2, 3, 5)
CONSECUTIVE = (1, 2)
FACTORS = (1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
QUANTILES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
"""Quantiles of a metric's values in all runs: the grid of bounds."""

Side = Literal["above", "below"]


@dataclass(frozen=True)
class Metric:
    """The sum of these columns, dangerous on one side."""

    label: str
    columns: tuple[str, ...]
    side: Side = "above"

    def values(self, run: Run) -> np.ndarray:
        """Return the sum of the columns, NaN if one of them was not stored."""
        steps = len(run.curve("rollout/reward_mean"))
        curves = [
            run.curve(name) if name in run.data["columns"] else np.full(steps, np.nan)
            for name in self.columns
        ]
        return np.sum(curves, axis=0)


METRICS = (
    Metric("KL(mu, pi_old), k3", ("train/kl_mu_pi_k3",)),
    Metric("largest abs(log mu - log pi_old)", ("train/logratio_abs_max",)),
    Metric("F(2)", ("logratio/f2_frac",)),
    Metric("first-order error, p95", ("first_order/total_p95",)),
    Metric("its training-inference part", ("first_order/train_infer_p95",)),
    Metric("its staleness part", ("first_order/staleness_p95",)),
    Metric("staleness, p99", ("logratio/staleness_p99",)),
    Metric("largest r", ("train/ratio_max",)),
    Metric("effective sample size", ("train/ess",), "below"),
    Metric("truncated weights", ("train/tis_truncated_frac",)),
    Metric("clipped tokens", ("train/clip_high_frac", "train/clip_low_frac")),
    Metric("entropy falls", ("train/entropy",), "below"),
    Metric("entropy rises", ("train/entropy",)),
    Metric("router mismatch", ("routing/router_mismatch",)),
    Metric("gradient norm", ("optim/grad_norm",)),
    Metric("groups without advantage", ("rollout/zero_advantage_groups_frac",)),
    Metric("reward of a step", ("rollout/reward_mean",), "below"),
)


@dataclass(frozen=True)
class Rule:
    """A rule for one metric; the module's docstring says when it gives an alarm."""

    metric: Metric
    bound: float
    is_factor: bool
    """`bound` is a factor of the metric's median over the run's first steps."""
    first: int
    """Steps before the rule applies."""
    consecutive: int

    def alarm(self, values: np.ndarray) -> int | None:
        """Return the step of the alarm, counted from 1, or None."""
        if len(values) <= self.first:
            return None
        bound = self.bound
        if self.is_factor:
            bound *= float(np.nanmedian(values[: self.first]))
        later = values[self.first :]
        beyond = later > bound if self.metric.side == "above" else later < bound
        single = beyond
        for shift in range(1, self.consecutive):
            beyond = beyond & np.concatenate([np.zeros(shift, bool), single[:-shift]])
        return self.first + int(np.argmax(beyond)) + 1 if beyond.any() else None

    def __str__(self) -> str:
        text = f"{self.metric.side} {self.bound:.3g}"
        text += f" x the median of {self.first} steps" if self.is_factor else ""
        text += "" if self.is_factor else f" after {self.first} steps"
        return text + (f", {self.consecutive} in a row" if self.consecutive > 1 else "")


@dataclass
class Score:
    """The alarms of a rule over a set of runs."""

    leads: list[int] = field(default_factory=list)
    """Lead times of the collapses that were detected, in steps."""
    collapses: int = 0
    false_alarms: int = 0
    others: int = 0

    def add(self, alarm: int | None, collapse: int | None) -> None:
        if collapse is None:
            self.others += 1
            self.false_alarms += alarm is not None
        else:
            self.collapses += 1
            if alarm is not None and alarm < collapse:
                self.leads.append(collapse - alarm)

    def __iadd__(self, other: Score) -> Score:
        self.leads += other.leads
        self.collapses, self.others = self.collapses + other.collapses, self.others + other.others
        self.false_alarms += other.false_alarms
        return self

    @property
    def detected(self) -> float:
        return len(self.leads) / max(self.collapses, 1)

    @property
    def false_share(self) -> float:
        return self.false_alarms / max(self.others, 1)

    @property
    def order(self) -> tuple[bool, int, float, int]:
        """Return the criterion: the larger, the better."""
        lead = statistics.median(self.leads) if self.leads else 0.0
        return self.false_share <= MOST_FALSE, len(self.leads), lead, -self.false_alarms

    def cells(self) -> str:
        leads = ""
        if self.leads:
            leads = f"{statistics.median(self.leads):g} ({min(self.leads)} to {max(self.leads)})"
        return f"{len(self.leads)}/{self.collapses} | {leads} | {self.false_alarms}/{self.others}"


@dataclass(frozen=True, eq=False)  # compared by identity
class Curves:
    """A run as the rules see it."""

    table: str
    seed: int
    collapse: int | None
    """Step of its collapse."""
    values: dict[Metric, np.ndarray]
    moving: frozenset[Metric]
    """Metrics that are not the same number in all steps of all runs of the run's line."""


def curves_of(lines: Iterable[Sequence[Run]]) -> list[Curves]:
    """Return all runs, line by line."""
    return [curves for runs in lines for curves in curves_of_line(runs)]


def curves_of_line(runs: Sequence[Run]) -> Iterator[Curves]:
    values = [{metric: metric.values(run) for metric in METRICS} for run in runs]
    moving = frozenset(
        metric
        for metric in METRICS
        if len(np.unique(np.concatenate([curves_of_run[metric] for curves_of_run in values]))) > 1
    )
    for run, of_run in zip(runs, values, strict=True):
        yield Curves(run.data["table"], run.data["seed"], run.collapse_step, of_run, moving)


def rules_of(metric: Metric, runs: Sequence[Curves]) -> Iterator[Rule]:
    """Yield the grid of rules; bounds are values of the metric in these runs, collapsed or not."""
    everything = np.concatenate([run.values[metric] for run in runs]) if runs else np.empty(0)
    everything = everything[np.isfinite(everything)]
    if not len(everything):
        return
    is_above = metric.side == "above"
    quantiles = QUANTILES if is_above else [1 - q for q in QUANTILES]
    bounds = np.unique(np.quantile(everything, quantiles))
    for first in FIRST_STEPS:
        for consecutive in CONSECUTIVE:
            yield from (Rule(metric, float(bound), False, first, consecutive) for bound in bounds)
            yield from (
                Rule(metric, f if is_above else 1 / f, True, first, consecutive) for f in FACTORS
            )


def score(rule: Rule, runs: Sequence[Curves]) -> Score:
    """Score a rule over these runs.

    Runs that did not store the metric are left out, and so are those without a collapse in which it
    does not move.
    """
    total = Score()
    for run in runs:
        values = run.values[rule.metric]
        if not np.isnan(values).all() and (run.collapse is not None or rule.metric in run.moving):
            total.add(alarm(rule, run), run.collapse)
    return total


@functools.cache  # a rule is tried on a run again for every seed that is held out
def alarm(rule: Rule, run: Curves) -> int | None:
    return rule.alarm(run.values[rule.metric])


def best(metrics: Sequence[Metric], runs: Sequence[Curves]) -> Rule | None:
    """Return the first of the best rules by the criterion; None if no rule detects anything within
    MOST_FALSE.
    """
    rated = [pair for metric in metrics if (pair := rated_best(metric, tuple(runs))) is not None]
    if not rated:
        return None
    (is_allowed, detected, *_), rule = max(rated, key=lambda pair: pair[0])
    return rule if is_allowed and detected else None


@functools.cache  # asked for every metric alone, then for all of them
def rated_best(
    metric: Metric, runs: tuple[Curves, ...]
) -> tuple[tuple[bool, int, float, int], Rule] | None:
    rated = [(score(rule, runs).order, rule) for rule in rules_of(metric, runs)]
    return max(rated, key=lambda pair: pair[0], default=None)


def held_out(metrics: Sequence[Metric], runs: Sequence[Curves]) -> Score:
    """Score the best rule of all other seeds on every seed's runs.

    If there is no rule, every collapse is missed, and no other run counts.
    """
    total = Score()
    for seed in sorted({run.seed for run in runs}):
        inside, outside = (
            [run for run in runs if (run.seed == seed) is flag] for flag in (True, False)
        )
        rule = best(metrics, outside)
        if rule is not None:
            total += score(rule, inside)
        else:
            total.collapses += sum(run.collapse is not None for run in inside)
    return total


def is_justified(total: Score) -> bool:
    """Return whether a rule may be in the run's health line."""
    return total.detected >= LEAST_DETECTED and total.false_share <= MOST_FALSE


def table(runs: Sequence[Curves]) -> str:
    """Return a table with one row per metric, and one for the choice among all."""
    head = ("metric", "best rule", "detected", "lead, median", "false alarms")
    head += ("held out", "lead", "false")
    rows = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    stored = [
        metric for metric in METRICS if not all(np.isnan(run.values[metric]).all() for run in runs)
    ]
    for label, metrics in (
        *((metric.label, (metric,)) for metric in METRICS),
        ("**all of them**", METRICS),
    ):
        if not set(metrics) & set(stored):
            rows.append(f"| {label} | not stored |" + " |" * 6)
            continue
        rule, outside = best(metrics, runs), held_out(metrics, runs)
        row = (
            "none | | | "
            if rule is None
            else f"{shown(rule, len(metrics) > 1)} | {score(rule, runs).cells()}"
        )
        rows.append(f"| {label} | {row} | {outside.cells()} |")
    return "\n".join(rows)


def shown(rule: Rule, with_metric: bool) -> str:
    return f"{rule.metric.label} {rule}" if with_metric else str(rule)


def by_table(rule: Rule | None, runs: Sequence[Curves]) -> str:
    """Return a table with one row per table of the experiment."""
    rows = [
        "| best rule of all, by table | detected | lead, median | false alarms |",
        "|" + "---|" * 4,
    ]
    for name in dict.fromkeys(run.table for run in runs):
        total = Score() if rule is None else score(rule, [run for run in runs if run.table == name])
        rows.append(f"| {name} | {total.cells()} |")
    return "\n".join(rows)


def report(name: str, runs: Sequence[Curves]) -> str:
    collapsed = sum(run.collapse is not None for run in runs)
    with_collapse = {run.table for run in runs if run.collapse is not None}
    tables = f"{table(runs)}\n\n{by_table(best(METRICS, runs), runs)}"
    return (
        f"# {name}: lead times of metrics\n\n{len(runs)} runs, {collapsed} collapsed.  Steps; rules"
        f" and criterion: examples/experiments/lead_times.py.\n\n{tables}\n\n"
        f"A rule in the run's health line: {verdict(runs)} (held out, at least"
        f" {LEAST_DETECTED:.0%} detected with at most {MOST_FALSE:.0%} false alarms).  In the"
        " tables with a collapse"
        f" alone: {verdict([run for run in runs if run.table in with_collapse])}.\n"
    )


def verdict(runs: Sequence[Curves]) -> str:
    chosen = held_out(METRICS, runs)
    word = "justified" if is_justified(chosen) else "not justified"
    return (
        f"{word}, {len(chosen.leads)}/{chosen.collapses} and {chosen.false_alarms}/{chosen.others}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("experiment", choices=ANALYSED)
    parser.add_argument("--results", type=Path, help="default: examples/EXPERIMENT/results")
    arguments = parser.parse_args()
    experiment = load_experiment(arguments.experiment)
    results = arguments.results or experiment.folder / "results"
    lines = load(results / "cells", experiment)
    text = report(experiment.name, curves_of(lines.values())) + "\n" + health_table(lines.values())
    (results / "lead_times.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
