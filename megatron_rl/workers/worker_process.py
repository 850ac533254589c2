"""The trainer's side of a worker: starts it, sends calls, kills it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import socket
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from megatron_rl.workers.protocol import (
    ANSWER_BYTES,
    CallFailed,
    WorkerSpec,
    call_line,
    kill_group,
)

START_SECONDS = 120.0  # for the imports of users' code
PACKAGE = Path(__file__).parents[1] / "__init__.py"
START = f"""
import runpy, sys
from importlib.util import module_from_spec, spec_from_file_location
if sys.version_info < (3, 11):
    sys.exit(f"{{sys.executable}} is Python {{sys.version.split()[0]}}: must be 3.11 or later")
package = spec_from_file_location("megatron_rl", {str(PACKAGE)!r})
sys.modules["megatron_rl"] = module_from_spec(package)
package.loader.exec_module(sys.modules["megatron_rl"])
runpy.run_module("megatron_rl.workers.serving", run_name="__main__", alter_sys=True)
"""
"""Program of a worker: it finds this package in any Python, and nothing else of the trainer's
environment."""
EXIT_SECONDS = 1.0  # between the end of the connection and that of the process


def launch_worker(
    spec: WorkerSpec, mode: Literal["one", "forks"]
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start serving.py; returns the process and this side of its connection."""
    # packets: a call to fork must not be separated from the socket that comes with it
    kind = socket.SOCK_SEQPACKET if mode == "forks" else socket.SOCK_STREAM
    ours, theirs = socket.socketpair(type=kind)
    env = {name: value for name, value in os.environ.items() if name not in spec.hidden_env}
    arguments = [mode, spec.loader, json.dumps(spec.arguments), str(spec.memory_bytes)]
    with theirs:
        process = subprocess.Popen(
            [spec.python, "-c", START, *arguments],
            stdin=theirs.fileno(),
            start_new_session=True,
            env={**env, "OMP_NUM_THREADS": "1"},  # many workers on the cores of the trainer
        )
    return process, ours


def end_launched(process: subprocess.Popen[bytes]) -> None:
    kill_group(process.pid)
    process.wait()


class WorkerProcess:
    """A worker and its calls, which one event loop makes.

    Several calls may run at a time where the service is concurrent.  A worker that is lost takes no
    further call.
    """

    def __init__(
        self,
        channel: socket.socket,
        end: Callable[[], None],
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        """end: kills the process and its children.  process: None where another is its parent."""
        self.process = process
        self._channel, self._end = channel, end
        self._is_killed = False
        self._lost: CallFailed | None = None
        self._reading: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._answers: dict[int, asyncio.Future[Any]] = {}  # of running calls, by number
        self._count = 0

    @classmethod
    def launched(cls, spec: WorkerSpec) -> WorkerProcess:
        """Start a worker.  The kernel kills it when the thread that started it ends."""
        process, channel = launch_worker(spec, "one")
        return cls(channel, partial(end_launched, process), process)

    async def connect(self) -> Any:
        """Wait until the service is made; returns its description.  Raises CallFailed."""
        if self._reading is None:
            self._made = self._answers[0] = asyncio.get_running_loop().create_future()
            self._reading = asyncio.create_task(self._read_answers())
        return await self._answer(self._made, "not imported", START_SECONDS)

    async def call(
        self, call: str, argument: object, seconds: float = math.inf, grace: float = 0.0
    ) -> Any:
        """Return the service's answer.  Raises CallFailed; unless its kind is "errors", the worker
        is lost.

        A call that takes longer than `seconds` is late, and the worker is killed `grace` seconds
        later, in which it may still answer.
        """
        if self._lost is not None:  # between two calls: this one was not sent
            raise replace(self._lost)
        assert self._writer is not None, "call connect() first"
        self._count += 1
        answer = self._answers[self._count] = asyncio.get_running_loop().create_future()
        # buffered: a stopped worker, which reads nothing, must not block
        self._writer.write(call_line(self._count, call, argument))
        return await self._answer(answer, "no answer", seconds, grace)

    async def _answer(
        self, answer: asyncio.Future[Any], why: str, seconds: float, grace: float = 0.0
    ) -> Any:
        try:
            async with asyncio.timeout(seconds + grace):
                # a cancelled caller must not cancel what _read_answers fills in
                return await asyncio.shield(answer)
        except TimeoutError:
            self.lose(CallFailed(f"{why} within {seconds:g} s", kind="timeouts"))
            return await answer

    def lose(self, failure: CallFailed, *, is_known: bool = False) -> None:
        """Kill the process; every running call raises `failure`.

        is_known: a call that has its answer is the cause, and no running one.
        """
        self.kill()
        answers, self._answers = self._answers, {}
        self._lost = replace(failure, was_alone=False)
        for answer in answers.values():
            answer.set_exception(replace(failure, was_alone=len(answers) == 1 and not is_known))

    def kill(self) -> None:
        """End the process and its children; running calls get no answer."""
        if self._is_killed:
            return
        self._is_killed = True
        self._end()
        if self._writer is None:
            self._channel.close()
        else:
            self._writer.transport.abort()

    async def _read_answers(self) -> None:
        """Give every answer to its call, until the worker ends or sends an invalid message."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            reader, self._writer = await asyncio.open_connection(
                sock=self._channel, limit=ANSWER_BYTES + 1
            )
            # a line without its end is the end of the file
            while (line := await reader.readline()).endswith(b"\n"):
                match json.loads(line):
                    case {"number": number, "failed": why, "where": where}:
                        failure = CallFailed(why, where)
                        self._answers.pop(number).set_exception(failure)
                    case {"number": number, "answer": answer}:
                        self._answers.pop(number).set_result(answer)
                    case _:
                        break
        if not self._is_killed:
            self.lose(CallFailed(self._how_it_ended(), kind="crashes"))

    def _how_it_ended(self) -> str:
        if self.process is None:
            return "its process ended"
        # the connection ends a moment before the process; a process that closed it may live on
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(EXIT_SECONDS)
        return f"the worker exited with status {self.process.poll()}"
