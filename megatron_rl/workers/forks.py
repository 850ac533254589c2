"""Workers that are forked from a process which has loaded the users' code: the trainer's side.

A fork takes milliseconds where an import takes seconds, so that every episode can have a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from megatron_rl.workers.protocol import CallFailed, WorkerSpec, call_line
from megatron_rl.workers.worker_process import (
    START_SECONDS,
    WorkerProcess,
    end_launched,
    launch_worker,
)

CLOSE_SECONDS = 5.0
PACKET_BYTES = 2**16  # more than a failure has


@dataclass
class ForkingProcess:
    """Starts workers by forks, from any thread and event loop.

    The process that forks is started when it is first needed, and again after it died.
    """

    spec: WorkerSpec
    _process: subprocess.Popen[bytes] | None = None
    _channel: socket.socket | None = None
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[WorkerProcess]:
        """Yield a worker, which is killed at the end.

        Raises CallFailed where the users' code cannot be loaded.
        """
        ours, theirs = socket.socketpair()
        # In a thread, as it may load users' code, which takes seconds.  A future and no task: the
        # end of the event loop cancels tasks, and the worker would be lost.
        start = asyncio.get_running_loop().run_in_executor(None, self._fork, theirs)
        try:
            end = await asyncio.shield(start)
        except BaseException:  # cancelled: the process may start all the same
            ours.close()
            start.add_done_callback(end_unused)
            raise
        worker = WorkerProcess(ours, end)
        try:
            yield worker
        finally:
            worker.kill()

    def start(self) -> None:
        """Load the users' code.  Raises CallFailed where that fails."""
        with self._lock:
            self._load()

    def close(self) -> None:
        """End all processes."""
        with self._lock:
            if self._process is not None and self._channel is not None:
                self._channel.shutdown(socket.SHUT_RDWR)  # it ends its workers, then itself
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(CLOSE_SECONDS)
                end_launched(self._process)
                self._channel.close()
            self._process = self._channel = None

    def _fork(self, theirs: socket.socket) -> Callable[[], None]:
        """Start a worker that gets its calls from `theirs`; returns what ends it."""
        # closed here, not in `worker`: a cancellation must not close it while it is sent
        with theirs, self._lock:
            if self._process is None or self._process.poll() is not None:
                self._load()
            assert self._channel is not None
            number = next(self._numbers)
            socket.send_fds(self._channel, [call_line(number, "fork", None)], [theirs.fileno()])
            return partial(order_end, self._channel, number)

    def _load(self) -> None:
        self._process, self._channel = launch_worker(self.spec, "forks")
        try:
            self._channel.settimeout(START_SECONDS)
            try:
                packet = self._channel.recv(PACKET_BYTES)
            except TimeoutError:
                why = f"not imported within {START_SECONDS:g} s, the limit for users' code"
                raise CallFailed(why, kind="timeouts") from None
            self._channel.settimeout(None)
            if not packet:
                raise CallFailed(f"the process exited with {self._process.wait()}", kind="crashes")
            message = json.loads(packet)
            if "failed" in message:
                raise CallFailed(message["failed"], message["where"])
        except BaseException:  # the next `_fork` must not use this process
            end_launched(self._process)
            self._process = self._channel = None
            raise


def order_end(channel: socket.socket, number: int) -> None:
    """End a worker.  Takes no lock: another thread may hold it while it loads users' code, and the
    whole event loop would wait.
    """
    # an error: the process that forked the worker ended, and the worker with it
    with contextlib.suppress(OSError):
        channel.sendall(call_line(number, "end", None))


def end_unused(start: asyncio.Future[Callable[[], None]]) -> None:
    """End the worker that was started for a cancelled caller."""
    if not start.cancelled() and start.exception() is None:
        start.result()()
