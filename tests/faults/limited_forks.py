"""An environment whose second worker cannot be forked, as at a limit of processes."""

import errno
import itertools
import os

from tests.faults.environments import Asked

__all__ = ["Asked"]

calls, fork = itertools.count(1), os.fork


def limited() -> int:
    if next(calls) == 2:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return fork()


os.fork = limited
