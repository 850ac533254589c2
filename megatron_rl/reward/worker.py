"""The worker process: `python -m megatron_rl.reward.worker FUNCTION PATTERN`.  One JSON line in, one JSON line out.

in: [prompt, response, label]; out: Score or Failure (failures.py).  First line out: {"ready": true} or a Failure.
Standard input is a socket that carries both.  Loads no torch: it starts in a second and stays small.
"""

from __future__ import annotations

import ctypes
import importlib
import io
import json
import math
import os
import re
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable

from megatron_rl.reward.failures import Failure, LabelError, Score

PR_SET_PDEATHSIG = 1
MEMORY_BYTES = 4 * 2**30  # of address space
FRAMES = 3
PRINTED_CHARACTERS = 4096  # per response: a gigabyte would bury the run's own output
MATH = "megatron_rl.reward.math_answer:score"
Function = Callable[[str, str, str], float]


def main() -> None:
    """Serve until the connection or the parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # a copy that children do not inherit: one that outlives a crashed worker would keep the connection open
    channel = socket.socket(fileno=os.dup(0)).makefile("rw", encoding="utf-8", newline="\n")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what C code or children print belongs to standard error
    name, pattern = sys.argv[1], re.compile(sys.argv[2])
    if name == "math":  # 10**10**8 ends in MemoryError; a user's function may need the address space (CUDA does)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    try:
        function = load_function(MATH if name == "math" else name)
    except Exception as error:
        print(json.dumps(failure("errors", error)), file=channel, flush=True)
        return
    print(json.dumps({"ready": True}), file=channel, flush=True)
    for line in channel:
        sys.stdout = sys.stderr = Printed()
        print(json.dumps(answer(function, pattern, *json.loads(line))), file=channel, flush=True)


class Printed(io.TextIOBase):
    """Passes the first characters that a function prints for a response to standard error."""

    def __init__(self) -> None:
        self.left = PRINTED_CHARACTERS

    def write(self, text: str) -> int:
        if self.left > 0:
            print(text[: self.left], end="", file=sys.__stderr__, flush=True)
            self.left -= len(text)
        return len(text)


def load_function(name: str) -> Function:
    """Import `package.module:function`."""
    module, _, attribute = name.partition(":")
    function = getattr(importlib.import_module(module), attribute)
    if not callable(function):
        raise TypeError(f"reward.function = {name!r} is not callable")
    return function


def answer(function: Function, pattern: re.Pattern[str], prompt: str, response: str, label: str) -> Score | Failure:
    try:
        score = float(function(prompt, response, label))
        formatted = pattern.search(response) is not None
    except LabelError as error:
        return failure("bad_labels", error)
    except MemoryError as error:
        return failure("memory", error)
    except (Exception, SystemExit) as error:  # sys.exit in a reward function must not end the worker
        return failure("errors", error)
    if not math.isfinite(score):
        return Failure(failed="invalid", why=f"score {score} is not finite", where=[])
    return Score(score=score, formatted=formatted)


def failure(kind: str, error: BaseException) -> Failure:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    where = [f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"[:500] for frame in frames[-FRAMES:]]
    return Failure(failed=kind, why=f"{type(error).__name__}: {error}"[:500], where=where)


if __name__ == "__main__":
    main()
