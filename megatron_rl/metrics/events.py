"""events.jsonl: the events of a run beside its steps, for the time axis of the curves.

One line is {"time": Unix seconds, "step": the number of finished steps or of the one in progress,
counted from 1, "kind", "text"}, with "seconds" for an event that took time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from megatron_rl.config.redact import Redactor
from megatron_rl.metrics.file_writer import FileWriter
from megatron_rl.metrics.lines import append_lines

EventKind = Literal[
    "start", "resume", "stop", "weight_sync", "server_restart", "skipped_update", "checkpoint",
    "anomaly", "evaluation",
]  # fmt: skip


class Events:
    """The writer of events.jsonl.

    path: the file; None on ranks that write nothing.
    files: the writer that counts errors of the disk; without it they are raised.
    hidden: names of environment variables whose values no text may show.
    """

    def __init__(
        self,
        path: Path | None = None,
        files: FileWriter | None = None,
        hidden: Iterable[str | None] = (),
    ) -> None:
        self.path, self.files = path, files
        self._redactor = Redactor(hidden)

    def add(self, kind: EventKind, step: int, text: str, seconds: float | None = None) -> None:
        """Append one event."""
        if self.path is None:
            return
        path, now = self.path, round(time.time(), 3)
        text = self._redactor.text(text)  # the text of an error may hold the URL that failed
        event: dict[str, object] = {"time": now, "step": step, "kind": kind, "text": text}
        if seconds is not None:
            event["seconds"] = round(seconds, 3)
        if self.files is None:
            append_lines(path, [event])
        else:  # counts and logs an error of the disk instead of raising it
            self.files.now(path, lambda: append_lines(path, [event]))

    @contextmanager
    def timed(self, kind: EventKind, step: int, text: str) -> Iterator[None]:
        """Add the event after the work inside, with the seconds that it took."""
        start = time.monotonic()
        # no event where the work fails: the error ends the run, with an event of its own
        yield
        self.add(kind, step, text, time.monotonic() - start)
