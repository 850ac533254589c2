"""run.trace: what this process did when, as spans.  trace_file.py writes them for Perfetto.
Imports no torch.

A span belongs to a thread, where spans nest, or to a `key`: a request, an episode.  Those overlap,
and get lanes in the file.
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
    """start, end: time.monotonic_ns().  kind: step, stage, part, collective, sampling, request,
    episode, environment, reward.

    process: URL of a server; "" for this rank.  thread: its name, or that of the lanes where there
    is a key.
    """

    name: str
    kind: str
    start: int
    end: int = 0
    process: str = ""
    thread: str = MAIN
    key: str = ""
    values: dict[str, object] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return (self.end - self.start) / 1e9


class Trace:
    """Records while `is_on`; off, a span costs less than a microsecond.  From any thread."""

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
        """What happens inside; the values that it yields are shown with the span, and may be added
        to.

        thread: by default the current one.
        """
        if not self.is_on:
            return nullcontext({})
        return self._record(
            Span(name, kind, 0, 0, process, thread or current_thread(), key, values)
        )

    def add(self, span: Span) -> None:
        """A span that is known already."""
        if self.is_on:
            self._done.append(span)

    def take(self) -> list[Span]:
        """Since the last call; spans that have not ended end now, marked as unfinished, and come
        again when they have ended.
        """
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
"""Records nothing."""


def current_thread() -> str:
    thread = threading.current_thread()
    return MAIN if thread is threading.main_thread() else thread.name
