"""Weights & Biases (pip install '.[wandb]').  Offline it writes to RUN/wandb, which `wandb sync`
sends later.

The x axis of every chart is `step`, a value that this module sends: a resumed run sends steps again
that the counter of W&B would refuse.  A per-layer metric is a histogram with one bin per layer.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import wandb

from megatron_rl.metrics.trackers.tracker import COLUMNS, Row, TrackedRun, Tracker, cells


class WandB(Tracker):
    def __init__(self, run: TrackedRun) -> None:
        self.id = run.id or uuid.uuid4().hex[:12]
        self._run = wandb.init(
            project=run.project,
            entity=run.entity or None,
            name=run.name,
            id=self.id,
            resume="allow",
            dir=str(run.folder),
            mode=run.mode,
            config={**run.config, "versions": dict(run.versions)},
            # no terminal output, command line or environment of this process: they may hold secrets
            settings=wandb.Settings(
                console="off", x_disable_meta=True, disable_git=True, save_code=False, silent=True
            ),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(
        self, step: int, metrics: Mapping[str, float], per_layer: Mapping[str, Sequence[float]]
    ) -> None:
        profiles = {name: profile(values) for name, values in per_layer.items()}
        self._run.log({"step": step, **metrics, **profiles})

    def samples(self, step: int, tables: Mapping[str, Sequence[Row]]) -> None:
        shown = {
            f"samples/{title}": wandb.Table(
                columns=list(COLUMNS), data=[cells(row) for row in rows]
            )
            for title, rows in tables.items()
        }
        self._run.log({"step": step, **shown})

    def report(self, page: Path) -> None:
        # inject would add W&B's style sheet to a page that has its own
        self._run.log({"report": wandb.Html(page.read_text(encoding="utf-8"), inject=False)})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def profile(values: Sequence[float]) -> wandb.Histogram:
    """Return a histogram with one bin per layer, whose count is the value of the layer."""
    counts = np.array([value if math.isfinite(value) else 0.0 for value in values])
    return wandb.Histogram(np_histogram=(counts, np.arange(len(counts) + 1) - 0.5))
