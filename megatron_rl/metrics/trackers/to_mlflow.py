"""MLflow (pip install '.[mlflow]'): the server at MLFLOW_TRACKING_URI; offline RUN/mlflow.db and
RUN/mlflow.

MLflow's names have no "@": eval/heldout/avg@4 becomes eval/heldout/avg_at_4.  A per-layer metric is
one metric per layer.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from megatron_rl.metrics.trackers.tracker import (
    COLUMNS,
    Row,
    TrackedRun,
    Tracker,
    cells,
    flat_config,
)

BATCH, PARAMETERS = 1000, 100
"""The largest numbers of metrics and of parameters in one request."""
VALUE_CHARACTERS = 500
"""The largest length of a parameter's value that every MLflow server accepts."""


class MLflow(Tracker):
    def __init__(self, run: TrackedRun) -> None:
        uri = f"sqlite:///{run.folder.resolve() / 'mlflow.db'}" if run.mode == "offline" else None
        self._client = MlflowClient(tracking_uri=uri)
        self.id = run.id or self._new_run(run)
        if run.id:  # an earlier process may have set it to finished or failed
            self._client.update_run(self.id, status="RUNNING")

    def _new_run(self, run: TrackedRun) -> str:
        client = self._client
        folder = (run.folder.resolve() / "mlflow").as_uri() if run.mode == "offline" else None
        experiment = client.get_experiment_by_name(run.project)
        experiment_id = (
            experiment.experiment_id if experiment else self._new_experiment(run.project, folder)
        )
        run_id: str = client.create_run(experiment_id, run_name=run.name).info.run_id
        config = flat_config(run.config)
        values = [Param(name, str(value)[:VALUE_CHARACTERS]) for name, value in config.items()]
        for start in range(0, len(values), PARAMETERS):
            client.log_batch(run_id, params=values[start : start + PARAMETERS])
        tags = [RunTag(f"version.{name}", value) for name, value in run.versions.items()]
        client.log_batch(run_id, tags=tags)
        content = {"config": dict(run.config), "versions": dict(run.versions)}
        client.log_dict(run_id, content, "config.json")
        return run_id

    def _new_experiment(self, name: str, folder: str | None) -> str:
        try:
            experiment_id: str = self._client.create_experiment(name, artifact_location=folder)
        except MlflowException:
            # another run may have created it since
            experiment = self._client.get_experiment_by_name(name)
            if experiment is None:
                raise
            experiment_id = experiment.experiment_id
        return experiment_id

    def log(
        self, step: int, metrics: Mapping[str, float], per_layer: Mapping[str, Sequence[float]]
    ) -> None:
        layers = {
            # two digits: names sort by layer
            f"{name}/layer_{i:02d}": value
            for name, values in per_layer.items()
            for i, value in enumerate(values)
        }
        now = int(1000 * time.time())
        values = [
            Metric(allowed(name), value, now, step) for name, value in {**metrics, **layers}.items()
        ]
        for start in range(0, len(values), BATCH):
            self._client.log_batch(self.id, metrics=values[start : start + BATCH])

    def samples(self, step: int, tables: Mapping[str, Sequence[Row]]) -> None:
        for title, rows in tables.items():
            file = f"samples/{title.replace(' ', '_')}_{step:06d}.json"
            table = {"columns": list(COLUMNS), "data": [cells(row) for row in rows]}
            self._client.log_dict(self.id, table, file)

    def report(self, page: Path) -> None:
        for path in (page, page.with_suffix(".png")):
            self._client.log_artifact(self.id, str(path))

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self.id, "FAILED" if failed else "FINISHED")


def allowed(name: str) -> str:
    """Return the name of a metric in the characters that MLflow allows."""
    return re.sub(r"[^\w./ -]", "_", name.replace("@", "_at_"))
