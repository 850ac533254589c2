"""One run at a time in a run directory.

A second run would delete the checkpoint that the first is writing.  The lock is an advisory one
(flock) on LOCK, held by rank 0's process.  The kernel releases it when that process ends, however
it ends.  Between nodes it works where the file system forwards flock: NFS, Lustre mounted with -o
flock, GPFS.  Without support there is a warning, and the run continues without a lock.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_rl.checkpoint.folder import make_folder

LOCK = "run.lock"
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

log = logging.getLogger(__name__)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of run directory `folder`, which is created if it is missing.

    Raises ValueError where another process holds it, naming that process.
    """
    make_folder(folder)
    path = folder / LOCK
    with path.open("a+") as file:  # not truncated: it names the holder
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ValueError(
                f"{folder} is in use by {file.read().strip() or 'another process'}: only one run at"
                " a time in a run directory; wait until it ends, stop it, or set another run.name"
            ) from None
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            log.warning(
                "%s: no lock on this file system (%s): do not start a second run in this directory",
                path,
                error,
            )
        file.truncate(0)
        file.write(
            f"pid {os.getpid()} on {socket.gethostname()}, started"
            f" {time.strftime('%Y-%m-%d %H:%M:%S')}\n"
        )
        file.flush()
        # when the block ends, the file is closed, which releases the lock
        yield
