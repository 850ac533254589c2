"""Settings of Python's garbage collector in a run, which holds the libraries' million objects and
all episodes of a step.

A full collection visits every container that exists and stops all threads meanwhile, also the event
loop of the episodes: 0.1 to 0.3 s with 1,024 episodes.  Reference counts free large objects at
once, so full collections can wait for the end of a step.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable

YOUNG, MIDDLE = 50, 3
"""Number of new containers, less those freed, per collection of the young generation (Python: 700),
and number of those per collection of the middle one.  Many short collections take as long as a few
that stop the event loop for 10 to 30 ms."""
MIDDLE_PER_FULL = 42_000
"""Number of middle collections per full one, about 6 million new containers.  It bounds the memory
of cycles that a step leaves."""


def return_free_memory() -> None:
    """Give the memory of freed arrays back to the system, which glibc otherwise keeps for arrays to
    come: some MiB each, of threads that may never need as much again.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # None without glibc
    if trim is not None:
        trim(0)


def postpone_full_collections() -> Callable[[], None]:
    """Exclude what exists now from collections, before the first step.

    Returns a function that restores the collector, to be called at the end of the run.
    """
    before = gc.get_threshold()
    gc.collect()  # garbage must not be frozen
    gc.freeze()
    # Python waits until a quarter of what the last full collection left is new: collect again, so
    # that what is frozen does not count
    gc.collect()
    gc.set_threshold(YOUNG, MIDDLE, MIDDLE_PER_FULL)

    def restore() -> None:
        gc.set_threshold(*before)
        gc.unfreeze()

    return restore
