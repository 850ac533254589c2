"""What one call of RolloutClient.fill keeps of its requests while they are in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from megatron_rl.rollout.client.counters import CallStats
from megatron_rl.rollout.client.load_balancer import ServerState
from megatron_rl.rollout.client.request import Sampling


class GroupCancelled(Exception):
    """Enough other groups are complete: this one is given up."""


@dataclass
class Call:
    """One generate() call in progress.  in_flight: request id -> (server, number of samples) that still may answer."""

    http: httpx.AsyncClient
    sampling: Sampling
    stats: CallStats
    enough: bool = False
    keeps_parts: bool = False  # what an abort cut short is kept, to be continued
    busy: set[asyncio.Task[None]] = field(
        default_factory=set
    )  # asking, or taking in an answer: not waiting for its turn
    asking: set[asyncio.Task[None]] = field(default_factory=set)
    in_flight: dict[str, tuple[ServerState, int]] = field(default_factory=dict)
    aborts: set[asyncio.Task[None]] = field(default_factory=set)
    late: set[str] = field(default_factory=set)  # requests that were aborted at their deadline


@contextmanager
def among(tasks: set[asyncio.Task[None]]) -> Iterator[None]:
    """The current task is one of `tasks` meanwhile."""
    task = this_task()
    tasks.add(task)
    try:
        yield
    finally:
        tasks.discard(task)


def this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None, "called outside a task"
    return task


def is_empty(sample: Any) -> bool:
    return isinstance(sample, dict) and sample.get("output_ids") == []
