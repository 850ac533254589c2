"""What a step counts and how long its stages take, on this rank.  The trainer and its source of rollouts share one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_rl.launch.watchdog import Watchdog
from megatron_rl.metrics.reduce import MetricSums

TIMED = ("rollout", "reward", "split", "old_logprob", "update", "weight_sync")


class StepMeter:
    """sums: the metrics counted since `take_sums`.  The watchdog, if any, learns of every stage before it begins."""

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
        """Tell the watchdog; no time is counted."""
        if self.watchdog is not None:
            self.watchdog.enter(stage, self.step)

    def restart(self) -> None:
        """The step's wall-clock time counts from now: what lies before belongs to no step."""
        self._started = time.monotonic()

    def take_sums(self) -> MetricSums:
        """What was counted since the last call."""
        sums, self.sums = self.sums, MetricSums()
        return sums

    def take_times(self) -> dict[str, float]:
        """time/*: seconds since the last call or `restart`; `other` is what no stage accounts for."""
        total = time.monotonic() - self._started
        self._started += total
        times = {f"time/{name}": self._seconds.get(name, 0.0) for name in TIMED}
        times["time/other"] = total - sum(times.values())
        times["time/step"] = total
        self._seconds = {}
        return times
