"""Heartbeats: what every rank says of itself, and which ranks keep the others waiting."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import psutil
import torch
from torch.distributed import DistError

from megatron_rl.launch.status import names

NOT_STARTED, LOADING, ENDED, FAILED = "start-up", "loading", "ended", "failed"
CUT_OFF = "a collective that lost its peer"
"""Stages that the watchdog treats differently from those of a step."""


class RankState(NamedTuple):
    """State of a rank's main thread.

    One attribute of the watchdog has all of it, so that its thread never sees half of a change.
    """

    entered: int
    """Stages entered so far; every rank enters them in the same order."""
    stage: str
    step: int
    """Counted from 0; -1 outside steps."""
    since: float
    """time.monotonic() at the beginning of the stage."""
    memory: int = 0
    """Bytes in use at the beginning of the stage."""

    @property
    def where(self) -> str:
        return f"{self.stage} of step {self.step + 1}" if self.step >= 0 else self.stage


@dataclass(frozen=True)
class Heartbeat:
    """A rank's report in the job's store: JSON of these fields, in this order."""

    count: int
    """Heartbeats of this rank so far."""
    entered: int
    """Stages entered so far."""
    stage: str
    where: str
    """The stage and its step, for people."""
    seconds: float
    """Time in this stage."""
    message: str
    """The error of a rank that failed, or the servers that a running rank waits for."""
    host: str
    memory: int = 0
    """Bytes in use: on the rank's GPU by torch's allocator, without a GPU resident bytes."""


def memory_in_use() -> int:
    """Return the bytes that torch has allocated on this thread's GPU.

    Without a GPU they are the resident bytes of the process.
    """
    if torch.cuda.is_initialized():
        return torch.cuda.memory_allocated()
    return psutil.Process().memory_info().rss


def find_stalled(beats: Mapping[int, Heartbeat], stage_seconds: float) -> str | None:
    """Name the ranks that keep the others waiting, where one has been in a stage for too long.

    Ranks that have ended count as ahead.  Loading weights has no limit: ranks that load are named
    only where others wait for them.
    """
    running = {
        rank: beat for rank, beat in beats.items() if beat.stage not in (ENDED, FAILED, CUT_OFF)
    }
    limited = [beat for beat in running.values() if beat.stage not in (NOT_STARTED, LOADING)]
    if not any(beat.seconds > stage_seconds for beat in limited):
        return None
    # ranks enter the same stages in one order: the slow ones keep the others waiting
    least = min(beat.entered for beat in running.values())
    late = {rank: beat for rank, beat in running.items() if beat.entered == least}
    where = next(iter(late.values())).where
    waits = "".join(
        f"; rank {rank} waits for {beat.message}" for rank, beat in late.items() if beat.message
    )
    if len(late) == len(beats):
        return (
            f"every rank has been in {where} for more than {stage_seconds:.0f} s: a call in it"
            f" hangs{waits}"
        )
    seconds = max(beat.seconds for beat in late.values())
    others = stages_of_ranks(beats, late)
    return (
        f"{names(late)} still in {where} after {seconds:.0f} s, and the others wait:"
        f" {others}{waits}"
    )


def lost_peer(error: BaseException) -> bool:
    """Return True where the error says that a connection broke or a peer did not answer.

    Collectives and the job's store raise such errors.
    """
    return isinstance(error, DistError) or (
        # gloo raises plain RuntimeErrors, which name its source files
        isinstance(error, RuntimeError) and "/gloo/" in str(error)
    )


def stages_of_ranks(beats: Mapping[int, Heartbeat], without: Collection[int]) -> str:
    """List the ranks by the stage they are in, except those in `without`."""
    ranks_at: dict[str, list[int]] = {}
    for rank, beat in beats.items():
        if rank not in without:
            ranks_at.setdefault(beat.where, []).append(rank)
    return ", ".join(f"{names(ranks)} in {where}" for where, ranks in ranks_at.items())
