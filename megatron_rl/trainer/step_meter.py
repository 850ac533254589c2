"""Metric sums and stage times of a step, on this rank.  The trainer and its rollout source share one meter."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_rl.launch.watchdog import Watchdog
from megatron_rl.metrics.reduce import MetricSums

TIMED = ("rollout", "reward", "split", "old_logprob", "update", "weight_sync")


class StepMeter:
    """sums: the metrics counted since `take_sums`.  The watchdog, if any, is notified before each stage."""

    def __init__(self, watchdog: Watchdog | None = None) -> None:
        self.watchdog = watchdog
        self.step = -1
        self.sums = MetricSums()
        self._seconds: dict[str, float] = {}
        self._started = time.monotonic()

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        """Add this rank's wall-clock seconds inside to time/`stage` of the step."""
        start = time.monotonic()
        self.enter(stage)
        try:
            yield
        finally:
            self._seconds[stage] = self._seconds.get(stage, 0.0) + time.monotonic() - start

    def enter(self, stage: str) -> None:
        """Notify the watchdog; no time is counted."""
        if self.watchdog is not None:
            self.watchdog.enter(stage, self.step)

    def restart(self) -> None:
        """Start the step's wall-clock time now: evaluations and checkpoints belong to no step."""
        self._started = time.monotonic()

    def take_sums(self) -> MetricSums:
        """The sums since the last call."""
        sums, self.sums = self.sums, MetricSums()
        return sums

    def take_times(self) -> dict[str, float]:
        """time/*: seconds since the last call or `restart`; `other` is outside every stage."""
        total = time.monotonic() - self._started
        self._started += total
        times = {f"time/{name}": self._seconds.get(name, 0.0) for name in TIMED}
        times["time/other"] = total - sum(times.values())
        times["time/step"] = total
        self._seconds = {}
        return times
