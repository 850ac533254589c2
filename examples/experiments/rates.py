"""Comparisons at the best learning rate: the lines of a table are rates, one seed searches, and
others, which the search did not see, compare.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.experiments.analyse import REWARD, Run, last_third, load
from examples.experiments.experiment import Experiment, Line

SEARCH_SEED = 0

Runs = dict[int, Run]
"""By seed."""


def line_name(rate: float) -> str:
    return f"lr{rate:g}"


def rate_lines(rates: Sequence[float]) -> dict[str, Line]:
    return {
        line_name(rate): Line(f"rate {rate:g}", {"optim": {"lr": rate}}, is_papers=False)
        for rate in rates
    }


def reward(run: Run) -> float:
    """Return the mean training reward of the last third, by which rates are chosen."""
    return run.share(REWARD, last_third(run))


@dataclass(frozen=True)
class Rates:
    """The runs of an experiment whose lines are rates."""

    experiment: Experiment
    runs: dict[tuple[str, str], Runs]
    """(table, line) -> its runs."""
    seeds: tuple[int, ...]
    """Seeds of the comparison."""

    @classmethod
    def read(cls, experiment: Experiment, results: Path, seeds: tuple[int, ...]) -> Rates:
        lines = load(results / "cells", experiment)
        runs = {place: {run.data["seed"]: run for run in runs} for place, runs in lines.items()}
        return cls(experiment, runs, seeds)

    def best(self, table: str) -> str:
        """Return the line with the highest reward in the search, "" before it."""
        searched = {
            line: reward(self.runs[table, line][SEARCH_SEED])
            for line in self.experiment.tables[table].lines
            if SEARCH_SEED in self.runs.get((table, line), {})
        }
        return max(searched, key=lambda line: searched[line]) if searched else ""

    def compared(self, table: str, line: str) -> Runs:
        """Return the runs of the comparison."""
        runs = self.runs.get((table, line), {})
        return {seed: run for seed, run in runs.items() if seed in self.seeds}

    def search_table(self) -> str:
        """Return the search as Markdown."""
        rows = [
            "# Search, seed 0: mean reward of the last third\n",
            "| trained | rate | reward | collapsed |",
            "|---|---|---|---|",
        ]
        for (_, line), cells in self.runs.items():
            if SEARCH_SEED in cells:
                run = cells[SEARCH_SEED]
                collapsed = "no" if run.collapse_step is None else f"step {run.collapse_step}"
                rate = run.table.lines[line].label.removeprefix("rate ")
                rows.append(f"| {run.table.title} | {rate} | {reward(run):.3f} | {collapsed} |")
        return "\n".join(rows)


def write_table(experiment: Experiment, tables: Callable[[Path], str], text: str) -> None:
    """Write and print `tables`, Markdown of an experiment's results folder, as its table.md.

    text: the help of the command.
    """
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=experiment.folder / "results")
    results = parser.parse_args().results
    content = tables(results)
    (results / "table.md").write_text(content)
    print(content)
