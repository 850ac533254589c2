"""Write tables.md and one picture per table from the results of an experiment's cells, in the
results folder:

    python -m examples.experiments.analyse paper_tiny [--results DIR]

Shapes: a curve is [steps]; the curves of one line's seeds are stacked to [seeds, steps], NaN after
a run's end.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import fisher_exact, ttest_rel
from scipy.stats import t as student

from examples.experiments.experiment import ANALYSED, ENDED, Experiment, Table, load_experiment
from megatron_rl.config.renamed import new_metric

COLLAPSE_FRACTION = 0.7
REWARD, ENTROPY, KL = "rollout/reward_mean", "train/entropy", "train/kl_mu_pi_k3"


@dataclass(frozen=True)
class Run:
    """The result file of a cell, with its table."""

    data: dict[str, Any]
    table: Table

    def curve(self, name: str) -> np.ndarray:
        return np.array(
            [np.nan if value is None else value for value in self.data["columns"][name]],
            dtype=float,
        )

    @property
    def window(self) -> int:
        """Return the steps of the moving average: a tenth of the planned run, so that all tables
        have the same smoothing.
        """
        return max(2, self.table.num_steps // 10)

    @property
    def reward(self) -> np.ndarray:
        """Return the trailing moving average of the training reward, [steps - window + 1]; for a
        shorter run the mean.
        """
        reward = self.curve(REWARD)
        window = min(self.window, len(reward))
        return np.convolve(reward, np.ones(window) / window, "valid")

    @property
    def collapse_step(self) -> int | None:
        """Return the step of the collapse, or None.

        A run collapses if it stops on non-finite numbers, or if its smoothed reward falls below
        COLLAPSE_FRACTION of its highest so far and is below that fraction of the peak at the end.
        """
        steps = len(self.curve(REWARD))
        if self.data["outcome"] == "diverged":
            return steps
        reward = self.reward
        highest = np.maximum.accumulate(reward)
        if reward[-1] >= COLLAPSE_FRACTION * highest[-1]:
            return None
        last_high = int(np.flatnonzero(reward >= COLLAPSE_FRACTION * highest)[-1])
        # the average at index i ends at step i + window
        return last_high + 1 + steps - len(reward) + 1

    def share(self, name: str, part: slice) -> float:
        return float(np.nanmean(self.curve(name)[part]))

    @property
    def evals(self) -> list[tuple[int, float]]:
        return sorted((int(step), score) for step, score in self.data["eval"].items())


def last_third(run: Run) -> slice:
    """Return the steps of the last third of the run."""
    return slice(-max(1, len(run.curve(REWARD)) // 3), None)


def interval(differences: list[float]) -> str:
    """Return the mean difference, with the interval of Student's t from two pairs on."""
    if not differences:
        return "-"
    mean = f"{statistics.mean(differences):+.3f}"
    if len(differences) < 2:
        return mean
    error = statistics.stdev(differences) / len(differences) ** 0.5
    half = float(student.ppf(0.975, len(differences) - 1)) * error
    return f"{mean} +- {half:.3f}"


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
    parts = []
    for name, table in experiment.tables.items():
        present = {line: lines[name, line] for line in table.lines if lines.get((name, line))}
        if not present:
            continue
        plot(table, present, results / f"{name}.png")
        parts.append(f"## {table.title}\n" + stability_table(present))
    parts.append("## What each ingredient changes\n" + effects_table(experiment, lines))
    if experiment.hypotheses:
        parts.append("## Hypotheses\n" + hypotheses_table(experiment, lines))
    parts.append("## Cells that failed or timed out\n" + unfinished_table(results / "cells"))
    (results / "tables.md").write_text("\n\n".join(parts) + "\n")
    print("\n\n".join(parts))


def load(folder: Path, experiment: Experiment) -> dict[tuple[str, str], list[Run]]:
    """Return (table, line) -> its runs, by seed, without those that failed or timed out."""
    lines: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text())
        data["columns"] = {new_metric(name): values for name, values in data["columns"].items()}
        run = Run(data, experiment.tables[data["table"]])
        if data["outcome"] in ENDED and len(run.curve(REWARD)):
            lines[run.data["table"], run.data["line"]].append(run)
    return lines


def unfinished_table(folder: Path) -> str:
    """Return one row per attempt without a result, even if a later attempt has one."""
    rows = []
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text())
        for attempt in (*data.get("earlier_attempts", []), data):
            if attempt["outcome"] not in ENDED:
                rows.append(
                    f"| {path.stem} | {attempt['outcome']} | {attempt['seconds']:.0f} |"
                    f" {attempt['commit']} |"
                )
    if not rows:
        return "None."
    return "\n".join(["| cell | outcome | seconds | commit |", "|---|---|---|---|", *rows])


def stability_table(lines: dict[str, list[Run]]) -> str:
    """Return one row per line: mean +- standard deviation over seeds.

    "First" and "last" stand for a tenth of the run's steps.
    """
    head = (
        "| line | seeds | collapsed (step) | peak reward | last reward | best score | last score |"
        " last entropy | KL first -> last | growth | experts differ | clipped |"
    )
    rows = [head, "|" + "---|" * 12]
    for line, runs in lines.items():
        collapsed = [run.collapse_step for run in runs if run.collapse_step is not None]
        first, last = (
            [run.share(KL, part(run)) for run in runs] for part in (first_tenth, last_tenth)
        )
        differ = statistics.mean(
            run.share("routing/router_mismatch", last_tenth(run)) for run in runs
        )
        rows.append(
            f"| {runs[0].table.lines[line].label} | {len(runs)} | {len(collapsed)}/{len(runs)}"
            + (f" ({', '.join(map(str, collapsed))})" if collapsed else "")
            + f" | {spread([float(run.reward.max()) for run in runs])} |"
            f" {spread([float(run.reward[-1]) for run in runs])} |"
            f" {spread([max(score for _, score in run.evals) for run in runs])} |"
            f" {spread([run.evals[-1][1] for run in runs])} |"
            f" {spread([run.share(ENTROPY, last_tenth(run)) for run in runs])} |"
            f" {statistics.mean(first):.1e} -> {statistics.mean(last):.1e} |"
            f" x{geometric([b / a for a, b in zip(first, last, strict=True)]):.1f} |"
            f" {differ:.1%} | {statistics.mean(clipped(run) for run in runs):.1%} |"
        )
    return "\n".join(rows)


def effects_table(experiment: Experiment, lines: dict[tuple[str, str], list[Run]]) -> str:
    """Return one row per question and table: differences between the same seed's runs with and
    without the ingredient.

    Values are mean +- standard error over the pairs; "better" counts pairs with a higher last
    score.
    """
    rows = [
        "| change | table | pairs | last score | better | last reward | KL ratio |",
        "|" + "---|" * 7,
    ]
    for question, pairs in experiment.questions:
        for name, table in experiment.tables.items():
            matched = [
                pair
                for before, after in pairs
                if before in table.lines and after in table.lines
                for pair in same_seed(lines, name, before, after)
            ]
            if not matched:
                continue
            score = [b.evals[-1][1] - a.evals[-1][1] for a, b in matched]
            reward = [float(b.reward[-1] - a.reward[-1]) for a, b in matched]
            kl = geometric(
                [b.share(KL, slice(None)) / a.share(KL, slice(None)) for a, b in matched]
            )
            rows.append(
                f"| {question} | {name} | {len(matched)} | {with_error(score)} |"
                f" {sum(d > 0 for d in score)}/{len(matched)} | {with_error(reward)} | x{kl:.2f} |"
            )
    return "\n".join(rows)


def hypotheses_table(experiment: Experiment, lines: dict[tuple[str, str], list[Run]]) -> str:
    """Return the comparison that decides each hypothesis: the mean difference of the last score
    with a 95 % interval of Student's t, and how many runs of the two lines collapsed, in the order
    of the comparison, with p of Fisher's exact test.
    """
    rows = [
        "| hypothesis | table | comparison | pairs | last score, 95 % interval | collapsed (p) |",
        "|" + "---|" * 6,
    ]
    for name, table, before, after in experiment.hypotheses:
        pairs = same_seed(lines, table, before, after)
        if len(pairs) < 2:
            continue
        old, new = zip(*pairs, strict=True)
        old_scores, new_scores = ([run.evals[-1][1] for run in runs] for runs in (old, new))
        low, high = ttest_rel(new_scores, old_scores).confidence_interval(0.95)
        collapsed = [sum(run.collapse_step is not None for run in runs) for runs in (new, old)]
        p = fisher_exact([[count, len(pairs) - count] for count in collapsed]).pvalue
        rows.append(
            f"| {name} | {table} | {after} - {before} | {len(pairs)} "
            f"| {np.mean(new_scores) - np.mean(old_scores):+.3f} ({low:+.3f} to {high:+.3f}) "
            f"| {collapsed[0]}, {collapsed[1]} ({p:.2g}) |"
        )
    return "\n".join(rows)


def same_seed(
    lines: dict[tuple[str, str], list[Run]], table: str, before: str, after: str
) -> list[tuple[Run, Run]]:
    return [
        (old, new)
        for old in lines.get((table, before), [])
        for new in lines.get((table, after), [])
        if old.data["seed"] == new.data["seed"]
    ]


def with_error(differences: list[float]) -> str:
    error = (
        f" +- {statistics.stdev(differences) / len(differences) ** 0.5:.3f}"
        if len(differences) > 1
        else ""
    )
    return f"{statistics.mean(differences):+.3f}{error}"


def first_tenth(run: Run) -> slice:
    return slice(0, run.window)


def last_tenth(run: Run) -> slice:
    return slice(-run.window, None)


def clipped(run: Run) -> float:
    """Return the fraction of response tokens that clipping dropped over the run."""
    whole = slice(None)
    return run.share("train/clip_high_frac", whole) + run.share("train/clip_low_frac", whole)


def spread(values: list[float]) -> str:
    deviation = f" +- {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{deviation}"


def geometric(values: list[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


# Plots --------------------------------------------------------------------------------------------


def plot(table: Table, lines: dict[str, list[Run]], path: Path) -> None:
    """Draw the paper's four panels against updates; a line is the mean over seeds, its band from
    the lowest to the highest.
    """
    figure = Figure(figsize=(11, 7.5), layout="constrained", facecolor="white")
    axes = figure.subplots(2, 2, sharex=True)
    for index, (line, runs) in enumerate(lines.items()):
        style = {
            "color": f"C{index}",
            "label": f"{table.lines[line].label} ({len(runs)})",
            "lw": 1.6,
        }
        for axis, name in zip(axes.flat, (REWARD, None, ENTROPY, KL), strict=True):
            curves = evals(runs) if name is None else smoothed(runs, name, table.num_steps)
            draw(axis, *curves, table.num_mini_batches, style)
    titles = ("training reward", "held-out score", "entropy", "KL(mu || pi_old), k3")
    for axis, title in zip(axes.flat, titles, strict=True):
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3)
    axes[1, 1].set_yscale("log")
    for axis in axes[1]:
        axis.set_xlabel("updates")
    axes[0, 0].legend(fontsize=8)
    figure.suptitle(
        f"{table.title}: mean and range over seeds (their number in brackets)", fontsize=11
    )
    figure.savefig(path, dpi=80)


def smoothed(runs: list[Run], name: str, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (steps [S], curves [seeds, S]): moving averages, NaN after a run's end."""
    window = runs[0].window
    steps = max(steps, *(len(run.curve(name)) for run in runs))
    curves = np.full((len(runs), steps), np.nan)
    for row, run in zip(curves, runs, strict=True):
        curve = run.curve(name)
        for step in range(len(curve)):
            row[step] = np.nanmean(curve[max(0, step - window + 1) : step + 1])
    return np.arange(1, steps + 1), curves


def evals(runs: list[Run]) -> tuple[np.ndarray, np.ndarray]:
    """Return (steps [E], scores [seeds, E]), NaN where a run has no evaluation."""
    steps = sorted({step for run in runs for step, _ in run.evals})
    return np.array(steps), np.array(
        [[dict(run.evals).get(step, np.nan) for step in steps] for run in runs]
    )


def draw(
    axis: Axes, steps: np.ndarray, curves: np.ndarray, num_mini_batches: int, style: dict[str, Any]
) -> None:
    is_measured = ~np.isnan(curves).all(axis=0)
    updates, curves = steps[is_measured] * num_mini_batches, curves[:, is_measured]
    axis.plot(updates, np.nanmean(curves, axis=0), **style)
    axis.fill_between(
        updates,
        np.nanmin(curves, axis=0),
        np.nanmax(curves, axis=0),
        color=style["color"],
        alpha=0.12,
        lw=0,
    )


if __name__ == "__main__":
    main()
