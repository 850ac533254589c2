"""Compares the reward function with the labels before anything is trained: right answers must be
rewarded, answers of other rows must not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from megatron_rl.config import RewardConfig
from megatron_rl.data.rows import DataError
from megatron_rl.recipes.formats import Row
from megatron_rl.recipes.prompt_set import text_of
from megatron_rl.reward.pool import RewardPool
from megatron_rl.reward.scored_response import Episode

CHECKED = 50
"""The first rows of a set are checked."""
SHOWN = 3


def check_rewards(
    rows: Sequence[Row], solution: Callable[[Row], str], config: RewardConfig
) -> Iterator[str]:
    """Yield a line about the rewards of right and of wrong answers to the first rows, and one for
    each of the first right answers that gets less than others.

    solution: a response to a row that must be rewarded.  A wrong answer is the solution of the next
    row that has another label.  Raises DataError where the function tells neither from the other.
    """
    checked = list(rows[:CHECKED])
    wrong = [other_row(number, checked) for number in range(len(checked))]
    pairs = [(row, solution(row)) for row in checked]
    others = [(row, solution(other)) for row, other in zip(checked, wrong, strict=True) if other]
    with RewardPool(config) as pool:
        scored = pool.score_episodes([[episode_of(*pair)] for pair in [*pairs, *others]])
    values = np.array([rewarded.reward for (rewarded,) in scored])
    right, rest = values[: len(pairs)], values[len(pairs) :]
    if len(rest) and not np.nanmean(right) > np.nanmean(rest):
        row, response = pairs[0]
        raise DataError(
            f"reward.function = {config.function!r} disagrees with the labels: right answers to the"
            f" first {len(right)} rows get {np.nanmean(right):.2f} on average, answers of other"
            f" rows {np.nanmean(rest):.2f}; for example {response[-80:]!r} for label"
            f" {row['label'][:80]!r} gets {right[0]:g}; correct reward.py, or convert in prepare.py"
        )
    yield (
        f"{config.function} on the first {len(right)} rows: right answers get"
        f" {np.nanmean(right):.2f} on average, answers of other rows"
        f" {np.nanmean(rest) if len(rest) else 0.0:.2f}"
    )
    low = [pair for pair, value in zip(pairs, right, strict=True) if not value >= right.max()]
    for row, response in low[:SHOWN]:
        yield f"  WARNING {row['id']}: {response[-80:]!r} is not accepted for its own label"
    if len(low) > SHOWN:
        yield f"  WARNING ... and {len(low) - SHOWN} more"


def episode_of(row: Row, response: str) -> Episode:
    metadata = {key: value for key, value in row.items() if key not in ("id", "prompt", "label")}
    return Episode(text_of(row["prompt"]), response, row["label"], metadata=metadata)


def other_row(number: int, rows: Sequence[Row]) -> Row | None:
    """Return the next row, in a circle, with another label."""
    order = [*rows[number + 1 :], *rows[:number]]
    return next((row for row in order if row["label"] != rows[number]["label"]), None)
