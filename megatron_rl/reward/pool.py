"""A pool of worker processes that score responses, each with a time-out on the wall clock.

A worker that hangs is killed with everything it started and replaced.  What cannot be scored is counted by kind, logged,
and gets what reward.on_error says.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_rl.config import RewardConfig
from megatron_rl.reward.failures import KINDS

START_TIMEOUT_SECONDS = 120.0
Item = tuple[str, str, str]
"""(prompt, response, label)"""

logger = logging.getLogger(__name__)


class RewardError(RuntimeError):
    """The reward function cannot be used at all, or failed where reward.on_error = raise."""


@dataclass(frozen=True)
class Outcome:
    """What became of one item: its score and whether it has reward.format_pattern, or the kind of its failure."""

    score: float = math.nan
    formatted: bool = True
    failed: str | None = None


class RewardPool:
    """Use as a context manager, from the main thread.

    `counters`, of responses since it was made: scored, unformatted, and the kinds of failures.KINDS.
    No threads: a worker dies with the thread that started it (the kernel's parent-death signal), so the calling thread
    starts, asks and replaces all of them and waits on their pipes together.
    """

    def __init__(self, config: RewardConfig, *, hidden_env: str | None = None) -> None:
        """hidden_env: an environment variable that workers do not get, such as the servers' API key."""
        self.config = config
        self.hidden_env = hidden_env
        self.counters: Counter[str] = Counter()
        self._workers: list[Worker] = []

    def __enter__(self) -> RewardPool:
        """Start the workers.  Raises RewardError when the function cannot be imported."""
        try:
            self._workers = [Worker(self.config, self.hidden_env) for _ in range(self.config.num_workers)]
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

    @property
    def failures(self) -> int:
        """Responses that could not be scored, since the pool was made."""
        return sum(self.counters[kind] for kind in KINDS)

    def score(self, items: Sequence[Item], *, shaped: bool = True, failed: float | None = None) -> np.ndarray:
        """float32 [n] rewards in the order of `items`; equal items are scored once.

        A failed one gets `failed`, by default reward.on_error, or NaN where that is drop.  `shaped`: less
        reward.format_penalty where reward.format_pattern is missing.  Takes at most
        ceil(n / workers) x (reward.timeout_seconds + a worker's start).
        Raises RewardError when the function raised on every one of several items (then it is broken, not they), and
        at the first failure under reward.on_error = raise.
        """
        waiting = deque(dict.fromkeys(items))
        outcomes: dict[Item, Outcome] = {}
        while waiting or any(worker.item is not None for worker in self._workers):
            for worker in self._workers:
                if waiting and worker.is_idle:
                    worker.ask(waiting.popleft(), self.config.timeout_seconds)
            self._collect(outcomes)
        if len(outcomes) > 1 and all(outcome.failed == "errors" for outcome in outcomes.values()):
            raise RewardError(
                f"reward.function = {self.config.function!r} failed on all {len(outcomes)} responses; the errors are logged above"
            )
        if failed is None:
            failed = math.nan if isinstance(self.config.on_error, str) else self.config.on_error
        return np.array([self._reward(outcomes[item], shaped, failed) for item in items], np.float32)

    def _reward(self, outcome: Outcome, shaped: bool, failed: float) -> float:
        self.counters[outcome.failed or "scored"] += 1
        if outcome.failed:
            return failed
        self.counters["unformatted"] += not outcome.formatted
        return outcome.score - self.config.format_penalty * (shaped and not outcome.formatted)

    def _collect(self, outcomes: dict[Item, Outcome]) -> None:
        """Wait for a reply or a deadline; note what came, replace workers that hang or died."""
        active = [worker for worker in self._workers if not worker.is_idle]
        patience = max(0.0, min(worker.deadline for worker in active) - time.monotonic())
        with selectors.DefaultSelector() as selector:  # select.select refuses descriptors from 1,024 on
            for worker in active:
                selector.register(worker.stdout, selectors.EVENT_READ)
                if worker.unsent:
                    selector.register(worker.stdin, selectors.EVENT_WRITE)
            ready = {key.fileobj for key, _ in selector.select(patience)}
        for worker in active:
            if worker.stdin in ready:
                worker.send()
            if worker.stdout in ready:
                reply = worker.read()
            elif time.monotonic() >= worker.deadline:
                reply = {"failed": "timeouts", "why": "no answer in time"}
            else:
                continue
            if reply is not None:
                self._note(worker, reply, outcomes)

    def _note(self, worker: Worker, reply: Mapping[str, Any], outcomes: dict[Item, Outcome]) -> None:
        item = worker.item
        if item is None:
            if "ready" not in reply:
                raise RewardError(f"reward.function = {self.config.function!r} cannot be loaded: {dict(reply)}")
            worker.is_starting = False
            return
        worker.item = None
        kind = reply.get("failed")
        if kind is None:
            outcomes[item] = Outcome(float(reply["score"]), bool(reply["formatted"]))
            return
        outcomes[item] = Outcome(failed=kind)
        said = f"response {item[1][-80:]!r}, label {item[2][:80]!r}: {kind} ({KINDS[kind]}): {reply['why']}"
        if self.config.on_error == "raise":
            raise RewardError(f"{said}; reward.on_error = raise stops the run")
        logger.warning("reward of %s; it gets reward.on_error = %s", said, self.config.on_error)
        if kind in ("timeouts", "crashes", "memory"):
            worker.kill()
            self._workers[self._workers.index(worker)] = Worker(self.config, self.hidden_env)


class Worker:
    """One process of worker.py in a session of its own, so that killing it takes its children along.

    It is starting, or scores `item`, or is idle; unless idle, a reply is due by `deadline` (time.monotonic()).
    """

    def __init__(self, config: RewardConfig, hidden_env: str | None) -> None:
        env = {name: value for name, value in os.environ.items() if name != hidden_env}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "megatron_rl.reward.worker", config.function, config.format_pattern],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env={**env, "OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        os.set_blocking(self.stdin.fileno(), False)  # a stopped worker must not stop us
        self.is_starting = True
        self.item: Item | None = None
        self.deadline = time.monotonic() + START_TIMEOUT_SECONDS
        self.unsent = b""
        self._buffer = b""

    @property
    def is_idle(self) -> bool:
        return not self.is_starting and self.item is None

    def ask(self, item: Item, timeout: float) -> None:
        """Begin to send one item; `send` goes on when the worker has read what the pipe holds."""
        self.item = item
        self.deadline = time.monotonic() + timeout
        self.unsent = json.dumps(item).encode() + b"\n"
        self.send()

    def send(self) -> None:
        """As much as the pipe takes now."""
        try:
            self.unsent = self.unsent[os.write(self.stdin.fileno(), self.unsent) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # dead: that shows when its answer is read
            self.unsent = b""

    def read(self) -> dict[str, Any] | None:
        """The worker's reply (see worker.py), or one that says how it died; None while it is incomplete."""
        data = os.read(self.stdout.fileno(), 1 << 16)
        if not data:
            return {"failed": "crashes", "why": f"the worker exited with status {self.process.wait()}"}
        self._buffer += data
        if b"\n" not in self._buffer:
            return None
        line, _, self._buffer = self._buffer.partition(b"\n")
        return dict(json.loads(line))

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.stdin.close()
        self.stdout.close()
