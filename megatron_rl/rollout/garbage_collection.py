"""Python's garbage collector in a run, which holds the libraries' million objects and all episodes
of a step.

A full collection looks at every container there is and stops all threads meanwhile, the event loop
of the episodes too: 0.1 to 0.3 s with 1,024 episodes.  Reference counts free what matters in time,
so full collections wait for the end of a step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

YOUNG, MIDDLE = 50, 3
"""New containers, less those that were freed, per collection of the young generation (Python: 700),
and such collections per one of the middle: many short ones instead of a few that stop the event
loop for 10 to 30 ms; together they take as long."""
MIDDLE_PER_FULL = 42_000
"""Bounds the memory of cycles that a step leaves: after so many, about 6 million new containers,
there is a full one anyway.
"""


def postpone_full_collections() -> Callable[[], None]:
    """Before the first step: what exists now is not looked at again until the returned function is
    called, at the end.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.collect()  # Python waits until a quarter is new: of what is left now, not of what is frozen
    gc.set_threshold(YOUNG, MIDDLE, MIDDLE_PER_FULL)

    def restore() -> None:
        gc.set_threshold(*before)
        gc.unfreeze()

    return restore
