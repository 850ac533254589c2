"""trackio (pip install '.[trackio]'): a local database, or the server or Space that trackio's
environment variables name.

A per-layer metric is one metric per layer.  trackio continues the run of the same name in a
project, so a new run gets a unique name: run.name and six random digits.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import trackio

from megatron_rl.metrics.trackers.tracker import COLUMNS, Row, TrackedRun, Tracker, cells


class Trackio(Tracker):
    def __init__(self, run: TrackedRun) -> None:
        self.id = run.id or f"{run.name}-{uuid.uuid4().hex[:6]}"
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == "trackio":
                # trackio prints to standard output, between the lines of the run
                vars(module)["print"] = lambda *values: None
        self._project = run.project
        self._run = trackio.init(
            project=run.project,
            name=self.id,
            config={**run.config, "versions": dict(run.versions)},
            resume="allow",
            embed=False,  # no dashboard in a notebook, and no metrics of this machine
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(
        self, step: int, metrics: Mapping[str, float], per_layer: Mapping[str, Sequence[float]]
    ) -> None:
        layers = {
            f"{name}/layer_{i:02d}": value
            for name, values in per_layer.items()
            for i, value in enumerate(values)
        }
        self._run.log({**metrics, **layers}, step=step)

    def samples(self, step: int, tables: Mapping[str, Sequence[Row]]) -> None:
        shown = {
            f"samples/{title}": trackio.Table(
                columns=list(COLUMNS), data=[cells(row) for row in rows]
            )
            for title, rows in tables.items()
        }
        self._run.log(shown, step=step)

    def report(self, page: Path) -> None:
        trackio.save(page, project=self._project)

    def close(self, *, failed: bool) -> None:
        self._run.finish()
