"""The worker process: `python -m megatron_rl.reward.worker FUNCTION`.  One JSON line in, one JSON line out.

in: [prompt, response, label]; out: {"score": float} or {"error": text}.  First line out: {"ready": true} or
{"error": text}.  Loads no torch: it starts in a second and stays small.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import math
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

PR_SET_PDEATHSIG = 1
MEMORY_BYTES = 4 * 2**30
MATH = "megatron_rl.reward.math_answer:score"


def main() -> None:
    """Serve until standard input ends or the parent dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a reward function prints goes to standard error, not into the protocol
    name = sys.argv[1]
    if name == "math":  # 10**10**8 ends in MemoryError; a user's function may need the address space (CUDA does)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    try:
        function = load_function(MATH if name == "math" else name)
    except Exception as error:  # reported to the parent, which raises it
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=replies)
        return
    print(json.dumps({"ready": True}), file=replies)
    for line in sys.stdin:
        print(json.dumps(answer(function, *json.loads(line))), file=replies)


def load_function(name: str) -> Callable[[str, str, str], float]:
    """Import `package.module:function`."""
    module, separator, attribute = name.partition(":")
    if not separator:
        raise ValueError(f"reward.function = {name!r}: use math or package.module:function")
    function = getattr(importlib.import_module(module), attribute)
    if not callable(function):
        raise TypeError(f"reward.function = {name!r} is not callable")
    return function  # type: ignore[no-any-return]


def answer(function: Callable[[str, str, str], float], prompt: str, response: str, label: str) -> dict[str, Any]:
    try:
        score = float(function(prompt, response, label))
    except (Exception, RecursionError, SystemExit) as error:  # counted by the parent; the response scores 0
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    return {"score": score} if math.isfinite(score) else {"error": f"score {score} is not finite"}


if __name__ == "__main__":
    main()
