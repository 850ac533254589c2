"""[track]: the trackers that get metrics, beside metrics.jsonl."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from megatron_rl.config.base import AboveZero, Count, Section, nearest

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""package.module:Class"""


class TrackConfig(Section):
    """Trackers that get the metrics, beside metrics.jsonl (docs/guides/look_at_a_run.md)."""

    to: tuple[str, ...] = ("tensorboard",)
    """Trackers: tensorboard, wandb, mlflow, trackio, or package.module:Class of your own; none =
    only metrics.jsonl."""
    project: Annotated[str, Field(min_length=1)] = "megatron_rl"
    """Project of W&B and trackio, experiment of MLflow.  The run in it has the name run.name."""
    entity: str = ""
    """Team or user of W&B; default: that of the account."""
    mode: Literal["online", "offline"] = "online"
    """offline: nothing is sent over the network."""
    samples_every: Count = 20
    """Steps between tables of the best and the worst responses; 0 = only at the end."""
    close_seconds: AboveZero = 30.0
    """At the end of a run, time for a tracker to send what it has not sent yet."""

    def problems(self) -> Iterator[str]:
        for name in self.to:
            if name not in TRACKERS and not CLASS.fullmatch(name):
                yield (
                    f"to has {name!r}: must be a tracker, or "
                    f"package.module:Class{nearest(name, TRACKERS)}"
                )
        if len(set(self.to)) < len(self.to):
            yield f"to = {list(self.to)} has one twice: every value would be sent twice; remove one"
        if self.entity and "wandb" not in self.to:
            yield (
                f"entity = {self.entity!r} has no effect without wandb in track.to; remove it, or "
                "add wandb"
            )
