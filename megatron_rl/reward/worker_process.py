"""The trainer's side of a worker process (worker.py): starts it, sends calls, kills it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from typing import TypedDict, final

from megatron_rl.config import RewardConfig
from megatron_rl.reward.failures import Failure, Reply
from megatron_rl.reward.function import Form, Item

START_TIMEOUT_SECONDS = 120.0
# in which a late call of an async function must end, else it blocks the worker's event loop
CANCEL_SECONDS = 2.0
EXIT_SECONDS = 1.0  # between the end of the connection and that of the process
LINE_BYTES = 2**28


class RewardError(RuntimeError):
    """The reward function cannot be loaded, fails on everything, or failed where reward.on_error =
    raise.
    """


class WorkerLost(Exception):
    """The process died or was killed during a call.

    was_alone: no other call was running, so this one is the cause.
    """

    def __init__(self, failure: Failure, *, was_alone: bool) -> None:
        super().__init__(failure["why"])
        self.failure, self.was_alone = failure, was_alone


@final
class Ready(TypedDict):
    """The first line of a worker."""

    form: Form
    is_async: bool


class Worker:
    """One process of worker.py in a session of its own, so that killing it also kills its children.

    form, is_async: of the function, known once it is connected.
    """

    def __init__(self, config: RewardConfig, hidden_env: str | None) -> None:
        self.config = config
        self.form: Form = "texts"
        self.is_async = False
        self.lost: Failure | None = None
        env = {name: value for name, value in os.environ.items() if name != hidden_env}
        self._socket, theirs = socket.socketpair()
        settings = [config.function, config.format_pattern, str(config.timeout_seconds)]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "megatron_rl.reward.worker", *settings],
                stdin=theirs.fileno(),
                start_new_session=True,
                env={**env, "OMP_NUM_THREADS": "1"},  # many workers on the cores of the trainer
            )
        self._writer: asyncio.StreamWriter | None = None
        self._connecting = asyncio.Lock()
        self._calls: dict[int, asyncio.Future[list[Reply]]] = {}
        self._count = 0

    async def connect(self) -> asyncio.StreamWriter:
        """Wait for the function to be imported, the first time.

        Raises RewardError when it cannot be.
        """
        async with self._connecting:
            if self._writer is None:
                reader, self._writer = await asyncio.open_connection(
                    sock=self._socket, limit=LINE_BYTES
                )
                ready = await self._first_line(reader)
                if "failed" in ready:
                    name, where = self.config.function, frames(ready)
                    raise RewardError(
                        f"reward.function = {name!r} cannot be loaded: {ready['why']}{where}"
                    )
                self.form, self.is_async = ready["form"], ready["is_async"]
                self._reading = asyncio.create_task(self._read_replies(reader))
            return self._writer

    async def call(self, item: Item) -> list[Reply]:
        """One reply per response of the item.

        Raises WorkerLost; then the worker is of no further use.
        """
        writer = await self.connect()
        if self.lost is not None:  # between two calls: this one was not sent
            raise WorkerLost(self.lost, was_alone=False)
        self._count += 1
        reply = self._calls[self._count] = asyncio.get_running_loop().create_future()
        # buffered: a stopped worker, which reads nothing, must not block
        writer.write(json.dumps({"number": self._count, "item": item}).encode() + b"\n")
        timer = asyncio.timeout(self.config.timeout_seconds + CANCEL_SECONDS * self.is_async)
        try:
            async with timer:
                return await asyncio.shield(reply)
        except TimeoutError:
            why = f"no answer within {self.config.timeout_seconds:g} s"
            self.lose(Failure(failed="timeouts", why=why, where=[]))
            return await reply

    def lose(self, failure: Failure, *, is_known: bool = False) -> None:
        """Kill the process; every running call raises WorkerLost.

        is_known: another call is the cause, and was answered.
        """
        self.kill()
        self.lost = failure
        calls, self._calls = self._calls, {}
        for reply in calls.values():
            reply.set_exception(WorkerLost(failure, was_alone=len(calls) == 1 and not is_known))

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self._writer is None:
            self._socket.close()
        else:
            self._writer.close()

    async def _first_line(self, reader: asyncio.StreamReader) -> Ready | Failure:
        try:
            async with asyncio.timeout(START_TIMEOUT_SECONDS):
                line = await reader.readline()
        except TimeoutError:
            return Failure(
                failed="timeouts", why=f"not imported within {START_TIMEOUT_SECONDS:g} s", where=[]
            )
        return json.loads(line) if line.endswith(b"\n") else self._crash()

    async def _read_replies(self, reader: asyncio.StreamReader) -> None:
        """Give every reply to its call, until the worker ends."""
        with contextlib.suppress(ConnectionResetError):  # died before it read a call
            # else end of file, perhaps within a line
            while (line := await reader.readline()).endswith(b"\n"):
                reply = json.loads(line)
                self._calls.pop(reply["number"]).set_result(reply["replies"])
        if self.lost is None:
            self.lose(self._crash())

    def _crash(self) -> Failure:
        with contextlib.suppress(subprocess.TimeoutExpired):  # it closed the connection and lives
            self.process.wait(EXIT_SECONDS)
        return Failure(
            failed="crashes", why=f"the worker exited with status {self.process.poll()}", where=[]
        )


def frames(reply: Failure) -> str:
    return "".join(f"\n  {frame}" for frame in reply["where"])
