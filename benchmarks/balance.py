"""Balancing 1,024 sequences over data-parallel replicas: waiting time of replicas that run in
lockstep.

    OMP_NUM_THREADS=1 python benchmarks/balance.py [--seeds 3] [--replicas 8 32] [--json] [--peers \
DIR ...]

Lengths are lognormal (median 4,000, sigma 1), cut at the cap of a micro-batch, 32,768 tokens.
`capped`: 12 % have that length.

    lockstep   work / (replicas x sum over slots of the costliest micro-batch); work is FLOPs of
               Qwen3-30B-A3B for all planners
    total      the same if replicas waited only at the end of a mini-batch
    fill       tokens / (micro-batches x cap)
    over       number of micro-batches above the cap, and the largest of them
    moved      share of the tokens that move to another replica
    pods       share of the tokens that move to another pod
    ms         the plan, CPU time of one rank
    in place   ours without moving sequences: each replica plans what it sampled

--peers: source checkouts of verl and slime, whose own functions plan the same lengths.  verl: a
Karmarkar-Karp partition over replicas, then rearrange_micro_batches with the count that all
replicas need.  slime: build_dp_schedule with balance_data, and with balance_by_flops.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.peers import make_packages
from megatron_rl.batch.assignment import make_plan, plan_of, pod_size
from megatron_rl.batch.balance import Slot, Work, plan_slots

CAP, SEQUENCES, GROUP = 32_768, 1024, 8
QWEN3_30B = {
    "hidden_size": 2048, "num_attention_heads": 32, "num_query_groups": 4, "kv_channels": 128,
    "num_layers": 48,
    "num_experts": 128, "moe_ffn_hidden_size": 768, "moe_router_topk": 8, "ffn_hidden_size": 6144,
    "vocab_size": 151_936,
}  # fmt: skip
BALANCE_LENGTH = 15_470  # megatron_rl/engine/flops.py for this model
Planner = Callable[[list[int], int], tuple[list[Slot], float]]
"""(lengths, replicas) -> (slots, seconds of one rank)."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--replicas", nargs="+", type=int, default=[8, 32])
    parser.add_argument("--peers", nargs="+", type=Path, default=[])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    planners: dict[str, Planner] = {"ours": ours, "in place": timed(in_place)}
    for checkout in args.peers:
        planners |= {name: timed(planner) for name, planner in load_peers(checkout).items()}
    rows = [
        measure(name, planner, kind, replicas, args.seeds)
        for kind in ("lognormal", "capped")
        for replicas in args.replicas
        for name, planner in planners.items()
    ]
    print(json.dumps(rows, indent=1) if args.json else table(rows))
    return 0


def measure(name: str, planner: Planner, kind: str, replicas: int, seeds: int) -> dict[str, object]:
    """Return the mean over seeds, but the worst of `over` and of ms."""
    results = []
    for seed in range(seeds):
        lengths = draw(kind, seed, replicas)
        slots, seconds = planner(lengths, replicas)
        assert sorted(i for slot in slots for part in slot for i in part) == list(
            range(len(lengths))
        )
        work = Work(lengths, CAP, BALANCE_LENGTH)
        totals = [
            sum(work.cost(slot[replica]) for slot in slots if slot[replica])
            for replica in range(replicas)
        ]
        sizes = [sum(lengths[i] for i in part) for slot in slots for part in slot]
        share = len(lengths) // replicas
        moves = [
            (i, i // share, to)
            for slot in slots
            for to, part in enumerate(slot)
            for i in part
            if i // share != to
        ]
        moved, size = sum(lengths[i] for i, _, _ in moves), pod_size(replicas)
        pods = sum(lengths[i] for i, home, to in moves if home // size != to // size)
        results.append(
            (
                plan_of(slots).lockstep_efficiency(work), sum(totals) / (replicas * max(totals)),
                sum(lengths) / (len(sizes) * CAP), moved / sum(lengths), pods / sum(lengths),
                len(slots),
                sum(size > CAP for size in sizes), max(sizes), 1e3 * seconds,
            )
        )  # fmt: skip
    values = np.array(results)
    names = ("lockstep", "total", "fill", "moved", "pods", "slots")
    means = {key: round(float(value), 3) for key, value in zip(names, values.mean(0), strict=False)}
    worst = {
        "least": round(float(values[:, 0].min()), 3),
        "over": int(values[:, 6].max()),
        "ms": round(values[:, 8].max(), 1),
    }
    return {
        "planner": name,
        "lengths": kind,
        "replicas": replicas,
        **means,
        **worst,
        "largest": int(values[:, 7].max()),
    }


def draw(kind: str, seed: int, replicas: int) -> list[int]:
    """Draw lengths in the order of sampling: replica r has the r-th part."""
    rng = np.random.default_rng(seed)
    count = max(SEQUENCES, 32 * replicas)
    lengths = np.minimum(rng.lognormal(np.log(4000), 1.0, count), CAP).astype(int).clip(64)
    return (
        np.where(rng.random(count) < 0.12, CAP, lengths).tolist()
        if kind == "capped"
        else lengths.tolist()
    )


def timed(planner: Callable[[list[int], int], list[Slot]]) -> Planner:
    def plan(lengths: list[int], replicas: int) -> tuple[list[Slot], float]:
        gc.collect()
        start = time.process_time()
        slots = planner(lengths, replicas)
        return slots, time.process_time() - start

    return plan


def ours(lengths: list[int], replicas: int) -> tuple[list[Slot], float]:
    """Plan on one thread for a rank of each pod, then time one of them again with the agreed
    values, so that all-reduces cost nothing.
    """
    owners = np.arange(len(lengths)) * replicas // len(lengths)
    work = Work(np.array(lengths), CAP, BALANCE_LENGTH)
    speakers = range(0, replicas, pod_size(replicas))
    meeting = Meeting(len(speakers))
    with ThreadPoolExecutor(len(speakers)) as pool:
        plan, *_ = pool.map(
            lambda member: make_plan(work, owners, replicas, member, meeting), speakers
        )
    seconds = []
    gc.collect()  # else the heap of the imported libraries may be searched while the clock runs
    for _ in range(3):
        replay = iter(meeting.agreed).__next__
        start = time.process_time()
        make_plan(
            work, owners, replicas, 0, lambda values, op, replay=replay: replay()
        ).micro_batches(0)
        seconds.append(time.process_time() - start)
    return [plan.side_by_side(slot) for slot in range(plan.num_slots)], min(seconds)


class Meeting:
    """An all-reduce among threads; remembers what was agreed."""

    def __init__(self, size: int) -> None:
        self.barrier, self.brought, self.agreed = (
            threading.Barrier(size),
            list[np.ndarray](),
            list[np.ndarray](),
        )

    def __call__(self, values: np.ndarray, op: dist.ReduceOp.RedOpType) -> np.ndarray:
        self.brought.append(values)
        if self.barrier.wait() == 0:
            self.agreed.append(
                np.max(self.brought, 0) if op == dist.ReduceOp.MAX else np.sum(self.brought, 0)
            )
            self.brought = []
        self.barrier.wait()
        return self.agreed[-1]


def in_place(lengths: list[int], replicas: int) -> list[Slot]:
    """Let each replica plan its sequences, with as many micro-batches as the replica that needs
    most.
    """
    share = len(lengths) // replicas
    parts = [range(r * share, (r + 1) * share) for r in range(replicas)]
    count = 1
    while True:
        plans = []
        for part in parts:
            work = Work([lengths[i] for i in part], CAP, BALANCE_LENGTH)
            plans.append(
                [
                    [part[i] for i in members]
                    for (members,) in plan_slots(work, 1, count_multiple=count)
                ]
            )
        if len({len(plan) for plan in plans}) == 1:
            return [list(slot) for slot in zip(*plans, strict=True)]
        count = max(len(plan) for plan in plans)


def load_peers(checkout: Path) -> dict[str, Planner]:
    if (checkout / "verl").is_dir():
        return {"verl": load_verl(checkout)}
    if (checkout / "slime").is_dir():
        return {
            "slime": load_slime(checkout, by_flops=False),
            "slime by FLOPs": load_slime(checkout, by_flops=True),
        }
    print(f"peers: {checkout} has neither verl/ nor slime/: skipped", file=sys.stderr)
    return {}


def load_verl(checkout: Path) -> Planner:
    """Load trainer_base's partition over replicas and what each worker does, with stand-ins for
    modules that only carry data.
    """
    make_packages(checkout, "verl", "verl.utils")
    for name, contents in (
        ("verl.protocol", {"DataProto": object}),
        (
            "verl.utils.tensordict_utils",
            {"index_select_tensor_dict": lambda batch, partition: None},
        ),
        ("verl.utils.device", {"get_device_name": lambda: "cpu"}),
    ):
        stand_in = sys.modules[name] = ModuleType(name)
        vars(stand_in).update(contents)
    vars(sys.modules["verl.utils"])["tensordict_utils"] = sys.modules["verl.utils.tensordict_utils"]
    balancing = importlib.import_module("verl.utils.seqlen_balancing")

    def rearrange(lengths: Sequence[int], at_least: int | None) -> list[list[int]]:
        ids = torch.nested.as_nested_tensor(
            [torch.zeros(n, dtype=torch.uint8) for n in lengths], layout=torch.jagged
        )
        return balancing.rearrange_micro_batches(
            {"input_ids": ids}, CAP, min_num_micro_batch=at_least
        )[1]

    def plan(lengths: list[int], replicas: int) -> list[Slot]:
        workloads = balancing.calculate_workload(torch.tensor(lengths)).tolist()
        parts = balancing.get_seqlen_balanced_partitions(
            workloads, k_partitions=replicas, equal_size=True
        )
        count = max(-(-sum(lengths[i] for i in part) // CAP) for part in parts)
        plans = [
            [[part[i] for i in micro] for micro in rearrange([lengths[i] for i in part], count)]
            for part in parts
        ]
        return [list(slot) for slot in zip(*plans, strict=True)]

    return plan


def load_slime(checkout: Path, *, by_flops: bool) -> Planner:
    make_packages(checkout, "slime", "slime.utils")
    schedule = importlib.import_module("slime.utils.dp_schedule")
    args = SimpleNamespace(
        **QWEN3_30B,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=CAP,
        balance_data=True,
        balance_by_flops=by_flops,
    )

    def plan(lengths: list[int], replicas: int) -> list[Slot]:
        config = {
            "dp_size": replicas,
            "cp_size": 1,
            "vpp_size": 1,
            "microbatch_group_size_per_vp_stage": 1,
        }
        partitions, micro_batches, _, _ = schedule.build_dp_schedule(
            args,
            config,
            lengths,
            global_batch_size=len(lengths),
            rollout_indices=list(range(len(lengths))),
        )
        plans = [
            [[part[i] for i in micro] for micro in members]
            for part, members in zip(partitions, micro_batches, strict=True)
        ]
        return [list(slot) for slot in zip(*plans, strict=True)]

    return plan


def table(rows: Sequence[dict[str, object]]) -> str:
    columns = (
        "lengths",
        "replicas",
        "planner",
        "lockstep",
        "least",
        "total",
        "fill",
        "slots",
        "over",
        "largest",
        "moved",
        "pods",
        "ms",
    )
    lines = [[str(row[column]) for column in columns] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(columns, *lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        for cells in [columns, *lines]
    )


if __name__ == "__main__":
    raise SystemExit(main())
