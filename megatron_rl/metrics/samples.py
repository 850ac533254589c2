"""The best and the worst of the last responses that a run recorded (config/run_paths.py)."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TypeAlias

from megatron_rl.config.run_paths import RunFolder, StepFile

logger = logging.getLogger(__name__)

Row: TypeAlias = dict
"""A line of rollouts."""

NUM_SAMPLES = 8
"""The number of best, and of worst, responses."""
LAST_ROWS = 512
"""The number of rows of rollouts that are read."""
BLOCK_BYTES = 1 << 20  # read at a time, from the end of the file


def best_and_worst(rows: Sequence[Row]) -> tuple[dict[str, list[Row]], str]:
    """Return ({title: rows}, a sentence that says which rows they were chosen from)."""
    rows = [row for row in rows if not row.get("episode")]  # these are one sequence of an episode
    scored = [
        row
        for row in rows
        if isinstance(row.get("reward"), int | float) and not math.isnan(row["reward"])
    ]
    if not scored:
        return {}, ""
    first, last = min(row["step"] for row in scored), max(row["step"] for row in scored)
    ordered = sorted(scored, key=lambda row: -row["reward"])
    best = one_per_prompt(ordered)
    # responses as good as the best are not shown as the worst
    worst = [row for row in one_per_prompt(reversed(ordered)) if row["reward"] < best[0]["reward"]]
    note = f"Of the last {len(scored)} responses (steps {first} to {last})."
    return {"Best responses": best, "Worst responses": worst}, note


def one_per_prompt(rows: Iterable[Row]) -> list[Row]:
    chosen: dict[str, Row] = {}
    for row in rows:
        if len(chosen) < NUM_SAMPLES:
            chosen.setdefault(row["prompt"], row)
    return list(chosen.values())


def last_rollouts(run_dir: Path) -> list[Row]:
    """Return the last LAST_ROWS rows of rollouts that a run wrote, ordered by step.

    A warning counts the lines of a file that cannot be read.
    """
    rows: list[Row] = []
    files = sorted(RunFolder(run_dir).line_files("rollouts"), key=lambda file: -file.step)
    for _, of_step in groupby(files, key=lambda file: file.step):
        for file in of_step:
            rows += rows_of(file)
        if len(rows) >= LAST_ROWS:  # earlier files have earlier steps
            break
    return sorted(rows, key=lambda row: row["step"])[-LAST_ROWS:]


def rows_of(file: StepFile) -> list[Row]:
    """Return the last LAST_ROWS rows of a file."""
    rows: list[Row] = []
    broken = 0
    for line in last_lines(file.path, LAST_ROWS):
        try:
            row = json.loads(line)
            fixed = {"step": int(row["step"]), "prompt": str(row["prompt"])}
            rows.append({**row, **fixed, "file": file.writer})
        except (ValueError, KeyError, TypeError):
            broken += 1
    if broken:
        text = "%s: %d of the last %d lines are not rollouts"
        logger.warning(text, file.path, broken, LAST_ROWS)
    return rows


def last_lines(path: Path, count: int) -> list[bytes]:
    """Return the last `count` lines that are not empty, read from the end of the file, which may
    have millions.
    """
    with open(path, "rb") as file:
        start = file.seek(0, os.SEEK_END)
        tail = b""
        while start > 0 and tail.count(b"\n") <= count:
            size = min(BLOCK_BYTES, start)
            start = file.seek(start - size)
            tail = file.read(size) + tail
    return [line for line in tail.split(b"\n") if line.strip()][-count:]
