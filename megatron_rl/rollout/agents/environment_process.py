"""agent.isolation = process: every episode's environment in a process of its own, which is killed
with its children when the episode ends or a call takes too long.  Messages are JSON lines
(environment_worker.py)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import subprocess
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_rl.records import Prompt
from megatron_rl.rollout.agents.environment_worker import ANSWER_BYTES, fields_of_turn, order
from megatron_rl.rollout.agents.episode import EpisodeError, Observation, Step, Turn
from megatron_rl.workers import kill_group, start_worker

START_SECONDS = 120.0
MODULE = "megatron_rl.rollout.agents.environment_worker"


@dataclass
class EnvironmentProcesses:
    """Starts a process per episode, by the fork of one that has imported `name`
    (package.module:Class).

    memory_bytes: of address space per process, 0 = no limit.  hidden_env: a variable that they do
    not get.
    """

    name: str
    memory_bytes: int = 0
    hidden_env: str | None = None
    _process: subprocess.Popen[bytes] | None = None
    _channel: socket.socket | None = None
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[RemoteEnvironment]:
        """A process for one episode.  Raises EpisodeError where the class cannot be imported."""
        ours, theirs = socket.socketpair()
        # it may import the class: seconds; a future, for the end of the event loop cancels tasks
        start = asyncio.get_running_loop().run_in_executor(None, self._start, theirs)
        try:
            number = await asyncio.shield(start)
            reader, writer = await asyncio.open_connection(sock=ours, limit=ANSWER_BYTES + 1)
        except BaseException:  # cancelled: the process may start all the same
            ours.close()
            start.add_done_callback(self._end_unused)
            raise
        try:
            yield RemoteEnvironment(reader, writer)
        finally:
            writer.transport.abort()
            self._end(number)

    @property
    def pid(self) -> int:
        """Of the process that starts the others; 0 before."""
        return 0 if self._process is None else self._process.pid

    def start(self) -> None:
        """Import the class.  Raises EpisodeError where that fails."""
        with self._lock:
            self._import()

    def close(self) -> None:
        """End all processes."""
        with self._lock:
            if self._process is not None and self._channel is not None:
                self._channel.close()  # it ends its episodes, then itself
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(5.0)
                kill_group(self._process.pid)
                self._process.wait()
            self._process = self._channel = None

    def _start(self, theirs: socket.socket) -> int:
        with theirs, self._lock:  # closed here: a cancellation must not close it while it is sent
            if self._process is None or self._process.poll() is not None:
                self._import()
            number = next(self._numbers)
            assert self._channel is not None
            socket.send_fds(self._channel, [order(start=number)], [theirs.fileno()])
            return number

    def _import(self) -> None:
        try:
            self._start_and_import()
        except BaseException:  # a process that cannot be used must not be taken for one that can
            if self._process is not None:
                kill_group(self._process.pid)
                self._process.wait()
            self._process = self._channel = None
            raise

    def _start_and_import(self) -> None:
        self._process, self._channel = start_worker(
            MODULE, [self.name, str(self.memory_bytes)], self.hidden_env
        )
        self._channel.settimeout(START_SECONDS)
        with self._channel.makefile("rb") as lines:
            line = lines.readline()
        self._channel.settimeout(None)
        if not line.endswith(b"\n"):
            raise EpisodeError(
                f"agent.environment: the process that imports it exited with {self._process.wait()}"
            )
        if why := json.loads(line).get("failed"):
            raise EpisodeError(
                f"agent.environment cannot be imported in a process of its own: {why}"
            )

    def _end(self, number: int) -> None:
        """Never waits for the lock: another thread may hold it as long as an import takes, and all
        episodes would wait.
        """
        if self._lock.acquire(blocking=False):
            try:
                self._send_end(number)
            finally:
                self._lock.release()
        else:
            threading.Thread(target=self._end_later, args=(number,), daemon=True).start()

    def _end_later(self, number: int) -> None:
        with self._lock:
            self._send_end(number)

    def _send_end(self, number: int) -> None:
        # it ended: so did its episodes
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if self._channel is not None:
                self._channel.sendall(order(end=number))

    def _end_unused(self, start: asyncio.Future[int]) -> None:
        if not start.cancelled() and start.exception() is None:
            self._end(start.result())


@dataclass
class RemoteEnvironment:
    """An environment in its process: `reset` and `step` as awaitables."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def constructor(self) -> None:
        await self._call("constructor", {})

    async def reset(self, prompt: Prompt) -> Observation | None:
        return await self._call("reset", asdict(prompt))

    async def step(self, turn: Turn) -> Step:
        answer = await self._call("step", fields_of_turn(turn))
        if not isinstance(answer, dict) or set(answer) != {"step"}:
            raise EpisodeError(
                f"agent.environment: step returned {type(answer).__name__}, must be a Step"
            )
        return Step(**answer["step"])

    async def _call(self, call: str, argument: dict[str, Any]) -> Any:
        self.writer.write(json.dumps({"call": call, "argument": argument}).encode() + b"\n")
        try:
            line = await self.reader.readline()
        except (ConnectionResetError, ValueError) as error:  # ValueError: a line above the limit
            raise EpisodeError(
                f"agent.environment: {call} broke the connection to its process: {error}"
            ) from error
        if not line.endswith(b"\n"):
            raise EpisodeError(f"agent.environment: its process ended in {call}")
        try:
            reply = json.loads(line)
            if "answer" in reply:
                return reply["answer"]
            why, where = reply["failed"], reply["where"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise EpisodeError(
                f"agent.environment: {call} answered {line[:80]!r}, no JSON of ours"
            ) from error
        raise EpisodeError("\n  ".join([f"agent.environment: {call} failed: {why}", *where]))
