"""Time that one rank spends in our own code as the job grows from 8 to 4,096 ranks with the same
work per rank: simulated.

    OMP_NUM_THREADS=1 python benchmarks/scaling.py [--ranks 8 32 128 512 1024 4096] [--repeats 3]

Every rank is a data-parallel replica with 32 responses of a mini-batch (lognormal lengths, median
400, routes of 12 layers, top-8), experts over 8 ranks.  CPU milliseconds of one rank, minimum of
the repeats.  Other ranks are stand-ins: an all-reduce returns what the real one would, an
all-to-all returns as much as the rank sent.  The watchdogs' store is real (TCP, this machine) and
has the heartbeats of all ranks.  The network's own time is not included.

    plan       make_plan: the rank's pod, and its work for all sequences of the job
    exchange   destinations, packing into bytes and unpacking, and the rounds in which they are sent
    pack       micro-batches, and this rank's routes in the layout of its routers
    dry run    --dry-run of the configuration (once, before a run)
    watchdog   one tick of a rank, every two seconds; of rank 0, which compares all, mean of the
               ticks between two readings
    status     status.json of all ranks, on rank 0, every two seconds
    metrics    combining the metric names of all ranks, once per step
    plan save  rank 0's part of the plan of a run's first save: the parts of all ranks (300 tensors
               each) are read and validated twice, as core does, and so are the write plans, of
               which the beginning of .metadata is made
    save       rank 0's end of every save: where all ranks wrote, .metadata written and its digest,
               the manifest; both with Python's garbage collector as in a run
               (rollout/garbage_collection.py)
    join       seconds of the job's store until a gloo group of all ranks has connected for its
               first collectives, computed: 4 log2(n) - 1 requests per rank with answers of 154
               bytes (both counted with 8, 32, 128 and 512 ranks, torch 2.13), times those of one
               request, measured
    at once    the same where every rank connects to every other as the group is made
               (TORCH_GLOO_LAZY_INIT=0): 2n + 1 requests with answers of 154 + 8n bytes (counted
               with 2 to 128 ranks)
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

# before megatron-core: makes it work without CUDA, and quiet
import megatron_rl.distributed  # noqa: F401

# isort: split
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner
from megatron.core.dist_checkpointing.validation import validate_sharding_integrity
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from megatron_rl.batch import transfer
from megatron_rl.batch.assignment import POD, Plan, make_plan
from megatron_rl.batch.balance import Work
from megatron_rl.batch.pack import PackRule, Sample, pack
from megatron_rl.checkpoint.manifest import FileDigest, digest_files, manifest_text
from megatron_rl.checkpoint.torch_dist.metadata_pieces import beginning, complete, piece
from megatron_rl.config import load_config
from megatron_rl.launch.heartbeats import Heartbeat
from megatron_rl.launch.status import StatusWriter
from megatron_rl.launch.watchdog import READ_AT_ONCE, Watchdog, WatchSettings
from megatron_rl.models.known import KNOWN
from megatron_rl.plan.dry_run import report
from megatron_rl.records import Rollout
from megatron_rl.replay.layout import RankLayout
from megatron_rl.rollout.garbage_collection import postpone_full_collections

SHARE, CAP, LAYERS, TOP_K, EXPERTS, BALANCE_LENGTH, TENSORS = 32, 4096, 12, 8, 128, 15_470, 300


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 32, 128, 512, 1024, 4096])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    rows = {ranks: measure(ranks, args.repeats) for ranks in args.ranks}
    parts = list(next(iter(rows.values())))
    print("  ".join([f"{'ranks':>6s}", *(f"{part:>{max(8, len(part))}s}" for part in parts)]))
    for ranks, measured in rows.items():
        values = [f"{measured[part]:{max(8, len(part))}.2f}" for part in parts]
        print("  ".join([f"{ranks:6d}", *values]))
    return 0


def measure(ranks: int, repeats: int) -> dict[str, float]:
    """Return part -> CPU milliseconds of one rank."""
    lengths = draw(ranks)
    work, owners = Work(lengths, CAP, BALANCE_LENGTH), np.repeat(np.arange(ranks), SHARE)
    complete = plan_of_all(work, owners, ranks)
    samples = make_samples(lengths[:SHARE])
    mini_batch = complete.micro_batches(0)
    with tempfile.TemporaryDirectory() as folder:
        dry = least(dry_run(ranks, Path(folder)), repeats)
    return {
        "plan": least(lambda: plan_of_one(work, owners, ranks, complete), repeats),
        "exchange": least(lambda: trade(samples, complete, ranks), repeats),
        "pack": least(lambda: pack_all(samples, [len(part) for part in mini_batch]), repeats),
        "dry run": dry,
        **watch(ranks, repeats),
        "status": least(write_status(ranks), repeats),
        "metrics": least(gather_names(ranks), repeats),
        **as_in_a_run(lambda: save(ranks, repeats)),
        "join": requests(ranks, 4 * math.ceil(math.log2(ranks)) - 1, 154),
        "at once": requests(ranks, 2 * ranks + 1, 154 + 8 * ranks),
    }


def least(work: Callable[[], Any], repeats: int) -> float:
    seconds = []
    gc.collect()  # the heap of the imported libraries is not searched while the clock runs
    for _ in range(repeats):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return 1e3 * min(seconds)


def draw(ranks: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.minimum(rng.lognormal(np.log(400), 1.0, SHARE * ranks), CAP).astype(np.int64).clip(16)


def plan_of_all(work: Work, owners: np.ndarray, ranks: int) -> Plan:
    """Join the plans of all pods, which plan their sequences; all have the slots of the pod that
    needs most.
    """
    most = 0

    def all_reduce(values: np.ndarray, op: Any) -> np.ndarray:
        return values if op == dist.ReduceOp.SUM else np.array([max(most, values[0]), values[1]])

    def plan_pods() -> list[Plan]:
        return [make_plan(work, owners, ranks, first, all_reduce) for first in range(0, ranks, POD)]

    pods = plan_pods()
    if len(pods) == 1:
        return pods[0]
    while (needed := max(plan.num_slots for plan in pods)) > most:
        most = needed
        pods = plan_pods()
    return Plan(np.sum([plan.places for plan in pods], 0), pods[0].num_slots, ranks)


def plan_of_one(work: Work, owners: np.ndarray, ranks: int, complete: Plan) -> None:
    """Return rank 0's plan: from the lengths of all to its micro-batches, destinations and the
    gauge of the plan.
    """
    plan = make_plan(
        work,
        owners,
        ranks,
        0,
        lambda values, op: complete.places if op == dist.ReduceOp.SUM else values,
    )
    plan.micro_batches(0)
    plan.destinations(slice(0, SHARE))
    plan.lockstep_efficiency(work)


def make_samples(lengths: np.ndarray) -> list[Sample]:
    rng = np.random.default_rng(1)
    return [
        Sample(
            Rollout(
                id=f"0/{index}",
                tokens=rng.integers(2, 1000, length),
                prompt_length=4,
                rollout_logprobs=np.full(length - 4, -1, np.float32),
                routed_experts=np.argsort(rng.random((length - 1, LAYERS, EXPERTS), np.float32))[
                    ..., :TOP_K
                ].astype(np.uint8),
                finish_reason="stop",
                policy_versions=np.zeros(length - 4, np.int32),
            ),
            1.0,
        )
        for index, length in enumerate(lengths.tolist())
    ]


def trade(samples: list[Sample], complete: Plan, ranks: int) -> None:
    """Exchange as many bytes as leave.

    The collectives do nothing: what arrives has the right size.
    """

    def all_to_all(out: torch.Tensor, data: torch.Tensor, *sizes: Any, **on: Any) -> None:
        if not sizes:  # the sizes of the parts
            out.copy_(data)
        else:
            out[:] = data

    group: Any = SimpleNamespace(size=lambda: ranks, rank=lambda: 0)
    with (
        patch.object(dist, "all_to_all_single", all_to_all),
        patch.object(transfer, "all_reduce_ints", lambda values, op, group: values),
        patch.object(transfer, "device_of", lambda group: torch.device("cpu")),
    ):
        transfer.exchange(samples, complete.destinations(slice(0, SHARE)), group)


def pack_all(samples: list[Sample], counts: list[int]) -> None:
    """Pack the plan's number of micro-batches from this rank's samples: as many tokens as arrive
    from the others.
    """
    layout = RankLayout(
        layers=tuple(range(LAYERS)), tp_rank=0, tp_size=1, sequence_parallel=False,
        num_experts=EXPERTS, top_k=TOP_K, ep_size=8
    )  # fmt: skip
    rule, share = PackRule(), -(-len(samples) // len(counts))
    for start in range(0, len(samples), share):
        batch = pack(
            part := samples[start : start + share],
            rule.rows([len(sample.rollout.tokens) for sample in part]),
        )
        routes = [sample.rollout.routed_experts for sample in part]
        layout.local_routes(routes, batch.cu_seqlens)


def dry_run(ranks: int, folder: Path) -> Callable[[], str]:
    (folder / "config.json").write_text(json.dumps(KNOWN["qwen3-30b-a3b"]))
    (folder / "train.jsonl").write_text(json.dumps({"prompt": "1 + 1 = ?", "label": "2"}) + "\n")
    sections = {
        "model": {"path": str(folder), "layer_spec": "transformer_engine"},
        "data": {"train": str(folder / "train.jsonl")},
        "run": {"prompts_per_step": 4 * ranks, "max_tokens_per_micro_batch": CAP},
        "parallel": {"ep": 8},
    }
    cfg = load_config(None, [], sections)
    return lambda: report(cfg, ranks)


def watch(ranks: int, repeats: int) -> dict[str, float]:
    """Run a tick of rank 1 and of rank 0 after heartbeats of all ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # not in torch's stubs
    client = dist.PrefixStore("megatron_rl", store.clone())  # type: ignore[attr-defined]
    settings = WatchSettings(stage_seconds=600, silence_seconds=300, folder=Path())
    dogs = [Watchdog(client, rank, ranks, settings, stop=print) for rank in (0, 1)]
    for rank in range(ranks):
        beat = Heartbeat(1, 7, "update", "update of step 4", 12.5, "", "host")
        client.set(f"beat/{rank}", json.dumps(list(vars(beat).values())))
    now, turns = time.monotonic(), -(-ranks // READ_AT_ONCE)
    other, first = (
        least(lambda dog=dog: [dog.tick(now) for _ in range(turns)], repeats) for dog in dogs[::-1]
    )
    return {"watchdog": other / turns, "rank 0's": first / turns}


def write_status(ranks: int) -> Callable[[], None]:
    writer = StatusWriter(Path(tempfile.mkdtemp()), 10)
    writer.beats(
        {
            rank: Heartbeat(1, 7, "update", "update of step 4", 12.5, "", "host", 2**30)
            for rank in range(ranks)
        }
    )
    return writer._write


def save(ranks: int, repeats: int) -> dict[str, float]:
    """Save as core, torch and the checkpointer do, with stand-ins for the data of other ranks."""
    begun: list[bytes] = []
    parts = pickle.dumps(parts_of(0, ranks))  # those of the others are as large
    plans = [pickle.dumps(write_plan(parts_of(rank, ranks))) for rank in range(ranks)]
    planned = least(lambda: begun.append(plan_save(parts, plans)), 1)
    gc.collect()  # cycles of core's plan
    with tempfile.TemporaryDirectory() as folder:
        return {
            "plan save": planned,
            "save": least(lambda: finish_save(ranks, begun[0], Path(folder)), repeats),
        }


def parts_of(rank: int, ranks: int) -> list[ShardedTensor]:
    """Return rows of TENSORS matrices, of which every rank has a few; the boxes of the distributed
    optimizer have no regular grid.
    """
    return [
        ShardedTensor(
            f"optimizer.state.exp_avg.decoder.layers.{i}.mlp.linear_fc1.weight", None,
            torch.float32, (4, 512),
            (4 * ranks, 512), (4 * rank, 0), axis_fragmentations=None, replica_id=(0, 0, 0)
        )
        for i in range(TENSORS)
    ]  # fmt: skip


def write_plan(parts: list[ShardedTensor]) -> SavePlan:
    items = []
    for part in parts:
        chunk = ChunkStorageMetadata(torch.Size(part.global_offset), torch.Size(part.local_shape))
        data = TensorWriteData(
            chunk, TensorProperties(dtype=part.dtype), torch.Size(part.global_shape)
        )
        items.append(
            WriteItem(MetadataIndex(part.key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)
        )
    return SavePlan(items)


def plan_save(parts: bytes, plans: list[bytes]) -> bytes:
    with patch.object(dist, "get_rank", lambda: 0):
        for _ in range(2):
            # its own bytes
            validate_sharding_integrity([pickle.loads(parts) for _ in plans])  # noqa: S301
    everyone = [pickle.loads(plan) for plan in plans]  # noqa: S301
    return beginning(MCoreSavePlanner(flatten_state_dict=False).create_global_plan(everyone)[1])


def finish_save(ranks: int, begun: bytes, folder: Path) -> None:
    results = [
        WriteResult(part.index, 2**20, _StorageInfo("__0_0.distcp", i * 2**20, 2**20))
        for i, part in enumerate(write_plan(parts_of(0, ranks)).items)
    ]
    digests = {f"__0_{part}.distcp": FileDigest(2**30, "0" * 64) for part in range(2)}
    sent = pickle.dumps((piece(results), digests))
    written = [pickle.loads(sent) for _ in range(ranks)]  # noqa: S301  (its own bytes)
    with open(folder / ".metadata", "wb") as file:
        file.writelines(complete(begun, (places for places, _ in written)))
    files = {
        f"{rank}{name}": digest
        for rank, (_, parts) in enumerate(written)
        for name, digest in parts.items()
    }
    manifest_text(
        files | digest_files(folder, [".metadata"]), {"step": 1, "serial": 1, "value": None}
    )


def as_in_a_run(work: Callable[[], dict[str, float]]) -> dict[str, float]:
    restore = postpone_full_collections()
    try:
        return work()
    finally:
        restore()


def requests(ranks: int, per_rank: int, num_bytes: int) -> float:
    """Return the seconds of `per_rank` requests of every rank, one after the other, as one client
    measures them with answers of this size.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = store.clone()  # type: ignore[attr-defined]  # not in torch's stubs
    client.set("address", bytes(num_bytes))
    count = 2000
    start = time.monotonic()
    for _ in range(count // 2):
        client.wait(["address"])
        client.get("address")
    return (time.monotonic() - start) / count * ranks * per_rank


def gather_names(ranks: int) -> Callable[[], Any]:
    """Do the work that all_gather_object leaves to Python: unpickle every rank's names and join
    them.
    """
    names = [
        [f"train/metric_{index}" for index in range(60)],
        [f"rollout/fault_{index}_total" for index in range(30)],
    ]
    sent = pickle.dumps(names)

    def unite() -> list[Any]:
        everyone = [pickle.loads(sent) for _ in range(ranks)]  # noqa: S301  (its own bytes)
        return [
            sorted({name for rank in everyone for name in rank[kind]}) for kind in range(len(names))
        ]

    return unite


if __name__ == "__main__":
    sys.exit(main())
