"""A writer of files that training does not need: it works in a thread, and counts and logs errors
instead of raising them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from safetensors import SafetensorError

MOST_WAITING = 4
"""The largest number of waiting jobs: a job keeps the arrays that it writes in memory."""


class FileWriter:
    """The thread that writes files, in the order of the calls.  log: prints one line."""

    def __init__(self, log: Callable[[str], None] = lambda text: None) -> None:
        self.failed = 0
        """The number of writes that failed: of a file, or of lines of one."""
        self._log = log
        # one thread, so that jobs run in the order of the calls
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="file-writer")
        self._waiting: deque[Future[None]] = deque()

    def now(self, path: Path, write: Callable[[], None]) -> None:
        """Call `write`, which writes `path`.  The first error (a full disk, a folder without write
        permission) is logged, all are counted.
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
        """Call `now` in the thread.  Wait for older jobs where the disk is slower than training."""
        self._waiting.append(self._pool.submit(self.now, path, write))
        while len(self._waiting) > MOST_WAITING:
            self._waiting.popleft().result()

    def wait(self) -> None:
        """Wait until everything is written."""
        while self._waiting:
            self._waiting.popleft().result()

    def close(self) -> None:
        self.wait()
        self._pool.shutdown()
