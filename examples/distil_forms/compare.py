"""Write table.md from the cells of distil_forms, in the results folder:

python -m examples.distil_forms.compare [--results DIR]
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from examples.distil_forms.cells import AGES, ARMS, EXPERIMENT, FORMS, LABELS, SEEDS, table_name
from examples.experiments.analyse import REWARD, Run, interval
from examples.experiments.rates import Rates, Runs, reward, write_table

SECONDS = "time/step"


def tables(results: Path) -> str:
    """Return the search and both comparisons as Markdown."""
    rates = Rates.read(EXPERIMENT, results, SEEDS)
    lines = [
        rates.search_table(),
        "\n# Rewards, teacher or both: the best rates, seeds 1 to 5\n",
        "| learns from | rate | seeds | reward | held out | minus rewards | minus teacher |"
        " seconds a step | reward at equal seconds | minus rewards |",
        "|" + "---|" * 10,
        *arm_rows(rates),
        "\n# Forms and the age of rollouts, seeds 1 to 5\n",
        "| form | age | seeds | reward | range | KL(mu, pi_T) | collapsed | minus age 0 |",
        "|" + "---|" * 8,
        *age_rows(rates),
    ]
    return "\n".join(lines) + "\n"


def arm_rows(rates: Rates) -> list[str]:
    runs = {arm: rates.compared(arm, rates.best(arm)) for arm in ARMS}
    early = at_equal_seconds(runs)
    rows = []
    for arm, cells in runs.items():
        if not cells:
            continue
        minus = [differences(runs[other], cells) for other in ("rewards", "token")]
        seconds = np.median([np.median(run.curve(SECONDS)) for run in cells.values()])
        earlier = [
            early[arm][seed] - early["rewards"][seed]
            for seed in sorted(early[arm].keys() & early["rewards"].keys())
        ]
        rows.append(
            f"| {LABELS[arm]} | {rates.best(arm).removeprefix('lr')} | {len(cells)} |"
            f" {mean(map(reward, cells.values()))} |"
            f" {mean(run.evals[-1][1] for run in cells.values())} |"
            f" {'' if arm == 'rewards' else interval(minus[0])} |"
            f" {'' if arm == 'token' else interval(minus[1])} |"
            f" {seconds:.2f} | {mean(early[arm].values())} |"
            f" {'' if arm == 'rewards' else interval(earlier)} |"
        )
    return rows


def age_rows(rates: Rates) -> list[str]:
    rows = []
    for form in FORMS:
        line = rates.best(form)
        now = rates.compared(form, line)
        for age in (0, *AGES):
            if not (cells := rates.compared(table_name(form, age), line)):
                continue
            rewards = [reward(run) for run in cells.values()]
            kl = mean(run.curve("teacher/reverse_kl")[-1] for run in cells.values())
            collapsed = sum(run.collapse_step is not None for run in cells.values())
            rows.append(
                f"| {LABELS[form]} | {age} | {len(cells)} | {mean(rewards)} |"
                f" {min(rewards):.3f} to {max(rewards):.3f} | {kl} | {collapsed} |"
                f" {interval(differences(now, cells)) if age else ''} |"
            )
    return rows


def at_equal_seconds(runs: dict[str, Runs]) -> dict[str, dict[int, float]]:
    """Return arm -> seed -> the mean reward of the last third of the steps that end before the
    quickest arm of the seed does.
    """
    early: dict[str, dict[int, float]] = {}
    for arm, cells in runs.items():
        early[arm] = {}
        for seed, run in cells.items():
            theirs = [others[seed] for others in runs.values() if seed in others]
            limit = min(float(np.sum(other.curve(SECONDS))) for other in theirs)
            early[arm][seed] = reward_within(run, limit)
    return early


def reward_within(run: Run, seconds: float) -> float:
    steps = max(1, int(np.searchsorted(np.cumsum(run.curve(SECONDS)), seconds, "right")))
    return float(np.mean(run.curve(REWARD)[steps - max(1, steps // 3) : steps]))


def differences(before: Runs, after: Runs) -> list[float]:
    """Return the differences of reward, one per seed that both have."""
    return [reward(after[seed]) - reward(before[seed]) for seed in sorted(before.keys() & after)]


def mean(values: Iterable[float]) -> str:
    return f"{np.mean([*values]):.3f}"


if __name__ == "__main__":
    write_table(EXPERIMENT, tables, __doc__ or "")
