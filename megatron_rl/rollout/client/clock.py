"""A clock that stands still while servers are paused, so that the deadlines of requests that they
keep are extended by the pause.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

POLL_SECONDS = 0.05
"""The longest delay of an alarm whose deadline a pause has moved."""


class Clock:
    """Seconds of `now` without the pauses.

    All methods may be called from any thread, but `alarm` and `timeout` only in an event loop.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()  # guards the two fields below
        self._paused_at: float | None = None
        self._paused_seconds = 0.0

    def __call__(self) -> float:
        with self._lock:
            now = self._now() if self._paused_at is None else self._paused_at
            return now - self._paused_seconds

    @property
    def is_paused(self) -> bool:
        return self._paused_at is not None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock inside the context."""
        start = self._now()
        with self._lock:
            self._paused_at = start
        try:
            yield
        finally:
            with self._lock:
                self._paused_seconds += self._now() - start
                self._paused_at = None

    def alarm(self, seconds: float, call: Callable[[], object]) -> Alarm:
        """Call `call` after so many seconds of this clock."""
        return Alarm(self, self() + seconds, call)

    @asynccontextmanager
    async def timeout(self, seconds: float) -> AsyncIterator[None]:
        """Raise TimeoutError after so many seconds of this clock, as asyncio.timeout does."""
        async with asyncio.timeout(None) as limit:
            # the limit is set to now when the alarm comes, as asyncio's own clock does not pause
            alarm = self.alarm(seconds, lambda: limit.reschedule(asyncio.get_running_loop().time()))
            try:
                yield
            finally:
                alarm.cancel()


class Alarm:
    """A call at a time of a clock, unless it is cancelled before."""

    def __init__(self, clock: Clock, end: float, call: Callable[[], object]) -> None:
        self._clock, self._end, self._call = clock, end, call
        self._wait(end - clock())

    def _wait(self, seconds: float) -> None:
        self._handle = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        left = self._end - self._clock()
        if left > 0:
            self._wait(max(left, POLL_SECONDS))
        else:
            self._call()

    def cancel(self) -> None:
        self._handle.cancel()
