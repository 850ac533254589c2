"""Write map.md and map.png from the cells of dose_map and paper_tiny, in the results folder:

    python -m examples.dose_map.map [--results DIR]

A square is a rounding and a number of updates per step; its value the mean over the seeds that ran.
Reward and KL are means over the last third of a run's steps.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from examples.dose_map.cells import EXPERIMENT, INGREDIENTS, LABELS, ROUNDINGS, STALENESS, place
from examples.experiments.analyse import KL, REWARD, geometric, interval, last_third, load
from examples.paper_tiny.cells import EXPERIMENT as PAPER_TINY

Square = tuple[str, int]
"""(rounding, updates per step)."""
SQUARES = [(rounding, updates) for rounding in ROUNDINGS for updates in STALENESS]
LOWEST_KL, HIGHEST_KL = 1e-7, 1e-1


class Map:
    """Runs of every square and ingredient, by seed."""

    def __init__(self, results: Path) -> None:
        lines = {
            EXPERIMENT.name: load(results / "cells", EXPERIMENT),
            PAPER_TINY.name: load(PAPER_TINY.folder / "results/cells", PAPER_TINY),
        }
        self.runs = {
            (square, ingredient): {
                run.data["seed"]: run for run in lines[where.experiment][where[1:]]
            }
            for square in SQUARES
            for ingredient in INGREDIENTS
            for where in [place(*square, ingredient)]
        }

    def values(self, square: Square, ingredient: str, column: str) -> dict[int, float]:
        """Return seed -> mean of the column over the last third of the run."""
        return {
            seed: run.share(column, last_third(run))
            for seed, run in self.runs[square, ingredient].items()
        }

    def collapsed(self, square: Square, ingredient: str) -> int:
        return sum(run.collapse_step is not None for run in self.runs[square, ingredient].values())

    def differences(self, square: Square, before: str, after: str) -> list[float]:
        """Return the differences of the reward between runs of equal seeds."""
        old, new = (self.values(square, name, REWARD) for name in (before, after))
        return [new[seed] - old[seed] for seed in sorted(old.keys() & new.keys())]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=EXPERIMENT.folder / "results")
    results: Path = parser.parse_args().results
    cells = Map(results)
    (results / "map.md").write_text(tables(cells))
    print(tables(cells))
    draw(cells).savefig(results / "map.png", dpi=80)


def tables(cells: Map) -> str:
    return "\n\n".join(
        (
            "# dose_map: tables",
            "## Reward of the last third, and runs that collapsed",
            table_of_rewards(cells),
            "## What each ingredient changes, with 95 % intervals over pairs of a seed",
            table_of_changes(cells) + "\n",
        )
    )


def table_of_rewards(cells: Map) -> str:
    head = f"| rounding | N | {' | '.join(line.label for line in INGREDIENTS.values())} |"
    rows = [head, "|" + "---|" * (2 + len(INGREDIENTS))]
    for square in SQUARES:
        texts = [reward_text(cells, square, name) for name in INGREDIENTS]
        rows.append(f"| {LABELS[square[0]]} | {square[1]} | {' | '.join(texts)} |")
    return "\n".join(rows)


def reward_text(cells: Map, square: Square, ingredient: str) -> str:
    rewards = cells.values(square, ingredient, REWARD)
    if not rewards:
        return "-"
    return (
        f"{statistics.mean(rewards.values()):.3f}, "
        f"{cells.collapsed(square, ingredient)}/{len(rewards)}"
    )


def table_of_changes(cells: Map) -> str:
    changes = (
        ("weight", "nothing", "weight"),
        ("clip", "weight", "clip"),
        ("R2", "weight", "r2"),
        ("R3", "weight", "r3"),
    )
    names = " | ".join(name for name, _, _ in changes)
    rows = [f"| rounding | N | {names} | KL, weight | KL, R3 |", "|" + "---|" * 8]
    for square in SQUARES:
        texts = [
            "same" if place(*square, before) == place(*square, after)
            else interval(cells.differences(square, before, after))
            for _, before, after in changes
        ]  # fmt: skip
        for ingredient in ("weight", "r3"):
            kl = list(cells.values(square, ingredient, KL).values())
            texts.append(f"{geometric(kl):.1e}" if kl else "-")
        rows.append(f"| {LABELS[square[0]]} | {square[1]} | {' | '.join(texts)} |")
    return "\n".join(rows)


def draw(cells: Map) -> Figure:
    """Draw one column of panels per ingredient: its rewards above, its KL below."""
    figure = Figure(figsize=(15, 6.4), layout="constrained", facecolor="white")
    axes = figure.subplots(2, len(INGREDIENTS), sharex=True, sharey=True)
    rows = (
        (REWARD, Normalize(0, 0.8), "viridis", "reward, last third"),
        (KL, LogNorm(LOWEST_KL, HIGHEST_KL), "magma", "KL(mu, pi_old), k3"),
    )
    for row, (column, norm, colours, label) in zip(axes, rows, strict=True):
        for axis, ingredient in zip(row, INGREDIENTS, strict=True):
            values = panel(cells, ingredient, column)
            image = axis.imshow(values, norm=norm, cmap=colours, aspect="auto")
            write_values(axis, values, cells, ingredient, column)
        figure.colorbar(image, ax=list(row), label=label, shrink=0.9)
    for axis, line in zip(axes[0], INGREDIENTS.values(), strict=True):
        axis.set_title(line.label, fontsize=11)
    for axis in axes[1]:
        axis.set_xlabel("updates per step, N")
        axis.set_xticks(range(len(STALENESS)), [str(updates) for updates in STALENESS])
    for axis in axes[:, 0]:
        axis.set_yticks(range(len(ROUNDINGS)), [LABELS[name] for name in ROUNDINGS])
    seeds = [len(runs) for runs in cells.runs.values()]
    figure.suptitle(
        f"Discrepancy by staleness, {min(seeds)} to {max(seeds)} seeds a square; "
        "c/s: c of s runs collapsed",
        fontsize=11,
    )
    return figure


def panel(cells: Map, ingredient: str, column: str) -> np.ndarray:
    """Return [roundings, updates]: means over the seeds, NaN where no cell has run."""
    means = [
        np.mean(list(values.values())) if values else np.nan
        for square in SQUARES
        for values in [cells.values(square, ingredient, column)]
    ]
    return np.array(means).reshape(len(ROUNDINGS), len(STALENESS))


def write_values(axis: Axes, values: np.ndarray, cells: Map, ingredient: str, column: str) -> None:
    for index, (rounding, updates) in enumerate(SQUARES):
        y, x = divmod(index, len(STALENESS))
        value, square = values[y, x], (rounding, updates)
        if np.isnan(value):
            continue
        num_collapsed = cells.collapsed(square, ingredient)
        text = f"{value:.2f}" if column == REWARD else f"{value:.0e}"
        if num_collapsed and column == REWARD:
            text += f"\n{num_collapsed}/{len(cells.runs[square, ingredient])}"
        is_dark = value < 0.4 if column == REWARD else value < 1e-4
        axis.text(
            x, y, text, ha="center", va="center", fontsize=9,
            color="white" if is_dark else "black",
        )  # fmt: skip


if __name__ == "__main__":
    main()
