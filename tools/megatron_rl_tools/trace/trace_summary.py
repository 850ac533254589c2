"""The numbers of a step's merged trace: seconds of the stages on every rank, and where ranks wait
in collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from megatron_rl.launch.trace_file import LANES, RANKS, Event

ROLLOUT, OTHER = "rollout", "other"
SAMPLING = ("request", "episode")
"""Kinds of spans.

An open call of the client lasts until the next weight sync, with or without them.
"""


@dataclass(frozen=True)
class RankTimes:
    """Seconds of one rank within the step.  stages: with `other`; waits: of its collectives, by
    stage; sampling: with a request or an episode of its replica in progress (0 off leaders)."""

    rank: int
    step: float
    stages: Mapping[str, float]
    waits: Mapping[str, float]
    sampling: float


@dataclass(frozen=True)
class TraceSummary:
    """step: its number, from 1."""

    step: int
    ranks: Sequence[RankTimes]

    @property
    def seconds(self) -> float:
        return max(each.step for each in self.ranks)

    @property
    def sampling(self) -> float:
        return max(each.sampling for each in self.ranks)

    @property
    def training(self) -> float:
        """Of the stages that do not wait for the servers, on the rank where they take longest."""
        return max(
            sum(s for name, s in each.stages.items() if name not in (ROLLOUT, OTHER))
            for each in self.ranks
        )

    @property
    def other(self) -> float:
        """The largest share of a rank's step that is outside all stages."""
        return max(each.stages[OTHER] / each.step for each in self.ranks)

    @property
    def of_ideal(self) -> float:
        """max(sampling, training) / step: 1 where the shorter of the two is entirely at the same
        time as the longer.
        """
        return max(self.sampling, self.training) / self.seconds

    def lines(self) -> Iterator[str]:
        """A table: a row per stage, for any number of ranks."""
        yield f"step {self.step}: {self.seconds:.2f} s on {len(self.ranks)} rank(s)"
        yield (
            f"{'stage':<12}{'mean s':>9}{'share':>7}{'longest':>18}   in collectives:"
            f" {'most':>17}{'least':>18}"
        )
        for stage in self.ranks[0].stages:
            seconds = {each.rank: each.stages.get(stage, 0.0) for each in self.ranks}
            waits = {each.rank: each.waits.get(stage, 0.0) for each in self.ranks}
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
    """Of a merged trace.  Raises ValueError where the step did not end."""
    of_rank: dict[int, list[Event]] = {}
    for event in events:
        if event["ph"] == "X" and (event["pid"] < RANKS or event["cat"] == "request"):
            rank = (
                event["pid"] if event["pid"] < RANKS else event["tid"] // LANES
            )  # a request is in its server's process
            of_rank.setdefault(rank, []).append(event)
    steps = {
        event["name"] for found in of_rank.values() for event in found if event["cat"] == "step"
    }
    if len(steps) != 1:
        raise ValueError(
            f"the trace holds the steps {sorted(steps)}, must be one: the run stopped in it"
        )
    return TraceSummary(
        int(steps.pop().split()[1]),
        [times_of(rank, found) for rank, found in sorted(of_rank.items())],
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
            overlap_seconds(each, max(event["ts"], start), min(until, end)) for each in collectives
        )
        waits[name] = waits.get(name, 0.0) + inside / 1e6
    seconds = step["dur"] / 1e6
    stages[OTHER] = seconds - sum(stages.values())
    waits[OTHER] = sum(overlap_seconds(each, start, end) for each in collectives) / 1e6 - sum(
        waits.values()
    )
    sampling = covered(
        (max(e["ts"], start), min(e["ts"] + e["dur"], end)) for e in events if e["cat"] in SAMPLING
    )
    return RankTimes(rank, seconds, stages, waits, sampling / 1e6)


def overlap_seconds(event: Event, start: float, end: float) -> float:
    """Microseconds of `event` between the two."""
    return max(0.0, min(event["ts"] + event["dur"], end) - max(event["ts"], start))


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of their union."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
