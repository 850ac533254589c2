"""Whole-step alignment of routes: rollouts' ids -> every micro-batch's [l, t, K] of one rank, against memcpy of that payload.

    OMP_NUM_THREADS=1 python benchmarks/align.py [--repeats 9] [--peers DIR_WITH_VERL_AND_SLIME] [--json]

16 micro-batches of 32,768 tokens, 48 MoE layers, top-8 of 128 experts, one sequence per micro-batch, ids as the decoder
leaves them (uint8, layer-major).  Times are the best and the median of the repeats, after one that is not counted; memcpy
copies the same number of bytes into warm memory, in the same process, alternating with ours, over as many buffers.
`fresh` is ours without reused memory; `validate` is the check of range and distinct ids, once per batch; `extra` is the
largest resident memory above that before the call, as a multiple of the payload.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from megatron_rl.batch.pack import pack_routes
from megatron_rl.records import Rollout, RowState
from megatron_rl.replay.layout import RankLayout, RouteMemory, check_local_routes

MICRO_BATCHES, TOKENS, LAYERS, EXPERTS, TOP_K = 16, 32_768, 48, 128, 8
LAYOUTS = {  # name: (tp, cp, pp, vp)
    "TP1 CP1 PP1": (1, 1, 1, 1),
    "TP4 CP1 PP4": (4, 1, 4, 1),
    "TP4 CP2 PP4 VP2": (4, 2, 4, 2),
    "TP8 CP4 PP4 VP2": (8, 4, 4, 2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--peers", type=Path, help="directory with source checkouts verl/ and slime/")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--memory", choices=LAYOUTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory:
        print(extra_memory(arguments.memory))
        return
    torch.set_num_threads(1)
    rollouts = make_rollouts()
    rows = []
    for name in LAYOUTS:
        row = measure(name, rollouts, arguments.repeats)
        command = [sys.executable, __file__, "--memory", name]
        row["extra"] = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        rows.append(row)
        if not arguments.json:
            print_row(row, first=len(rows) == 1)
    if arguments.json:
        print(json.dumps(rows, indent=1))
    if arguments.peers is not None:
        print(f"peers: {arguments.peers} is not measured by this script yet", file=sys.stderr)


def make_rollouts() -> list[Rollout]:
    """Distinct buffers, so that every copy reads cold memory."""
    rng = np.random.default_rng(0)
    base = np.argsort(rng.random((4096, EXPERTS)), axis=-1)[:, :TOP_K].astype(np.uint8)
    rollouts = []
    for index in range(MICRO_BATCHES):
        ids = base[rng.integers(0, len(base), (LAYERS, TOKENS - 1))]
        tokens = np.zeros(TOKENS, np.int64)
        routes = ids.transpose(1, 0, 2)
        rollouts.append(Rollout(str(index), tokens, 1, np.zeros(TOKENS - 1, np.float32), routes, "stop", 0))
    return rollouts


def make_layout(name: str) -> RankLayout:
    """The rank with tensor rank 1 (or 0), context rank 0, pipeline stage 1 (or 0)."""
    tp, cp, pp, vp = LAYOUTS[name]
    stage, per_chunk = min(1, pp - 1), LAYERS // (pp * vp)
    layers = [chunk * pp * per_chunk + stage * per_chunk + i for chunk in range(vp) for i in range(per_chunk)]
    return RankLayout(
        layers=tuple(layers),
        tp_rank=min(1, tp - 1),
        tp_size=tp,
        sequence_parallel=tp > 1,
        num_experts=EXPERTS,
        top_k=TOP_K,
        ep_size=1,
        cp_rank=0,
        cp_size=cp,
    )


def align(rollouts: list[Rollout], layout: RankLayout, memory: RouteMemory | None) -> list[np.ndarray]:
    """What the engine does per step (make_routes), without the row states."""
    cu_seqlens = torch.tensor([0, TOKENS], dtype=torch.int32)
    size = len(layout.layers) * layout.num_rows(TOKENS) * TOP_K
    locals_ = []
    for index, rollout in enumerate(rollouts):
        routes = pack_routes([rollout])
        assert routes is not None
        out = None if memory is None else memory.take(index, size, routes[0].dtype)
        locals_.append(layout.local_routes(routes, cu_seqlens, out))
    return locals_


def measure(name: str, rollouts: list[Rollout], repeats: int) -> dict[str, float | str]:
    layout, memory = make_layout(name), RouteMemory()
    local = align(rollouts, layout, memory)
    payload = sum(ids.nbytes for ids in local)
    rows = torch.arange(TOKENS)[layout.rows(torch.tensor([0, TOKENS]))].numpy()
    for ids, rollout in zip(local, rollouts, strict=True):  # what is timed is right
        known = rows < TOKENS - 1
        assert rollout.routed_experts is not None
        expected = rollout.routed_experts[rows[known]][:, list(layout.layers)].transpose(1, 0, 2)
        assert (ids[:, known] == expected).all()
    sources = [np.ones(payload // MICRO_BATCHES, np.uint8) for _ in rollouts]
    targets = [np.ones_like(source) for source in sources]
    ours, copies = [], []
    for _ in range(repeats + 1):
        copies.append(seconds(lambda: [np.copyto(t, s) for t, s in zip(targets, sources, strict=True)]))
        ours.append(seconds(lambda: align(rollouts, layout, memory)))
    fresh = min(seconds(lambda: align(rollouts, layout, None)) for _ in range(3))
    state = torch.full((local[0].shape[1],), RowState.REPLAYED, dtype=torch.uint8)
    if layout.tp_size == layout.cp_size == 1:
        state[-1] = RowState.LIVE
    validate = min(
        seconds(lambda: [check_local_routes(ids, state, layout.layers, EXPERTS, str) for ids in local]) for _ in range(2)
    )
    ours, copies = ours[1:], copies[1:]
    return {
        "layout": name,
        "payload_MB": payload / 1e6,
        "memcpy_ms": 1e3 * min(copies),
        "memcpy_median_ms": 1e3 * statistics.median(copies),
        "ours_ms": 1e3 * min(ours),
        "ours_median_ms": 1e3 * statistics.median(ours),
        "ratio": min(ours) / min(copies),
        "ratio_median": statistics.median(o / c for o, c in zip(ours, copies, strict=True)),
        "fresh_ms": 1e3 * fresh,
        "validate_ms": 1e3 * validate,
    }


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def extra_memory(name: str) -> float:
    """In a process of its own: growth of the peak resident size over one alignment, in payloads."""
    rollouts, layout = make_rollouts(), make_layout(name)
    align(rollouts[:1], layout, RouteMemory())  # imports, small pools
    # the peak so far includes the making of the rollouts: raise it to now, then see how much further it goes
    before = resident()
    local = align(rollouts, layout, RouteMemory())
    return (resident() - before) / sum(ids.nbytes for ids in local)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def print_row(row: dict[str, float | str], *, first: bool) -> None:
    if first:
        print("| layout | payload MB | memcpy ms | ours ms | ours / memcpy (median) | fresh ms | validate ms | extra |")
        print("|---|---|---|---|---|---|---|---|")
    print(
        f"| {row['layout']} | {row['payload_MB']:.1f} | {row['memcpy_ms']:.3g} | {row['ours_ms']:.3g} | "
        f"{row['ratio']:.2f} ({row['ratio_median']:.2f}) | {row['fresh_ms']:.3g} | {row['validate_ms']:.3g} | "
        f"{row['extra']:.2f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
