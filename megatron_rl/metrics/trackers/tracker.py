"""What a tracker is.  Subclass Tracker for one of your own: every method may be left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

Row: TypeAlias = Mapping[str, Any]
"""A line of rollouts.jsonl."""
COLUMNS = ("prompt", "response", "label", "reward", "response_length", "step")
"""Those of a sample table, keys of a Row."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is made from.

    id: that of the tracker's own run which this run continues, "" for a new one.
    first_step: finished steps that it continues after; what an earlier process sent of later ones
    is sent again.
    config: the resolved configuration as {"section": {"key": value}}, and versions: of packages and
    of git; without secrets.
    """

    name: str
    folder: Path
    project: str = "megatron_rl"
    entity: str = ""
    mode: Literal["online", "offline"] = "online"
    id: str = ""
    first_step: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


class Tracker:
    """Made and called on one background thread; an exception that it raises is counted, and
    training continues.

    id: identifies its run in the tracker; kept in the run's folder and in checkpoints, and given to
    the next process.
    """

    id = ""

    def __init__(self, run: TrackedRun) -> None:
        """Open it."""

    def log(
        self, step: int, metrics: Mapping[str, float], per_layer: Mapping[str, Sequence[float]]
    ) -> None:
        """The metrics after `step` finished steps, of training or of an evaluation; per_layer: one
        value per MoE layer.
        """

    def samples(self, step: int, tables: Mapping[str, Sequence[Row]]) -> None:
        """The best and the worst of the last responses: title -> rows, as in report.html."""

    def report(self, page: Path) -> None:
        """The run has finished; `page` is its report.html, with report.png beside it."""

    def close(self, *, failed: bool) -> None:
        """The process ends; failed: by an error."""


def flat_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """{"section.key": value}."""
    return {
        f"{section}.{key}": value
        for section, keys in config.items()
        for key, value in (keys if isinstance(keys, Mapping) else {"": keys}).items()
    }


def cells(row: Row) -> list[Any]:
    """The row's values of COLUMNS."""
    return [row.get(column) for column in COLUMNS]
