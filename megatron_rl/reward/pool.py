"""A pool of worker processes that score responses, each with a wall-clock timeout.

A worker that hangs is killed with its process group and replaced.  A response that cannot be scored is counted by kind, logged,
and gets reward.on_error.
Not pebble 5.2, which kills a worker by its pid alone: children of one that crashed, was stopped or ignores SIGTERM stayed (3 of 5
cases, with setsid and killpg in its initializer), and its workers import torch: they start in 8 s, 220 MB (ours: 0.3 s, 13 MB).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Sequence

import numpy as np

from megatron_rl.config import RewardConfig
from megatron_rl.reward.failures import KINDS, Failure, Score

SHOWN = 3  # failures of a kind that are logged in full
START_TIMEOUT_SECONDS = 120.0
Item = tuple[str, str, str]
"""(prompt, response, label)"""

logger = logging.getLogger(__name__)


class RewardError(RuntimeError):
    """The reward function cannot be loaded, fails on everything, or failed where reward.on_error = raise."""


class RewardPool:
    """Use as a context manager, from one thread: the kernel kills a worker when the thread that started it ends.

    `counters`, of responses since it was made: scored, unformatted, and the kinds of failures.KINDS.
    """

    def __init__(self, config: RewardConfig, *, hidden_env: str | None = None) -> None:
        """hidden_env: an environment variable that workers do not get, such as the servers' API key."""
        self.config = config
        self.hidden_env = hidden_env
        self.counters: Counter[str] = Counter()
        self._runner = asyncio.Runner()  # one loop for the pool's life: streams belong to the loop that opened them
        self._workers: list[Worker] = []
        self._logged: Counter[str] = Counter()

    def __enter__(self) -> RewardPool:
        """Start the workers.  Raises RewardError when the function cannot be imported."""
        try:
            self._workers = [Worker(self.config, self.hidden_env) for _ in range(self.config.num_workers)]
            self._runner.run(self._ask_all(deque(), {}))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers = []
        self._runner.close()

    def score(self, items: Sequence[Item], *, shaped: bool = True, failed: float | None = None) -> np.ndarray:
        """float32 [n] rewards in the order of `items`; equal items are scored once.

        A failed one gets `failed`, by default reward.on_error, or NaN where that is drop.  `shaped`: subtract
        reward.format_penalty where reward.format_pattern is missing.  Takes at most
        ceil(n / workers) x (reward.timeout_seconds + a worker's start).
        Raises RewardError when the function raised on every one of several items (then the function is broken), and
        after the first failure under reward.on_error = raise.
        """
        replies: dict[Item, Score | Failure] = {}
        waiting = deque(dict.fromkeys(items))  # responses of a group are often equal
        self._runner.run(self._ask_all(waiting, replies))
        failures = [(item, reply) for item, reply in replies.items() if "failed" in reply]
        if failures and self.config.on_error == "raise":
            raise RewardError(
                f"{describe(*failures[0])}; reward.on_error = raise stops the run{frames(failures[0][1])}"
            )
        if len(replies) > 1 and [reply["failed"] for _, reply in failures] == ["errors"] * len(replies):
            last = failures[-1][1]
            raise RewardError(
                f"reward.function = {self.config.function!r} failed on all {len(replies)} responses: {last['why']}{frames(last)}"
            )
        if failed is None:
            failed = math.nan if isinstance(self.config.on_error, str) else self.config.on_error
        return np.array([self._reward(replies[item], shaped, failed) for item in items], np.float32)

    def _reward(self, reply: Score | Failure, shaped: bool, failed: float) -> float:
        if "failed" in reply:
            self.counters[reply["failed"]] += 1
            return failed
        self.counters["scored"] += 1
        self.counters["unformatted"] += not reply["formatted"]
        return reply["score"] - self.config.format_penalty * (shaped and not reply["formatted"])

    async def _ask_all(self, waiting: deque[Item], replies: dict[Item, Score | Failure]) -> None:
        await asyncio.gather(*(worker.connect() for worker in self._workers))
        await asyncio.gather(*(self._ask(slot, waiting, replies) for slot in range(len(self._workers))))

    async def _ask(self, slot: int, waiting: deque[Item], replies: dict[Item, Score | Failure]) -> None:
        """Let one worker score items until none is left; replace it when it hangs or dies."""
        while waiting:
            item = waiting.popleft()
            reply = replies[item] = await self._workers[slot].score(item)
            if "failed" not in reply:
                continue
            if self.config.on_error == "raise":
                waiting.clear()  # the other workers end their item: their connections stay usable
            self._log(item, reply)
            if reply["failed"] in ("timeouts", "crashes", "memory"):
                self._workers[slot].kill()
                self._workers[slot] = Worker(self.config, self.hidden_env)

    def _log(self, item: Item, reply: Failure) -> None:
        kind = reply["failed"]
        self._logged[kind] += 1
        if self._logged[kind] <= SHOWN:
            text, on_error = describe(item, reply), self.config.on_error
            logger.warning("reward of %s; it gets reward.on_error = %s%s", text, on_error, frames(reply))
        elif str(self._logged[kind]).strip("0") == "1":  # 10, 100, ...: a line each would bury everything else
            logger.warning("reward: %d responses so far: %s (%s)", self._logged[kind], kind, KINDS[kind])


class Worker:
    """One process of worker.py in a session of its own, so that killing it also kills its children."""

    def __init__(self, config: RewardConfig, hidden_env: str | None) -> None:
        self.config = config
        env = {name: value for name, value in os.environ.items() if name != hidden_env}
        self._socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "megatron_rl.reward.worker", config.function, config.format_pattern],
                stdin=theirs.fileno(),
                start_new_session=True,
                env={**env, "OMP_NUM_THREADS": "1"},  # many workers on the cores of the trainer
            )
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Wait for the function to be imported, the first time.  Raises RewardError when it cannot be."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(sock=self._socket)
            reply = await self._read(self._streams[0], START_TIMEOUT_SECONDS)
            if "failed" in reply:
                where = frames(reply)
                raise RewardError(f"reward.function = {self.config.function!r} cannot be loaded: {reply['why']}{where}")
        return self._streams

    async def score(self, item: Item) -> Score | Failure:
        reader, writer = await self.connect()
        writer.write(
            json.dumps(item).encode() + b"\n"
        )  # buffered: a stopped worker, which reads nothing, must not block
        return await self._read(reader, self.config.timeout_seconds)

    async def _read(self, reader: asyncio.StreamReader, seconds: float) -> Score | Failure:
        try:
            async with asyncio.timeout(seconds):
                line = await reader.readline()
        except TimeoutError:
            return Failure(failed="timeouts", why=f"no answer within {seconds:g} s", where=[])
        except ConnectionResetError:  # died before it read the item
            line = b""
        if not line.endswith(b"\n"):  # end of file, perhaps within a line
            return Failure(failed="crashes", why=f"the worker exited with status {self.process.wait()}", where=[])
        return json.loads(line)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self._streams is None:
            self._socket.close()
        else:
            self._streams[1].close()


def describe(item: Item, reply: Failure) -> str:
    kind = reply["failed"]
    return f"response {item[1][-80:]!r}, label {item[2][:80]!r}: {kind} ({KINDS[kind]}): {reply['why']}"


def frames(reply: Failure) -> str:
    return "".join(f"\n  {frame}" for frame in reply["where"])
