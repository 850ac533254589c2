"""Old-logprob pass and update on a CPU: seconds computed by the step-time model against seconds
measured with the engine.

    OMP_NUM_THREADS=1 python benchmarks/step_time.py [--repeats 3] [--ranks 1 2]

First the row "cpu" of plan/hardware.py is measured here: a matrix product, a copy, an all-to-all
over gloo.  The first case then calibrates `matrices`, `experts` and `attention` (one share for all
three) from its old-logprob pass, and the fixed time of a layer from the same model with 64 rows.
All other cases are predicted from these two, with other models, rows, sequences, recompute or
layouts.  Float32, one thread per rank, local layers; CPU seconds of the slowest rank, minimum of
the repeats. Rollout and weight sync are not measured here.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.config import Config, load_config
from megatron_rl.plan.hardware import HARDWARE, Assumptions, Hardware
from megatron_rl.plan.training_time import Tokens, TrainingModel
from tests.dist.launch import run_ranks

BASE = {
    "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 32,
    "moe_intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4, "vocab_size": 4096,
    "max_position_embeddings": 4096,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A case: its differences from BASE, and a step's shape of `micro_batches` on every replica, of
    rows / sequence sequences each.
    """

    name: str
    model: dict[str, int] = field(default_factory=dict)
    rows: int = 2048
    sequence: int = 512
    micro_batches: int = 1
    recompute: str = "none"
    fused_lm_head: bool = False
    parallel: dict[str, int] = field(default_factory=dict)


CALIBRATION, SMALL = Case("calibration"), Case("64 rows", rows=64, sequence=64)
CASES = [
    Case("4 x rows", rows=8192),
    Case("sequences of 2,048", rows=4096, sequence=2048),
    Case("full recompute", recompute="full"),
    Case("selective recompute", recompute="selective"),
    Case(
        "twice as wide",
        model={"hidden_size": 512, "num_attention_heads": 16, "moe_intermediate_size": 256},
    ),
    Case(
        "8 layers, 32 experts, top-2",
        model={"num_hidden_layers": 8, "num_experts": 32, "num_experts_per_tok": 2},
    ),
    Case("vocabulary of 32,768", model={"vocab_size": 32_768}),
    Case("the same, fused LM head", model={"vocab_size": 32_768}, fused_lm_head=True),
    Case("8 micro-batches of 256", rows=256, sequence=128, micro_batches=8),
]
TWO_RANKS = [
    Case("dp 2", micro_batches=2),
    Case("ep 2", parallel={"ep": 2}, micro_batches=2),
    Case("tp 2, ep 2, etp 1", parallel={"tp": 2, "ep": 2, "etp": 1}, micro_batches=2),
    Case("cp 2", parallel={"cp": 2}, rows=4096, micro_batches=2),
    Case("pp 2", parallel={"pp": 2}, micro_batches=4),
]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2], choices=(1, 2))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    cases = [CALIBRATION, SMALL, *CASES]
    with tempfile.TemporaryDirectory() as folder:
        (alone,) = run_ranks(measure_all, 1, cases, folder, args.repeats, timeout=1500)
        together = (
            run_ranks(measure_all, 2, TWO_RANKS, folder, args.repeats, timeout=900)
            if 2 in args.ranks
            else []
        )
    hardware = replace(HARDWARE["cpu"], flops=alone["flops"], bandwidth=alone["bandwidth"])
    if together:
        hardware = replace(hardware, nvlink=min(rank["link"] for rank in together))
    assumed = calibrate(hardware, alone["seconds"])
    rows = [
        compare(case, 1, hardware, assumed, seconds)
        for case, seconds in zip(cases, alone["seconds"], strict=True)
    ]
    for index, case in enumerate(TWO_RANKS if together else []):
        old, update = (max(rank["seconds"][index][which] for rank in together) for which in (0, 1))
        rows.append(compare(case, 2, hardware, assumed, (old, update)))
    result = {"hardware": asdict(hardware), "assumed": asdict(assumed), "cases": rows}
    print(json.dumps(result, indent=1) if args.json else report(hardware, assumed, rows))
    return 0


def measure_all(cases: list[Case], folder: str, repeats: int) -> dict[str, Any]:
    """Measure this CPU, and (old-logprob, update) seconds of each case.  Runs on every rank."""
    from megatron_rl.distributed import make_parallel

    dist.init_process_group("gloo")
    measured: dict[str, Any] = {"flops": flops(), "bandwidth": bandwidth(), "link": link()}
    measured["seconds"] = []
    for case in cases:
        cfg = config(case, Path(folder))
        parallel = make_parallel(cfg.parallel, device="cpu", timeout_minutes=5)
        measured["seconds"].append(measure(cfg, case, parallel, repeats))
        parallel.destroy()
        gc.collect()
    dist.destroy_process_group()
    return measured


def measure(cfg: Config, case: Case, parallel: Any, repeats: int) -> tuple[float, float]:
    from megatron_rl.batch.split import make_mini_batch
    from megatron_rl.engine.engine import Engine
    from megatron_rl.metrics.reduce import MetricSums

    engine = Engine(cfg, parallel, total_updates=100)
    own_samples = samples(
        case.micro_batches * case.rows // case.sequence, case.sequence, cfg, parallel.dp_rank
    )
    batch = make_mini_batch(
        own_samples, max_tokens=case.rows, rule=engine.pack_rule, dp_group=parallel.dp_group
    )
    assert len(batch.micro_batches) == case.micro_batches
    old, updates = [], []
    for _ in range(repeats + 1):
        sums = MetricSums()
        start = time.process_time()
        passed = engine.old_logprobs(batch, sums, replay="none")
        middle = time.process_time()
        engine.update(batch, passed, sums, replay="none")
        old.append(middle - start)
        updates.append(time.process_time() - middle)
    # the first ones fill caches and make the optimizer's state
    return min(old[1:]), min(updates[1:])


def config(case: Case, folder: Path) -> Config:
    from tests.tiny import random_checkpoint

    name = "-".join(f"{key}{value}" for key, value in sorted(case.model.items())) or "base"
    path = folder / f"{name}-{dist.get_rank()}"
    if not path.exists():
        random_checkpoint(path, **{**BASE, **case.model})
    sections = {
        "model": {
            "path": str(path),
            "dtype": "float32",
            "recompute": case.recompute,
            "fused_lm_head": case.fused_lm_head,
        },
        "data": {"train": "unused", "max_prompt_tokens": 4},
        "run": {"max_tokens_per_micro_batch": case.rows, "device": "cpu", "prompts_per_step": 2},
        "replay": {"mode": "none", "measure": False},
        "parallel": case.parallel,
    }
    return load_config(None, [], sections)


def samples(count: int, length: int, cfg: Config, seed: int) -> list[Any]:
    from megatron_rl.batch.pack import Sample
    from megatron_rl.records import Rollout

    rng = np.random.default_rng(seed)
    response = length - 4
    return [
        Sample(
            Rollout(
                id=f"{seed}/{index}",
                tokens=rng.integers(2, 4096, length),
                prompt_length=4,
                rollout_logprobs=np.full(response, -8, np.float32),
                routed_experts=None,
                finish_reason="stop",
                policy_versions=np.zeros(response, np.int32),
            ),
            1.0,
        )
        for index in range(count)
    ]


# What this CPU can do -----------------------------------------------------------------------------


def best_of(work: Callable[[], Any], repeats: int = 7) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return min(seconds)


def flops() -> float:
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return 2 * 1024**3 / best_of(lambda: a @ b)


def bandwidth() -> float:
    """Return the bytes/s read and written by a copy."""
    source = torch.randn(1 << 24)
    target = torch.empty_like(source)
    return 2 * source.nbytes / best_of(lambda: target.copy_(source))


def link() -> float:
    """Return the bytes/s that a rank sends in an all-to-all of 8 MiB, by wall clock."""
    world = dist.get_world_size()
    if world == 1:
        return 0.0
    sent = torch.randn(1 << 21)
    arrived, seconds = torch.empty_like(sent), []
    for _ in range(7):
        start = time.perf_counter()
        dist.all_to_all_single(arrived, sent)
        seconds.append(time.perf_counter() - start)
    return sent.nbytes * (world - 1) / world / min(seconds)


# Predicted ----------------------------------------------------------------------------------------


def calibrate(hardware: Hardware, seconds: list[tuple[float, float]]) -> Assumptions:
    """Return the share of peak and the fixed time of a layer that reproduce the old-logprob passes
    of the two calibration cases.
    """
    layers = BASE["num_hidden_layers"]
    assumed = replace(
        Assumptions(), bandwidth=1.0, nvlink=1.0, lockstep=1.0, fill=1.0, layer_seconds=1e-9
    )
    for _ in range(50):
        large = predict(CALIBRATION, 1, hardware, assumed)[0]
        products = large.matrices + large.experts + large.attention
        share = assumed.matrices * products / (seconds[0][0] - (large.total - products))
        assumed = replace(assumed, matrices=share, experts=share, attention=share)
        small = predict(SMALL, 1, hardware, assumed)[0]
        assumed = replace(
            assumed,
            layer_seconds=max(1e-9, (seconds[1][0] - (small.total - small.layers)) / layers),
        )
    return assumed


def predict(case: Case, world: int, hardware: Hardware, assumed: Assumptions) -> tuple[Any, Any]:
    from megatron_rl.models.known import KNOWN, make_spec

    spec = make_spec({**KNOWN["qwen3-30b-a3b"], **BASE, **case.model})
    sections = {
        "model": {
            "path": "unused",
            "dtype": "float32",
            "recompute": case.recompute,
            "fused_lm_head": case.fused_lm_head,
        },
        "data": {"train": "unused"},
        "run": {"max_tokens_per_micro_batch": case.rows, "device": "cpu"},
        "parallel": case.parallel,
    }
    cfg = load_config(None, [], sections)
    trainer = TrainingModel(spec, cfg, world, hardware, assumed)
    replicas = world // (cfg.parallel.tp * cfg.parallel.cp * cfg.parallel.pp)
    tokens = Tokens(
        replicas * case.micro_batches * case.rows / case.sequence, case.sequence, case.sequence
    )
    return trainer.old_logprob(tokens), trainer.update(tokens)


def compare(
    case: Case, ranks: int, hardware: Hardware, assumed: Assumptions, seconds: tuple[float, float]
) -> dict[str, Any]:
    row: dict[str, Any] = {"case": case.name, "ranks": ranks}
    for name, parts, measured in zip(
        ("old_logprob", "update"), predict(case, ranks, hardware, assumed), seconds, strict=True
    ):
        # waiting is no CPU time
        computed = parts.total - parts.waiting if ranks > 1 else parts.total
        ratio = round(computed / measured, 2)
        row[name] = {
            "computed": round(computed, 4),
            "measured": round(measured, 4),
            "ratio": ratio,
        }
    return row


def report(hardware: Hardware, assumed: Assumptions, rows: list[dict[str, Any]]) -> str:
    rates = (
        f"{hardware.flops / 1e9:.0f} GFLOP/s, {hardware.bandwidth / 1e9:.1f} GB/s; a link"
        f" {hardware.nvlink / 1e9:.2f} GB/s"
    )
    lines = [
        f"torch {torch.__version__}, megatron-core {metadata.version('megatron-core')}",
        f"one thread: {rates}",
        f"calibrated: {assumed.matrices:.2f} of peak, {1e3 * assumed.layer_seconds:.2f} ms a layer",
        (
            f"{'case':30s} ranks  old-logprob computed / measured, s      update computed /"
            " measured, s"
        ),
    ]
    for row in rows:
        passes = [row["old_logprob"], row["update"]]
        cells = [
            f"{part['computed']:8.3f} / {part['measured']:8.3f} = {part['ratio']:.2f}"
            for part in passes
        ]
        lines.append(f"{row['case']:30s} {row['ranks']:5d}  {cells[0]:>34s} {cells[1]:>34s}")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
