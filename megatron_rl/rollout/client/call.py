"""What one call of RolloutClient.fill keeps of its requests while they are in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import aiohttp

from megatron_rl.rollout.client.counters import CallStats, RolloutCounters
from megatron_rl.rollout.client.load_balancer import ServerState
from megatron_rl.rollout.client.request import Sampling, abort
from megatron_rl.rollout.partial import PartialGroup

Tasks = set[asyncio.Task[None]]


class GroupCancelled(Exception):
    """Enough other groups are complete: this one is not needed in this call."""


@dataclass
class Call:
    """One fill() call in progress.

    enough      no more requests: what is in flight is aborted
    keeps_parts  responses that an abort cut short are kept, to be continued
    busy        tasks that wait for an answer or read it, not for their turn; asking: those that wait for it
    in_flight   request id -> (server, number of samples) that may still be answered
    episodes    tasks of agent.function
    late        requests that were aborted at their deadline
    """

    http: aiohttp.ClientSession
    sampling: Sampling
    stats: CallStats
    counters: RolloutCounters
    keeps_parts: bool
    enough: bool = False
    busy: Tasks = field(default_factory=set)
    asking: Tasks = field(default_factory=set)
    in_flight: dict[str, tuple[ServerState, int]] = field(default_factory=dict)
    aborts: Tasks = field(default_factory=set)
    episodes: Tasks = field(default_factory=set)
    late: set[str] = field(default_factory=set)

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
