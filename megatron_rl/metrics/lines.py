"""Files of one JSON object a line: appending without losing a line, and reading metrics.jsonl.

A killed run may leave the last line incomplete.  This module imports no torch, because the viewer
uses it.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from megatron_rl.config.renamed import new_metric

logger = logging.getLogger(__name__)

MALFORMED = ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError
"""Exceptions for a line that is not JSON, lacks a key or has a value of another type."""

MetricLine = tuple[int, int, dict[str, float], dict[str, list[float]]]
"""(finished steps, policy version, {metric: value}, {metric: one value per MoE layer})."""


def append_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Append `rows` in one write, after removing an incomplete last line."""
    append_text(path, encoded(rows))


def encoded(rows: Iterable[Mapping[str, object]]) -> bytes:
    """Return the lines of `rows`, with "?" for each half of a surrogate pair, as in the name of a
    file that is not UTF-8: an escape of it is JSON, but readers refuse it or cannot write it.
    """
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return lines.encode(errors="replace")


def append_text(path: Path, text: bytes) -> None:
    """Append complete lines in one write, after removing an incomplete last line."""
    with open(path, "a+b") as file:
        # one byte tells whether the last line is complete; the file is read only where it is not
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                cut_partial_line(path)
        file.write(text)


def replace_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write a file of `rows`, complete or not at all; its folder is made."""
    replace_text(path, encoded(rows))


def replace_text(path: Path, text: bytes) -> None:
    """Write a file of complete lines beside `path` and rename it; its folder is made, but no folder
    above: a run's folder that is gone may be on a disk that is not mounted any more.
    """
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_suffix(".lines")
    try:
        temporary.write_bytes(text)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def cut_partial_line(path: Path) -> None:
    """Remove an incomplete last line: the next line appended would be joined to it."""
    content = path.read_bytes() if path.exists() else b""
    complete = content.rfind(b"\n") + 1
    if complete < len(content):
        logger.warning("%s: removed %d bytes of an incomplete line", path, len(content) - complete)
        os.truncate(path, complete)


def forget_later_steps(path: Path, last_step: int) -> None:
    """Remove the lines of a metrics.jsonl about steps after `last_step`: an attempt that was taken
    back.  Lines that cannot be read stay.
    """
    reader, kept, num_later = MetricLines(), list[bytes](), 0
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        try:
            is_later = reader.parse(line)[0] > last_step
        except ValueError:
            is_later = False
        num_later += is_later
        if not is_later:
            kept.append(line)
    if num_later:
        logger.warning("%s: removed %d lines of steps that are trained again", path, num_later)
        replace_text(path, b"".join(kept))


class MetricLines:
    """The reader of the lines of one metrics.jsonl, in order.

    It has a state, because lines of version 0.1, which numbered steps from 0, are recognised by
    their metric names, and a line of an evaluation alone has none of these names.
    """

    def __init__(self) -> None:
        self._is_former = False

    def parse(self, line: str | bytes) -> MetricLine:
        """Return the metrics of one line: null is NaN, former names are replaced by the new ones.

        Raises ValueError for a line that does not hold the metrics of a step.
        """
        try:
            row = json.loads(line)
            has_former = any(new_metric(name) != name for name in row)
            self._is_former = (
                row["step"] == -1
                or has_former
                or (self._is_former and "time/weight_sync" not in row)
            )
            # version 0.1 wrote one step less
            step, version = int(row.pop("step")) + self._is_former, int(row.pop("policy_version"))
            per_layer = {
                new_metric(name): [number_of(value) for value in values]
                for name, values in row.pop("per_layer", {}).items()
            }
            metrics = {new_metric(name): number_of(value) for name, value in row.items()}
        except MALFORMED as error:
            raise ValueError(f"not a step's metrics: {error!r}") from error
        return step, version, metrics, per_layer


def number_of(value: float | None) -> float:
    return math.nan if value is None else float(value)
