"""Traces of a step as files in the Trace Event Format.

Perfetto (ui.perfetto.dev) and chrome://tracing open them.  A rank's file has its own process and
its requests, with one process for each server.  The ids of processes and threads are unique over
all ranks, so that the events of several files together are one trace (`merge`).

Times are those of the host's monotonic clock, the same for all processes of a host.  Every rank
notes when it left a barrier as the step began.  Between hosts `merge` lets these moments coincide,
which is as exact as ranks leave a barrier together.
"""

from __future__ import annotations

import gzip
import heapq
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from megatron_rl.config.run_paths import RunFolder
from megatron_rl.launch.trace import MAIN, Span

SCHEMA = 1
LAST = "last"
THREADS = ("step", MAIN, "sampling")
"""The first threads of a rank, in this order."""
LANES, RANKS = 10_000, 100_000
"""Thread ids of the lanes of one name begin at multiples of LANES, servers' process ids at RANKS.
"""

Event = dict[str, Any]


@dataclass(frozen=True)
class SharedClock:
    """A moment on this rank's clocks that all ranks share."""

    host: str
    synchronized: int
    """time.monotonic_ns() when this rank left the barrier."""
    unix: int
    """time.time_ns() at that moment."""


@dataclass(frozen=True)
class RankTrace:
    """The content of one rank's file."""

    rank: int
    world_size: int
    step: int
    """Counted from 0."""
    clock: SharedClock
    events: list[Event]
    """Events whose `ts` and `dur` are microseconds of the host's monotonic clock."""


def rank_path(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.json.gz"


def gpu_path(folder: Path, rank: int) -> Path:
    """Return the file of torch.profiler."""
    return folder / f"gpu_{rank:05d}.json.gz"


def step_folder(run_dir: Path, name: str) -> Path:
    """Return the folder of a step; `name` is LAST, or a step_folder_name."""
    return RunFolder(run_dir).traces / name


def step_folder_name(step: int) -> str:
    return f"step_{step + 1:06d}"


def write_trace(
    path: Path,
    spans: Sequence[Span],
    *,
    rank: int,
    world_size: int,
    step: int,
    clock: SharedClock,
    redact: Callable[[Any], Any] = lambda tree: tree,
) -> None:
    """Replace the file of a rank.  `redact` removes secrets from its values."""
    about = {"schema": SCHEMA, "rank": rank, "world_size": world_size, "step": step, **vars(clock)}
    write_lines(path, [*rank_events(spans, rank, clock.host)], about, redact)


def write_lines(
    path: Path,
    events: Sequence[Event],
    about: dict[str, object],
    redact: Callable[[Any], Any] = lambda tree: tree,
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}
    content = json.dumps(redact(trace), separators=(",", ":"))
    temporary.write_bytes(gzip.compress(content.encode(), compresslevel=3))
    temporary.replace(path)


def read_rank(path: Path) -> RankTrace:
    """Read the file of a rank.  Raises ValueError for a file that `write_trace` has not written."""
    try:
        content = json.loads(gzip.decompress(path.read_bytes()))
        about = content["otherData"]
        if about["schema"] != SCHEMA:
            raise ValueError(f"schema {about['schema']}, must be {SCHEMA}")
        clock = SharedClock(about["host"], about["synchronized"], about["unix"])
        return RankTrace(
            about["rank"], about["world_size"], about["step"], clock, content["traceEvents"]
        )
    except (OSError, EOFError, zlib.error, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not the trace of a rank: {error!r}") from error


def read_ranks(folder: Path) -> list[RankTrace]:
    """Read the ranks of a step, as many as rank 0 had.

    An earlier run of the step may have left files of more ranks.
    """
    first = read_rank(rank_path(folder, 0))
    others = (rank_path(folder, rank) for rank in range(1, first.world_size))
    return [first, *(read_rank(path) for path in others if path.exists())]


def merge(ranks: Sequence[RankTrace]) -> list[Event]:
    """Return the events of all ranks on the clock of the first host, from 0.

    Raises ValueError where they are of several steps.
    """
    steps = sorted({trace.step + 1 for trace in ranks})
    if len(steps) > 1:
        raise ValueError(
            f"the ranks' traces are of steps {steps}, must be of one: the run ended as they were"
            " written"
        )
    left: dict[str, list[int]] = {}
    for trace in ranks:
        left.setdefault(trace.clock.host, []).append(trace.clock.synchronized)
    # the median over a host's ranks: one that left the barrier late does not shift its host
    first = median(left[ranks[0].clock.host])
    shifts = {host: (first - median(moments)) / 1e3 for host, moments in left.items()}
    events = [
        {**event, "ts": event["ts"] + shifts[trace.clock.host]} if "ts" in event else event
        for trace in ranks
        for event in trace.events
    ]
    start = min((event["ts"] for event in events if "ts" in event), default=0.0)
    names = [event for event in events if event["ph"] == "M"]
    # every rank names the servers
    unique = {json.dumps(event, sort_keys=True): event for event in names}
    return [
        *unique.values(),
        *({**event, "ts": event["ts"] - start} for event in events if "ts" in event),
    ]


def rank_events(spans: Sequence[Span], rank: int, host: str) -> Iterator[Event]:
    """Yield metadata and complete events ("X") of one rank."""
    yield name_events("process_name", rank, 0, f"rank {rank} ({host})")
    yield sort_event("process_sort_index", rank, 0, rank)
    used = {span.thread for span in spans if not span.process and not span.key}
    threads = dict.fromkeys([*THREADS, *sorted(used)])
    numbers = {name: number for number, name in enumerate(threads, 1)}
    for name, number in numbers.items():
        if name in used:
            yield from thread(rank, number, name)
    for span in spans:
        if not span.key:
            yield event_of(span, rank, numbers[span.thread])
    kinds = dict.fromkeys((span.process, span.thread) for span in spans if span.key)
    for number, (process, name) in enumerate(kinds, 1):
        pid, first = (server_pid(process), rank * LANES) if process else (rank, number * LANES)
        if process:
            yield name_events("process_name", pid, 0, f"server {process}")
        lane = process, name
        inside = [span for span in spans if span.key and (span.process, span.thread) == lane]
        prefix = f"rank {rank}: {name}" if process else name
        yield from lanes(inside, pid, first, prefix)


def lanes(spans: Sequence[Span], pid: int, first: int, name: str) -> Iterator[Event]:
    """Yield the spans of each key on the lowest lane that is free while they last."""
    free: list[int] = []
    busy: list[tuple[int, int]] = []  # (end, lane)
    count = 0
    for unit in sorted(units(spans), key=lambda unit: unit[0].start):
        while busy and busy[0][0] <= unit[0].start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            count += 1
            free.append(count)
            yield from thread(pid, first + count, f"{name} {count}")
        lane = heapq.heappop(free)
        heapq.heappush(busy, (max(span.end for span in unit), lane))
        for span in unit:
            yield event_of(span, pid, first + lane)


def units(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """Yield the spans of each key; where they overlap without nesting they are several units."""
    of_key: dict[str, list[Span]] = {}
    for span in spans:
        of_key.setdefault(span.key, []).append(span)
    for of_one_key in of_key.values():
        left = sorted(of_one_key, key=lambda span: (span.start, -span.end))
        while left:
            unit, ends, others = [], [left[0].end], []
            for span in left:
                while len(ends) > 1 and ends[-1] <= span.start:
                    ends.pop()
                if span.end <= ends[-1]:
                    unit.append(span)
                    ends.append(span.end)
                else:
                    others.append(span)
            yield unit
            left = others


def event_of(span: Span, pid: int, tid: int) -> Event:
    values = {**span.values, "key": span.key} if span.key else span.values
    start, end = span.start / 1e3, span.end / 1e3
    place = {"ph": "X", "name": span.name, "cat": span.kind, "pid": pid, "tid": tid}
    return place | {"ts": start, "dur": end - start, "args": values}


def name_events(what: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def sort_event(what: str, pid: int, tid: int, index: int) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"sort_index": index}}


def thread(pid: int, tid: int, name: str) -> Iterator[Event]:
    yield name_events("thread_name", pid, tid, name)
    yield sort_event("thread_sort_index", pid, tid, tid)


def server_pid(url: str) -> int:
    """Return the server's process id: the same on every rank, and different from every rank's."""
    # not hash(), which differs between processes
    return RANKS + zlib.crc32(url.encode()) % (1 << 30)
