"""The last program before a user's in the namespaces of bubblewrap: sets limits, gives up root.

inside.py SPEC    SPEC: JSON {"limits": {"AS": bytes, ...}, "user": id, "program": [...],
                  "keep": [descriptor, ...]}
"""

from __future__ import annotations

import contextlib
import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import kernel  # by its path


def start(
    program: list[str],
    limits: dict[str, int],
    user: int,
    keep: list[int],
    starter: int | None = None,
) -> None:
    """Become the program, with limits and without privileges.

    keep: open descriptors, beside 0, 1 and 2.
    starter: the end of a pipe whose other end the parent holds; the program ends with the parent.
    """
    if os.geteuid() == 0:
        kernel.become_nobody(user)
    kernel.forbid_new_privileges()
    kernel.set_limits(limits)
    if starter is not None:
        # else kill(0) would reach the trainer, whose process group this is
        os.setsid()
        kernel.die_with_parent()
        os.set_blocking(starter, False)
        try:
            os.read(starter, 1)
            return  # the end of the pipe: the parent died before
        except BlockingIOError:
            pass
    for number in set(range(3, 64)) - set(keep):
        with contextlib.suppress(OSError):
            os.close(number)
    os.execve(program[0], program, dict(os.environ))


if __name__ == "__main__":
    spec = json.loads(sys.argv[1])
    start(spec["program"], spec["limits"], spec["user"], spec["keep"])
