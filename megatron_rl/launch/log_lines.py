"""The lines that this program writes, as text or as JSON (run.log_format), without secrets.

A line of JSON is an object with "time" (Unix seconds), "event", "text" (the line for people) and
the event's own keys (docs/reference/token_data.md#log-lines).
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TextIO, TypeAlias

from megatron_rl.config.redact import Redactor

LogFormat: TypeAlias = Literal["text", "json"]
Event: TypeAlias = Literal["log", "warning", "error", "step", "evaluation", "progress", "summary"]
Value: TypeAlias = "str | float | int | Mapping[str, Value] | Iterable[Value] | None"


class LogLines:
    """Formats the lines of a run.

    `hidden` are environment variables that hold secrets although their names do not look like it.
    """

    def __init__(self, log_format: LogFormat = "text", hidden: Iterable[str | None] = ()) -> None:
        self.log_format, self.redactor = log_format, Redactor(hidden)

    @property
    def is_json(self) -> bool:
        return self.log_format == "json"

    def line(self, event: Event, text: str, **values: Value) -> str:
        """Return one line; several where `text` has several and the format is text.

        NaN and infinity become null.
        """
        text = encodable(self.redactor.text(text))
        if not self.is_json:
            return text
        row = {
            "time": round(time.time(), 3),
            "event": event,
            "text": text,
            **self.redactor.tree(values),
        }
        return json.dumps(strict(row))

    def print_error(self, text: str, **values: Value) -> None:
        """Print one line on standard error."""
        print(self.line("error", text, **values), file=sys.stderr, flush=True)

    def catch_warnings(self) -> None:
        """Write what this package's modules log (`logging`) in this format, on standard error."""
        logger = logging.getLogger("megatron_rl")
        for handler in logger.handlers[:]:
            if isinstance(handler, LogHandler):
                logger.removeHandler(handler)  # an earlier run of this process added it
        logger.addHandler(LogHandler(self))

    @contextmanager
    def clean_stderr(self) -> Iterator[None]:
        """Remove secrets from what Python code writes on standard error.

        These are warnings, tracebacks of threads and lines of libraries.
        """
        before = sys.stderr
        sys.stderr = CleanStream(before, self.redactor)
        try:
            yield
        finally:
            sys.stderr = before


class CleanStream:
    """A text stream that writes without secrets."""

    def __init__(self, stream: TextIO, redactor: Redactor) -> None:
        self._stream, self._redactor = stream, redactor

    def write(self, text: str) -> int:
        self._stream.write(self._redactor.text(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class LogHandler(logging.Handler):
    def __init__(self, lines: LogLines) -> None:
        super().__init__(logging.WARNING)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        line = self._lines.line("warning", record.getMessage(), logger=record.name)
        print(line, file=sys.stderr, flush=True)


def encodable(text: str) -> str:
    """Return `text` with "?" for each half of a surrogate pair, as in names of files that are not
    UTF-8 and in escapes that a model writes: it cannot be printed or sent.
    """
    return text.encode(errors="replace").decode()


def strict(value: object) -> object:
    """Return the value as strict JSON has it, without NaN and infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    return [strict(item) for item in value] if isinstance(value, list | tuple) else value
