"""The numbers of a step's merged trace: seconds of the stages on every rank, and the time that
ranks wait in collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from megatron_rl.launch.trace_file import LANES, RANKS, Event

ROLLOUT, OTHER = "rollout", "other"
SAMPLING = ("request", "episode")
"""Kinds of spans that count as sampling.

The client's call does not: an open one lasts until the next weight sync, with or without requests.
"""


@dataclass(frozen=True)
class RankTimes:
    """The seconds of one rank within the step."""

    rank: int
    step: float
    """Seconds of the step."""
    stages: Mapping[str, float]
    """Stage, or "other" -> seconds."""
    waits: Mapping[str, float]
    """Stage, or "other" -> seconds in collectives."""
    sampling: float
    """Seconds with a request or an episode of its replica in progress; 0 on all but leaders."""


@dataclass(frozen=True)
class TraceSummary:
    """The times of all ranks in a step."""

    step: int
    """Its number, from 1."""
    ranks: Sequence[RankTimes]

    @property
    def seconds(self) -> float:
        return max(rank.step for rank in self.ranks)

    @property
    def sampling(self) -> float:
        return max(rank.sampling for rank in self.ranks)

    @property
    def training(self) -> float:
        """Return the seconds of the stages that do not wait for the servers, on the rank with the
        most.
        """
        return max(
            sum(s for name, s in rank.stages.items() if name not in (ROLLOUT, OTHER))
            for rank in self.ranks
        )

    @property
    def other(self) -> float:
        """Return the largest share of a rank's step that is outside all stages."""
        return max(rank.stages[OTHER] / rank.step for rank in self.ranks)

    @property
    def of_ideal(self) -> float:
        """Return max(sampling, training) / step, which is 1 if the shorter of the two is entirely
        at the same time as the longer.
        """
        return max(self.sampling, self.training) / self.seconds

    def lines(self) -> Iterator[str]:
        """Yield the lines of a table with a row per stage, for any number of ranks."""
        yield f"step {self.step}: {self.seconds:.2f} s on {len(self.ranks)} rank(s)"
        yield (
            f"{'stage':<12}{'mean s':>9}{'share':>7}{'longest':>18}   in collectives:"
            f" {'most':>17}{'least':>18}"
        )
        for stage in self.ranks[0].stages:
            seconds = {rank.rank: rank.stages.get(stage, 0.0) for rank in self.ranks}
            waits = {rank.rank: rank.waits.get(stage, 0.0) for rank in self.ranks}
            mean = fmean(seconds.values())
            longest, most = (
                stage_names(of_rank, max(of_rank, key=of_rank.__getitem__))
                for of_rank in (seconds, waits)
            )
            least = stage_names(waits, min(waits, key=waits.__getitem__))
            yield (
                f"{stage:<12}{mean:>9.3f}{mean / self.seconds:>7.1%}{longest:>18}   {'':>15}"
                f" {most:>17}{least:>18}"
            )
        yield (
            f"sampling {self.sampling:.2f} s, training {self.training:.2f} s: the longer one is"
            f" {self.of_ideal:.2f} of the step (1: they overlap entirely); other {self.other:.1%}"
        )
        yield "The rank with the least time in collectives is the one that the others wait for."


def stage_names(of_rank: Mapping[int, float], rank: int) -> str:
    return f"{of_rank[rank]:.3f} (rank {rank})"


def summarize_trace(events: Sequence[Event]) -> TraceSummary:
    """Summarize a merged trace.  Raises ValueError if the step did not end."""
    of_rank: dict[int, list[Event]] = {}
    for event in events:
        if event["ph"] == "X" and (event["pid"] < RANKS or event["cat"] == "request"):
            # a request is in its server's process, on a thread of its rank
            rank = event["pid"] if event["pid"] < RANKS else event["tid"] // LANES
            of_rank.setdefault(rank, []).append(event)
    steps = {
        event["name"] for members in of_rank.values() for event in members if event["cat"] == "step"
    }
    if len(steps) != 1:
        raise ValueError(
            f"the trace holds the steps {sorted(steps)}, must be one: the run stopped in it"
        )
    return TraceSummary(
        int(steps.pop().split()[1]),
        [times_of(rank, members) for rank, members in sorted(of_rank.items())],
    )


def times_of(rank: int, events: Sequence[Event]) -> RankTimes:
    (step,) = [event for event in events if event["cat"] == "step"]
    start, end = step["ts"], step["ts"] + step["dur"]
    stages: dict[str, float] = {}
    waits: dict[str, float] = {}
    of_stage = [
        event
        for event in events
        if event["cat"] == "stage" and overlap_seconds(event, start, end) > 0
    ]
    collectives = [event for event in events if event["cat"] == "collective"]
    for event in of_stage:
        name, until = event["name"], event["ts"] + event["dur"]
        stages[name] = stages.get(name, 0.0) + overlap_seconds(event, start, end) / 1e6
        inside = sum(
            overlap_seconds(wait, max(event["ts"], start), min(until, end)) for wait in collectives
        )
        waits[name] = waits.get(name, 0.0) + inside / 1e6
    seconds = step["dur"] / 1e6
    stages[OTHER] = seconds - sum(stages.values())
    waits[OTHER] = sum(overlap_seconds(wait, start, end) for wait in collectives) / 1e6 - sum(
        waits.values()
    )
    sampling = covered(
        (max(e["ts"], start), min(e["ts"] + e["dur"], end)) for e in events if e["cat"] in SAMPLING
    )
    return RankTimes(rank, seconds, stages, waits, sampling / 1e6)


def overlap_seconds(event: Event, start: float, end: float) -> float:
    """Return the microseconds of `event` between `start` and `end`."""
    return max(0.0, min(event["ts"] + event["dur"], end) - max(event["ts"], start))


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of the intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
