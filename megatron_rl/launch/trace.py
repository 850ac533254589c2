"""Spans of run.trace: what this process did, and when.  Imports no torch.

A span belongs to a thread, where spans nest, or to a `key`, such as a request or an episode.  Those
overlap, and get lanes in the file that trace_file.py writes for Perfetto.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

MAIN = "main"


@dataclass(frozen=True)
class Span:
    """A period of time and what was done in it."""

    name: str
    kind: str
    """step, stage, part, collective, sampling, request, episode, environment or reward."""
    start: int
    """time.monotonic_ns()."""
    end: int = 0
    """time.monotonic_ns()."""
    process: str = ""
    """URL of a server; "" for this rank."""
    thread: str = MAIN
    """Name of the thread; of the lanes where there is a key."""
    key: str = ""
    values: dict[str, object] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return (self.end - self.start) / 1e9


class Trace:
    """Records spans of any thread while `is_on`; off, a span costs less than a microsecond."""

    def __init__(self, *, is_on: bool = False) -> None:
        self.is_on = is_on
        self._done: list[Span] = []
        self._open: dict[int, Span] = {}

    def span(
        self,
        name: str,
        kind: str,
        *,
        process: str = "",
        thread: str = "",
        key: str = "",
        **values: object,
    ) -> AbstractContextManager[dict[str, object]]:
        """Record what happens inside the block.

        The values that it yields are shown with the span, and the block may add to them.  `thread`
        is by default the current one.
        """
        if not self.is_on:
            return nullcontext({})
        return self._record(
            Span(name, kind, 0, 0, process, thread or current_thread(), key, values)
        )

    def add(self, span: Span) -> None:
        """Record a span that has ended already."""
        if self.is_on:
            self._done.append(span)

    def take(self) -> list[Span]:
        """Return the spans since the last call.

        Spans that have not ended end now, marked as unfinished, and come again when they have
        ended.
        """
        # other threads may add meanwhile: what comes later is in the next list
        done, self._done = self._done, []
        now = time.monotonic_ns()
        unfinished = [
            replace(span, end=now, values={**span.values, "unfinished": True})
            for span in [*self._open.values()]
        ]
        return done + unfinished

    @contextmanager
    def _record(self, span: Span) -> Iterator[dict[str, object]]:
        span = replace(span, start=time.monotonic_ns())
        self._open[id(span)] = span
        try:
            yield span.values
        except BaseException as error:
            span.values["error"] = type(error).__name__
            raise
        finally:
            del self._open[id(span)]
            self._done.append(replace(span, end=time.monotonic_ns()))


OFF = Trace()
"""A trace that records nothing."""


def current_thread() -> str:
    thread = threading.current_thread()
    return MAIN if thread is threading.main_thread() else thread.name
