"""A pool of worker processes that score responses, each call with a wall-clock timeout.

A worker that hangs is killed with its process group and replaced.  A response that cannot be scored
is counted by kind, logged, and gets reward.on_error.  Calls of an async function share a worker:
where one is lost with several running, each is called again, alone, so that only the one that kills
it fails.

We do not use pebble 5.2, which kills a worker by its pid alone: children of a worker that crashed,
was stopped or ignores SIGTERM stayed (3 of 5 cases, with setsid and killpg in its initializer), and
its workers import torch: they start in 8 s, 220 MB (ours: 0.3 s, 13 MB).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_rl.config import ConfigError, RewardConfig
from megatron_rl.launch.trace import OFF
from megatron_rl.reward.failures import KINDS, Failure, Reply, RewardError
from megatron_rl.reward.function import Form
from megatron_rl.reward.scored_response import Episode
from megatron_rl.workers.protocol import CallFailed, WorkerSpec
from megatron_rl.workers.worker_process import WorkerProcess

__all__ = ["RewardError", "RewardNotLoaded", "RewardPool", "Rewarded"]

SHOWN = 3  # failures of a kind that are logged in full
# workers of a slot that may be lost, one after the other, while they start, until the run stops
MAX_STARTS = 3
# seconds in which a late call of an async function must end; else it blocks the worker's event loop
CANCEL_SECONDS = 2.0
MATH_GIB = 4.0  # address space of a worker for math: 10**10**8 ends in MemoryError
Call = tuple[Episode, ...]
"""The responses that one call of the function scores."""

logger = logging.getLogger(__name__)


class RewardNotLoaded(RewardError, ConfigError):
    """The reward function cannot be imported, or takes other arguments."""


@dataclass(frozen=True)
class Rewarded:
    """The reward of a response (NaN: none), and the metrics of the function."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)


class RewardPool:
    """Worker processes that score responses, as a context manager.

    Use it from one thread: the kernel kills a worker when the thread that started it ends.
    """

    def __init__(self, config: RewardConfig, *, hidden_env: Sequence[str] = ()) -> None:
        """hidden_env: environment variables that workers do not get: keys of servers."""
        self.config = config
        self._spec = WorkerSpec(
            loader="megatron_rl.reward.function:load_reward",
            arguments=(config.function, config.format_pattern, config.timeout_seconds),
            memory_bytes=memory_bytes(config),
            hidden_env=tuple(hidden_env),
        )
        self.counters: Counter[str] = Counter()
        """Responses since the pool was made: scored, unformatted, and failures.KINDS; and
        lost_starts, of workers."""
        # one loop for the pool's life: streams belong to the loop that opened them
        self._runner = asyncio.Runner()
        self._workers: list[WorkerProcess] = []
        self._form: Form = "texts"
        self._is_async = self._has_loaded = False
        self._logged: Counter[str] = Counter()
        self._unchecked: list[tuple[Call, list[Reply]]] = []
        self._has_worked = False  # on some response of the last check
        self.trace, self._number = OFF, itertools.count(1)

    def __enter__(self) -> RewardPool:
        """Start the workers.  Raises RewardNotLoaded when the function cannot be imported, or takes
        other arguments, and RewardError when a worker is lost meanwhile.
        """
        try:
            self._workers = [
                WorkerProcess.launched(self._spec) for _ in range(self.config.num_workers)
            ]
            self._runner.run(self._connect_all())
            self._form, self._is_async = self._runner.run(self._workers[0].connect())
            self._has_loaded = True
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers = []
        self._runner.close()

    def score_episodes(
        self,
        groups: Sequence[Sequence[Episode]],
        *,
        shaped: bool = True,
        failed: float | None = None,
        is_last: bool = True,
    ) -> list[list[Rewarded]]:
        """Return the reward of every response of every group, in their order; equal calls are made
        once.

        A failed response gets `failed`, by default reward.on_error, or NaN where that is drop.
        `shaped`: subtract reward.format_penalty where reward.format_pattern is missing.  Takes at
        most ceil(calls / workers) x (reward.timeout_seconds + a worker's start).  is_last: False
        where more groups of the step follow.

        Raises RewardError when the function is broken: it raised on every one of several responses,
        those of earlier calls with is_last = False among them; and after the first failure under
        reward.on_error = raise.  Where a function scored others just before, responses to a single
        prompt are no proof: the prompt may be at fault.
        """
        calls = [self._calls(group) for group in groups]
        # equal for equal calls: responses of a group are often equal
        keys = [[json.dumps(self._item(call)) for call in group] for group in calls]
        waiting = dict(zip(itertools.chain(*keys), itertools.chain(*calls), strict=True))
        replies: dict[str, list[Reply]] = {}
        self._runner.run(self._ask_all(waiting, replies))
        self._unchecked += [(waiting[key], answer) for key, answer in replies.items()]
        self._check(is_last=is_last)
        if failed is None:
            failed = math.nan if isinstance(self.config.on_error, str) else self.config.on_error
        return [
            [self._rewarded(reply, shaped, failed) for key in group for reply in replies[key]]
            for group in keys
        ]

    def score(
        self,
        items: Sequence[tuple[str, str, str]],
        *,
        shaped: bool = True,
        failed: float | None = None,
    ) -> np.ndarray:
        """Return the rewards, float32 [n], of (prompt, response, label), each as a group of one:
        see score_episodes.
        """
        groups = [[Episode(*item)] for item in items]
        rewards = self.score_episodes(groups, shaped=shaped, failed=failed)
        return np.array([rewarded.reward for (rewarded,) in rewards], np.float32)

    def totals(self) -> dict[str, float]:
        """Return metrics: counts of responses since the pool was made."""
        counted = {kind: self.counters[kind] for kind in ("unformatted", "lost_starts", *KINDS)}
        counted["responses"] = self.counters["scored"] + sum(self.counters[kind] for kind in KINDS)
        return {f"reward/{name}_total": float(count) for name, count in counted.items()}

    def _calls(self, group: Sequence[Episode]) -> list[Call]:
        """Return the calls that score a group."""
        if self._form == "group":
            return [tuple(group)] if group else []
        return [(episode,) for episode in group]

    def _item(self, call: Call) -> list:
        if self._form == "texts":
            return [call[0].prompt, call[0].response, call[0].label]
        return [episode.to_json() for episode in call]

    def _check(self, *, is_last: bool) -> None:
        """Raise RewardError where the run must stop."""
        calls = self._unchecked
        pairs = [pair for call, answer in calls for pair in zip(call, answer, strict=True)]
        failures = [(episode, reply) for episode, reply in pairs if "failed" in reply]
        if failures and self.config.on_error == "raise":
            text, where = describe_failure(*failures[0]), frames_text(failures[0][1])
            raise RewardError(f"{text}; reward.on_error = raise stops the run{where}")
        if not is_last:
            return
        self._unchecked, has_worked = [], self._has_worked
        if not calls:
            return
        self._has_worked = [reply["failed"] for _, reply in failures] != ["errors"] * len(pairs)
        # a single prompt on which a working function fails may be at fault itself
        of_one_prompt = len({episode.prompt for episode, _ in pairs}) == 1
        if len(pairs) > 1 and not self._has_worked and not (of_one_prompt and has_worked):
            last = failures[-1][1]
            raise RewardError(
                f"reward.function = {self.config.function!r} failed on all {len(pairs)} responses:"
                f" {last['why']}{frames_text(last)}"
            )

    def _rewarded(self, reply: Reply, shaped: bool, failed: float) -> Rewarded:
        if "failed" in reply:
            self.counters[reply["failed"]] += 1
            return Rewarded(failed)
        self.counters["scored"] += 1
        self.counters["unformatted"] += not reply["formatted"]
        penalty = self.config.format_penalty * (shaped and not reply["formatted"])
        return Rewarded(reply["score"] - penalty, reply["metrics"])

    async def _connect_all(self) -> None:
        await asyncio.gather(*map(self._connected, range(len(self._workers))))

    async def _connected(self, slot: int, start: int = 1) -> WorkerProcess:
        """Return the worker of the slot when it has loaded the function.  One that is lost
        meanwhile is replaced, where others have loaded it before.  Raises RewardError.
        """
        worker, name = self._workers[slot], f"reward.function = {self.config.function!r}"
        try:
            await worker.connect()
            return worker
        except CallFailed as error:
            if error.kind == "errors" or not self._has_loaded:
                # one that is lost, for lack of memory perhaps, may start again
                kind = RewardNotLoaded if error.kind == "errors" else RewardError
                raise kind(f"{name} cannot be loaded: {error}") from error
            if start == MAX_STARTS:
                raise RewardError(
                    f"{name}: {MAX_STARTS} workers in a row were lost while they started, the last"
                    f" one: {error}; others have loaded it before: look for what kills them, such"
                    " as a lack of memory"
                ) from error
            if self._workers[slot] is worker:  # several calls may have waited for it
                self.counters["lost_starts"] += 1
                logger.warning("reward: a worker was lost while it started: %s; replaced", error)
                self._replace(slot, worker)
        return await self._connected(slot, start + 1)

    async def _ask_all(self, calls: Mapping[str, Call], replies: dict[str, list[Reply]]) -> None:
        await self._connect_all()
        waiting, suspects = deque(calls), deque[str]()
        num_calls = self.config.concurrency if self._is_async else 1  # side by side in a worker
        slots = [slot for slot in range(len(self._workers)) for _ in range(num_calls)]
        for queue, askers in (waiting, slots), (suspects, range(len(self._workers))):
            await asyncio.gather(
                *(self._ask(slot, calls, queue, suspects, replies) for slot in askers)
            )

    async def _ask(
        self,
        slot: int,
        calls: Mapping[str, Call],
        waiting: deque[str],
        suspects: deque[str],
        replies: dict[str, list[Reply]],
    ) -> None:
        """Let one worker answer until nothing is waiting; replace it when it hangs or dies.

        suspects: calls that were running, with others, in a worker that was lost.
        """
        while waiting:
            key = waiting.popleft()
            try:
                with self.trace.span(
                    "score", "reward", thread="reward", key=str(next(self._number)), worker=slot
                ):
                    worker = await self._connected(slot)
                    grace = CANCEL_SECONDS * self._is_async
                    item, seconds = self._item(calls[key]), self.config.timeout_seconds
                    answer = await worker.call("score", item, seconds, grace)
            except CallFailed as error:
                if error.kind != "errors":
                    self._replace(slot, worker)
                # suspects are asked one at a time
                if not error.was_alone and waiting is not suspects:
                    suspects.append(key)
                    continue
                failure = Failure(failed=error.kind, why=error.why, where=error.where)
                answer = [failure] * len(calls[key])
            replies[key] = answer
            for episode, reply in zip(calls[key], answer, strict=True):
                if "failed" not in reply:
                    continue
                if self.config.on_error == "raise":
                    # the other workers end their call: their connections stay usable
                    waiting.clear()
                    suspects.clear()
                self._log(episode, reply)
                if reply["failed"] == "memory":
                    worker.lose(CallFailed("out of memory", kind="crashes"), is_known=True)
                    self._replace(slot, worker)

    def _replace(self, slot: int, lost: WorkerProcess) -> None:
        """Start another worker, once where several calls were running in the lost one."""
        if self._workers[slot] is lost:
            self._workers[slot] = WorkerProcess.launched(self._spec)

    def _log(self, episode: Episode, reply: Failure) -> None:
        kind = reply["failed"]
        self._logged[kind] += 1
        if self._logged[kind] <= SHOWN:
            text, on_error = describe_failure(episode, reply), self.config.on_error
            logger.warning(
                "reward of %s; it gets reward.on_error = %s%s", text, on_error, frames_text(reply)
            )
        # 10, 100, ...: a line each would bury everything else
        elif str(self._logged[kind]).strip("0") == "1":
            logger.warning(
                "reward: %d responses so far: %s (%s)", self._logged[kind], kind, KINDS[kind]
            )


def memory_bytes(config: RewardConfig) -> int:
    """Return the limit of a worker's address space in bytes; 0: none."""
    limit = config.memory_gib
    if limit == "auto":
        limit = MATH_GIB if config.function == "math" else 0.0
    return int(limit * 2**30)


def describe_failure(episode: Episode, reply: Failure) -> str:
    kind = reply["failed"]
    return (
        f"response {episode.response[-80:]!r}, label {episode.label[:80]!r}: {kind}"
        f" ({KINDS[kind]}): {reply['why']}"
    )


def frames_text(reply: Failure) -> str:
    return "".join(f"\n  {frame}" for frame in reply["where"])
