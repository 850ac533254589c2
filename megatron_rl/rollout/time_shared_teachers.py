"""Teachers whose servers have GPU memory only while they score ([teachers.NAME] release_memory).

At most one of them is awake, between the end of a step's sampling and the step's first pass:

    sampling --release_servers--> wake A, score, release A, wake B, score --> trainer: release B

Rank 0 started the servers, and makes the calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch.distributed as dist

from megatron_rl.distributed import from_rank_0
from megatron_rl.rollout.server.server_info import ServerError
from megatron_rl.weights.sync.servers import TO_LOAD, TO_SERVE, Servers, WeightPushError

MOST_DIFFERENCE = 0.1
"""Largest mean difference, in nats per token, of two log-probs of one text by the same weights:
rounding that depends on batches and caches is smaller, other weights give more."""


class SleepingTeacher:
    """The server of one teacher.  It is awake at first."""

    def __init__(self, name: str, servers: Servers, probe: Callable[[], np.ndarray | None]) -> None:
        """probe: returns the server's log-probs of a text; None where there is no text."""
        self.name, self.servers, self.probe = name, servers, probe
        self.expected = probe()

    def release(self) -> None:
        """Let the server free its GPU memory.  Raises ServerError."""
        try:
            self.servers.release_memory()
        except WeightPushError as error:
            raise ServerError(f"teacher {self.name} did not release its memory: {error}") from error

    def wake(self) -> None:
        """Let the server allocate its memory again, with the weights that it had.

        Raises ServerError where it does not answer, or scores the text in another way than before.
        """
        try:
            for tags in (TO_LOAD, TO_SERVE):
                self.servers.resume_memory(tags, self.servers.urls)
            self.servers.continue_serving()
            values = self.probe()
        except (WeightPushError, ServerError) as error:
            raise ServerError(f"teacher {self.name} did not wake: {error}") from error
        if self.expected is None or values is None:
            return
        difference = float(np.abs(values - self.expected).mean())
        if not difference <= MOST_DIFFERENCE:
            raise ServerError(
                f"teacher {self.name}: {self.servers.urls[0]} has other weights since it got its"
                f" memory back: log-probs of one text differ by {difference:.3g} nats a token on"
                f" average, must be at most {MOST_DIFFERENCE:g}; look at its log, or set"
                f" teachers.{self.name}.release_memory = false"
            )


def no_seconds() -> dict[str, float]:
    return {"teacher/turn_seconds": 0.0, "teacher/switch_seconds": 0.0}


@dataclass
class TimeSharedTeachers:
    """The teachers that share GPUs, as one rank sees them: at most one has its memory at a time.

    Every method is collective.
    """

    names: tuple[str, ...]
    sleepers: Mapping[str, SleepingTeacher]
    """The teachers of `names` on rank 0, none on others."""
    group: dist.ProcessGroup | None = None
    """All ranks, over gloo (Parallel.host_group)."""
    awake: str = ""
    """Name of the teacher that has its memory, "" for none."""
    seconds: dict[str, float] = field(default_factory=no_seconds)
    """Metric -> seconds of the step in progress."""

    def wake(self, name: str) -> None:
        """Give this teacher its memory, after the one before has released its own."""
        self.release()
        with self.timed("teacher/switch_seconds"):
            from_rank_0(lambda: self.sleepers[name].wake(), self.group)
        self.awake = name

    def release(self) -> None:
        """Take the memory of the teacher that has it, if one has."""
        if not (name := self.awake):
            return
        with self.timed("teacher/switch_seconds"):
            from_rank_0(lambda: self.sleepers[name].release(), self.group)
        self.awake = ""

    @contextmanager
    def timed(self, metric: str) -> Iterator[None]:
        """Add the seconds inside to a metric of the step."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[metric] += time.monotonic() - start

    def take_seconds(self) -> dict[str, float]:
        """Return the metrics of the step in progress, and begin the next."""
        taken, self.seconds = self.seconds, no_seconds()
        return taken
