"""Writes each step's results to metrics.jsonl and TensorBoard in the run directory, and reads metrics.jsonl.

One line of metrics.jsonl is one StepResult: {"step", "policy_version", "group/name": number or null, ...,
"per_layer": {"group/name": [one number per MoE layer]}}.  `step` counts finished steps, as the terminal does: the first is
1, the evaluation before it 0 (version 0.1 wrote one less).  In TensorBoard a per-layer metric is one scalar per layer, and a
histogram with one bin per layer.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from megatron_rl.config.renamed import new_metric
from megatron_rl.records import StepResult

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"


class Sinks:
    """Appends: a resumed run writes the steps after its checkpoint again, and the last line of a step counts."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / METRICS_FILE
        cut_partial_line(path)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  closed by close()
        self._board = SummaryWriter(str(run_dir / "tensorboard"))

    def write(self, result: StepResult) -> None:
        """Write one result; its line is readable when this returns."""
        finished = result.step + 1
        row: dict[str, object] = {"step": finished, "policy_version": result.policy_version}
        row |= {name: finite(value) for name, value in result.metrics.items()}
        if result.per_layer:
            row["per_layer"] = {name: [finite(v) for v in values] for name, values in result.per_layer.items()}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()  # readers and the report follow a running job
        for name, value in result.metrics.items():
            self._board.add_scalar(name, value, finished)
        for name, values in result.per_layer.items():
            for layer, value in enumerate(values):
                self._board.add_scalar(f"{name}/layer_{layer:02d}", value, finished)
            self._draw_layers(name, values, finished)

    def _draw_layers(self, name: str, values: list[float], finished: int) -> None:
        """One histogram per step with a bin per layer, whose counts are the layers' values: the profile over depth."""
        counts = [value if math.isfinite(value) else 0.0 for value in values]
        self._board.add_histogram_raw(
            name,
            min=-0.5,
            max=len(counts) - 0.5,
            num=sum(counts),
            sum=sum(layer * count for layer, count in enumerate(counts)),
            sum_squares=sum(layer**2 * count for layer, count in enumerate(counts)),
            bucket_limits=[layer + 0.5 for layer in range(len(counts))],
            bucket_counts=counts,
            global_step=finished,
        )

    def flush(self) -> None:
        self._file.flush()
        self._board.flush()

    def close(self) -> None:
        self._file.close()
        self._board.close()

    def __enter__(self) -> Sinks:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[StepResult]:
    """The lines of a metrics.jsonl by step, null as NaN, former names of metrics replaced by the current ones.

    Lines of the same step are merged; the later value counts.  Lines of version 0.1, which numbered steps from 0, are recognised
    by their metric names.  Raises ValueError with the line number for one that is not a result.
    """
    merged: dict[int, StepResult] = {}
    is_former = False
    for number, line in numbered_lines(path):
        try:
            row = json.loads(line)
            has_former = any(new_metric(name) != name for name in row)
            # stays True after the first such line: a line of an evaluation alone has no former name
            is_former = row["step"] == -1 or has_former or (is_former and "time/weight_sync" not in row)
            step, version = int(row.pop("step")) - (not is_former), int(row.pop("policy_version"))
            per_layer = {
                new_metric(name): [number_of(v) for v in values] for name, values in row.pop("per_layer", {}).items()
            }
            metrics = {new_metric(name): number_of(value) for name, value in row.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}, line {number}: not a step's metrics: {error!r}") from error
        old = merged.get(step, StepResult(step, version, {}))
        merged[step] = StepResult(step, version, old.metrics | metrics, old.per_layer | per_layer)
    return [merged[step] for step in sorted(merged)]


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, line


def cut_partial_line(path: Path) -> None:
    """Remove an incomplete last line, which a killed run leaves: an appended line would be joined to it."""
    content = path.read_bytes() if path.exists() else b""
    complete = content.rfind(b"\n") + 1
    if complete < len(content):
        logger.warning("%s: removed %d bytes of an incomplete line", path, len(content) - complete)
        os.truncate(path, complete)


def finite(value: float) -> float | None:
    """JSON has no NaN or infinity: null."""
    return float(value) if math.isfinite(value) else None


def number_of(value: float | None) -> float:
    return math.nan if value is None else float(value)
