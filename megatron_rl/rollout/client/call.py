"""What one call of RolloutClient.fill keeps of its requests while they are in flight."""

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
from megatron_rl.rollout.client.request import ABORT_SECONDS, Sampling, abort
from megatron_rl.rollout.partial import PartialGroup

Tasks = set[asyncio.Task[None]]
Ending = Literal["drain", "abort"]
"""How an open call ends.  drain: groups in progress are completed, the others are not started;
abort: every request is aborted, and what there is of its responses is kept."""


@dataclass(frozen=True)
class NewWeights:
    """The servers have other weights since, and kept their requests (rollout.weight_update =
    in_place).

    version: of these weights, which sample the next requests; oldest: of the tokens that may be
    kept.  groups: all that the call samples, and complete ones that it sampled.  done: called, in
    the thread of the call, when no group of them has older tokens except those whose requests are
    aborted for it.
    """

    version: int
    oldest: int
    groups: Sequence[PartialGroup]
    done: Callable[[], object]


Commands = SimpleQueue[Sequence[PartialGroup] | NewWeights | Ending]
"""Further groups for an open call, new weights, and at last how it ends.  From any thread."""


SampleTurn = Callable[[PartialGroup], Awaitable[None]]
"""Fills a group of one response: the client's retries, deadlines and servers."""


class EpisodeSampler(Protocol):
    """The episodes of one call of the client."""

    async def fill(self, group: PartialGroup) -> None: ...
    def check(self) -> None: ...


class Episodes(Protocol):
    """What the client needs of rollout/agents to sample a response of several turns."""

    def adapt(self, sampling: Sampling) -> Sampling: ...
    def serving(self) -> AbstractAsyncContextManager[None]: ...
    def call(self, sampling: Sampling, sample: SampleTurn, call: Call) -> EpisodeSampler: ...


class GroupCancelled(Exception):
    """Enough other groups are complete: this one is not needed in this call."""


@dataclass(eq=False)
class Request:
    """In flight: it may still be answered.

    sampling: as it was sent.  indexes: of the responses that it asks for.  timer: of its deadline,
    or of the next abort.
    cut_by: why it was aborted by itself, before all others are.
    """

    rid: str
    server: ServerState
    group: PartialGroup
    sampling: Sampling
    indexes: list[int]
    timer: Alarm = field(init=False)
    cut_by: Literal["", "deadline", "age"] = ""

    @property
    def num_samples(self) -> int:
        return len(self.indexes)

    @property
    def oldest_version(self) -> int:
        """No token of its responses, and no key or value that they attend to, is of older weights."""
        known = [
            self.group.prefixes[index] for index in self.indexes if index in self.group.prefixes
        ]
        return min([self.sampling.policy_version, *(rollout.oldest_version for rollout in known)])


@dataclass
class Call:
    """One fill() call in progress.

    tasks       of the groups that are sampled
    enough      no more requests: what is in flight is aborted; drains: no more groups; is_over:
                every task is cancelled
    keeps_parts  responses that an abort cut short are kept, to be continued
    busy        tasks that wait for an answer or read it, not for their turn; asking: those that
                wait for it
    in_flight   requests that may still be answered, by id
    episodes    tasks of agent.function
    clock       of deadlines: a paused server returns nothing
    """

    http: aiohttp.ClientSession
    sampling: Sampling
    get_stats: Callable[[], CallStats]
    counters: RolloutCounters
    keeps_parts: bool
    trace: Trace = OFF
    clock: Clock = field(default_factory=Clock)
    enough: bool = False
    drains: bool = False
    is_over: bool = False
    tasks: dict[asyncio.Task[None], PartialGroup] = field(default_factory=dict)
    busy: Tasks = field(default_factory=set)
    asking: Tasks = field(default_factory=set)
    in_flight: dict[str, Request] = field(default_factory=dict)
    aborts: Tasks = field(default_factory=set)
    episodes: Tasks = field(default_factory=set)

    @property
    def stats(self) -> CallStats:
        """Those of now: the client's are taken while the call is in progress."""
        return self.get_stats()

    async def first_to_finish(
        self, groups: Sequence[PartialGroup], keep: int
    ) -> list[PartialGroup]:
        """Wait for `keep` complete groups and for all that are due; return `keep`, those that are
        due before others.

        They are in the order of `groups`.  Raises what a task raised.
        """
        complete = [group for group in groups if group.is_complete]
        waiting = set(self.tasks)
        while len(complete) < keep or not all(
            group.is_complete for group in groups if group.is_due
        ):
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in [
                task for task in self.tasks if task in done
            ]:  # a set has no order: `tasks` makes ties repeatable
                task.result()
                complete.append(self.tasks[task])
        complete = sorted(complete, key=lambda group: not group.is_due)[:keep]
        return [group for group in groups if group in complete]

    async def follow(
        self, commands: Commands, begin: Callable[[Sequence[PartialGroup]], None]
    ) -> Ending:
        """Sample what is added until a command ends the call.  Raises what a task raised."""
        command = None
        while True:
            command = command or asyncio.create_task(asyncio.to_thread(commands.get))
            await asyncio.wait([command, *self.tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in self.tasks if task.done()]:
                # its group may be trained on, and released, before the call ends
                del self.tasks[task]
                task.result()
            if command.done():
                given, command = command.result(), None
                if isinstance(given, str):
                    return given
                if isinstance(given, NewWeights):
                    begin(self.renew(given))
                    given.done()
                else:
                    begin(given)

    def renew(self, new: NewWeights) -> Sequence[PartialGroup]:
        """Abort the requests whose responses may be too old, drop what is; returns the groups that
        nothing samples.
        """
        self.sampling = replace(self.sampling, policy_version=new.version)
        for request in self.in_flight.values():
            if request.oldest_version < new.oldest:
                self.cut(request, "age")
        running = [*self.tasks.values()]
        idle = [group for group in new.groups if group not in running]
        drop_older(idle, new.oldest, self.counters)
        # the others when their requests are answered
        drop_older(running, new.oldest, self.counters, is_asked=True)
        return idle

    async def collect(self, seconds: float) -> None:
        """Abort every request in flight and read the answers that come within `seconds`."""
        self.enough = True
        deadline = self.clock() + seconds
        while (unfinished := {*self.busy, *self.aborts}) and self.clock() < deadline:
            # again: an abort may overtake its request. Not in a pause: SGLang would not find a
            # request that came during it, and ignores a second abort
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
        # not gather: a signal would cancel it with its tasks, and lose what they have sampled
        if self.tasks:
            await asyncio.wait(self.tasks)
        for task in self.tasks:
            with suppress(GroupCancelled):
                task.result()

    async def end(self) -> None:
        """Cancel what still runs."""
        self.is_over = True
        for task in (unfinished := [*self.tasks, *self.episodes, *self.aborts]):
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)

    def sampling_of(self, group: PartialGroup) -> Sampling:
        """With the group's own limit and stop tokens, where it has them, and the rows that are
        known.
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
        """`request` is in flight inside; after `seconds` it is cut short."""
        self.in_flight[request.rid] = request
        request.group.sent_to = request.sampling.policy_version
        request.timer = self.clock.alarm(seconds, lambda: self.cut(request, "deadline"))
        try:
            yield
        finally:
            del self.in_flight[request.rid]
            request.timer.cancel()

    def cut(self, request: Request, why: Literal["deadline", "age"]) -> None:
        """Abort a request by itself, again and again until it is answered: an abort may be lost."""
        request.cut_by = request.cut_by or why
        self.abort(request)
        request.timer.cancel()  # of the deadline
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
    """The current task is one of `tasks` inside."""
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
