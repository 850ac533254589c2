"""The order in which the sources of a push (the training ranks that send) send their buckets.

SGLang loads one bucket at a time (it holds a lock meanwhile), and a broadcast to several servers
needs all of them at the same bucket.  Two sources whose calls reached two servers in different
orders would wait for each other.  So there is one order, the same on every rank, and one counter of
loaded buckets in the job's store.  Meanwhile sources gather and flatten their next bucket.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from torch import distributed as dist

from megatron_rl.weights.sync.servers import WeightPushError

FAILED = 1 << 40
"""Added to the counter when a bucket could not be sent: more than any bucket waits for."""
SHORTEST_POLL, LONGEST_POLL = 0.001, 0.05
"""Seconds between two questions to the store."""


class BucketOrder:
    """The order of the buckets of one push: bucket n waits until n buckets are loaded.

    `name` is unique in the job's store.  `patience` is the number of seconds without any bucket
    being loaded after which a waiting one gives up.
    """

    def __init__(self, store: dist.Store, name: str, patience: float) -> None:
        self.store = store
        self.name = name
        self.patience = patience

    def wait(self, number: int) -> bool:
        """Wait until the buckets before this one are loaded; return False where one of them failed.

        Raises WeightPushError when no bucket is loaded for `patience` seconds.
        """
        before, deadline = -1, 0.0
        while (loaded := self.store.add(self.name, 0)) < number:
            if loaded != before:
                before, deadline = loaded, time.monotonic() + self.patience
            if time.monotonic() > deadline:
                raise WeightPushError(
                    f"bucket {number} of the weight sync waited {self.patience:g} s for bucket"
                    f" {loaded}: the rank that sends it hangs or died; look at its log"
                )
            # the next in line asks often, the others rarely: the store may serve a thousand ranks
            time.sleep(min(LONGEST_POLL, SHORTEST_POLL * (number - loaded)))
        return loaded < FAILED

    def done(self) -> None:
        """Note that the servers have loaded the bucket whose turn it was."""
        self.store.add(self.name, 1)

    def fail(self) -> None:
        """Let no source send anything more in this push."""
        self.store.add(self.name, FAILED)

    def close(self) -> None:
        """Remove the counter.  Called on one rank, when no rank waits any more."""
        self.store.delete_key(self.name)


@contextmanager
def one_at_a_time(store: dist.Store, name: str, patience: float) -> Iterator[None]:
    """Admit one rank at a time to the block, of all ranks that use this name, in order of arrival.

    A rank enters all the same when no other has left for `patience` seconds, or where the store is
    gone: the rank inside may have died.
    """
    with suppress(RuntimeError):
        number, before, deadline = store.add(f"{name}/came", 1) - 1, -1, 0.0
        while (left := store.add(f"{name}/left", 0)) < number:
            if left != before:
                before, deadline = left, time.monotonic() + patience
            if time.monotonic() > deadline:
                break
            time.sleep(LONGEST_POLL)
    try:
        yield
    finally:
        with suppress(RuntimeError):
            store.add(f"{name}/left", 1)
