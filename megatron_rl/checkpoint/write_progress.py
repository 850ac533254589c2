"""Shows how far the files of a checkpoint are written, by their sizes: other code writes them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_rl.metrics.console import ShowProgress

MIB = 2**20
POLL_SECONDS = 0.5


@contextmanager
def show_writing(
    progress: ShowProgress, text: str, files: Sequence[Path], num_bytes: int
) -> Iterator[None]:
    """Show how much of `files`, of `num_bytes` together, there is while the block writes them."""
    done = threading.Event()
    with progress(text, num_bytes // MIB, "MiB") as advance:

        def follow() -> None:
            shown = 0
            while not done.wait(POLL_SECONDS):
                written = sum(map(size_of, files)) // MIB
                advance(max(0, written - shown))
                shown = max(shown, written)

        thread = threading.Thread(target=follow, name="checkpoint progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def size_of(file: Path) -> int:
    """Return the file's size in bytes, 0 before it exists."""
    with suppress(OSError):
        return file.stat().st_size
    return 0
