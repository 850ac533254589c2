"""Alignment of routes for a complete step: rollouts' ids -> every micro-batch's [l, t, K] of one
rank, against memcpy.

    OMP_NUM_THREADS=1 python benchmarks/align.py [--repeats 9] [--json] [--peers DIR ... \
[--check-peers 200]]

16 micro-batches of 32,768 tokens, 48 MoE layers, top-8 of 128 experts, one sequence per
micro-batch, ids as the decoder returns them (uint8, layer-major).  Times are the best and the
median of the repeats, after one that is not counted. memcpy copies the same number of bytes into
warm memory, in the same process, alternating with ours, over the same number of buffers.

    fresh      ours without reused memory
    validate   the check of range and distinct ids, once per batch
    extra      peak of newly allocated memory of one complete step, in payloads
    bytes/id   bytes kept per id

--peers: source checkouts of verl and slime, whose own functions align the same ids in the same run
(peers.py). --check-peers N: instead compare ours with theirs, id by id, in N random cases of
lengths, parallel sizes, ranks and dense layers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.peers import Job, Peer, load_peers
from megatron_rl.records import Rollout
from megatron_rl.records.packed import RowState
from megatron_rl.replay.layout import RankLayout, check_local_routes
from megatron_rl.replay.rollout_routes import RouteMemory

MICRO_BATCHES, TOKENS, LAYERS, EXPERTS, TOP_K = 16, 32_768, 48, 128, 8
LAYOUTS = {  # name: (tp, cp, pp, vp)
    "TP1 CP1 PP1": (1, 1, 1, 1),
    "TP4 CP1 PP4": (4, 1, 4, 1),
    "TP4 CP2 PP4 VP2": (4, 2, 4, 2),
    "TP8 CP4 PP4 VP2": (8, 4, 4, 2),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--peers",
        type=Path,
        nargs="+",
        default=[],
        metavar="DIR",
        help="checkouts of verl and slime",
    )
    parser.add_argument(
        "--check-peers",
        type=int,
        default=0,
        metavar="N",
        help="compare in N random cases, time nothing",
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    peers = load_peers(arguments.peers)
    if arguments.check_peers:
        check_peers(peers, arguments.check_peers)
        return
    rollouts = make_rollouts()
    rows = []
    for name in LAYOUTS:
        rows.append(row := measure(name, rollouts, arguments.repeats))
        if not arguments.json:
            print_row(row, first=len(rows) == 1)
    for index, (peer, name) in enumerate(itertools.product(peers, LAYOUTS)):
        rows.append(measure_peer(peer, name, rollouts, arguments.repeats))
        if not arguments.json:
            print_peer(rows[-1], first=index == 0)
    if arguments.json:
        print(json.dumps(rows, indent=1))


def make_rollouts() -> list[Rollout]:
    """Make rollouts with distinct buffers, so that every copy reads cold memory."""
    rng = np.random.default_rng(0)
    base = np.argsort(rng.random((4096, EXPERTS)), axis=-1)[:, :TOP_K].astype(np.uint8)
    rollouts = []
    for index in range(MICRO_BATCHES):
        ids = base[rng.integers(0, len(base), (LAYERS, TOKENS - 1))]
        tokens = np.zeros(TOKENS, np.int64)
        routes, nothing = ids.transpose(1, 0, 2), np.zeros(TOKENS - 1, np.float32)
        rollouts.append(
            Rollout(str(index), tokens, 1, nothing, routes, "stop", nothing.astype(np.int32))
        )
    return rollouts


def make_layout(name: str) -> RankLayout:
    """Return the layout of the rank with tensor rank 1 (or 0), context rank 0, pipeline stage 1 (or
    0).
    """
    tp, cp, pp, vp = LAYOUTS[name]
    stage, per_chunk = min(1, pp - 1), LAYERS // (pp * vp)
    layers = tuple(
        chunk * pp * per_chunk + stage * per_chunk + i
        for chunk in range(vp)
        for i in range(per_chunk)
    )
    return RankLayout(
        layers=layers,
        tp_rank=min(1, tp - 1),
        tp_size=tp,
        sequence_parallel=tp > 1,
        num_experts=EXPERTS,
        top_k=TOP_K,
        ep_size=1,
        cp_rank=0,
        cp_size=cp,
    )


def align(
    rollouts: list[Rollout], layout: RankLayout, memory: RouteMemory | None
) -> list[np.ndarray]:
    """Align the routes as the engine does in a step (RolloutRoutes), without the row states."""
    cu_seqlens = torch.tensor([0, TOKENS], dtype=torch.int32)
    size = len(layout.layers) * layout.num_router_rows(TOKENS) * TOP_K
    locals_ = []
    for index, rollout in enumerate(rollouts):
        assert rollout.routed_experts is not None
        routes = [rollout.routed_experts]
        out = None if memory is None else memory.take(index, size, routes[0].dtype)
        locals_.append(layout.local_routes(routes, cu_seqlens, out))
    return locals_


def measure(name: str, rollouts: list[Rollout], repeats: int) -> dict[str, float | str]:
    layout, memory = make_layout(name), RouteMemory()
    local = align(rollouts, layout, memory)
    payload = sum(ids.nbytes for ids in local)
    rows = torch.arange(TOKENS)[layout.router_rows(torch.tensor([0, TOKENS]))].numpy()
    for ids, rollout in zip(local, rollouts, strict=True):  # what is timed is right
        known = rows < TOKENS - 1
        assert rollout.routed_experts is not None
        expected = rollout.routed_experts[rows[known]][:, list(layout.layers)].transpose(1, 0, 2)
        assert (ids[:, known] == expected).all()
    sources = [np.ones(payload // MICRO_BATCHES, np.uint8) for _ in rollouts]
    targets = [np.ones_like(source) for source in sources]
    ours, copies = [], []
    for _ in range(repeats + 1):
        copies.append(
            seconds(lambda: [np.copyto(t, s) for t, s in zip(targets, sources, strict=True)])
        )
        ours.append(seconds(lambda: align(rollouts, layout, memory)))
    fresh = min(seconds(lambda: align(rollouts, layout, None)) for _ in range(3))
    state = torch.full((local[0].shape[1],), RowState.REPLAYED, dtype=torch.uint8)
    if layout.tp_size == layout.cp_size == 1:
        state[-1] = RowState.LIVE
    validate = min(
        seconds(
            lambda: [check_local_routes(ids, state, layout.layers, EXPERTS, str) for ids in local]
        )
        for _ in range(2)
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
        "extra": extra_memory(rollouts, layout),
        "bytes_per_id": payload / sum(ids.size for ids in local),
    }


def measure_peer(
    peer: Peer, name: str, rollouts: list[Rollout], repeats: int
) -> dict[str, float | str]:
    """Measure the peer and ours, alternating, after one warm-up of each.

    The peer's inputs are made before.
    """
    layout, memory, job = (
        make_layout(name),
        RouteMemory(),
        make_job(make_layout(name), LAYOUTS[name][3]),
    )
    inputs = [
        peer.inputs([rollout.routed_experts])
        for rollout in rollouts
        if rollout.routed_experts is not None
    ]
    theirs, ours = [], []
    for _ in range(min(repeats, 3) + 1):
        theirs.append(seconds(lambda: peer.align(job, inputs)))
        ours.append(seconds(lambda: align(rollouts, layout, memory)))
    ids = [layer for micro_batch in peer.align(job, inputs) for layer in micro_batch]
    return {
        "layout": name,
        "peer": peer.name,
        "peer_ms": 1e3 * min(theirs[1:]),
        "ours_ms": 1e3 * min(ours[1:]),
        "peer_bytes_per_id": sum(x.nbytes for x in ids) / sum(x.numel() for x in ids),
    }


def make_job(layout: RankLayout, num_chunks: int) -> Job:
    size = len(layout.layers) // num_chunks
    chunks = tuple(layout.layers[i * size : (i + 1) * size] for i in range(num_chunks))
    place = {
        key: getattr(layout, key)
        for key in ("tp_rank", "tp_size", "cp_rank", "cp_size", "sequence_parallel")
    }
    return Job(num_layers=LAYERS, num_experts=EXPERTS, chunks=chunks, **place)


def check_peers(peers: list[Peer], cases: int) -> None:
    """Raise AssertionError unless ours holds each peer's ids in every row of a token that has
    routes.
    """
    rng = np.random.default_rng(0)
    for peer in peers:
        compared = 0
        for case in range(cases):
            compared += check_case(peer, rng, f"{peer.name}, case {case}")
        print(f"{peer.name}: {cases} random cases, {compared} (row, layer) pairs, every id equal")


def check_case(peer: Peer, rng: np.random.Generator, name: str) -> int:
    """Compare with the peers in one random case, and return the number of compared (row, layer)
    pairs.
    """
    pp, vp, layers_per_chunk = (int(rng.choice(sizes)) for sizes in ((1, 2, 4), (1, 2), (1, 2, 3)))
    num_layers, stage = pp * vp * layers_per_chunk, int(rng.integers(pp))
    is_moe = rng.random(num_layers) < 0.75
    is_moe[: int(rng.integers(2))] = False  # first-k-dense
    is_moe[-1] = True
    layers_of_chunk = [
        [(c * pp + stage) * layers_per_chunk + i for i in range(layers_per_chunk)]
        for c in range(vp)
    ]
    chunks = tuple(tuple(layer for layer in chunk if is_moe[layer]) for chunk in layers_of_chunk)
    if not any(chunks):
        return check_case(peer, rng, name)
    tp, cp = int(rng.choice([1, 2, 4])), int(rng.choice([1, 2, 4]))
    place = {
        "tp_rank": int(rng.integers(tp)),
        "tp_size": tp,
        "cp_rank": int(rng.integers(cp)),
        "cp_size": cp,
    }
    # verl's always is
    sequence_parallel = tp > 1 and (peer.name == "verl" or bool(rng.integers(2)))
    job = Job(
        num_layers,
        EXPERTS,
        chunks,
        **place,
        sequence_parallel=sequence_parallel,
        pad_multiplier=int(rng.choice([1, 2])),
    )
    lengths = rng.integers(2, int(rng.choice([20, 200])), int(rng.integers(1, 6))).tolist()
    routes = [
        rng.random((size - 1, num_layers, EXPERTS)).argsort(-1)[..., :TOP_K].astype(np.uint8)
        for size in lengths
    ]
    theirs = peer.align(job, [peer.inputs(routes)])[0]
    bounds, moe_index = torch.tensor(peer.bounds(job, lengths)), is_moe.cumsum() - 1
    layout = RankLayout(
        layers=tuple(int(moe_index[layer]) for chunk in chunks for layer in chunk),
        **place,
        sequence_parallel=sequence_parallel,
        num_experts=EXPERTS,
        top_k=TOP_K,
        ep_size=1,
    )
    ours = layout.local_routes([np.ascontiguousarray(ids[:, is_moe]) for ids in routes], bounds)
    rows = torch.arange(int(bounds[-1]))[layout.router_rows(bounds)]
    ends = torch.tensor(
        [start + size - 1 for start, size in zip(bounds.tolist(), lengths, strict=False)]
    )
    sequence = torch.searchsorted(bounds, rows, right=True) - 1
    known = (rows < torch.cat([ends, torch.zeros(len(bounds), dtype=ends.dtype)])[sequence]).numpy()
    assert len(theirs) == len(ours), name
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape, f"{name}: ours {a.shape}, theirs {tuple(b.shape)}"
        assert (a[known] == b.numpy()[known]).all(), name
    return int(known.sum()) * len(ours)


def seconds(work: Callable[[], object]) -> float:
    """Return the CPU seconds of this process, which has one working thread."""
    start = time.process_time()
    work()
    return time.process_time() - start


def extra_memory(rollouts: list[Rollout], layout: RankLayout) -> float:
    """Return the peak of NumPy's allocations in the alignment of a step, without reused memory, in
    payloads.
    """
    tracemalloc.start()
    local = align(rollouts, layout, RouteMemory())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / sum(ids.nbytes for ids in local)


def print_row(row: dict[str, float | str], *, first: bool) -> None:
    if first:
        head = (
            "layout | payload MB | memcpy ms | ours ms | ours / memcpy (median) | fresh ms |"
            " validate ms | extra | bytes/id"
        )
        print(f"| {head} |\n|{'---|' * 9}")
    print(
        f"| {row['layout']} | {row['payload_MB']:.1f} | {row['memcpy_ms']:.3g} |"
        f" {row['ours_ms']:.3g} | {row['ratio']:.2f} ({row['ratio_median']:.2f}) |"
        f" {row['fresh_ms']:.3g} | {row['validate_ms']:.3g} | {row['extra']:.2f} |"
        f" {row['bytes_per_id']:.1f} |",
        flush=True,
    )


def print_peer(row: dict[str, float | str], *, first: bool) -> None:
    if first:
        print(
            "\n| layout | peer | peer ms | ours ms | peer / ours | peer's bytes/id"
            " |\n|---|---|---|---|---|---|"
        )
    theirs, ours = float(row["peer_ms"]), float(row["ours_ms"])
    print(
        f"| {row['layout']} | {row['peer']} | {theirs:.0f} | {ours:.3g} | {theirs / ours:.0f} | "
        f"{row['peer_bytes_per_id']:.1f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
