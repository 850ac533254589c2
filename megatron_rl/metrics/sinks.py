"""metrics.jsonl and the trackers, which get the results of every step; reading metrics.jsonl.

One line of metrics.jsonl is one StepResult: {"step", "policy_version", "group/name": number or
null, ..., "per_layer": {"group/name": [one number per MoE layer]}}.  `step` counts finished steps,
as the terminal does: the first is 1, the evaluation before it 0 (version 0.1 wrote one less).
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.config.run_paths import RunFolder
from megatron_rl.launch.signals import StoppedBySignal
from megatron_rl.metrics.lines import MetricLines, cut_partial_line, forget_later_steps
from megatron_rl.metrics.trackers.background import Call
from megatron_rl.metrics.trackers.registry import Trackers
from megatron_rl.records.packed import StepResult

logger = logging.getLogger(__name__)


class Sinks:
    """The writer of metrics.jsonl, which also sends results to the trackers.

    The lines of steps after the checkpoint of a resumed run are removed, as these are trained
    again.
    """

    def __init__(
        self, run_dir: Path, trackers: Trackers | None = None, *, last_step: int | None = None
    ) -> None:
        """last_step: lines of steps after this one are removed, all for -1; None: no line is."""
        run_dir.mkdir(parents=True, exist_ok=True)
        path = RunFolder(run_dir).metrics
        # a killed run may have left half a line, to which the first new line would be joined
        cut_partial_line(path)
        if last_step is not None:
            forget_later_steps(path, last_step)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  closed by close()
        self.trackers = trackers

    def write(self, result: StepResult) -> None:
        """Write the line of one result before returning; the trackers get it in the background."""
        finished = result.step + 1
        row: dict[str, object] = {"step": finished, "policy_version": result.policy_version}
        row |= {name: finite(value) for name, value in result.metrics.items()}
        if result.per_layer:
            row["per_layer"] = {
                name: [finite(v) for v in values] for name, values in result.per_layer.items()
            }
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()  # readers and the report follow a running job
        self.track(lambda tracker: tracker.log(finished, result.metrics, result.per_layer))

    def track(self, call: Call) -> None:
        """Have `call` made with every tracker, in the background."""
        if self.trackers is not None:
            self.trackers.put(call)

    def close(self, *, failed: bool = False) -> None:
        self._file.close()
        if self.trackers is not None:
            self.trackers.close(failed=failed)

    def __enter__(self) -> Sinks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        # an interrupted or stopped run has not failed: the same command continues it
        stopped = kind is not None and issubclass(kind, (KeyboardInterrupt, StoppedBySignal))
        self.close(failed=kind is not None and not stopped)


def read_metrics(path: Path) -> list[StepResult]:
    """Return the results in a metrics.jsonl, ordered by step.

    null is NaN, and former names of metrics are replaced by the new ones.  Lines of the same step
    are merged, and the later value counts.  Lines of version 0.1, which numbered steps from 0, are
    recognised by their metric names.  An incomplete last line, which a killed run leaves, is left
    out.  Raises ValueError with the number of another line that is not a result.
    """
    merged: dict[int, StepResult] = {}
    lines = MetricLines()
    for number, line in numbered_lines(path):
        try:
            finished, version, metrics, per_layer = lines.parse(line)
        except ValueError as error:
            if not line.endswith(b"\n"):
                logger.warning("%s: line %d is incomplete and left out", path, number)
                continue
            raise ValueError(f"{path}, line {number}: {error}") from error
        step = finished - 1
        old = merged.get(step, StepResult(step, version, {}))
        merged[step] = StepResult(step, version, old.metrics | metrics, old.per_layer | per_layer)
    return [merged[step] for step in sorted(merged)]


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, line


def finite(value: float) -> float | None:
    """Return the value, or None (null) for NaN and infinity, which JSON does not have."""
    return float(value) if math.isfinite(value) else None
