"""Time that one rank spends in our own code as the job grows from 8 to 1,024 ranks with the same work per rank: simulated.

    OMP_NUM_THREADS=1 python benchmarks/scaling.py [--ranks 8 32 128 512 1024] [--repeats 3]

Every rank is a data-parallel replica with 32 responses of a mini-batch (lognormal lengths, median 400, routes of 12 layers,
top-8), experts over 8 ranks.  CPU milliseconds of one rank, minimum of the repeats.  Other ranks are stand-ins: an all-reduce
returns what the real one would, an all-to-all returns as much as the rank sent.  The watchdogs' store is real (TCP, this
machine) and has the heartbeats of all ranks.  The network's own time is not included.

    plan       make_plan: the rank's pod, and its work for all sequences of the job
    exchange   destinations, packing into bytes and unpacking
    pack       micro-batches, and this rank's routes in the layout of its routers
    dry run    --dry-run of the configuration (once, before a run)
    watchdog   one tick of a rank, every two seconds; of rank 0, which compares all
    metrics    combining the metric names of all ranks, once per step
"""

from __future__ import annotations

import argparse
import gc
import json
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_rl.batch import transfer
from megatron_rl.batch.assignment import POD, Plan, make_plan
from megatron_rl.batch.balance import Work
from megatron_rl.batch.pack import PackRule, Sample, pack
from megatron_rl.config import load_config
from megatron_rl.launch.watchdog import Heartbeat, Watchdog
from megatron_rl.models.known import KNOWN
from megatron_rl.plan.dry_run import report
from megatron_rl.records import Rollout
from megatron_rl.replay.layout import RankLayout

SHARE, CAP, LAYERS, TOP_K, EXPERTS, BALANCE_LENGTH = 32, 4096, 12, 8, 128, 15_470


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 32, 128, 512, 1024])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    rows = {ranks: measure(ranks, args.repeats) for ranks in args.ranks}
    parts = list(next(iter(rows.values())))
    print("  ".join([f"{'ranks':>6s}", *(f"{part:>{max(8, len(part))}s}" for part in parts)]))
    for ranks, found in rows.items():
        print("  ".join([f"{ranks:6d}", *(f"{found[part]:{max(8, len(part))}.2f}" for part in parts)]))
    return 0


def measure(ranks: int, repeats: int) -> dict[str, float]:
    """Part -> CPU milliseconds of one rank."""
    lengths = draw(ranks)
    work, owners = Work(lengths, CAP, BALANCE_LENGTH), np.repeat(np.arange(ranks), SHARE)
    complete = plan_of_all(work, owners, ranks)
    samples = make_samples(lengths[:SHARE])
    own = complete.micro_batches(0)
    with tempfile.TemporaryDirectory() as folder:
        dry = least(dry_run(ranks, Path(folder)), repeats)
    return {
        "plan": least(lambda: plan_of_one(work, owners, ranks, complete), repeats),
        "exchange": least(lambda: trade(samples, complete, ranks), repeats),
        "pack": least(lambda: pack_all(samples, [len(part) for part in own]), repeats),
        "dry run": dry,
        **watch(ranks, repeats),
        "metrics": least(gather_names(ranks), repeats),
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
    """Put together from the pods, each of which fills in its own sequences."""
    pods = [make_plan(work, owners, ranks, first, lambda values, op: values) for first in range(0, ranks, POD)]
    if len(pods) == 1:
        return pods[0]
    assert len({plan.num_slots for plan in pods}) == 1
    return Plan(np.sum([plan.places for plan in pods], 0), pods[0].num_slots, ranks)


def plan_of_one(work: Work, owners: np.ndarray, ranks: int, complete: Plan) -> None:
    """Rank 0's: from the lengths of all to its micro-batches, destinations and the gauge of the plan."""
    plan = make_plan(work, owners, ranks, 0, lambda values, op: complete.places if op == dist.ReduceOp.SUM else values)
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
                routed_experts=np.argsort(rng.random((length - 1, LAYERS, EXPERTS), np.float32))[..., :TOP_K].astype(
                    np.uint8
                ),
                finish_reason="stop",
                policy_versions=np.zeros(length - 4, np.int32),
            ),
            1.0,
        )
        for index, length in enumerate(lengths.tolist())
    ]


def trade(samples: list[Sample], complete: Plan, ranks: int) -> None:
    send, transfer.send_bytes = transfer.send_bytes, lambda outgoing, group: list(outgoing)
    try:
        group: Any = SimpleNamespace(size=lambda: ranks, rank=lambda: 0)
        transfer.exchange(samples, complete.destinations(slice(0, SHARE)), group)
    finally:
        transfer.send_bytes = send


def pack_all(samples: list[Sample], counts: list[int]) -> None:
    """The plan's number of micro-batches, from this rank's own samples: as many tokens as arrive from the others."""
    layout = RankLayout(
        layers=tuple(range(LAYERS)), tp_rank=0, tp_size=1, sequence_parallel=False, num_experts=EXPERTS, top_k=TOP_K, ep_size=8
    )  # fmt: skip
    rule, share = PackRule(), -(-len(samples) // len(counts))
    for start in range(0, len(samples), share):
        batch = pack(part := samples[start : start + share], rule.rows([len(each.rollout.tokens) for each in part]))
        assert batch.routed_experts is not None
        layout.local_routes(batch.routed_experts, batch.cu_seqlens)


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
    """A tick of rank 1 and of rank 0, all ranks having beaten."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.PrefixStore("megatron_rl", store.clone())
    settings: dict[str, Any] = {"stage_seconds": 600, "silence_seconds": 300, "folder": Path(), "stop": print}
    dogs = [Watchdog(client, rank, ranks, **settings) for rank in (0, 1)]
    for rank in range(ranks):
        beat = Heartbeat(1, 7, "update", "update of step 4", 12.5, "", "host")
        client.set(f"beat/{rank}", json.dumps(list(vars(beat).values())))
    now = time.monotonic()
    other, first = (least(lambda dog=dog: dog.tick(now), repeats) for dog in dogs[::-1])
    return {"watchdog": other, "rank 0's": first}


def gather_names(ranks: int) -> Callable[[], Any]:
    """What all_gather_object leaves to Python: unpickle every rank's names, unite them."""
    mine = [[f"train/metric_{index}" for index in range(60)], [f"rollout/fault_{index}_total" for index in range(30)]]
    sent = pickle.dumps(mine)

    def unite() -> list[Any]:
        everyone = [pickle.loads(sent) for _ in range(ranks)]  # noqa: S301  (its own bytes)
        return [sorted({name for rank in everyone for name in rank[kind]}) for kind in range(len(mine))]

    return unite


if __name__ == "__main__":
    sys.exit(main())
