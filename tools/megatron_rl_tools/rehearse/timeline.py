"""Pretended time: seconds of every operation and collective on a GPU, and when each rank does what.

An operation takes the longer of its arithmetic and its bytes through memory, at the vendor's
figures times the fractions of plan/hardware.py; a collective its bytes over the links.  A
collective starts when all rehearsed ranks of its group have reached it, so that waits for other
stages and replicas show.  All of it is computed from the operations of the run, not measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron_rl.plan.hardware import Assumptions, Hardware, Rates

KERNEL_SECONDS = 2e-6
"""Least time of a kernel; assumed."""
FLOAT32 = 67 / 989
"""Peak of float32 products without TF32 relative to 16-bit ones: NVIDIA's H100 SXM data sheet."""
HALF = ("bfloat16", "float16")
GROUPED = ("_grouped_mm", "te.grouped linear")


class Span(NamedTuple):
    """What a rank did from `start` to `end`, in seconds of pretended time."""

    start: float
    end: float
    phase: str
    kind: str
    """gemm, experts, attention, memory, a collective's operation, or "wait"."""
    name: str
    place: str


@dataclass
class Meeting:
    """A collective on the way."""

    ready: dict[int, float] = field(default_factory=dict)
    """Rank -> the time at which it reached the call."""
    seconds: float = 0.0
    end: float | None = None


class Deadlock(Exception):
    """Ranks wait for one another: their collectives are in different orders."""


class Timeline:
    """Runs the events of all rehearsed ranks (Recorder.events) against one another."""

    def __init__(
        self,
        events: Mapping[int, Sequence[Sequence[Any]]],
        hardware: Hardware,
        assumed: Assumptions,
    ) -> None:
        self.events, self.hardware, self.assumed = events, hardware, assumed
        self.rates = Rates(hardware, assumed)
        self.spans: dict[int, list[Span]] = {rank: [] for rank in events}
        self.clock = dict.fromkeys(events, 0.0)
        self._next = dict.fromkeys(events, 0)
        self._meetings: defaultdict[Any, Meeting] = defaultdict(Meeting)
        self._calls: dict[tuple[int, int], tuple[Any, dict[str, Any]]] = {}
        self._group_free: defaultdict[Any, float] = defaultdict(float)

    def run(self) -> dict[int, list[Span]]:
        """Return rank -> its spans.  Raises Deadlock, which names the calls that wait."""
        moved = True
        while moved:
            moved = False
            for rank in self.events:
                moved |= self._advance(rank)
        waiting = {
            rank: events[self._next[rank]]
            for rank, events in self.events.items()
            if self._next[rank] < len(events)
        }
        if waiting:
            calls = [self._calls[rank, event[2]][1] for rank, event in sorted(waiting.items())]
            lines = [f"  rank {c['rank']} waits in {c['operation']} at {c['place']}" for c in calls]
            raise Deadlock("\n".join(["ranks wait for one another:", *lines]))
        return self.spans

    def _advance(self, rank: int) -> bool:
        """Run a rank until it must wait; return whether it did anything."""
        events, start = self.events[rank], self._next[rank]
        while self._next[rank] < len(events):
            event = events[self._next[rank]]
            if event[0] == "op":
                self._operation(rank, event)
            elif event[0] == "post":
                self._post(rank, event)
            elif not self._wait(rank, event):
                break
            self._next[rank] += 1
        return self._next[rank] > start

    def _operation(self, rank: int, event: Sequence[Any]) -> None:
        _, phase, name, place, kind, flops, num_bytes, dtype = event
        if kind == "gemm" and name.startswith(GROUPED):
            kind = "experts"
        seconds = max(
            KERNEL_SECONDS,
            flops / self._flops_per_second(kind, dtype),
            num_bytes / self.rates.memory,
        )
        now = self.clock[rank]
        self.clock[rank] = now + seconds
        self.spans[rank].append(Span(now, now + seconds, phase, kind, name, place))

    def _flops_per_second(self, kind: str, dtype: str) -> float:
        rates = {"experts": self.rates.experts, "attention": self.rates.attention}
        rate = rates.get(kind, self.rates.matrices)
        return rate if dtype in HALF else rate * FLOAT32

    def _post(self, rank: int, event: Sequence[Any]) -> None:
        call = event[3]
        key = meeting_key(call)
        self._calls[rank, event[2]] = key, call
        meeting = self._meetings[key]
        meeting.ready[rank] = self.clock[rank]
        meeting.seconds = max(meeting.seconds, self.collective_seconds(call))
        if meeting.ready.keys() >= self._members(call):
            # a group's collectives run one after another
            start = max(*meeting.ready.values(), self._group_free[key[0]])
            meeting.end = self._group_free[key[0]] = start + meeting.seconds

    def _wait(self, rank: int, event: Sequence[Any]) -> bool:
        """Let the rank's compute wait for a call; False while the call has no end yet."""
        key, call = self._calls[rank, event[2]]
        meeting = self._meetings[key]
        if meeting.end is None:
            return False
        now, end = self.clock[rank], meeting.end
        begin = max(end - meeting.seconds, meeting.ready[rank])
        if begin > now:
            self._span(rank, now, begin, event[1], "wait", call)
        if end > now:
            self._span(rank, max(now, begin), end, event[1], call["operation"], call)
            self.clock[rank] = end
        return True

    def _span(
        self, rank: int, start: float, end: float, phase: str, kind: str, call: Mapping[str, Any]
    ) -> None:
        name = f"{call['operation']} of {len(call['group'][1])} ranks"
        self.spans[rank].append(Span(start, end, phase, kind, name, call["place"]))

    def _members(self, call: Mapping[str, Any]) -> set[int]:
        ranks = call["group"][1]
        if call["operation"] in ("send", "recv"):
            ranks = (call["rank"], ranks[call["root"]])
        return set(ranks) & self.events.keys()

    def collective_seconds(self, call: Mapping[str, Any]) -> float:
        """Return the time of a collective: latency, and its bytes over the slowest link."""
        backend, ranks, _ = call["group"]
        n, size = len(ranks), call["num_bytes"]
        if n == 1 or backend != "nccl":
            return 0.0
        if call["operation"] in ("send", "recv"):
            ranks = (call["rank"], ranks[call["root"]])
        nodes = {rank // self.hardware.per_node for rank in ranks}
        link = self.rates.nvlink if len(nodes) == 1 else self.rates.network
        # a ring sends every byte n - 1 times over n ranks, an all-reduce twice
        factor = {"all_reduce": 2 * (n - 1) / n, "send": 1.0, "recv": 1.0, "broadcast": 1.0}
        return (
            self.assumed.collective_seconds
            + size * factor.get(call["operation"], (n - 1) / n) / link
        )


def meeting_key(call: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what the calls of one collective have in common; the first part is its stream."""
    backend, ranks, made = call["group"]
    group = (backend, tuple(ranks), made)
    if call["operation"] in ("send", "recv"):
        me = ranks.index(call["rank"])
        ends = (me, call["root"]) if call["operation"] == "send" else (call["root"], me)
        return ((group, *ends), call["number"])
    return (group, call["number"])


def phase_seconds(spans: Sequence[Span]) -> dict[str, dict[str, float]]:
    """Return phase -> kind -> seconds of one rank."""
    totals: dict[str, dict[str, float]] = {}
    for span in spans:
        kinds = totals.setdefault(span.phase, {})
        kinds[span.kind] = kinds.get(span.kind, 0.0) + span.end - span.start
    return totals


def chrome_trace(spans: Mapping[int, Sequence[Span]]) -> dict[str, Any]:
    """Return the timeline in Chrome's trace format, one process for each rank (ui.perfetto.dev)."""
    events: list[dict[str, Any]] = []
    for rank, of_rank in spans.items():
        events.append(
            {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
        )
        for span in of_rank:
            events.append({
                "ph": "X", "pid": rank, "tid": 0, "name": span.name, "cat": span.kind,
                "ts": span.start * 1e6, "dur": (span.end - span.start) * 1e6,
                "args": {"phase": span.phase, "line": span.place},
            })  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms"}
