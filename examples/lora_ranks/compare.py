"""Write table.md from the cells of lora_ranks, in the results folder:

python -m examples.lora_ranks.compare [--results DIR]
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from examples.experiments.analyse import KL, interval, last_third
from examples.experiments.rates import Rates, Runs, reward, write_table
from examples.lora_ranks.cells import EXPERIMENT, SEEDS


def tables(results: Path) -> str:
    """Return the search and the comparison as Markdown."""
    rates = Rates.read(EXPERIMENT, results, SEEDS)
    lines = [
        rates.search_table(),
        "\n# Comparison at the best rates, seeds 1 to 5\n",
        "| trained | rate | seeds | reward | KL(mu, pi_old) | collapsed | minus full training |",
        "|---|---|---|---|---|---|---|",
    ]
    full = rates.compared("full", rates.best("full"))
    for table in EXPERIMENT.tables:
        line = rates.best(table)
        if cells := rates.compared(table, line):
            lines.append(row(table, line, cells, full))
    return "\n".join(lines) + "\n"


def row(table: str, line: str, cells: Runs, full: Runs) -> str:
    rewards = [reward(run) for run in cells.values()]
    kl = np.mean([run.share(KL, last_third(run)) for run in cells.values()])
    collapsed = sum(run.collapse_step is not None for run in cells.values())
    pairs = [reward(cells[seed]) - reward(full[seed]) for seed in sorted(cells.keys() & full)]
    difference = "" if table == "full" else interval(pairs)
    return (
        f"| {EXPERIMENT.tables[table].title} | {line.removeprefix('lr')} | {len(cells)} |"
        f" {np.mean(rewards):.3f} ({min(rewards):.3f} to {max(rewards):.3f}) | {kl:.1e} |"
        f" {collapsed} | {difference} |"
    )


if __name__ == "__main__":
    write_table(EXPERIMENT, tables, __doc__ or "")
