"""Weight sync: every pipeline stage and expert rank sends its own part, against rank 0 alone; and its overhead per tensor.

    OMP_NUM_THREADS=1 python benchmarks/push.py [--pp 4 --ep 2] [--servers 2] [--pushes 3]
    OMP_NUM_THREADS=1 python benchmarks/push.py --overhead

The first starts pp x ep ranks with a Qwen3-MoE of megatron-core (--layers, --experts, --hidden; bfloat16) and receivers that load
one bucket at a time, as SGLang does (tests/fake_receiver.py, over gloo).  Rank 0 alone is the same code with one source.  All of
it shares this machine's cores: seconds compare the two ways here, bytes are the same on any machine.  Of each way: seconds of a
push (median), bytes that each rank sends to the servers and to other ranks, and memory above that before the push.

--overhead: one rank with 48 layers of 128 experts (18,432 expert tensors, Qwen3-30B-A3B) whose tensors have only a few values, so
that what remains is the time per tensor: export, checks, buckets and the JSON that names them.  CPU time; nothing is sent.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import resource
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl.models.families import make_spec
from megatron_rl.models.spec import ModelSpec, load_hf_config
from megatron_rl.weights.hf.export import (
    Place,
    assign_sources,
    batches,
    export_planned,
    few_sources,
    forwarded,
    order_steps,
    plan_export,
)
from megatron_rl.weights.hf.mapping import entries, shard_shape
from megatron_rl.weights.sync.buckets import Bucket
from megatron_rl.weights.sync.push import WeightPusher, checked
from tests.dist.launch import build, run_ranks
from tests.fake_receiver import receivers
from tests.tiny import random_checkpoint

MIB = 1 << 20
CPU = torch.device("cpu")


# Overhead -----------------------------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    """The parameters of one layer under TransformerEngine's names, without the layers."""

    def __init__(self, number: int, parameters: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.layer_number = number
        for name, tensor in parameters.items():
            module: torch.nn.Module = self
            *parents, own = name.split(".")
            for parent in parents:
                if not hasattr(module, parent):
                    module.add_module(parent, torch.nn.Module())
                module = getattr(module, parent)
            module.register_parameter(own, torch.nn.Parameter(tensor))


def small_model(spec: ModelSpec) -> torch.nn.Module:
    """All parameters of one rank."""
    model, layers = torch.nn.Module(), dict[int, dict[str, torch.Tensor]]()
    model.config = SimpleNamespace(transformer_impl="local")
    for entry in entries(spec):
        tensor = torch.zeros(shard_shape(entry, 1), dtype=torch.bfloat16)
        if entry.layer is not None:
            layers.setdefault(entry.layer, {})[entry.name.removeprefix(f"decoder.layers.{entry.layer}.")] = tensor
            continue
        module: torch.nn.Module = model
        *parents, own = entry.name.split(".")
        for parent in parents:
            if not hasattr(module, parent):
                module.add_module(parent, torch.nn.Module())
            module = getattr(module, parent)
        module.register_parameter(own, torch.nn.Parameter(tensor))
    if not hasattr(model, "decoder"):
        model.add_module("decoder", torch.nn.Module())
    model.decoder.layers = torch.nn.ModuleList(Layer(number + 1, layers[number]) for number in sorted(layers))
    return model


def overhead(folder: Path) -> None:
    spec = make_spec(load_hf_config(random_checkpoint(folder / "model")))
    spec = replace(
        spec, num_layers=48, moe_layers=tuple(range(48)), num_experts=128, hidden_size=8, expert_ffn_size=4, num_heads=2,
        num_kv_heads=1, head_dim=4,
    )  # fmt: skip
    model = small_model(spec)
    table = list(entries(spec))
    start = time.process_time()
    keys = frozenset({*range(48), *(entry.name for entry in table if entry.layer is None)})
    places = [Place(0, 0, (0,), (0,), keys)]
    plan = order_steps(table, assign_sources(table, places), places)
    planned = time.process_time() - start
    expected = {name: (shape, torch.bfloat16) for entry in table for name, shape in entry.hf}
    parallel = SimpleNamespace(rank=0, ep_rank=0, ep_size=1, etp_group=None, tp_group=None)

    def push() -> tuple[int, int]:
        stream = export_planned(plan, [model], spec, parallel)
        sent = size = 0
        for number, batch in enumerate(
            batches(checked(stream, expected, folder), 512 * MIB // 1000, of_one_dtype=True)
        ):
            bucket = Bucket(CPU, number)
            for name, _, dtype, _, tensor in batch.tensors:
                bucket.add(name, tensor, dtype)
            sent += bucket.flat().nbytes
            size += len(json.dumps(bucket.describe()))
        return sent, size

    push()
    seconds = []
    for _ in range(5):
        start = time.process_time()
        sent, size = push()
        seconds.append(time.process_time() - start)
    experts = sum("experts" in name for name in expected)
    print(
        f"{len(expected)} tensors, {experts} of experts: plan {planned:.2f} s (once), push {statistics.median(seconds):.3f} s"
    )
    print(
        f"{sent} bytes of weights, {size} of names; {1e6 * statistics.median(seconds) / len(expected):.1f} us per tensor"
    )
    profile = cProfile.Profile()
    profile.runcall(push)
    pstats.Stats(profile).sort_stats("tottime").print_stats(12)


# Every rank against rank 0 -------------------------------------------------------------------------------------------


def measure(
    checkpoint: Path, layout: dict, urls: list[str], most: int, bucket_bytes: int, pushes: int, folder: Path
) -> dict:
    """On a rank."""
    import torch.distributed as dist

    from megatron_rl.distributed.ranks import Ranks

    chunks, spec, _, parallel = build(checkpoint, dtype="bfloat16", **layout)
    pusher = WeightPusher(
        urls, checkpoint=checkpoint, dtype=torch.bfloat16, transport="distributed", bucket_mb=1, device=CPU,
        timeout_seconds=300, disk_dir=folder, ranks=Ranks.of(parallel),
    )  # fmt: skip
    pusher.bucket_bytes = bucket_bytes
    plan = plan_export(chunks, spec, parallel)
    moved = [0]
    send = dist.send

    def counting(tensor: torch.Tensor, *args: object, **rest: object) -> None:
        moved[0] += tensor.nbytes
        send(tensor, *args, **rest)

    dist.send = counting

    def export():
        stream = export_planned(plan, chunks, spec, parallel)
        return forwarded(stream, few_sources(plan, most), parallel.rank, CPU)

    pusher.push(export, 1)  # makes the connections
    moved[0], before = 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reports = [pusher.push(export, 2 + number) for number in range(pushes)]
    pusher.close()
    return {
        "seconds": statistics.median(report.seconds for report in reports),
        "num_bytes": reports[0].num_bytes,
        "buckets": reports[0].num_buckets,
        "sent": reports[0].sent_bytes[parallel.rank],
        "moved": moved[0] // pushes,
        "memory": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024,
    }


def compare(args: argparse.Namespace, folder: Path) -> None:
    world = args.pp * args.ep
    checkpoint = random_checkpoint(
        folder / "model", dtype=torch.bfloat16, num_hidden_layers=args.layers, num_experts=args.experts,
        hidden_size=args.hidden, moe_intermediate_size=args.hidden // 2, vocab_size=1024,
    )  # fmt: skip
    bucket_bytes = int(args.bucket_mib * MIB)
    for most, name in ((world, "every rank"), (1, "rank 0 alone")):
        with receivers(checkpoint / "model.safetensors", args.servers) as servers:
            found = run_ranks(
                measure, world, checkpoint, {"pp": args.pp, "ep": args.ep}, [each.url for each in servers], most,
                bucket_bytes, args.pushes, folder, timeout=1200,
            )  # fmt: skip
        total, sent, moved = found[0]["num_bytes"], [each["sent"] for each in found], [each["moved"] for each in found]
        through = max(map(sum, zip(sent, moved, strict=True)))
        print(f"{name}: {found[0]['seconds']:.2f} s, {total / MIB:.1f} MiB in {found[0]['buckets']} buckets")
        print(f"  MiB to servers {in_mib(sent)}, to other ranks {in_mib(moved)}")
        print(f"  most through a rank {through / (total / world):.2f} x total / ranks")
        memory = max(each["memory"] for each in found)
        print(f"  most above the first push {memory / MIB:.1f} MiB; load {os.getloadavg()[0]:.1f}", flush=True)


def in_mib(sizes: list[int]) -> str:
    return " ".join(f"{size / MIB:.1f}" for size in sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--overhead", action="store_true")
    for name, value in (
        ("pp", 4),
        ("ep", 2),
        ("servers", 2),
        ("pushes", 3),
        ("layers", 8),
        ("experts", 32),
        ("hidden", 256),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--bucket_mib", type=float, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.overhead:
            overhead(Path(folder))
        else:
            compare(args, Path(folder))


if __name__ == "__main__":
    main()
