"""One prompt in a run, step by step, and the prompts that several runs have.

A prompt is found by its key (index_rows.prompt_key).
"""

from __future__ import annotations

import re
import sqlite3
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing

from megatron_rl_viewer.index import SHOWN_CHARACTERS
from megatron_rl_viewer.index_rows import searched_text
from megatron_rl_viewer.query import QueryError, rollout_row
from megatron_rl_viewer.run_folder import Run
from megatron_rl_viewer.token_data import read_line

STEPS = 50
"""The most steps of one answer."""
GROUP = ("key", "step", "count", "reward_mean", "reward_min", "reward_max")


def prompt_of_run(run: Run, key: str, after: int) -> dict[str, object] | None:
    """Return the answer to /prompt; None if the run has no such prompt.

    "prompt" is the whole text.  "groups" are those of the first STEPS steps after step `after`
    that have the prompt, each with its responses (an episode has one).  "next" is the `after` of
    the following steps, null if there are none.  "missing" has messages about what cannot be read.
    Raises QueryError for a text that is no key.
    """
    if not re.fullmatch("[0-9a-f]{16}", key):
        raise QueryError(f"key = {key[:80]!r}: must be 16 hexadecimal digits")
    with closing(run.index.connect()) as connection:
        of_prompt = "SELECT first FROM groups WHERE prompt_key = ? ORDER BY step LIMIT 1"
        first = connection.execute(of_prompt, (key,)).fetchone()
        if first is None:
            return None
        steps = [
            row["step"]
            for row in connection.execute(
                "SELECT DISTINCT step FROM groups WHERE prompt_key = ? AND step > ? ORDER BY step"
                " LIMIT ?",
                (key, after, STEPS + 1),
            )
        ]
        last = steps[:STEPS][-1] if steps else after
        which = "prompt_key = ? AND step > ? AND step <= ?"
        groups = connection.execute(
            f"SELECT * FROM groups WHERE {which} ORDER BY step, number", (key, after, last)
        ).fetchall()
        rows = connection.execute(
            "SELECT * FROM rollouts JOIN texts USING (number) WHERE episode = '' AND group_key IN"
            f" (SELECT key FROM groups WHERE {which}) ORDER BY number",
            (key, after, last),
        ).fetchall()
    responses = defaultdict(list)
    for row in rows:
        responses[row["group_key"]].append(rollout_row(row))
    missing: list[str] = []
    return {
        "key": key,
        "prompt": texts_of(run, [first["first"]], missing).get(key, ""),
        "groups": [
            {name: group[name] for name in GROUP} | {"responses": responses[group["key"]]}
            for group in groups
        ],
        "next": last if len(steps) > STEPS else None,
        "missing": missing,
    }


def common_prompts(runs: Sequence[Run], offset: int, limit: int) -> dict[str, object]:
    """Return {"total", "rows"}: the prompts that all of these runs have.

    Those whose mean rewards differ most come first.  "rewards" of a row are the means over the
    prompt's groups, one for each run, and "groups" their numbers.
    """
    of_runs = [mean_rewards(run) for run in runs]
    difference: dict[str, float | None] = {}
    for key in set.intersection(*map(set, of_runs)):
        rewards = [prompts[key]["reward"] for prompts in of_runs]
        difference[key] = None if None in rewards else max(rewards) - min(rewards)
    ranks = {key: -1.0 if value is None else value for key, value in difference.items()}
    keys = sorted(difference, key=lambda key: (-ranks[key], key))
    page = keys[offset : offset + limit]
    texts = excerpts(texts_of(runs[0], [of_runs[0][key]["first"] for key in page], []))
    return {
        "total": len(keys),
        "rows": [
            {
                "key": key,
                "prompt": texts.get(key, ""),
                "rewards": [prompts[key]["reward"] for prompts in of_runs],
                "groups": [prompts[key]["count"] for prompts in of_runs],
                "difference": difference[key],
            }
            for key in page
        ],
    }


def texts_of(run: Run, numbers: Sequence[int], missing: list[str]) -> dict[str, str]:
    """Return prompt_key -> the text of the prompt, for rollouts with these numbers.

    It is read from the run's file: the index has its beginning alone, which is returned, with a
    message in `missing`, where the line cannot be read.
    """
    marks = ",".join("?" * len(numbers))
    with closing(run.index.connect()) as connection:
        rows = connection.execute(
            f"SELECT * FROM rollouts JOIN texts USING (number) WHERE number IN ({marks})", numbers
        ).fetchall()
    return {
        row["prompt_key"]: searched_text(read_line(run, row, missing).get("prompt", row["prompt"]))
        for row in rows
    }


def excerpts(texts: Mapping[str, str]) -> dict[str, str]:
    """Return SHOWN_CHARACTERS of each text, from the word in which they differ: prompts of a data
    set often begin with the same instructions.
    """
    # what the least and the largest begin with, all between them begin with
    least, largest = min(texts.values(), default=""), max(texts.values(), default="")
    pairs = enumerate(zip(least, largest, strict=False))
    parting = next((place for place, (a, b) in pairs if a != b), 0)
    start = max(least.rfind(space, 0, parting) for space in " \n") + 1
    return {
        key: ("... " if start else "") + text[start : start + SHOWN_CHARACTERS]
        for key, text in texts.items()
    }


def mean_rewards(run: Run) -> dict[str, sqlite3.Row]:
    """Return prompt_key -> its mean reward, its number of groups, and the number of a rollout."""
    with closing(run.index.connect()) as connection:
        rows = connection.execute(
            "SELECT prompt_key, avg(reward_mean) AS reward, count(*) AS count,"
            " min(first) AS first FROM groups GROUP BY prompt_key"
        )
        return {row["prompt_key"]: row for row in rows}
