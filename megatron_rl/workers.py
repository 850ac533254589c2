"""What worker processes of users' code share: a socket as standard input, one JSON line per
message, and an end with all that they started.  Loads only the standard library.

A worker leads a session of its own, so that killing its process group also kills its children.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
FRAMES = 3
PRINTED_CHARACTERS = 4096  # per call: a gigabyte would bury the run's own output


def start_worker(
    module: str, arguments: Sequence[str], hidden_env: str | None = None
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """`python -m MODULE ARGUMENTS` and this side of its connection.

    hidden_env: a variable that it does not get.
    """
    ours, theirs = socket.socketpair()
    env = {name: value for name, value in os.environ.items() if name != hidden_env}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=theirs.fileno(),
            start_new_session=True,
            env={**env, "OMP_NUM_THREADS": "1"},  # many workers on the cores of the trainer
        )
    return process, ours


def kill_group(pid: int) -> None:
    """Kill the worker `pid`, which must not have been waited for, and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


# In the worker ------------------------------------------------------------------------------------


def open_channel() -> socket.socket:
    """The connection, a copy of standard input that children do not inherit: one that outlives a
    crashed worker would keep it open."""
    channel = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what C code or children print belongs to standard error
    return channel


def end_with_parent() -> None:
    """The kernel kills this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def limit_memory(num_bytes: int) -> None:
    """Of address space: what exceeds it raises MemoryError."""
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


def json_line(value: object) -> bytes:
    """Raises TypeError or ValueError for what JSON cannot hold."""
    return json.dumps(value, allow_nan=False).encode() + b"\n"


def frames_of(error: BaseException, *hidden: str) -> list[str]:
    """The last frames of a traceback, innermost last; hidden: files that are not shown."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename not in hidden
    ]
    return [
        f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"[:500]
        for frame in frames[-FRAMES:]
    ]


class Printed(io.TextIOBase):
    """Passes the first characters that a function prints in a call to standard error."""

    def __init__(self) -> None:
        self.left = PRINTED_CHARACTERS

    def write(self, text: str) -> int:
        if self.left > 0:
            print(text[: self.left], end="", file=sys.__stderr__, flush=True)
            self.left -= len(text)
        return len(text)
