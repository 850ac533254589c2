"""State of one call of RolloutClient.fill: its tasks, its requests in flight, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Literal, Protocol

import aiohttp

from megatron_rl.launch.trace import OFF, Trace
from megatron_rl.rollout.client.clock import Alarm, Clock
from megatron_rl.rollout.client.counters import CallStats, RolloutCounters, drop_older
from megatron_rl.rollout.client.load_balancer import ServerState
from megatron_rl.rollout.client.request import ABORT_SECONDS, abort
from megatron_rl.rollout.client.sampling import Sampling
from megatron_rl.rollout.group import Group

Tasks = set[asyncio.Task[None]]
Ending = Literal["drain", "abort"]
"""Ways to end an open call.  drain: groups in progress are completed, the others are not started;
abort: every request is aborted, and the sampled part of its responses is kept."""


@dataclass(frozen=True)
class NewWeights:
    """Command of an open call: the servers have received new weights and kept their requests
    (rollout.weight_update = in_place).
    """

    version: int
    """Version of these weights, which sample the next requests."""
    oldest: int
    """Oldest version of a token that may be kept."""
    groups: Sequence[Group]
    """All groups that the call samples, and complete ones that it has sampled."""
    done: Callable[[], object]
    """Called in the thread of the call when no group has older tokens, except those whose requests
    are aborted for that reason."""


Commands = SimpleQueue[Sequence[Group] | NewWeights | Ending]
"""Further groups for an open call, new weights, and at last how it ends.  From any thread."""


SampleTurn = Callable[[Group], Awaitable[None]]
"""Fills a group of one response with the client's retries, deadlines and servers."""


class EpisodeSampler(Protocol):
    """The episodes of one call of the client."""

    async def fill(self, group: Group) -> None:
        """Sample the group's responses, each as an episode."""
        ...

    def check(self) -> None:
        """Raise RolloutError where all of several episodes failed."""
        ...


class Episodes(Protocol):
    """The interface of rollout/agents by which the client samples a response of several turns."""

    def adapt(self, sampling: Sampling) -> Sampling:
        """Return the settings with the tokens that end a turn."""
        ...

    def serving(self) -> AbstractAsyncContextManager[None]:
        """Keep what episodes share open, such as the endpoint."""
        ...

    def call(self, sampling: Sampling, sample: SampleTurn, call: Call) -> EpisodeSampler:
        """Return the episodes of one fill()."""
        ...


class GroupCancelled(Exception):
    """Enough other groups are complete: this one is not needed in this call."""


@dataclass(eq=False)
class Request:
    """A request in flight: the server may still answer it."""

    rid: str
    server: ServerState
    group: Group
    sampling: Sampling
    """The settings that it was sent with."""
    indexes: list[int]
    """Places in the group of the responses that it asks for."""
    timer: Alarm = field(init=False)
    """Calls `Call.cut` at its deadline, then at its next abort."""
    cut_by: Literal["", "deadline", "age"] = ""
    """Reason to abort it alone, before all others; "": it was not."""

    @property
    def num_samples(self) -> int:
        return len(self.indexes)

    @property
    def oldest_version(self) -> int:
        """The version than which no token of its responses, and no key or value that they attend
        to, is older.
        """
        prefixes = self.group.prefixes
        known = [prefixes[index] for index in self.indexes if index in prefixes]
        return min([self.sampling.policy_version, *(rollout.oldest_version for rollout in known)])


@dataclass
class Call:
    """One fill() call in progress."""

    http: aiohttp.ClientSession
    sampling: Sampling
    """Settings of the next requests."""
    get_stats: Callable[[], CallStats]
    counters: RolloutCounters
    keeps_parts: bool
    """Responses that an abort cut short are kept, to be continued."""
    trace: Trace = OFF
    clock: Clock = field(default_factory=Clock)
    """Clock of deadlines, which stands still while servers are paused and return nothing."""
    enough: bool = False
    """No more requests: those in flight are aborted."""
    drains: bool = False
    """No more groups: those in progress are completed."""
    is_over: bool = False
    """Every task is cancelled."""
    tasks: dict[asyncio.Task[None], Group] = field(default_factory=dict)
    """Task of every group that is sampled."""
    busy: Tasks = field(default_factory=set)
    """Tasks that wait for an answer or read it, without those that wait for a slot."""
    asking: Tasks = field(default_factory=set)
    """The busy tasks that wait for an answer."""
    in_flight: dict[str, Request] = field(default_factory=dict)
    """Requests that may still be answered, by id."""
    aborts: Tasks = field(default_factory=set)
    """Tasks that send an abort."""
    episodes: Tasks = field(default_factory=set)
    """Tasks that run agent.function."""

    @property
    def stats(self) -> CallStats:
        """The client's present record, which take_stats() replaces during a call."""
        return self.get_stats()

    async def follow(self, commands: Commands, begin: Callable[[Sequence[Group]], None]) -> Ending:
        """Obey commands until one ends the call, and return it.  Raises what a task raised."""
        waiting = None
        while True:
            # a thread waits: the queue is filled from other threads, and get() blocks
            waiting = waiting or asyncio.create_task(asyncio.to_thread(commands.get))
            await asyncio.wait([waiting, *self.tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in self.tasks if task.done()]:
                # its group may be trained on, and released, before the call ends
                del self.tasks[task]
                task.result()
            if waiting.done():
                command, waiting = waiting.result(), None
                if isinstance(command, str):
                    return command
                if isinstance(command, NewWeights):
                    begin(self.renew(command))
                    command.done()
                else:
                    begin(command)

    def renew(self, new: NewWeights) -> Sequence[Group]:
        """Abort the requests whose responses may be too old, drop responses that are too old, and
        return the groups that no task samples.
        """
        self.sampling = replace(self.sampling, policy_version=new.version)
        for request in self.in_flight.values():
            if request.oldest_version < new.oldest:
                self.cut(request, "age")
        running = [*self.tasks.values()]
        idle = [group for group in new.groups if group not in running]
        drop_older(idle, new.oldest, self.counters)
        # prefixes of running groups are dropped when their requests are answered
        drop_older(running, new.oldest, self.counters, has_request=True)
        return idle

    async def collect(self, seconds: float) -> None:
        """Abort every request in flight and read the answers that arrive within `seconds`."""
        self.enough = True
        deadline = self.clock() + seconds
        while (unfinished := {*self.busy, *self.aborts}) and self.clock() < deadline:
            # repeatedly, as an abort may overtake its request, but not in a pause: SGLang would not
            # find a request that came during it, and ignores a second abort
            for request in () if self.clock.is_paused else [*self.in_flight.values()]:
                self.abort(request)
            await asyncio.wait(unfinished | self.aborts, timeout=ABORT_SECONDS)
        if self.keeps_parts:
            lost = sum(request.num_samples for request in self.in_flight.values())
            self.counters.lost_samples += lost
            self.counters.redrawn_samples += lost
            if reading := self.busy - self.asking:  # an answer that has arrived is not lost
                await asyncio.wait(reading)

    async def drain(self) -> None:
        """Complete the groups in progress.  Raises what a task raised."""
        self.drains = True
        # not gather: a signal would cancel it with its tasks, and what they sampled would be lost
        if self.tasks:
            await asyncio.wait(self.tasks)
        for task in self.tasks:
            with suppress(GroupCancelled):
                task.result()

    async def end(self) -> None:
        """Cancel the tasks that still run."""
        self.is_over = True
        for task in (unfinished := [*self.tasks, *self.episodes, *self.aborts]):
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)

    def sampling_of(self, group: Group) -> Sampling:
        """Return the call's settings with the group's limit and stop tokens, where it has them, and
        its first row without a known route.
        """
        call = self.sampling
        return replace(
            call,
            first_row=group.first_row,
            max_tokens=call.max_tokens if group.max_tokens is None else group.max_tokens,
            stop_token_ids=list(dict.fromkeys([*call.stop_token_ids, *group.stop_token_ids])),
        )

    @contextmanager
    def sending(self, request: Request, seconds: float) -> Iterator[None]:
        """Register `request` as in flight inside the context; cut it short after `seconds`."""
        self.in_flight[request.rid] = request
        request.group.request_version = request.sampling.policy_version
        request.timer = self.clock.alarm(seconds, lambda: self.cut(request, "deadline"))
        try:
            yield
        finally:
            del self.in_flight[request.rid]
            request.timer.cancel()

    def cut(self, request: Request, why: Literal["deadline", "age"]) -> None:
        """Abort one request, repeatedly until it is answered: an abort may be lost."""
        request.cut_by = request.cut_by or why
        self.abort(request)
        request.timer.cancel()  # the deadline's, where the reason is age
        request.timer = self.clock.alarm(ABORT_SECONDS, lambda: self.cut(request, why))

    def abort(self, request: Request) -> None:
        """Send the abort of a request, in the background."""

        async def send() -> None:
            self.counters.aborts += 1
            confirmed = False
            try:
                confirmed = await abort(
                    self.http, request.server.url, request.rid, request.num_samples
                )
            finally:
                self.counters.aborts_failed += not confirmed

        task = asyncio.create_task(send())
        self.aborts.add(task)
        task.add_done_callback(self.aborts.discard)


@contextmanager
def among(tasks: Tasks) -> Iterator[None]:
    """Count the current task among `tasks` inside the context."""
    task = this_task()
    tasks.add(task)
    try:
        yield
    finally:
        tasks.discard(task)


def this_task() -> asyncio.Task[None]:
    task = asyncio.current_task()
    assert task is not None, "called outside a task"
    return task
