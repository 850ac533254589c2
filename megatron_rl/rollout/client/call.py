"""What one call of RolloutClient.fill keeps of its requests while they are in flight."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Literal

import aiohttp

from megatron_rl.launch.trace import OFF, Trace
from megatron_rl.rollout.client.counters import CallStats, RolloutCounters
from megatron_rl.rollout.client.load_balancer import ServerState
from megatron_rl.rollout.client.request import ABORT_SECONDS, Sampling, abort
from megatron_rl.rollout.partial import PartialGroup

Tasks = set[asyncio.Task[None]]
Ending = Literal["drain", "abort"]
"""How an open call ends.  drain: groups in progress are completed, the others are not started; abort: every request is
aborted, and what there is of its responses is kept."""
Commands = SimpleQueue[Sequence[PartialGroup] | Ending]
"""Further groups for an open call, and at last how it ends.  From any thread."""


class GroupCancelled(Exception):
    """Enough other groups are complete: this one is not needed in this call."""


@dataclass
class Call:
    """One fill() call in progress.

    tasks       of the groups that are sampled
    enough      no more requests: what is in flight is aborted; drains: no more groups
    keeps_parts  responses that an abort cut short are kept, to be continued
    busy        tasks that wait for an answer or read it, not for their turn; asking: those that wait for it
    in_flight   request id -> (server, number of samples) that may still be answered
    episodes    tasks of agent.function
    late        requests that were aborted at their deadline
    """

    http: aiohttp.ClientSession
    sampling: Sampling
    get_stats: Callable[[], CallStats]
    counters: RolloutCounters
    keeps_parts: bool
    trace: Trace = OFF
    enough: bool = False
    drains: bool = False
    tasks: dict[asyncio.Task[None], PartialGroup] = field(default_factory=dict)
    busy: Tasks = field(default_factory=set)
    asking: Tasks = field(default_factory=set)
    in_flight: dict[str, tuple[ServerState, int]] = field(default_factory=dict)
    aborts: Tasks = field(default_factory=set)
    episodes: Tasks = field(default_factory=set)
    late: set[str] = field(default_factory=set)

    @property
    def stats(self) -> CallStats:
        """Those of now: the client's are taken while the call is in progress."""
        return self.get_stats()

    async def first_to_finish(self, groups: Sequence[PartialGroup], keep: int) -> list[PartialGroup]:
        """Wait for `keep` complete groups and for all with `must`; return `keep`, those with `must` before others.

        They are in the order of `groups`.  Raises what a task raised.
        """
        complete = [group for group in groups if group.is_complete]
        waiting = set(self.tasks)
        while len(complete) < keep or not all(group.is_complete for group in groups if group.must):
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in [
                task for task in self.tasks if task in done
            ]:  # a set has no order: `tasks` makes ties repeatable
                task.result()
                complete.append(self.tasks[task])
        complete = sorted(complete, key=lambda group: not group.must)[:keep]
        return [group for group in groups if group in complete]

    async def follow(self, commands: Commands, begin: Callable[[Sequence[PartialGroup]], None]) -> Ending:
        """Sample what is added until a command ends the call.  Raises what a task raised."""
        command = None
        while True:
            command = command or asyncio.create_task(asyncio.to_thread(commands.get))
            await asyncio.wait([command, *self.tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in self.tasks if task.done()]:
                del self.tasks[task]  # its group may be trained on, and released, before the call ends
                task.result()
            if command.done():
                given, command = command.result(), None
                if isinstance(given, str):
                    return given
                begin(given)

    async def collect(self, seconds: float) -> None:
        """Abort every request in flight and read the answers that come within `seconds`."""
        self.enough = True
        deadline = time.monotonic() + seconds
        while (unfinished := {*self.busy, *self.aborts}) and time.monotonic() < deadline:
            for rid, (server, num_samples) in [*self.in_flight.items()]:  # again: an abort may overtake its request
                self.abort(server, rid, num_samples)
            await asyncio.wait(unfinished | self.aborts, timeout=ABORT_SECONDS)
        if self.keeps_parts:
            lost = sum(num_samples for _, num_samples in self.in_flight.values())
            self.counters.lost_samples += lost
            self.counters.redrawn_samples += lost
            if reading := self.busy - self.asking:  # an answer that has arrived is not lost
                await asyncio.wait(reading)

    async def drain(self) -> None:
        """Complete the groups in progress.  Raises what a task raised."""
        self.drains = True
        if self.tasks:  # not gather: a signal would cancel it with its tasks, and lose what they have sampled
            await asyncio.wait(self.tasks)
        for task in self.tasks:
            with suppress(GroupCancelled):
                task.result()

    def sampling_of(self, group: PartialGroup) -> Sampling:
        """With the group's own limit and stop tokens, where it has them, and the rows that are known."""
        call = self.sampling
        return replace(
            call,
            first_row=group.first_row,
            max_tokens=call.max_tokens if group.max_tokens is None else group.max_tokens,
            stop_token_ids=list(dict.fromkeys([*call.stop_token_ids, *group.stop_token_ids])),
        )

    def abort(self, server: ServerState, rid: str, num_samples: int) -> None:
        """Send the abort of a request, in the background."""

        async def send() -> None:
            self.counters.aborts += 1
            confirmed = False
            try:
                confirmed = await abort(self.http, server.url, rid, num_samples)
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
    if task is None:
        raise RuntimeError("called outside a task")
    return task
