"""Messages between the trainer and a worker: JSON lines over the socket that is the worker's
standard input.

    in   {"number": 1, "call": "step", "argument": JSON}
    out  {"number": 1, "answer": JSON} or {"number": 1, "failed": "KeyError: 'a'", "where": frames}

Calls are numbered from 1.  The worker sends number 0 without a call, when its service is made or
cannot be made.  A process that forks workers takes the calls "fork" and "end", and answers neither.

No pickle: a worker runs code that the trainer does not trust.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

CALL_BYTES = 2**30
ANSWER_BYTES = 2**26
"""The longest answer: a longer one would not fit a context."""
FRAMES = 3


@dataclass(frozen=True)
class WorkerSpec:
    """The code of a worker and its limits."""

    loader: str
    """`module:function` that returns a Service (serving.py), or a function that makes one in each
    fork."""
    arguments: tuple[str | float, ...]
    memory_bytes: int = 0
    """Limit of the address space of a process that answers calls, 0 = none."""
    hidden_env: tuple[str, ...] = ()
    """Environment variables that it does not get, such as keys of servers."""
    python: str = sys.executable
    """The Python that runs it, 3.11 or later; of this package it needs megatron_rl.workers alone.
    """


@dataclass(eq=False)
class CallFailed(Exception):
    """A call failed; str() shows the reason and the frames."""

    why: str
    where: list[str] = field(default_factory=list)
    """The last frames of the user's code, innermost last."""
    kind: Literal["errors", "crashes", "timeouts"] = "errors"
    """errors: the user's code raised, or its answer cannot be sent.  The others: the process is
    lost."""
    was_alone: bool = True
    """No other call was running, so that this call is the cause where the process is lost."""

    def __str__(self) -> str:
        return "\n  ".join([self.why, *self.where])


def call_line(number: int, call: str, argument: object) -> bytes:
    return json.dumps({"number": number, "call": call, "argument": argument}).encode() + b"\n"


def answer_line(number: int, answer: object) -> bytes:
    """Return the message; raise TypeError or ValueError for an answer that JSON cannot hold."""
    line = json.dumps({"number": number, "answer": answer}, allow_nan=False).encode() + b"\n"
    if len(line) <= ANSWER_BYTES:
        return line
    return failure_line(number, f"answered {len(line)} bytes: must be at most {ANSWER_BYTES}")


def failure_line(number: int, why: str, where: Collection[str] = ()) -> bytes:
    return json.dumps({"number": number, "failed": why, "where": [*where]}).encode() + b"\n"


def frames_of(error: BaseException, hidden: Collection[str]) -> list[str]:
    """Return the last frames of the traceback, innermost last, without those of files `hidden`."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename not in hidden
    ]
    # the last ones are nearest to the error; a line of generated code may be long
    return [
        f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"[:500]
        for frame in frames[-FRAMES:]
    ]


def kill_group(pid: int) -> None:
    """Kill the worker `pid` and the children in its process group.  It must not have been waited
    for: another process could have its number.  A child that made a session of its own lives on.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
