"""The trainer's own Scheduler (rollout/scheduler.py) on the simulated clock of sampling_model.py.

Only what is below the Scheduler is simulated: Inference, client and servers.  A Rollout is a record
of the real class whose "tokens" are the numbers of tokens of its segments, one per weight version,
so that the Scheduler finds versions where it looks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.sampling_model import Key, Record, Response, Servers, Speed, Workload
from megatron_rl.config import load_config
from megatron_rl.data.prompts import PromptSource
from megatron_rl.records import Prompt, Rollout
from megatron_rl.rollout.client.counters import CallStats, RolloutCounters, drop_older
from megatron_rl.rollout.group import Group
from megatron_rl.rollout.scheduler import Sampled, Scheduler

PARALLEL = SimpleNamespace(
    dp_rank=0, dp_size=1, rank=0, device=torch.device("cpu"), node=SimpleNamespace(is_alone=True)
)
Settings = Mapping[str, object]
"""Settings of [rollout]."""


class SimulatedInference:
    """Replaces Inference: one open or closed task at a time, over simulated servers.  See
    RolloutClient.fill.

    concurrency: groups in progress at a time (rollout.max_concurrency).
    """

    time_shared_teachers = None  # no teacher shares GPUs

    def __init__(self, workload: Workload, speed: Speed, concurrency: int) -> None:
        self.workload, self.concurrency = workload, concurrency
        self.servers = Servers(speed, self._finished)
        self.client = SimpleNamespace(counters=RolloutCounters(), take_stats=CallStats)
        self.pending: list[Group] | None = None
        self.of: dict[int, Group] = {}  # in flight, by prompt
        self.asked: dict[Key, Response] = {}  # in flight
        self.queue: list[Group] = []  # not requested yet
        self.version, self.has_news = 0, True

    def start(
        self, groups: list[Group], *, keep: int | None, is_open: bool, **settings: object
    ) -> None:
        self.pending, self.keep, self.is_open = [], len(groups) if keep is None else keep, is_open
        self.version = self.servers.version
        self.add(groups)

    def add(self, groups: list[Group]) -> None:
        assert self.pending is not None
        self.pending += groups
        self.queue += [group for group in groups if not group.is_complete]
        self._begin()

    def renew(self, groups: list[Group], oldest: int) -> None:
        """Abort, after a weight sync that kept the requests, those that may be too old, as
        Call.renew does.
        """
        if self.pending is None or self.version == self.servers.version:
            return
        self.version = self.servers.version
        for group in [*self.of.values()]:
            if any(group.has_oldest_version(version) for version in range(oldest)):
                for response in [
                    response
                    for response in self.asked.values()
                    if self.of[response.key[0]] is group
                ]:
                    self.servers.remove(response)
                    self._put(response, "abort")
        drop_older(groups, oldest, self.client.counters)
        waiting = [
            group for group in groups if group.request_version is None and not group.is_complete
        ]
        self.queue = [*(group for group in waiting if group not in self.queue), *self.queue]
        self._begin()

    def wait(self, version: int, show: Callable[[], None], is_enough: Callable[[], bool]) -> None:
        enough = is_enough if self.is_open else self._is_filled
        self.has_news = True
        self.servers.advance(is_enough=lambda: self.has_news and (enough() or self._seen()))
        if not self.is_open:
            self._cut()

    def end(self, how: str) -> None:
        if how == "drain":
            self.queue = []
            self.servers.advance(is_enough=lambda: not self.of)
        self._cut()

    def _seen(self) -> bool:
        """Skip to the completion of the next group: nothing changes before."""
        self.has_news = False
        return False

    def _is_filled(self) -> bool:
        groups = self.pending or []
        enough = sum(group.is_complete for group in groups) >= self.keep
        return enough and all(group.is_complete for group in groups if group.is_due)

    def _begin(self) -> None:
        while self.queue and len(self.of) < self.concurrency:
            group = self.queue.pop(0)
            number = int(group.prompt.id)
            self.of[number], group.request_version = group, self.servers.version
            lengths = self.workload.lengths(number)
            for index in group.missing:
                prefix = group.prefixes.get(index)
                response = Response(
                    (number, index), lengths[index], [] if prefix is None else segments_of(prefix)
                )
                self.asked[response.key] = response
                self.servers.submit(response)

    def _put(self, response: Response, reason: str) -> None:
        """Answer the request of a group when all its responses are complete."""
        del self.asked[response.key]
        number, index = response.key
        group = self.of[number]
        if response.segments:
            group.put(index, rollout_of(response, reason))
        if not any(other == number for other, _ in self.asked):
            del self.of[number]
            group.request_version = None

    def _finished(self, response: Response) -> None:
        group = self.of[response.key[0]]
        self._put(response, "stop")
        if group.request_version is None:
            self.has_news = True
            # a response of an earlier request was too old
            self.queue[:0] = [] if group.is_complete else [group]
            self._begin()

    def _cut(self) -> None:
        for response in self.servers.stop():
            self._put(response, "abort")
        self.pending, self.queue = None, []


def rollout_of(response: Response, reason: str) -> Rollout:
    number, index = response.key
    versions, tokens = zip(*response.segments, strict=True)
    return Rollout(
        id=f"{number}/{index}",
        tokens=np.array([0, *tokens]),
        prompt_length=1,
        rollout_logprobs=np.zeros(len(tokens), np.float32),
        routed_experts=None,
        finish_reason=reason,  # type: ignore[arg-type]
        policy_versions=np.array(versions, np.int32),
    )


def segments_of(rollout: Rollout) -> list[tuple[int, float]]:
    return list(zip(rollout.policy_versions.tolist(), rollout.tokens[1:].tolist(), strict=True))


@contextmanager
def one_rank() -> Iterator[None]:
    """Replace the Scheduler's sums over ranks."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Run:
    """`workload.steps` steps of the loop of train.py, with the settings of [rollout]; `record`
    afterwards.
    """

    def __init__(
        self, workload: Workload, speed: Speed, settings: Settings, concurrency: int | None = None
    ) -> None:
        sections = {
            "run": {
                "num_steps": workload.steps,
                "prompts_per_step": workload.prompts,
                "group_size": workload.group,
            },
            "model": {"path": "unused"},
            "data": {"train": "unused"},
            "replay": {"mode": "none", "measure": False},
            "rollout": dict(settings),
        }
        self.workload, self.cfg, self.record = (
            workload,
            load_config(None, [], sections),
            Record(workload),
        )
        ahead, over = self.cfg.rollout.steps_ahead, self.cfg.rollout.over_sample
        longest_queue = int(workload.prompts * (1 + ahead + over)) + 1
        self.inference = SimulatedInference(workload, speed, concurrency or longest_queue)
        prompts = [
            Prompt(str(number), "", (0,), "")
            for number in range(workload.prompts * (workload.steps + 2 + ahead) * 2)
        ]
        self.source = PromptSource(prompts, seed=0, shuffle=False)
        self.scheduler = Scheduler(
            self.cfg, PARALLEL, self.inference, self.source, [1],
            lambda *_: nullcontext(lambda amount: None)
        )  # fmt: skip

    def run(self) -> Record:
        servers, record = self.inference.servers, self.record
        for step in range(self.workload.steps):
            began = servers.clock
            sampled = self.scheduler.take(step, step)
            record.idle += servers.clock - began
            record.dropped += len(self.scheduler.removed) - len(sampled.groups)  # by over_sample
            trained = servers.clock + record.train(responses_of(sampled), step)
            servers.advance(trained)
            self.scheduler.prepare_sync()  # drains, cuts responses short, or keeps requests
            record.idle += servers.clock - trained
            servers.pause(self.workload.sync)
            servers.next_version()
            self.scheduler.step_done()
            record.step_done(servers.clock)
        record.running = servers.busy / servers.clock
        record.stale = self.inference.client.counters.stale_samples
        waiting = [int(prompt.id) for prompt in (*self.scheduler.queue, *self.source.returned)]
        record.check(range(self.source.position), waiting, self.cfg.rollout.max_staleness)
        return record


def responses_of(sampled: Sampled) -> list[tuple[tuple[int, int], list[tuple[int, float]]]]:
    return [
        ((int(group.prompt.id), index), segments_of(rollout))
        for group in sampled.groups
        for index, rollout in enumerate(group.rollouts)
    ]


def simulate(
    workload: Workload, speed: Speed, settings: Settings, concurrency: int | None = None
) -> Record:
    with one_rank():
        return Run(workload, speed, settings, concurrency).run()


def with_update_share(workload: Workload, speed: Speed, share: float = 0.2) -> Workload:
    """Return `workload` with updates that take this share of a synchronous step without its weight
    sync.
    """
    record = simulate(replace(workload, update=0.0), speed, {})
    sampling = record.seconds - workload.steps * workload.sync
    return replace(workload, update=sampling / record.tokens * share / (1 - share))
