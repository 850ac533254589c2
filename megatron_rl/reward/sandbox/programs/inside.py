"""The last program before a user's in the namespaces of bubblewrap: sets limits, gives up root.

inside.py SPEC    SPEC: JSON {"limits": {"AS": bytes, ...}, "user": id, "program": [...],
                  "keep": [descriptor, ...], "environment": {name: value}, "is_first": bool}
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

from megatron_rl.reward.sandbox.programs import kernel
from megatron_rl.reward.sandbox.programs.system_calls import deny_system_calls


def start(spec: dict[str, Any], starter: int | None = None) -> None:
    """Become the program, with limits and without privileges.

    starter: the end of a pipe whose other end the parent holds; the program ends with the parent.
    """
    if os.geteuid() == 0:
        kernel.become_nobody(spec["user"])
    kernel.forbid_new_privileges()
    kernel.set_limits(spec["limits"])
    if starter is not None and not follow_parent(starter):
        return
    deny_system_calls()
    for number in set(range(3, 64)) - set(spec["keep"]):
        with contextlib.suppress(OSError):
            os.close(number)
    os.execve(spec["program"][0], spec["program"], spec["environment"])


def follow_parent(starter: int) -> bool:
    """Let the kernel end this process with its parent; return False where that died before.

    starter: the end of a pipe whose other end the parent holds.
    """
    # else kill(0) would reach the trainer, whose process group this is
    os.setsid()
    kernel.die_with_parent()
    os.set_blocking(starter, False)
    try:
        os.read(starter, 1)
        return False  # the end of the pipe
    except BlockingIOError:
        return True


if __name__ == "__main__":
    start(json.loads(sys.argv[1]))
