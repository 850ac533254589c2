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
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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
    """Use as a context manager.  `counters`: scored, timeouts, errors, crashes since it was made."""

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self.counters: Counter[str] = Counter()
        self._workers: list[Worker] = []

    def __enter__(self) -> RewardPool:
        """Start the workers.  Raises RewardError when the function cannot be imported."""
        try:
            for _ in range(self.config.num_workers):
                self._workers.append(Worker(self.config.function))
            for worker in self._workers:
                worker.wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def score(self, items: Sequence[Item]) -> np.ndarray:
        """float32 [n] rewards in the order of `items`.  Equal items are scored once."""
        unique = list(dict.fromkeys(items))
        parts = [unique[index :: len(self._workers)] for index in range(len(self._workers))]
        with ThreadPoolExecutor(len(self._workers)) as threads:
            results = list(threads.map(self._score_part, range(len(self._workers)), parts))
        scores = {item: score for part in results for item, score in part.items()}
        self.counters["scored"] += len(items)
        return np.array([scores[item] for item in items], np.float32)

    def _score_part(self, index: int, items: Sequence[Item]) -> dict[Item, float]:
        scores = {}
        for item in items:
            reply = self._workers[index].ask(item, self.config.timeout_seconds)
            if "score" in reply:
                scores[item] = float(reply["score"])
                continue
            kind = next(iter(reply))
            self.counters[kind] += 1
            log.warning("reward %s for response %.80r: %s; it scores 0", kind, item[1], reply[kind])
            scores[item] = 0.0
            if kind != "errors":
                self._workers[index].kill()
                self._workers[index] = Worker(self.config.function)
                self._workers[index].wait_until_ready()
        return scores


class Worker:
    """One process of worker.py in a session of its own, so that killing it takes its children along."""

    def __init__(self, function: str) -> None:
        self.function = function
        self.process = subprocess.Popen(
            [sys.executable, "-m", "megatron_rl.reward.worker", function],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._buffer = b""

    def wait_until_ready(self) -> None:
        reply = self._read(START_TIMEOUT_SECONDS)
        if "ready" not in reply:
            raise RewardError(f"reward.function = {self.function!r} cannot be loaded: {reply}")

    def ask(self, item: Item, timeout: float) -> dict[str, Any]:
        """{"score": ...}, or {"errors" | "timeouts" | "crashes": what happened}; after the last two, replace the worker."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(item).encode() + b"\n")
        except BrokenPipeError:
            return {"crashes": "the worker is gone"}
        reply = self._read(timeout)
        return {"errors": reply["error"]} if "error" in reply else reply

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _read(self, timeout: float) -> dict[str, Any]:
        """The next reply line, or {"timeouts": ...} or {"crashes": ...}."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return {"timeouts": f"no score within {timeout:g} s"}
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            if not data:
                return {"crashes": f"the worker exited with status {self.process.wait()}"}
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return dict(json.loads(line))
