"""Runs commands and reads and writes files in /box, for megatron_rl/reward/sandbox/workspace.py.

Messages, one JSON line each, over standard input and output:
    {"run": command, "seconds": limit, "kept": bytes}
        -> {"head", "tail", "left_out", "status", "is_late", "is_too_long"}
    {"read": path}                  -> {"text"}
    {"write": {path: text, ...}}    -> {}
An answer may be {"error": text} instead.  All processes of a command end with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import stat
import subprocess
import sys
import time
from typing import Any

from megatron_rl.reward.sandbox.programs.kernel import forbid_changes

FOLDER = "/box"
SHELL = ("/usr/bin/bash", "/usr/bin/sh")
MOST_OUTPUT = 16 * 2**20
"""Bytes of output after which a command is stopped."""
MOST_TEXT = 2**20
"""Bytes of a file that can be read."""


class Refused(Exception):
    """A request is refused; the text says why."""


def serve() -> None:
    """Answer messages until their end."""
    forbid_changes()  # a command could answer in its place
    os.chdir(FOLDER)
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "PWD": FOLDER}
    for line in sys.stdin.buffer:
        try:
            answer = answer_to(json.loads(line))
        except Refused as refused:
            answer = {"error": str(refused)}
        except OSError as error:
            answer = {"error": (error.strerror or str(error)).lower()}
        except ValueError as error:  # a zero byte in a path or a command
            answer = {"error": str(error)}
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


def answer_to(message: dict[str, Any]) -> dict[str, Any]:
    if "run" in message:
        return run(message["run"], message["seconds"], message["kept"])
    if "read" in message:
        return {"text": read(inside(message["read"]))}
    for path, text in message["write"].items():
        write(inside(path), text.encode(errors="surrogateescape"))
    return {}


def write(path: str, content: bytes) -> None:
    """Write a file, and the folders above it; where that fails, a file that is there stays."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    mode = None
    if os.path.exists(path):
        check_file(path)
        mode = stat.S_IMODE(os.stat(path).st_mode)
    new = f"{path}.{os.getpid()}~"
    try:
        with open(new, "wb") as file:
            file.write(content)
        if mode is not None:
            os.chmod(new, mode)
        os.replace(new, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(new)
        raise


def inside(path: str) -> str:
    """Return the absolute path without links.  Raises Refused where it is not in FOLDER."""
    real = os.path.realpath(os.path.join(FOLDER, path))
    if not real.startswith(f"{FOLDER}/"):
        raise Refused(f"{path} is not in the directory {FOLDER}")
    return real


def check_file(path: str) -> int:
    """Return the size of a file.  Raises Refused for a folder, a pipe or a device."""
    facts = os.stat(path)
    if not stat.S_ISREG(facts.st_mode):
        raise Refused(f"{path} is {'a directory' if stat.S_ISDIR(facts.st_mode) else 'no file'}")
    return facts.st_size


def read(path: str) -> str:
    size = check_file(path)
    if size > MOST_TEXT:
        raise Refused(f"{path} has {size} bytes, and {MOST_TEXT} can be read")
    with open(path, errors="surrogateescape", newline="") as file:
        return file.read()


def run(command: str, seconds: float, kept: int) -> dict[str, Any]:
    """Run a command of the shell, and end all that it started."""
    shell = next(path for path in SHELL if os.path.exists(path))
    process = subprocess.Popen(
        [shell, "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        output = Output(kept)
        is_late = not output.read(process, time.monotonic() + seconds)
    finally:
        end_all(process)
    left_out = output.count - len(output.head) - len(output.tail)
    parts = (output.head, output.tail) if left_out else (output.head + output.tail, b"")
    head, tail = (part.decode(errors="replace") for part in parts)
    return {
        "head": head,
        "tail": tail,
        "left_out": left_out,
        "status": process.returncode,
        "is_late": is_late,
        "is_too_long": output.count > MOST_OUTPUT,
    }


class Output:
    """The beginning and the end of what a command wrote."""

    def __init__(self, kept: int) -> None:
        self.half = kept // 2
        self.head, self.tail, self.count = b"", b"", 0

    def read(self, process: subprocess.Popen[bytes], deadline: float) -> bool:
        """Read until the shell has ended, or has written too much; return False at the deadline."""
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        with selectors.DefaultSelector() as selector, process.stdout as pipe:
            selector.register(pipe, selectors.EVENT_READ)
            # what it left in the background may hold the pipe for ever
            ended = os.pidfd_open(process.pid)
            selector.register(ended, selectors.EVENT_READ)
            try:
                while self.count <= MOST_OUTPUT:
                    ready = selector.select(max(0.0, deadline - time.monotonic()))
                    if not ready:
                        return False
                    files = [key.fileobj for key, _ in ready]
                    if pipe in files:
                        self.add(chunk := os.read(pipe.fileno(), 65_536))
                        if not chunk:  # the shell may have closed its output, and run on
                            selector.unregister(pipe)
                    if ended in files:  # what it wrote fits in one read, as the pipe holds no more
                        break
                    if time.monotonic() > deadline:
                        return False
            finally:
                os.close(ended)
        return True

    def add(self, chunk: bytes) -> None:
        self.count += len(chunk)
        room = self.half - len(self.head)
        self.head += chunk[:room] if room > 0 else b""
        tail = self.tail + (chunk[room:] if room > 0 else chunk)
        self.tail = tail[-self.half :] if self.half else b""


def end_all(process: subprocess.Popen[bytes]) -> None:
    """Kill every process within the walls but this one, and wait for them."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    process.wait()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


if __name__ == "__main__":
    if os.path.exists("/proc/self"):
        sys.exit("it kills every process that it sees, so it runs within walls alone")
    serve()
