"""Metric sums, stage times and spans of a step, on this rank.

The trainer and its rollout source share one meter.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from megatron_rl.launch.trace import MAIN, OFF, Span, Trace
from megatron_rl.launch.watchdog import Watchdog
from megatron_rl.metrics.reduce import MetricSums

TIMED = ("rollout", "reward", "split", "old_logprob", "update", "weight_sync")
"""Stages that every step reports as time/NAME, 0 where it did not enter them."""


class StepMeter:
    """Counts and times of the step in progress.

    sums: the metrics counted since the last `take_sums`.  The watchdog, if any, is notified before
    each stage.
    """

    def __init__(self, watchdog: Watchdog | None = None, trace: Trace = OFF) -> None:
        self.watchdog, self.trace = watchdog, trace
        self.step = -1
        self.sums = MetricSums()
        self._seconds: dict[str, float] = {}
        self._started = time.monotonic_ns()

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        """Add the wall-clock seconds that this rank spends inside to time/`stage` of the step."""
        start = time.monotonic_ns()
        self.enter(stage)
        try:
            yield
        finally:
            self._seconds[stage] = (
                self._seconds.get(stage, 0.0) + self._end(stage, "stage", start).seconds
            )

    def part(self, name: str) -> AbstractContextManager[object]:
        """Trace a part of a stage, or of the time outside all stages; count no time."""
        return self.trace.span(name, "part")

    @contextmanager
    def between_steps(self, stage: str) -> Iterator[None]:
        """Time what belongs to no step, as an evaluation or a checkpoint.  The next step begins
        afterwards.
        """
        self.enter(stage)
        start = time.monotonic_ns()
        try:
            yield
        finally:
            self.begin(self._end(stage, "stage", start).end)

    def begin(self, now: int | None = None) -> None:
        """Begin the next step.  Times counted before, such as those of a weight sync for an
        evaluation, belong to no step.

        now: time.monotonic_ns().
        """
        self._started, self._seconds = time.monotonic_ns() if now is None else now, {}

    def enter(self, stage: str) -> None:
        """Notify the watchdog; no time is counted."""
        if self.watchdog is not None:
            self.watchdog.enter(stage, self.step)

    def take_sums(self) -> MetricSums:
        """Return the sums since the last call."""
        sums, self.sums = self.sums, MetricSums()
        return sums

    def take_times(self) -> dict[str, float]:
        """Return time/*: seconds since the last call, `between_steps` or `begin`.

        time/other is the time outside every stage.
        """
        step = self._end(f"step {self.step + 1}", "step", self._started, thread="step")
        self._started, total = step.end, step.seconds
        times = {f"time/{name}": self._seconds.get(name, 0.0) for name in TIMED}
        times["time/other"] = total - sum(times.values())
        times["time/step"] = total
        self._seconds = {}
        return times

    def _end(self, name: str, kind: str, start: int, *, thread: str = MAIN) -> Span:
        """Return and trace the span from `start` (time.monotonic_ns()) until now.

        Counted and traced times are the same.
        """
        span = Span(name, kind, start, time.monotonic_ns(), thread=thread)
        self.trace.add(span)
        return span
