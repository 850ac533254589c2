"""Files of one JSON object a line: appended to without losing one, and the lines of metrics.jsonl
as numbers.

A killed run may leave the last line incomplete.  Imports no torch: the viewer reads with it too.
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

MetricLine = tuple[int, int, dict[str, float], dict[str, list[float]]]
"""(finished steps, policy version, metrics, per layer)"""


def append_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Append `rows` in one write: a kill leaves complete lines, or at most the last one cut, which
    is removed here.
    """
    append_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())


def append_text(path: Path, text: bytes) -> None:
    """The same for complete lines."""
    with open(path, "a+b") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                cut_partial_line(path)
        file.write(text)


def cut_partial_line(path: Path) -> None:
    """Remove an incomplete last line, which a killed run leaves: an appended line would be joined
    to it.
    """
    content = path.read_bytes() if path.exists() else b""
    complete = content.rfind(b"\n") + 1
    if complete < len(content):
        logger.warning("%s: removed %d bytes of an incomplete line", path, len(content) - complete)
        os.truncate(path, complete)


class MetricLines:
    """Reads the lines of one file in order: lines of version 0.1, which numbered steps from 0, are
    recognised by their metric names, and a line of an evaluation alone has none of these."""

    def __init__(self) -> None:
        self._is_former = False

    def parse(self, line: str | bytes) -> MetricLine:
        """null as NaN, former names of metrics replaced.

        Raises ValueError for a line that is not a step's metrics.
        """
        try:
            row = json.loads(line)
            has_former = any(new_metric(name) != name for name in row)
            self._is_former = (
                row["step"] == -1
                or has_former
                or (self._is_former and "time/weight_sync" not in row)
            )
            step, version = int(row.pop("step")) + self._is_former, int(row.pop("policy_version"))
            per_layer = {
                new_metric(name): [number_of(value) for value in values]
                for name, values in row.pop("per_layer", {}).items()
            }
            metrics = {new_metric(name): number_of(value) for name, value in row.items()}
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            raise ValueError(f"not a step's metrics: {error!r}") from error
        return step, version, metrics, per_layer


def number_of(value: float | None) -> float:
    return math.nan if value is None else float(value)
