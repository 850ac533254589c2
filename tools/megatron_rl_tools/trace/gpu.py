"""The events of a rank's GPU, from torch.profiler's file, on the clock of the rank's trace."""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import replace
from pathlib import Path

from megatron_rl.launch.trace_file import RANKS, Event, RankTrace, gpu_path, name_events

GPU_KINDS = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
FIRST_GPU = RANKS + (1 << 30)
"""The first process id of GPUs, after those of servers."""


def gpu_events(rank: RankTrace, folder: Path) -> RankTrace:
    """Return the trace with the kernels and copies of its GPU, one thread per stream; unchanged if
    it has no file of a GPU.

    Raises ValueError for a damaged file.
    """
    path = gpu_path(folder, rank.rank)
    if not path.exists():
        return rank
    try:
        content = json.loads(gzip.decompress(path.read_bytes()))
        base = content["baseTimeNanoseconds"]  # Unix time of ts 0
    except KeyError as error:
        raise ValueError(f"{path}: no baseTimeNanoseconds: torch 2.4 and later write it") from error
    except (OSError, EOFError, zlib.error, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a profile of torch: {error!r}; remove the file") from error
    shift = (base - rank.clock.unix + rank.clock.synchronized) / 1e3
    pid = FIRST_GPU + rank.rank
    events: list[Event] = [
        {**event, "pid": pid, "ts": event["ts"] + shift}
        for event in content["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in GPU_KINDS
    ]
    streams = [
        name_events("thread_name", pid, tid, f"stream {tid}")
        for tid in sorted({event["tid"] for event in events})
    ]
    name = name_events("process_name", pid, 0, f"rank {rank.rank} ({rank.clock.host}): GPU")
    return replace(rank, events=[*rank.events, name, *streams, *events])
