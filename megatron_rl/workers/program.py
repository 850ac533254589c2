"""A Python program that runs once in each fork of a process which has imported its modules.

It runs under any Python from 3.11 with the standard library alone: the program's own environment
need not have what the trainer imports.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

TAIL_BYTES = 1 << 16
"""Bytes that are kept of the end of each output."""


def load_program(*names: str) -> Callable[[], ProgramService]:
    """Import the modules; returns what makes the service of a fork."""
    for name in names:
        importlib.import_module(name)
    return ProgramService


class ProgramService:
    """The program, as a worker serves it."""

    is_concurrent = False
    description = None

    def answer(self, call: str, argument: Mapping[str, Any]) -> dict[str, object]:
        """Run the program with {"arguments", "env", "input"}: what follows `python` in its command,
        its environment variables and its standard input.  Returns {"status", "output", "errors"}:
        exit status, and the end of each output, also of what its children wrote.
        """
        os.environ.clear()
        os.environ.update(argument["env"])
        set_input(argument["input"])
        output, errors = Tail(1), Tail(2)
        sys.stdout, sys.stderr = (
            open(descriptor, "w", buffering=1, closefd=False)  # noqa: SIM115
            for descriptor in (1, 2)
        )
        status = run_main(argument["arguments"])
        # as Python does at its end: it ends executors, then waits for threads that are no daemons
        threading._shutdown()  # type: ignore[attr-defined]
        # which the program may have closed or replaced
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
        return {"status": status, "output": output.end(), "errors": errors.end()}


def run_main(arguments: Sequence[str]) -> int:
    """Run FILE or -m MODULE of the user's command with its arguments, as Python does; returns the
    exit status.  Functions of atexit are not called.
    """
    try:
        match arguments:
            case ["-m", module, *rest]:
                sys.argv = [module, *rest]
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            case [file, *rest]:
                sys.argv = [file, *rest]
                sys.path[0] = str(Path(file).resolve().parent)
                runpy.run_path(file, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def set_input(text: str) -> None:
    """Let standard input be `text`, of any length."""
    descriptor = os.memfd_create("input")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(text.encode())
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.dup2(descriptor, 0)
    os.close(descriptor)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115


class Tail:
    """Keeps the end of the output that is written to a file descriptor."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._former = os.dup(descriptor)
        self._reading, writing = os.pipe()
        os.dup2(writing, descriptor)
        os.close(writing)
        self._bytes = b""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def end(self) -> str:
        """Return the end of what was written.  A child may hold the pipe: it is not waited for."""
        os.dup2(self._former, self.descriptor)
        self._thread.join(timeout=0.5)
        return self._bytes.decode(errors="replace")

    def _read(self) -> None:
        while part := os.read(self._reading, TAIL_BYTES):
            self._bytes = (self._bytes + part)[-TAIL_BYTES:]
