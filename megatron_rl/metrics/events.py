"""events.jsonl: what happened in a run beside its steps, for the time axis of the curves.

One line is {"time": Unix seconds, "step": finished steps or the one in progress, counted from 1,
"kind", "text"}, and "seconds" where it took some time.
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
    "start",
    "resume",
    "stop",
    "weight_sync",
    "server_restart",
    "skipped_update",
    "checkpoint",
    "anomaly",
    "evaluation",
]
EVENTS_FILE = "events.jsonl"


class Events:
    """Appends to `path`; None on ranks that write nothing.

    hidden: environment variables whose values no text may show.
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
        """Append one event.

        A file that cannot be written is counted by the FileWriter, if there is one.
        """
        if self.path is None:
            return
        text = self._redactor.text(text)  # an error's may hold the URL that failed
        path, event = (
            self.path,
            {"time": round(time.time(), 3), "step": step, "kind": kind, "text": text},
        )
        if seconds is not None:
            event["seconds"] = round(seconds, 3)
        if self.files is None:
            append_lines(path, [event])
        else:
            self.files.now(path, lambda: append_lines(path, [event]))

    @contextmanager
    def timed(self, kind: EventKind, step: int, text: str) -> Iterator[None]:
        """Add the event with the seconds that the work inside took, when that is done."""
        start = time.monotonic()
        yield
        self.add(kind, step, text, time.monotonic() - start)
