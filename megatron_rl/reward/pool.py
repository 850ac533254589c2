"""A pool of worker processes that score responses, each call with a wall-clock timeout.

A worker that hangs is killed with its process group and replaced.  A response that cannot be scored
is counted by kind, logged, and gets reward.on_error.  Calls of an async function share a worker:
where one is lost with several running, each is called again, alone, so that only the one that kills
it fails. Not pebble 5.2, which kills a worker by its pid alone: children of one that crashed, was
stopped or ignores SIGTERM stayed (3 of 5 cases, with setsid and killpg in its initializer), and its
workers import torch: they start in 8 s, 220 MB (ours: 0.3 s, 13 MB).
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

from megatron_rl.config import RewardConfig
from megatron_rl.launch.trace import OFF
from megatron_rl.reward.failures import KINDS, Failure, Reply
from megatron_rl.reward.function import Form
from megatron_rl.reward.scored_response import Episode
from megatron_rl.reward.worker_process import RewardError, Worker, WorkerLost, frames

__all__ = ["RewardError", "RewardPool", "Rewarded"]

SHOWN = 3  # failures of a kind that are logged in full
Call = tuple[Episode, ...]
"""The responses that one call of the function scores."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rewarded:
    """The reward of a response (NaN: none), and the metrics of the function."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)


class RewardPool:
    """Use as a context manager, from one thread: the kernel kills a worker when the thread that
    started it ends.

    `counters`, of responses since it was made: scored, unformatted, and the kinds of
    failures.KINDS.  `totals`: as metrics.
    """

    def __init__(self, config: RewardConfig, *, hidden_env: str | None = None) -> None:
        """hidden_env: an environment variable that workers do not get, such as the servers' API
        key.
        """
        self.config = config
        self.hidden_env = hidden_env
        self.counters: Counter[str] = Counter()
        # one loop for the pool's life: streams belong to the loop that opened them
        self._runner = asyncio.Runner()
        self._workers: list[Worker] = []
        self._form: Form = "texts"
        self._num_calls = 1  # at a time in a worker
        self._logged: Counter[str] = Counter()
        self._unchecked: list[tuple[Call, list[Reply]]] = []
        self._has_worked = False  # on some response of the last check
        self.trace, self._number = OFF, itertools.count(1)

    def __enter__(self) -> RewardPool:
        """Start the workers.

        Raises RewardError when the function cannot be imported, or takes other arguments.
        """
        try:
            self._workers = [
                Worker(self.config, self.hidden_env) for _ in range(self.config.num_workers)
            ]
            self._runner.run(self._connect())
            self._form = self._workers[0].form
            self._num_calls = self.config.concurrency if self._workers[0].is_async else 1
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
        """Of every response of every group, in their order; equal calls are made once.

        A failed one gets `failed`, by default reward.on_error, or NaN where that is drop.
        `shaped`: subtract reward.format_penalty where reward.format_pattern is missing.  Takes at
        most ceil(calls / workers) x (reward.timeout_seconds + a worker's start).  is_last: False
        where more of a step's groups follow. Raises RewardError when the function raised on every
        one of several responses, those of the calls before with is_last = False among them (then
        the function is broken), and after the first failure under reward.on_error = raise.
        Responses to one prompt say nothing of a function that could score others just before: the
        prompt may be at fault.
        """
        keys = [[self._key(call) for call in self._calls(group)] for group in groups]
        waiting = {
            key: call
            for own, group in zip(keys, groups, strict=True)
            for key, call in zip(own, self._calls(group), strict=True)
        }
        replies: dict[str, list[Reply]] = {}
        self._runner.run(self._ask_all(waiting, replies))
        self._unchecked += [(waiting[key], found) for key, found in replies.items()]
        self._check(is_last=is_last)
        if failed is None:
            failed = math.nan if isinstance(self.config.on_error, str) else self.config.on_error
        return [
            [self._rewarded(reply, shaped, failed) for key in own for reply in replies[key]]
            for own in keys
        ]

    def score(
        self,
        items: Sequence[tuple[str, str, str]],
        *,
        shaped: bool = True,
        failed: float | None = None,
    ) -> np.ndarray:
        """float32 [n] rewards of (prompt, response, label), each a group of its own: see
        score_episodes.
        """
        found = self.score_episodes(
            [[Episode(*item)] for item in items], shaped=shaped, failed=failed
        )
        return np.array([rewarded.reward for (rewarded,) in found], np.float32)

    def totals(self) -> dict[str, float]:
        """Metric -> count since the pool was made."""
        counted = {kind: self.counters[kind] for kind in ("unformatted", *KINDS)}
        counted["responses"] = self.counters["scored"] + sum(self.counters[kind] for kind in KINDS)
        return {f"reward/{name}_total": float(count) for name, count in counted.items()}

    def _calls(self, group: Sequence[Episode]) -> list[Call]:
        """The calls that score a group."""
        if self._form == "group":
            return [tuple(group)] if group else []
        return [(episode,) for episode in group]

    def _item(self, call: Call) -> list:
        if self._form == "texts":
            return [call[0].prompt, call[0].response, call[0].label]
        return [episode.to_json() for episode in call]

    def _key(self, call: Call) -> str:
        """Equal for equal calls: responses of a group are often equal."""
        return json.dumps(self._item(call))

    def _check(self, *, is_last: bool) -> None:
        """Raise RewardError where the run must stop."""
        calls = self._unchecked
        pairs = [pair for call, found in calls for pair in zip(call, found, strict=True)]
        failures = [(episode, reply) for episode, reply in pairs if "failed" in reply]
        if failures and self.config.on_error == "raise":
            text, where = describe_failure(*failures[0]), frames(failures[0][1])
            raise RewardError(f"{text}; reward.on_error = raise stops the run{where}")
        if not is_last:
            return
        self._unchecked, has_worked = [], self._has_worked
        if not calls:
            return
        self._has_worked = [reply["failed"] for _, reply in failures] != ["errors"] * len(pairs)
        of_one_prompt = len({episode.prompt for episode, _ in pairs}) == 1
        if len(pairs) > 1 and not self._has_worked and not (of_one_prompt and has_worked):
            last = failures[-1][1]
            raise RewardError(
                f"reward.function = {self.config.function!r} failed on all {len(pairs)} responses:"
                f" {last['why']}{frames(last)}"
            )

    def _rewarded(self, reply: Reply, shaped: bool, failed: float) -> Rewarded:
        if "failed" in reply:
            self.counters[reply["failed"]] += 1
            return Rewarded(failed)
        self.counters["scored"] += 1
        self.counters["unformatted"] += not reply["formatted"]
        penalty = self.config.format_penalty * (shaped and not reply["formatted"])
        return Rewarded(reply["score"] - penalty, reply["metrics"])

    async def _connect(self) -> None:
        await asyncio.gather(*(worker.connect() for worker in self._workers))

    async def _ask_all(self, calls: Mapping[str, Call], replies: dict[str, list[Reply]]) -> None:
        await self._connect()
        waiting, suspects = deque(calls), deque[str]()
        slots = range(len(self._workers))
        await asyncio.gather(
            *(
                self._ask(slot, calls, waiting, suspects, replies)
                for slot in slots
                for _ in range(self._num_calls)
            )
        )
        await asyncio.gather(
            *(self._ask(slot, calls, suspects, suspects, replies) for slot in slots)
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

        suspects: what was running, with others, in a worker that was lost.
        """
        while waiting:
            key = waiting.popleft()
            worker = self._workers[slot]
            try:
                with self.trace.span(
                    "score", "reward", thread="reward", key=str(next(self._number)), worker=slot
                ):
                    found = await worker.call(self._item(calls[key]))
            except WorkerLost as lost:
                self._replace(slot, worker)
                if not lost.was_alone and waiting is not suspects:  # those are asked one at a time
                    suspects.append(key)
                    continue
                found = [lost.failure] * len(calls[key])
            replies[key] = found
            for episode, reply in zip(calls[key], found, strict=True):
                if "failed" not in reply:
                    continue
                if self.config.on_error == "raise":
                    # the other workers end their call: their connections stay usable
                    waiting.clear()
                    suspects.clear()
                self._log(episode, reply)
                if reply["failed"] == "memory":
                    worker.lose(reply, is_known=True)
                    self._replace(slot, worker)

    def _replace(self, slot: int, lost: Worker) -> None:
        """Once, where several calls were running in it."""
        if self._workers[slot] is lost:
            self._workers[slot] = Worker(self.config, self.hidden_env)

    def _log(self, episode: Episode, reply: Failure) -> None:
        kind = reply["failed"]
        self._logged[kind] += 1
        if self._logged[kind] <= SHOWN:
            text, on_error = describe_failure(episode, reply), self.config.on_error
            logger.warning(
                "reward of %s; it gets reward.on_error = %s%s", text, on_error, frames(reply)
            )
        # 10, 100, ...: a line each would bury everything else
        elif str(self._logged[kind]).strip("0") == "1":
            logger.warning(
                "reward: %d responses so far: %s (%s)", self._logged[kind], kind, KINDS[kind]
            )


def describe_failure(episode: Episode, reply: Failure) -> str:
    kind = reply["failed"]
    return (
        f"response {episode.response[-80:]!r}, label {episode.label[:80]!r}: {kind}"
        f" ({KINDS[kind]}): {reply['why']}"
    )
