"""A pool of worker processes that score responses, each with a time-out on the wall clock.

A worker that hangs is killed with everything it started and replaced; its response scores 0 and is counted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_rl.config import RewardConfig

START_TIMEOUT_SECONDS = 120.0
Item = tuple[str, str, str]
"""(prompt, response, label)"""

log = logging.getLogger(__name__)


class RewardError(RuntimeError):
    """The reward function cannot be used at all."""


class RewardPool:
    """Use as a context manager, from the main thread.  `counters`: scored, timeouts, errors, crashes since it was made.

    No threads: a worker dies with the thread that started it (the kernel's parent-death signal), so the calling thread
    starts, asks and replaces all of them and waits on their pipes together.
    """

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self.counters: Counter[str] = Counter()
        self._workers: list[Worker] = []

    def __enter__(self) -> RewardPool:
        """Start the workers.  Raises RewardError when the function cannot be imported."""
        try:
            self._workers = [Worker(self.config.function) for _ in range(self.config.num_workers)]
            while any(worker.is_starting for worker in self._workers):
                self._collect({})
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def score(self, items: Sequence[Item]) -> np.ndarray:
        """float32 [n] rewards in the order of `items`; equal items are scored once, a failed one gets 0.

        Raises RewardError when the function raised on every one of several items: then it is broken, not they.
        """
        errors_before = self.counters["errors"]
        waiting = deque(dict.fromkeys(items))
        scores: dict[Item, float] = {}
        while waiting or any(worker.item is not None for worker in self._workers):
            for worker in self._workers:
                if waiting and worker.is_idle:
                    worker.ask(waiting.popleft(), self.config.timeout_seconds)
            self._collect(scores)
        errors = self.counters["errors"] - errors_before
        if errors == len(scores) > 1:
            raise RewardError(
                f"reward.function = {self.config.function!r} failed on all {errors} responses; the errors are logged above"
            )
        self.counters["scored"] += len(items)
        return np.array([scores[item] for item in items], np.float32)

    def _collect(self, scores: dict[Item, float]) -> None:
        """Wait for a reply or a deadline; note what came, replace workers that hang or died."""
        active = [worker for worker in self._workers if not worker.is_idle]
        patience = max(0.0, min(worker.deadline for worker in active) - time.monotonic())
        ready, _, _ = select.select([worker.stdout for worker in active], [], [], patience)
        for worker in active:
            if worker.stdout in ready:
                reply = worker.read()
            elif time.monotonic() >= worker.deadline:
                reply = {"timeouts": "no answer in time"}
            else:
                continue
            if reply is not None:
                self._note(worker, reply, scores)

    def _note(self, worker: Worker, reply: dict[str, Any], scores: dict[Item, float]) -> None:
        item = worker.item
        if item is None:
            if "ready" not in reply:
                raise RewardError(f"reward.function = {self.config.function!r} cannot be loaded: {reply}")
            worker.is_starting = False
            return
        worker.item = None
        scores[item] = float(reply.get("score", 0.0))
        if "score" in reply:
            return
        kind = next(iter(reply))
        self.counters[kind] += 1
        log.warning("reward %s for response %.80r: %s; it scores 0", kind, item[1], reply[kind])
        if kind != "errors":
            worker.kill()
            self._workers[self._workers.index(worker)] = Worker(self.config.function)


class Worker:
    """One process of worker.py in a session of its own, so that killing it takes its children along.

    It is starting, or scores `item`, or is idle; unless idle, a reply is due by `deadline` (time.monotonic()).
    """

    def __init__(self, function: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "megatron_rl.reward.worker", function],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.is_starting = True
        self.item: Item | None = None
        self.deadline = time.monotonic() + START_TIMEOUT_SECONDS
        self._buffer = b""

    @property
    def is_idle(self) -> bool:
        return not self.is_starting and self.item is None

    def ask(self, item: Item, timeout: float) -> None:
        """Send one item.  An idle worker reads at once, so a long line does not block; a dead one shows when read."""
        self.item = item
        self.deadline = time.monotonic() + timeout
        with contextlib.suppress(BrokenPipeError):
            line = json.dumps(item).encode() + b"\n"
            while line:
                line = line[self.stdin.write(line) :]

    def read(self) -> dict[str, Any] | None:
        """The reply {"score" | "ready": ...} or {"errors" | "crashes": what happened}; None while it is incomplete."""
        data = os.read(self.stdout.fileno(), 1 << 16)
        if not data:
            return {"crashes": f"the worker exited with status {self.process.wait()}"}
        self._buffer += data
        if b"\n" not in self._buffer:
            return None
        line, _, self._buffer = self._buffer.partition(b"\n")
        reply = dict(json.loads(line))
        return {"errors": reply["error"]} if "error" in reply else reply

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.stdin.close()
        self.stdout.close()
