"""Runs that tests started, each in a process group of its own; its ranks and servers end with
it.
"""

import contextlib
import os
import signal
import subprocess

STARTED: list[subprocess.Popen] = []


def end_all() -> None:
    """Kill those that still run."""
    while STARTED:
        process = STARTED.pop()
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
