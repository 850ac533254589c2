"""The worker process: `python -m megatron_rl.reward.worker FUNCTION PATTERN`.  One JSON line in, one JSON line out.

in: [prompt, response, label]; out: {"score": float, "formatted": bool} or {"failed": kind, "why": text} (failures.KINDS).
First line out: {"ready": true} or {"failed": ...}.  Loads no torch: it starts in a second and stays small.
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
import sys
import traceback
from collections.abc import Callable
from typing import Any

from megatron_rl.reward.failures import LabelError

PR_SET_PDEATHSIG = 1
MEMORY_BYTES = 4 * 2**30
FRAMES = 3
PRINTED_CHARACTERS = 4096
MATH = "megatron_rl.reward.math_answer:score"
Function = Callable[[str, str, str], float]


def main() -> None:
    """Serve until standard input ends or the parent dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a reward function prints goes to standard error, not into the protocol
    name, pattern = sys.argv[1], re.compile(sys.argv[2])
    if name == "math":  # 10**10**8 ends in MemoryError; a user's function may need the address space (CUDA does)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    try:
        function = load_function(MATH if name == "math" else name)
    except Exception as error:  # reported to the parent, which raises it
        print(json.dumps(failure("errors", error)), file=replies)
        return
    print(json.dumps({"ready": True}), file=replies)
    for line in sys.stdin:
        sys.stdout = sys.stderr = Printed()
        print(json.dumps(answer(function, pattern, *json.loads(line))), file=replies)


class Printed(io.TextIOBase):
    """The first characters that a function prints for a response; a gigabyte of them would bury the run's own output."""

    def __init__(self) -> None:
        self.left = PRINTED_CHARACTERS

    def write(self, text: str) -> int:
        if self.left > 0:
            print(text[: self.left], end="", file=sys.__stderr__, flush=True)
            self.left -= len(text)
        return len(text)


def load_function(name: str) -> Function:
    """Import `package.module:function`."""
    module, separator, attribute = name.partition(":")
    if not separator:
        raise ValueError(f"reward.function = {name!r}: use math or package.module:function")
    function = getattr(importlib.import_module(module), attribute)
    if not callable(function):
        raise TypeError(f"reward.function = {name!r} is not callable")
    return function


def answer(function: Function, pattern: re.Pattern[str], prompt: str, response: str, label: str) -> dict[str, Any]:
    """The reply for one response."""
    try:
        score = float(function(prompt, response, label))
        formatted = pattern.search(response) is not None
    except LabelError as error:
        return failure("bad_labels", error)
    except MemoryError as error:
        return failure("memory", error)
    except (Exception, SystemExit) as error:
        return failure("errors", error)
    if not math.isfinite(score):
        return {"failed": "invalid", "why": f"score {score} is not finite"}
    return {"score": score, "formatted": formatted}


def failure(kind: str, error: BaseException) -> dict[str, Any]:
    """where: the last frames of the function's own code, the one that raised last."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    where = [f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames[-FRAMES:]]
    return {"failed": kind, "why": f"{type(error).__name__}: {error}"[:500], "where": where}


if __name__ == "__main__":
    main()
