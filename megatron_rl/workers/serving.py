"""A worker, as worker_process.py starts it, with one|forks LOADER ARGUMENTS MEMORY_BYTES.

With `one` it makes the service, then answers the calls of protocol.py.

With `forks` it loads the users' code once and forks a worker for every call "fork", which takes
milliseconds.  That call comes with a socket, as ancillary data, on which the worker answers; the
call "end" of the same number kills the worker and its children.  A process that forks starts no
thread and uses no GPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import inspect
import io
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

from megatron_rl.workers.protocol import (
    CALL_BYTES,
    answer_line,
    failure_line,
    frames_of,
    kill_group,
)

PR_SET_PDEATHSIG = 1  # linux/prctl.h: the signal that a process gets when its parent dies
ORDER_BYTES = 256  # more than a "fork" or "end" has
PRINTED_CHARACTERS = 4096  # per call: a gigabyte would bury the run's own output
Made = TypeVar("Made")


class Service(Protocol):
    """The user's code, as a worker calls it."""

    @property
    def is_concurrent(self) -> bool:
        """Every call is a coroutine, and calls run side by side in one event loop.  Otherwise they
        run one by one, outside of an event loop: users' code may call asyncio.run.
        """

    @property
    def description(self) -> object:
        """Facts about the service, for the trainer: the answer number 0."""

    def answer(self, call: str, argument: Any) -> Any:
        """Return the answer, which JSON must be able to hold, or a coroutine that returns it."""


def main() -> None:
    """Serve until the connection or the trainer ends."""
    mode, name, arguments, memory = sys.argv[1:]
    channel = open_channel()
    module, _, function = name.partition(":")
    loader = getattr(importlib.import_module(module), function)
    load = partial(loader, *json.loads(arguments))
    if mode == "forks":
        Connection(channel, inspect.getfile(loader)).serve_forks(load, int(memory))
    else:
        end_with_parent()
        limit_memory(int(memory))
        Connection(channel, inspect.getfile(loader)).serve(load)


class Connection:
    """The worker's side of the socket: reads calls and writes answers."""

    def __init__(self, channel: socket.socket, loader_file: str) -> None:
        self.channel = channel
        self.hidden = (__file__, loader_file)  # frames of our files do not help a user

    def serve(self, make: Callable[[], Service]) -> None:
        """Make the service, answer number 0, then calls."""
        service = self.made(make)
        if service is None:
            return
        if service.is_concurrent:
            asyncio.run(self.serve_side_by_side(service))
            return
        # one event loop for all calls: an environment may keep tasks and connections in it
        with asyncio.Runner() as runner, self.channel.makefile("rb") as lines:
            for line in lines:
                sys.stdout = sys.stderr = Printed()
                self.channel.sendall(self.reply(service, json.loads(line), runner))

    def made(self, make: Callable[[], Made]) -> Made | None:
        """Return what `make` returns, None where it fails; send number 0 in both cases."""
        try:
            made = make()
        except (Exception, SystemExit) as error:
            self.channel.sendall(self.failure(0, error))
            return None
        self.channel.sendall(answer_line(0, getattr(made, "description", None)))
        return made

    def reply(self, service: Service, message: Mapping[str, Any], runner: asyncio.Runner) -> bytes:
        try:
            answer = service.answer(message["call"], message["argument"])
            if inspect.iscoroutine(answer):
                answer = runner.run(answer)
            return answer_line(message["number"], answer)
        # sys.exit in a user's function must not look like a crash
        except (Exception, SystemExit) as error:
            return self.failure(message["number"], error)

    async def serve_side_by_side(self, service: Service) -> None:
        """Answer every call in a task of its own."""
        reader, writer = await asyncio.open_connection(sock=self.channel, limit=CALL_BYTES)

        async def reply(message: Mapping[str, Any]) -> None:
            answer = await service.answer(message["call"], message["argument"])
            writer.write(answer_line(message["number"], answer))

        async with asyncio.TaskGroup() as calls:
            while line := await reader.readline():
                sys.stdout = sys.stderr = Printed()
                calls.create_task(reply(json.loads(line)))

    def failure(self, number: int, error: BaseException) -> bytes:
        why = f"{type(error).__name__}: {error}"[:2000]
        return failure_line(number, why, frames_of(error, self.hidden))

    def serve_forks(self, load: Callable[[], Callable[[], Service]], memory_bytes: int) -> None:
        """Load the users' code, then fork and end workers; when the connection ends, end all."""
        make = self.made(load)
        pids: dict[int, int] = {}
        try:
            while make is not None:
                packet, descriptors, _, _ = socket.recv_fds(self.channel, ORDER_BYTES, 1)
                if not packet:
                    return
                order = json.loads(packet)
                if order["call"] == "end":
                    if (pid := pids.pop(order["number"], 0)) != 0:
                        end_fork(pid)
                    continue
                try:
                    pid = os.fork()
                except OSError as error:  # a limit of processes or of memory
                    with socket.socket(fileno=descriptors[0]) as channel:
                        channel.sendall(self.failure(0, error))
                    continue
                if pid == 0:
                    # the parent's: the trainer would not notice its end while a worker has a copy
                    self.channel.close()
                    self.channel = socket.socket(fileno=descriptors[0])
                    self.serve_as_fork(make, memory_bytes)
                else:
                    pids[order["number"]] = pid
                    os.close(descriptors[0])
        finally:
            for pid in pids.values():
                end_fork(pid)

    def serve_as_fork(self, make: Callable[[], Service], memory_bytes: int) -> None:
        """Serve in a forked process; never returns."""
        status = 1
        try:
            # a group of its own, which end_fork kills with all its children
            os.setsid()
            end_with_parent()
            limit_memory(memory_bytes)
            reseed()
            sys.stdout = sys.stderr = Printed()
            self.serve(make)
            status = 0
        finally:
            # no exit hooks: they are copies of the parent's
            os._exit(status)


def end_fork(pid: int) -> None:
    """Kill a worker and its children, and wait for it: it must not stay as a zombie."""
    kill_group(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # it may not lead its group yet
    os.waitpid(pid, 0)


def reseed() -> None:
    """Seed the global generators: they are copies of the parent's, so that all forks would draw the
    same numbers.  Python seeds its own after a fork.
    """
    for name in ("numpy.random", "torch"):
        if name in sys.modules:
            sys.modules[name].seed()


def open_channel() -> socket.socket:
    """Return the socket of the calls, a copy of standard input that children do not inherit: a
    child that outlives a crashed worker would keep it open.
    """
    channel = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what C code or children print belongs to standard error
    return channel


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def limit_memory(num_bytes: int) -> None:
    """Limit the address space, 0 = no limit; an allocation beyond it raises MemoryError."""
    if num_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


class Printed(io.TextIOBase):
    """Standard output and error of one call, of which the first characters are shown."""

    def __init__(self) -> None:
        self.left = PRINTED_CHARACTERS

    def write(self, text: str) -> int:
        if self.left > 0:
            print(text[: self.left], end="", file=sys.__stderr__, flush=True)
            self.left -= len(text)
        return len(text)


if __name__ == "__main__":
    main()
