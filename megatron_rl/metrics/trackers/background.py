"""The thread that calls a tracker: whatever the tracker does, training neither stops nor waits.

Calls wait in a queue of QUEUE_SIZE.  A call that raises, or that finds the queue full because an
earlier one hangs, is a failure: track/NAME_failures_total counts it, and the first one is logged.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

from megatron_rl.metrics.trackers.tracker import Tracker

QUEUE_SIZE = 256
Call: TypeAlias = Callable[[Tracker], None]

abandoned: list[str] = []
"""The names of this process's trackers that were not closed in time."""


def exit_if_tracker_hangs(status: int) -> None:
    """End the process at once with `status` where a tracker is abandoned.

    Otherwise the exit hooks of its package would wait for it, W&B's for 18 s or more.
    """
    if abandoned:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class BackgroundTracker:
    """One tracker, its thread and its queue.

    make: opens the tracker; called on the thread.
    log: prints one line.
    on_open: called with the id of the tracker after it has opened.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Tracker],
        log: Callable[[str], None],
        on_open: Callable[[str], None] = lambda run_id: None,
    ) -> None:
        self.name, self.failures = name, 0
        self._make, self._log, self._on_open = make, log, on_open
        self._calls: queue.Queue[Call | None] = queue.Queue(QUEUE_SIZE)
        self._lock = threading.Lock()  # both threads count failures
        # daemon: the process can end while the tracker hangs
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, call: Call) -> None:
        """Have `call` made with the tracker, in the order of the calls.  Returns at once."""
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._count(f"does not keep up: {QUEUE_SIZE} calls wait for it")

    def close(self, *, failed: bool, seconds: float) -> None:
        """Wait until everything is sent and the tracker is closed, at most `seconds`."""
        until = time.monotonic() + seconds
        try:
            # None ends the thread
            for last in (lambda tracker: tracker.close(failed=failed), None):
                self._calls.put(last, timeout=max(0.0, until - time.monotonic()))
        except queue.Full:
            pass  # the tracker hangs, and the thread is still alive below
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            abandoned.append(self.name)
            self._count(
                f"is not closed after track.close_seconds = {seconds:g}; what it has not sent is"
                " lost"
            )

    def _run(self) -> None:
        tracker = None
        try:
            tracker = self._make()
            self._on_open(tracker.id)
        # any error, an exit too: the code is that of another package or of the user
        except (Exception, SystemExit) as error:
            self._count(f"cannot be opened, nothing is sent to it: {error!r}")
        while (call := self._calls.get()) is not None:
            if tracker is None:
                self._count("is not open")
                continue
            try:
                call(tracker)
            except (Exception, SystemExit) as error:
                self._count(f"failed: {error!r}")

    def _count(self, cause: str) -> None:
        with self._lock:
            self.failures += 1
            is_first = self.failures == 1
        if is_first:
            self._log(
                f"WARNING tracker {self.name} {cause}.  Training continues;"
                f" track/{self.name}_failures_total counts its further failures"
            )
