"""A Box starts programs that are not trusted, within walls that the kernel keeps.

Two mechanisms make the walls: bubblewrap (`bwrap`), where it is installed, else namespaces that
programs/launch.py makes itself.  Both need a kernel that lets this user make namespaces (Linux 5.14
or later); a container's seccomp profile may forbid it.  `find_box` runs a program that tries the
walls, and refuses by name a mechanism whose walls do not hold.

| wall | how |
|---|---|
| network | a network namespace without any interface but a loopback of its own |
| files | a root of its own: Python's standard library and the shared libraries that it needs,
  read-only, and an empty /box in memory.  No /proc, no /home, and none of the trainer's files |
| environment | empty but for PATH, LANG and HOME |
| other processes | a process namespace; all processes end with the first |
| privileges | an unprivileged user, none of the rights of root, no set-user-id programs |
| memory, processes, files, CPU time | rlimits; bytes of /box by its size |
| wall time, output | the caller kills it |
"""

from __future__ import annotations

import json
import math
import os
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Literal

from megatron_rl.reward.sandbox.programs.kernel import user_of

Mechanism = Literal["bubblewrap", "unshare"]
PROGRAMS = Path(__file__).parent / "programs"
INSIDE = "/programs"
"""The folder in the box that has the package of the programs."""
PACKAGE = "megatron_rl.reward.sandbox.programs"
FLAGS = ("-S", "-s", "-P")
"""Options of Python: neither installed packages nor the current folder are imported from."""
PYTHON = "/python/bin/python3"
"""The interpreter in the box."""
PROBE_SECONDS = 20.0
SYSTEM = ("/lib/", "/lib64/", "/usr/lib/", "/usr/lib64/")
"""Folders of shared libraries of the system."""
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

    def __init__(self, mechanism: Mechanism, limits: Limits | None = None) -> None:
        self.mechanism, self.limits = mechanism, limits or Limits()

    def command(self, program: Sequence[str], keep: Sequence[int] = ()) -> list[str]:
        """Return the command that starts `program`, arguments of Python, within the walls."""
        inner = {
            "program": [PYTHON, *FLAGS, *program],
            "environment": ENVIRONMENT,
            "limits": self.limits.rlimits(),
            "keep": list(keep),
            "user": user_of(time.monotonic_ns() // 1000 ^ os.getpid()),
        }
        if self.mechanism == "bubblewrap":
            return [*bubblewrap(self.limits), *module("inside"), json.dumps(inner)]
        outer = {
            "binds": binds(),
            "hidden": hidden(),
            "links": LINKS,
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
    ) -> subprocess.Popen[bytes]:
        """Start `program`, arguments of Python.  `end` must be called with the process.

        keep: further descriptors that the program gets, by their numbers here.
        """
        return subprocess.Popen(
            self.command(program, keep),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=keep,
            env=ENVIRONMENT | ({} if self.mechanism == "bubblewrap" else OUTSIDE),
        )

    def run(self, source: str, stdin: bytes = b"") -> Outcome:
        """Run Python source in /box, and return what it wrote to standard output and its end.

        The source may be 100 kB long.
        """
        if len(source.encode()) > MOST_ARGUMENT_BYTES:
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


@cache
def python_files() -> dict[str, str]:
    """Return {path in the box: path here} of this Python, without its venv and its packages."""
    program = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    library = os.path.dirname(os.__file__)
    # Python looks for its library beside its program, in lib or lib64
    files = {PYTHON: program, place_in_box(library): library}
    # an interpreter that links libpython
    folder, name = map(sysconfig.get_config_var, ("LIBDIR", "INSTSONAME"))
    if folder and name and os.path.exists(shared := os.path.join(folder, name)):
        files[f"/python/lib/{name}"] = shared
    return {target: os.path.realpath(source) for target, source in files.items()}


def place_in_box(path: str) -> str:
    """Return where a file of this Python is in the box; another file stays at its path."""
    prefix = f"{sys.base_prefix.rstrip('/')}/"
    is_python = path.startswith(prefix) and not path.startswith(SYSTEM)
    is_library = path == os.path.dirname(os.__file__)
    return f"/python/{path.removeprefix(prefix)}" if is_python or is_library else path


@cache
def shared_libraries() -> dict[str, str]:
    """Return {path in the box: path here} of the shared libraries of Python and of its modules.

    Raises OSError where there is no ldd.
    """
    modules = Path(os.path.dirname(os.__file__), "lib-dynload").glob("*.so")
    files = [path for path in python_files().values() if os.path.isfile(path)]
    names = [*files, *map(str, modules)]
    output = subprocess.run(["ldd", *names], capture_output=True, text=True, check=False).stdout
    paths = dict.fromkeys(re.findall(r"(/\S+) \(0x[0-9a-f]+\)", output))
    return {place_in_box(path): os.path.realpath(path) for path in paths}


@cache
def binds() -> dict[str, str]:
    """Return {path in the box: path here} of what a box shows, read-only."""
    names = {"/etc/ld.so.cache": "/etc/ld.so.cache"} if os.path.exists("/etc/ld.so.cache") else {}
    return (
        python_files()
        | shared_libraries()
        | names
        | {f"{INSIDE}/{PACKAGE.replace('.', '/')}": str(PROGRAMS)}
    )


@cache
def hidden() -> list[str]:
    """Return the folders of a box that are empty there: packages that are installed here."""
    return [
        f"{target}/{name}"
        for target, source in python_files().items()
        for name in ("site-packages", "dist-packages")
        if os.path.isdir(f"{source}/{name}")
    ]


LINKS = {"/tmp": "/box", "/dev/shm": "/box"}
"""{path in the box: target} of its symbolic links."""


def bubblewrap(limits: Limits) -> list[str]:
    """Return the command of bubblewrap, up to the program."""
    options = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    if os.geteuid() == 0:
        # inside.py becomes another user: limits of processes have no effect on root
        options += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        options += ["--unshare-user", "--uid", "1000", "--gid", "1000"]
    # bubblewrap would make parents that only root can enter
    for folder in parents([*binds(), *LINKS, "/dev/null"]):
        options += ["--perms", "0755", "--dir", folder]
    for target, source in binds().items():
        options += ["--ro-bind", source, target]
    for folder in hidden():
        options += ["--tmpfs", folder, "--remount-ro", folder]
    for name in DEVICES:
        options += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    options += ["--perms", "1777", "--size", str(limits.box_mib * 2**20), "--tmpfs", "/box"]
    for name, target in LINKS.items():
        options += ["--symlink", target, name]
    options += ["--remount-ro", "/", "--chdir", "/box", "--die-with-parent", "--new-session"]
    return [shutil.which("bwrap") or "bwrap", *options, "--", PYTHON, *FLAGS]


def parents(paths: Sequence[str]) -> list[str]:
    """Return the folders above the paths, each after those above it; the root is left out."""
    above = {str(folder) for path in paths for folder in Path(path).parents}
    return sorted(above - {"/"})


def find_box(limits: Limits | None = None, mechanism: Mechanism | None = None) -> Box:
    """Return a box whose walls hold on this machine: of bubblewrap where it is installed, else of
    our own launcher.

    mechanism: only this one is tried.  Raises SandboxError.
    """
    names: tuple[Mechanism, ...] = ("bubblewrap", "unshare") if mechanism is None else (mechanism,)
    reasons = {name: problem_of(name) for name in names}
    for name, reason in reasons.items():
        if reason is None:
            return Box(name, limits)
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
