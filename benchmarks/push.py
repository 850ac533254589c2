"""Weight sync: every pipeline stage and expert rank sends its own part, against rank 0 alone; and
its overhead per tensor.

    OMP_NUM_THREADS=1 python benchmarks/push.py [--pp 4 --ep 2] [--servers 2] [--pushes 5] \
[--slime CHECKOUT]
    OMP_NUM_THREADS=1 python benchmarks/push.py --overhead

The first starts pp x ep ranks with a Qwen3-MoE of megatron-core (--layers, --experts, --hidden;
bfloat16) and receivers that load one bucket at a time, as SGLang does (tests/fake_receiver.py, over
gloo).  Rank 0 alone is the same code with one source; slime is its own update code (push_slime.py).
After each way every receiver must hold every tensor, bit by bit.  All of it shares this machine's
cores, so seconds compare the ways here; bytes are the same on any machine.  Of each way: seconds of
a push, CPU seconds of each rank, bytes that it sends to the servers and to other ranks, and the
most memory above that before the push (medians).

--overhead: one rank with 48 layers of 128 experts (18,432 expert tensors, Qwen3-30B-A3B) whose
tensors have only a few values, so that what remains is the time per tensor: export, checks, buckets
and the JSON that names them.  CPU time; nothing is sent.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import json
import os
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.push_slime import slime_push
from megatron_rl.distributed.ranks import Ranks
from megatron_rl.models.families import make_spec
from megatron_rl.models.spec import ModelSpec, load_hf_config
from megatron_rl.weights.hf.entries import entries, shard_shape
from megatron_rl.weights.hf.export import (
    HFTensor,
    RankParameters,
    assign_sources,
    batches,
    export_planned,
    few_sources,
    forwarded,
    order_steps,
    plan_export,
)
from megatron_rl.weights.sync.buckets import Bucket
from megatron_rl.weights.sync.push import WeightPusher
from megatron_rl.weights.sync.pushed_weights import PushedWeights, checked_stream
from megatron_rl.weights.sync.servers import ServerAccess
from megatron_rl.weights.sync.transports import TransportSettings
from tests.dist.launch import build, run_ranks
from tests.fake_receiver import fingerprint, receivers
from tests.tiny import random_checkpoint

MIB = 1 << 20
CPU = torch.device("cpu")


# Overhead -----------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    """The parameters of one layer under TransformerEngine's names, without the layers."""

    def __init__(self, number: int, parameters: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.layer_number = number
        for name, tensor in parameters.items():
            module: torch.nn.Module = self
            *parents, leaf = name.split(".")
            for parent in parents:
                if not hasattr(module, parent):
                    module.add_module(parent, torch.nn.Module())
                module = getattr(module, parent)
            module.register_parameter(leaf, torch.nn.Parameter(tensor))


def small_model(spec: ModelSpec) -> torch.nn.Module:
    """Return all parameters of one rank."""
    model, layers = torch.nn.Module(), dict[int, dict[str, torch.Tensor]]()
    model.config = SimpleNamespace(transformer_impl="local")
    for entry in entries(spec):
        tensor = torch.zeros(shard_shape(entry, 1), dtype=torch.bfloat16)
        if entry.layer is not None:
            layers.setdefault(entry.layer, {})[
                entry.name.removeprefix(f"decoder.layers.{entry.layer}.")
            ] = tensor
            continue
        module: torch.nn.Module = model
        *parents, leaf = entry.name.split(".")
        for parent in parents:
            if not hasattr(module, parent):
                module.add_module(parent, torch.nn.Module())
            module = getattr(module, parent)
        module.register_parameter(leaf, torch.nn.Parameter(tensor))
    if not hasattr(model, "decoder"):
        model.add_module("decoder", torch.nn.Module())
    model.decoder.layers = torch.nn.ModuleList(
        Layer(number + 1, layers[number]) for number in sorted(layers)
    )
    return model


def overhead(folder: Path) -> None:
    spec = make_spec(load_hf_config(random_checkpoint(folder / "model")))
    spec = replace(
        spec, num_layers=48, moe_layers=tuple(range(48)), num_experts=128, hidden_size=8,
        expert_ffn_size=4, num_heads=2,
        num_kv_heads=1, head_dim=4,
    )  # fmt: skip
    model = small_model(spec)
    table = list(entries(spec))
    start = time.process_time()
    keys = frozenset({*range(48), *(entry.name for entry in table if entry.layer is None)})
    places = [RankParameters(0, 0, (0,), (0,), keys)]
    plan = order_steps(table, assign_sources(table, places), places)
    planned = time.process_time() - start
    expected = {name: (shape, torch.bfloat16) for entry in table for name, shape in entry.hf}
    parallel = SimpleNamespace(rank=0, ep_rank=0, ep_size=1, etp_group=None, tp_group=None)

    def push() -> tuple[int, int]:
        stream = export_planned(plan, [model], spec, parallel)
        sent = size = 0
        for number, batch in enumerate(
            batches(checked_stream(stream, expected, folder), 512 * MIB // 1000, of_one_dtype=True)
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
        f"{len(expected)} tensors, {experts} of experts: plan {planned:.2f} s (once), push"
        f" {statistics.median(seconds):.3f} s"
    )
    print(
        f"{sent} bytes of weights, {size} of names;"
        f" {1e6 * statistics.median(seconds) / len(expected):.1f} us per tensor"
    )
    profile = cProfile.Profile()
    profile.runcall(push)
    pstats.Stats(profile).sort_stats("tottime").print_stats(12)


# Every rank against rank 0 ------------------------------------------------------------------------


@dataclass
class Way:
    """A way to push."""

    name: str
    most: int
    """The most ranks that send."""
    slime: Path | None = None
    """slime's source checkout, whose code replaces ours."""


@dataclass
class Moved:
    """Bytes that this rank has sent."""

    to_servers: int = 0
    """Bytes to the servers: one copy, however many servers there are."""
    to_ranks: int = 0

    def count(self) -> None:
        """Count, from now on, what goes through torch.distributed.

        Our broadcasts do not: PushReport has those.
        """
        send, gather, broadcast = dist.send, dist.all_gather, dist.broadcast

        def counted_send(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            self.to_ranks += tensor.nbytes
            return send(tensor, *args, **options)

        def counted_gather(
            parts: list[torch.Tensor], tensor: torch.Tensor, *args: Any, **options: Any
        ) -> Any:
            self.to_ranks += (len(parts) - 1) * tensor.nbytes
            return gather(parts, tensor, *args, **options)

        def counted_broadcast(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            self.to_servers += tensor.nbytes
            return broadcast(tensor, *args, **options)

        dist.send, dist.all_gather, dist.broadcast = counted_send, counted_gather, counted_broadcast


def memory(field: str) -> int:
    """Return the bytes of this process from /proc: VmRSS, and VmHWM, its maximum since the last
    reset.
    """
    (line,) = (
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(field)
    )
    return int(line.split()[1]) * 1024


def measure(
    checkpoint: Path,
    layout: dict[str, int],
    urls: list[str],
    way: Way,
    bucket_bytes: int,
    pushes: int,
    folder: Path,
) -> dict[str, float]:
    """Return the medians of the pushes after the first one, which makes the connections.  Runs on
    every rank.
    """
    chunks, spec, _, parallel = build(checkpoint, dtype="bfloat16", **layout)
    moved, buckets = Moved(), 0
    if way.slime is not None:
        update = slime_push(way.slime, chunks, spec, parallel, urls, bucket_bytes)
    else:
        pusher = WeightPusher(
            ServerAccess(urls, 300),
            PushedWeights(checkpoint, torch.bfloat16),
            TransportSettings("distributed", bucket_mb=1, device=CPU, disk_dir=folder),
            ranks=Ranks.of(parallel),
        )
        pusher.bucket_bytes = bucket_bytes
        plan = plan_export(chunks, spec, parallel)
        versions = itertools.count(1)

        def export() -> Iterable[HFTensor]:
            stream = export_planned(plan, chunks, spec, parallel)
            return forwarded(stream, few_sources(plan, way.most), parallel.rank, CPU)

        def update() -> None:
            nonlocal buckets
            report = pusher.push(export, next(versions))
            moved.to_servers += report.sent_bytes[parallel.rank]
            buckets = report.num_buckets

    moved.count()
    update()
    moved.to_servers = moved.to_ranks = 0
    seconds, used, extra = [], [], []
    for _ in range(pushes):
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        before, start, cpu = memory("VmRSS"), time.monotonic(), time.process_time()
        update()
        seconds.append(time.monotonic() - start)
        used.append(time.process_time() - cpu)
        extra.append(memory("VmHWM") - before)
    return {
        "seconds": statistics.median(seconds),
        "fastest": min(seconds),
        "cpu": statistics.median(used),
        "extra": statistics.median(extra),
        "sent": moved.to_servers // pushes,
        "moved": moved.to_ranks // pushes,
        "buckets": buckets,
    }


def compare(args: argparse.Namespace, folder: Path) -> None:
    world, bucket_bytes = args.pp * args.ep, int(args.bucket_mib * MIB)
    checkpoint = random_checkpoint(
        folder / "model", dtype=torch.bfloat16, num_hidden_layers=args.layers,
        num_experts=args.experts,
        hidden_size=args.hidden, moe_intermediate_size=args.hidden // 2, vocab_size=1024,
    )  # fmt: skip
    tensors = load_file(checkpoint / "model.safetensors")
    expected, total = (
        {name: fingerprint(tensor) for name, tensor in tensors.items()},
        size_of(tensors),
    )
    print(
        f"{total / MIB:.1f} MiB in {len(tensors)} tensors, buckets of {args.bucket_mib:g} MiB,"
        f" {world} ranks"
    )
    ways = [
        Way("every rank", world),
        Way("rank 0 alone", 1),
        *(Way("slime", args.pp, path) for path in args.slime),
    ]
    empty = folder / "empty.safetensors"
    save_file({"nothing": torch.zeros(1)}, empty)
    first: list[dict[str, float]] = []
    for way in ways:
        with receivers(empty, args.servers) as servers:
            measures = run_ranks(
                measure, world, checkpoint, {"pp": args.pp, "ep": args.ep},
                [receiver.url for receiver in servers], way,
                bucket_bytes, args.pushes, folder, timeout=1200,
            )  # fmt: skip
            for receiver in servers:
                state = receiver.state()["held"]
                assert {name: state.get(name) for name in expected} == expected, (
                    f"{way.name}: a receiver has other weights"
                )
        first = first or measures
        report(way, measures, first, total, bucket_bytes)


def report(
    way: Way,
    measures: list[dict[str, float]],
    first: list[dict[str, float]],
    total: int,
    bucket_bytes: int,
) -> None:
    def all_of(key: str) -> list[float]:
        return [measured[key] for measured in measures]

    slowest = max(all_of("seconds"))
    through = [measured["sent"] + measured["moved"] for measured in measures]
    ratio = slowest / max(measured["seconds"] for measured in first)
    print(
        f"{way.name}: {slowest:.2f} s (fastest {max(all_of('fastest')):.2f}), {ratio:.2f} x the"
        " first way's",
        end="; ",
    )
    print(f"load {os.getloadavg()[0]:.1f}")
    print(f"  MiB to servers {in_mib(all_of('sent'))}, to other ranks {in_mib(all_of('moved'))}")
    print(
        f"  most sent by a rank {max(through) / total:.3f} x total ="
        f" {max(through) * len(measures) / total:.2f} x total / ranks"
    )
    print(
        f"  CPU seconds of a rank {' '.join(f'{seconds:.2f}' for seconds in all_of('cpu'))}:"
        f" {sum(all_of('cpu')):.2f}",
        end="; ",
    )
    most = max(all_of("extra"))
    print(
        f"memory above that before: {most / MIB:.1f} MiB = {most / bucket_bytes:.2f} buckets",
        flush=True,
    )


def size_of(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def in_mib(sizes: list[float]) -> str:
    return " ".join(f"{size / MIB:.1f}" for size in sizes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--overhead", action="store_true")
    sizes = {"pp": 4, "ep": 2, "servers": 2, "pushes": 5, "layers": 8, "experts": 32, "hidden": 512}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--bucket_mib", type=float, default=4)
    parser.add_argument("--slime", type=Path, nargs="*", default=(), help="source checkout")
    args = parser.parse_args()
    # so that freed buckets leave the process, for both ways alike: a rank's memory is read from
    # /proc
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(MIB // 4)
    with tempfile.TemporaryDirectory() as folder:
        if args.overhead:
            overhead(Path(folder))
        else:
            compare(args, Path(folder))


if __name__ == "__main__":
    main()
