"""Writes files that training can do without: in a thread, and an error is counted and logged, never
raised.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from safetensors import SafetensorError

MOST_WAITING = 4
"""Jobs that may wait: each holds the arrays that it writes."""


class FileWriter:
    """`log` prints one line.  failed: files, or lines of one, that could not be written."""

    def __init__(self, log: Callable[[str], None] = lambda text: None) -> None:
        self.failed = 0
        self._log = log
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="file-writer")
        self._waiting: deque[Future[None]] = deque()

    def now(self, path: Path, write: Callable[[], None]) -> None:
        """Call `write`, which writes `path`; a full disk or a folder that cannot be written is
        reported once.
        """
        try:
            write()
        except (OSError, SafetensorError) as error:
            self.failed += 1
            if self.failed == 1:
                self._log(
                    f"{path} could not be written: {error}; training continues, further failures"
                    " are counted only"
                )

    def later(self, path: Path, write: Callable[[], None]) -> None:
        """`now` in the thread, in the order of the calls.

        Waits for older jobs where the disk is slower than training.
        """
        self._waiting.append(self._pool.submit(self.now, path, write))
        while len(self._waiting) > MOST_WAITING:
            self._waiting.popleft().result()

    def wait(self) -> None:
        """Until everything is written."""
        while self._waiting:
            self._waiting.popleft().result()

    def close(self) -> None:
        self.wait()
        self._pool.shutdown()
