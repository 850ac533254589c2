"""A Box starts programs that are not trusted, within walls that the kernel keeps.

Two mechanisms make the walls: bubblewrap (`bwrap`), where it is installed, else namespaces that
programs/launch.py makes itself.  Both need a kernel that lets this user make namespaces (Linux 5.14
or later); a container's seccomp profile may forbid it.  `find_box` runs a program that tries the
walls, and refuses by name a mechanism whose walls do not hold.

| wall | how |
|---|---|
| network | a network namespace without any interface but a loopback of its own |
| files | a root of its own: Python's standard library and the shared libraries that it needs,
  and commands that the caller names, read-only, and an empty /box in memory.  No /proc, no /home,
  and none of the trainer's files |
| environment | empty but for PATH, LANG and HOME |
| other processes | a process namespace; all processes end with the first |
| privileges | an unprivileged user, none of the rights of root, no set-user-id programs; system
  calls that would undo other walls fail (programs/system_calls.py) |
| memory, processes, files, CPU time | rlimits; bytes of /box by its size |
| wall time, output | the caller kills it |
"""

from __future__ import annotations

import json
import math
import os
import selectors
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import IO, Literal

from megatron_rl.reward.sandbox.programs.kernel import user_of
from megatron_rl.reward.sandbox.root import (
    INSIDE,
    PACKAGE,
    PROGRAMS,
    PYTHON,
    binds,
    hidden,
    links,
    parents,
    python_files,
)

Mechanism = Literal["bubblewrap", "unshare"]
FLAGS = ("-S", "-s", "-P")
"""Options of Python: neither installed packages nor the current folder are imported from."""
PROBE_SECONDS = 20.0
DEVICES = ("null", "zero", "full", "random", "urandom")
MOST_ARGUMENT_BYTES = 100_000
"""The kernel passes 131,072 bytes of one argument."""


class SandboxError(RuntimeError):
    """No mechanism works on this machine; the message says why, for each."""


@dataclass(frozen=True)
class Limits:
    """Limits of one program."""

    seconds: float = 10.0
    """Wall time, after which every process of the box is killed; also the CPU time of each."""
    memory_mib: int = 512
    """Address space of each process.  All together may take `processes` times as much."""
    processes: int = 8
    """Processes and threads at a time."""
    box_mib: int = 16
    """Bytes in all files; they are memory of this machine."""
    output_bytes: int = 65_536
    """Bytes that are read of its output; a program that writes more is killed."""

    def rlimits(self) -> dict[str, int]:
        return {
            "AS": self.memory_mib * 2**20,
            "NPROC": self.processes,
            "FSIZE": self.box_mib * 2**20,
            "CPU": math.ceil(self.seconds) + 1,
            "NOFILE": 64,
            "CORE": 0,
            "MEMLOCK": 0,
            "MSGQUEUE": 0,
        }


@dataclass(frozen=True)
class Outcome:
    """The end of a program."""

    output: bytes
    status: int
    """Exit status; 128 + n or 256 - n where signal n killed it."""
    is_late: bool = False
    """It was killed after Limits.seconds."""
    is_too_long: bool = False
    """It was killed as it wrote more than Limits.output_bytes."""
    seconds: float = 0.0


class Box:
    """Starts programs within walls.  The programs of one box are independent of one another."""

    def __init__(
        self,
        mechanism: Mechanism,
        limits: Limits | None = None,
        commands: tuple[str, ...] = (),
    ) -> None:
        """commands: names of commands of this machine that the programs see in /usr/bin."""
        self.mechanism, self.limits, self.commands = mechanism, limits or Limits(), commands

    def command(
        self, program: Sequence[str], keep: Sequence[int] = (), *, is_first: bool = False
    ) -> list[str]:
        """Return the command that starts `program`, arguments of Python, within the walls."""
        inner = {
            "program": [PYTHON, *FLAGS, *program],
            "environment": ENVIRONMENT,
            "limits": self.limits.rlimits(),
            "keep": list(keep),
            "user": user_of(time.monotonic_ns() // 1000 ^ os.getpid()),
            "is_first": is_first,
        }
        if self.mechanism == "bubblewrap":
            return [*bubblewrap(self.limits, self.commands), *module("inside"), json.dumps(inner)]
        outer = {
            "binds": binds(self.commands),
            "hidden": hidden(),
            "links": links(self.commands),
            "box_bytes": self.limits.box_mib * 2**20,
            "parent": os.getpid(),
        }
        launcher = [python_files()[PYTHON], *FLAGS, *module("launch")]
        return [*launcher, json.dumps(inner | outer)]

    def start(
        self,
        program: Sequence[str],
        *,
        stdin: int | IO[bytes],
        stdout: int | IO[bytes],
        stderr: int = subprocess.DEVNULL,
        keep: Sequence[int] = (),
        is_first: bool = False,
    ) -> subprocess.Popen[bytes]:
        """Start `program`, arguments of Python.  `end` must be called with the process.

        keep: further descriptors that the program gets, by their numbers here.
        is_first: it may be process 1 of its namespace, which no signal from there kills: it runs
        code of others in processes of their own alone.
        """
        return subprocess.Popen(
            self.command(program, keep, is_first=is_first),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=keep,
            env=ENVIRONMENT | ({} if self.mechanism == "bubblewrap" else OUTSIDE),
        )

    def run(self, source: str, stdin: bytes = b"") -> Outcome:
        """Run Python source in /box, and return what it wrote to standard output and its end.

        The source may be 100 kB long, as JSON writes it.
        """
        if len(json.dumps(source)) > MOST_ARGUMENT_BYTES:
            return Outcome(b"", 1, is_too_long=True)
        return self.run_program(["-c", source], stdin)

    def run_program(
        self, program: Sequence[str], stdin: bytes = b"", stderr: int = subprocess.DEVNULL
    ) -> Outcome:
        """Run `program`, arguments of Python: see `run`."""
        process = self.start(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr)
        try:
            return exchange(process, stdin, self.limits)
        finally:
            end(process)


ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "HOME": "/box",
    "PYTHONHASHSEED": "0",
    "LD_LIBRARY_PATH": "/python/lib",
    "PYTHONPATH": INSIDE,
}
OUTSIDE = {"PYTHONPATH": str(PROGRAMS.parents[3])}
"""Where launch.py finds its package, before there is a box."""


def module(name: str) -> list[str]:
    """Return the arguments of Python that start a program of PROGRAMS."""
    return ["-m", f"{PACKAGE}.{name}"]


def exchange(process: subprocess.Popen[bytes], text: bytes, limits: Limits) -> Outcome:
    """Write `text` to the process and read its output, until it ends or has passed a limit."""
    assert process.stdin is not None and process.stdout is not None
    started = time.monotonic()
    deadline = started + limits.seconds
    output, is_late = bytearray(), False
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        os.set_blocking(process.stdin.fileno(), False)
        selector.register(process.stdin, selectors.EVENT_WRITE)
        # until its output ends: every process that has it may still write
        while len(output) <= limits.output_bytes:
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                is_late = True
                break
            chunk: bytes | None = None
            for key, _ in ready:
                if key.fileobj is process.stdout:
                    chunk = os.read(process.stdout.fileno(), 65_536)
                    output += chunk
                else:
                    text = sent(process.stdin, text)
                    if not text:
                        selector.unregister(process.stdin)
                        process.stdin.close()
            if chunk == b"":
                break
    is_too_long = len(output) > limits.output_bytes
    if not is_late and not is_too_long:
        # a program that closed its output runs on
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            is_late = True
    end(process)
    kept = bytes(output[: limits.output_bytes])
    return Outcome(kept, process.returncode, is_late, is_too_long, time.monotonic() - started)


def sent(pipe: IO[bytes], text: bytes) -> bytes:
    """Write the beginning of `text`; return the rest, b"" where the reader has ended."""
    try:
        return text[os.write(pipe.fileno(), text[:65_536]) :] if text else b""
    except BrokenPipeError:
        return b""


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a program with all its processes, and close its pipes."""
    # the kernel kills what is within the walls with the process that made them
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def bubblewrap(limits: Limits, commands: tuple[str, ...] = ()) -> list[str]:
    """Return the command of bubblewrap, up to the program."""
    options = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    if os.geteuid() == 0:
        # inside.py becomes another user: limits of processes have no effect on root
        options += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        options += ["--unshare-user", "--uid", "1000", "--gid", "1000"]
    # bubblewrap would make parents that only root can enter
    for folder in parents([*binds(commands), *links(commands), "/dev/null"]):
        options += ["--perms", "0755", "--dir", folder]
    for target, source in binds(commands).items():
        options += ["--ro-bind", source, target]
    for folder in hidden():
        options += ["--tmpfs", folder, "--remount-ro", folder]
    for name in DEVICES:
        options += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    options += ["--perms", "1777", "--size", str(limits.box_mib * 2**20), "--tmpfs", "/box"]
    for name, target in links(commands).items():
        options += ["--symlink", target, name]
    options += ["--remount-ro", "/", "--chdir", "/box", "--die-with-parent", "--new-session"]
    return [shutil.which("bwrap") or "bwrap", *options, "--", PYTHON, *FLAGS]


def find_box(
    limits: Limits | None = None,
    mechanism: Mechanism | None = None,
    commands: tuple[str, ...] = (),
) -> Box:
    """Return a box whose walls hold on this machine: of bubblewrap where it is installed, else of
    our own launcher.

    mechanism: only this one is tried.  commands: see Box.  Raises SandboxError.
    """
    names: tuple[Mechanism, ...] = ("bubblewrap", "unshare") if mechanism is None else (mechanism,)
    reasons = {name: problem_of(name) for name in names}
    for name, reason in reasons.items():
        if reason is None:
            return Box(name, limits, commands)
    text = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise SandboxError(
        f"no sandbox works on this machine, so no program of the model is run ({text}); install"
        " bubblewrap, allow user namespaces (sysctl kernel.unprivileged_userns_clone = 1,"
        " kernel.apparmor_restrict_unprivileged_userns = 0), or start the container with a seccomp"
        " profile that allows unshare and mount"
    )


@cache
def problem_of(mechanism: Mechanism) -> str | None:
    """Return why a mechanism does not work here; None where its walls hold."""
    if mechanism == "bubblewrap" and shutil.which("bwrap") is None:
        return "bwrap is not installed"
    try:
        binds()
    except OSError as error:
        return f"ldd, which lists the libraries of Python, does not work: {error}"
    box = Box(mechanism, Limits(seconds=PROBE_SECONDS, memory_mib=256, processes=4, box_mib=1))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        outcome = box.run_program([*module("probe"), "4", port], stderr=subprocess.STDOUT)
    if outcome.is_late:
        return f"the probe did not end within {PROBE_SECONDS:g} s"
    try:
        broken = json.loads(outcome.output)
    except ValueError:
        text = outcome.output.decode(errors="replace").strip() or f"status {outcome.status}"
        return text[-300:]
    return "; ".join(broken) or None
