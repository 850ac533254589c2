"""Write table.md from the cells of lora_ranks, in the results folder:

python -m examples.lora_ranks.compare [--results DIR]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from examples.experiments.analyse import KL, REWARD, Run, interval, last_third, load
from examples.lora_ranks.cells import EXPERIMENT, SEARCH_SEED, SEEDS

Runs = dict[int, Run]
"""By seed."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=EXPERIMENT.folder / "results")
    results = parser.parse_args().results
    text = tables(results)
    (results / "table.md").write_text(text)
    print(text)


def tables(results: Path) -> str:
    """Return the search and the comparison as Markdown."""
    runs = by_seed(results)
    lines = [
        "# Search, seed 0: mean reward of the last third\n",
        "| trained | rate | reward | collapsed |",
        "|---|---|---|---|",
    ]
    for (_, line), cells in runs.items():
        if SEARCH_SEED in cells:
            run = cells[SEARCH_SEED]
            collapsed = "no" if run.collapse_step is None else f"step {run.collapse_step}"
            label = run.table.lines[line].label.removeprefix("rate ")
            lines.append(f"| {run.table.title} | {label} | {reward(run):.3f} | {collapsed} |")
    lines += [
        "\n# Comparison at the best rates, seeds 1 to 5\n",
        "| trained | rate | seeds | reward | KL(mu, pi_old) | collapsed | minus full training |",
        "|---|---|---|---|---|---|---|",
    ]
    full = compared(runs, "full")
    for table in EXPERIMENT.tables:
        if cells := compared(runs, table):
            lines.append(row(runs, table, cells, full))
    return "\n".join(lines) + "\n"


def row(runs: dict[tuple[str, str], Runs], table: str, cells: Runs, full: Runs) -> str:
    rewards = [reward(run) for run in cells.values()]
    kl = np.mean([run.share(KL, last_third(run)) for run in cells.values()])
    collapsed = sum(run.collapse_step is not None for run in cells.values())
    pairs = [reward(cells[seed]) - reward(full[seed]) for seed in sorted(cells.keys() & full)]
    difference = "" if table == "full" else interval(pairs)
    title, rate = EXPERIMENT.tables[table].title, best_line(runs, table).removeprefix("lr")
    return (
        f"| {title} | {rate} | {len(cells)} | {np.mean(rewards):.3f} ({min(rewards):.3f} to"
        f" {max(rewards):.3f}) | {kl:.1e} | {collapsed} | {difference} |"
    )


def by_seed(results: Path) -> dict[tuple[str, str], Runs]:
    return {
        place: {run.data["seed"]: run for run in runs}
        for place, runs in load(results / "cells", EXPERIMENT).items()
    }


def best_line(runs: dict[tuple[str, str], Runs], table: str) -> str:
    """Return the line with the highest reward in the search."""
    searched = {
        line: reward(runs[table, line][SEARCH_SEED])
        for line in EXPERIMENT.tables[table].lines
        if SEARCH_SEED in runs.get((table, line), {})
    }
    return max(searched, key=lambda line: searched[line]) if searched else ""


def compared(runs: dict[tuple[str, str], Runs], table: str) -> Runs:
    """Return the runs of the comparison."""
    line = best_line(runs, table)
    found = runs[table, line] if line else {}
    return {seed: run for seed, run in found.items() if seed in SEEDS}


def reward(run: Run) -> float:
    return run.share(REWARD, last_third(run))


if __name__ == "__main__":
    main()
