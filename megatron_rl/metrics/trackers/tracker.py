"""The base class of trackers.  Subclass Tracker to add one: every method is optional."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

Row: TypeAlias = Mapping[str, Any]
"""A line of rollouts."""
COLUMNS = ("prompt", "response", "label", "reward", "response_length", "step")
"""The columns of a sample table, which are keys of a Row."""


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker is made for."""

    name: str
    folder: Path
    project: str = "megatron_rl"
    entity: str = ""
    mode: Literal["online", "offline"] = "online"
    id: str = ""
    """The id, in the tracker, of the run to continue; "" for a new one."""
    first_step: int = 0
    """The number of finished steps to continue after.  Values of later steps that an earlier
    process sent are sent again."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The resolved configuration as {"section": {"key": value}}, without secrets."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of packages, and git revisions."""


class Tracker:
    """A receiver of a run's metrics.

    One background thread makes it and calls its methods.  An exception is counted, and training
    continues.
    """

    id = ""
    """The id of the run in the tracker.  It is kept in the run's folder and in checkpoints, and a
    process that continues the run gets it as TrackedRun.id."""

    def __init__(self, run: TrackedRun) -> None:
        """Open the tracker, and set `id`."""

    def log(
        self, step: int, metrics: Mapping[str, float], per_layer: Mapping[str, Sequence[float]]
    ) -> None:
        """Receive the metrics of training or of an evaluation after `step` finished steps.

        per_layer: metric -> one value per MoE layer.
        """

    def samples(self, step: int, tables: Mapping[str, Sequence[Row]]) -> None:
        """Receive {title: rows}: the best and worst of the last responses, as in report.html."""

    def report(self, page: Path) -> None:
        """Receive the report.html of a finished run; report.png is in the same folder."""

    def close(self, *, failed: bool) -> None:
        """Close the tracker at the end of the process.  failed: it ends with an error."""


def flat_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration as {"section.key": value}."""
    return {
        f"{section}.{key}": value
        for section, keys in config.items()
        for key, value in (keys if isinstance(keys, Mapping) else {"": keys}).items()
    }


def cells(row: Row) -> list[Any]:
    """Return the values of COLUMNS in a row, None where it has none."""
    return [row.get(column) for column in COLUMNS]
