"""Cost of the formulation's metrics: their share of the two passes, and time per million response
tokens.

    OMP_NUM_THREADS=1 python benchmarks/metric_cost.py --model .cache/tiny_moe-0 [--steps 5]

One rank trains the demo's model on random sequences of the demo's shape (1,024 responses, N = 2,
R3, full recompute).  Times are CPU time of one thread (other processes do not count).  "metrics" is
everything that the step spends on them: gathering flips, log-ratios, histograms, responses, and
their part of the reduction at its end.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.batch.pack import Sample, pack
from megatron_rl.batch.split import make_mini_batch
from megatron_rl.config import load_config
from megatron_rl.distributed import make_parallel
from megatron_rl.engine import engine as engine_module
from megatron_rl.engine.statistics import add_old_pass, add_update_pass, pass_tokens
from megatron_rl.metrics.reduce import MetricSums
from megatron_rl.records import Rollout
from megatron_rl.records.packed import MiniBatch

RESPONSES, PROMPT, RESPONSE, NUM_MINI_BATCHES = 1024, 7, 4, 2
GAUGES = ("flips_per_token", "pass_tokens", "add_old_pass", "add_update_pass")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="directory with the demo's checkpoint")
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cost, total = measure_step(arguments.model, arguments.steps)
    print(
        f"demo's shape: metrics {1e3 * cost:.1f} ms of {1e3 * total:.0f} ms of both passes,"
        f" {100 * cost / total:.2f} %"
    )
    for length in (1_000, 10_000):
        per_million = measure_tokens(length)
        print(
            f"responses of {length} tokens: {1e3 * per_million:.0f} ms per million response tokens,"
            " both passes together"
        )


def measure_step(model: str, steps: int) -> tuple[float, float]:
    """Return the median seconds of the metrics, and of the old-logprob passes, updates and
    reduction of a step.
    """
    cfg = load_config(
        None,
        [],
        {
            "model": {"path": model, "dtype": "float32", "recompute": "full"},
            "data": {"train": "unused"},
            "optim": {"lr": 1e-4, "distributed": False},
            "replay": {"mode": "R3", "measure": True},
        },
    )
    parallel = make_parallel(cfg.parallel, device="cpu")
    engine = engine_module.Engine(cfg, parallel, total_updates=100)
    spent = [0.0]
    for name in GAUGES:
        setattr(engine_module, name, timed(getattr(engine_module, name), spent))
    batches = make_batches(engine)
    times = []
    for _ in range(steps + 1):
        spent[0], start, sums = 0.0, time.thread_time(), MetricSums()
        passes = [engine.old_logprobs(batch, sums, replay="R3") for batch in batches]
        for batch, old in zip(batches, passes, strict=True):
            engine.update(batch, old, sums, replay="R3")
        before = time.thread_time()
        sums.reduce(dist.group.WORLD, "cpu")
        reduction = time.thread_time() - before
        without = MetricSums()
        without._sums, without._maxima = sums._sums, sums._maxima
        before = time.thread_time()
        without.reduce(dist.group.WORLD, "cpu")
        plain = time.thread_time() - before
        total = before - start
        times.append((spent[0] + max(0.0, reduction - plain), total))
    parallel.destroy()
    costs, totals = zip(*times[1:], strict=True)  # the first step warms up
    return statistics.median(costs), statistics.median(totals)


def timed(function: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            spent[0] += time.thread_time() - start

    return call


def make_batches(engine: engine_module.Engine) -> list[MiniBatch]:
    rng = np.random.default_rng(0)
    spec, size = engine.spec, PROMPT + RESPONSE
    batches = []
    for index in range(NUM_MINI_BATCHES):
        samples = []
        for number in range(RESPONSES // NUM_MINI_BATCHES):
            scores = rng.random((size - 1, len(spec.moe_layers), spec.num_experts))
            routes = np.argsort(scores, axis=-1)[..., : spec.top_k].astype(np.uint8)
            logprobs = rng.normal(-1, 0.3, RESPONSE).astype(np.float32)
            tokens = rng.integers(2, spec.vocab_size, size)
            rollout = Rollout(
                f"{index}.{number}",
                tokens,
                PROMPT,
                logprobs,
                routes,
                "stop",
                np.zeros(RESPONSE, np.int32),
            )
            samples.append(Sample(rollout, float(rng.normal())))
        batch = make_mini_batch(samples, max_tokens=2048, rule=engine.pack_rule, dp_group=None)
        batches.append(dataclasses.replace(batch, index=index))
    return batches


def measure_tokens(length: int, total: int = 1_000_000) -> float:
    """Return the seconds for `total` response tokens in responses of `length`, one mini-batch."""
    rng = np.random.default_rng(0)
    tokens = np.zeros(length + 1, np.int64)
    logprobs = rng.normal(-1, 0.3, length).astype(np.float32)
    routes = np.zeros((length, 1, 1), np.uint8)
    rollout = Rollout("r", tokens, 1, logprobs, routes, "stop", np.zeros(length, np.int32))
    batch = pack([Sample(rollout, 1.0)])
    batches = [batch] * (total // length)
    rows = total // length * (length + 1)
    old = torch.from_numpy(rng.normal(-1, 0.3, rows).astype(np.float32))
    flips = [torch.from_numpy(rng.integers(0, 9, length + 1).astype(np.uint8))] * len(batches)
    times = []
    for _ in range(4):
        sums, start = MetricSums(), time.thread_time()
        passed = pass_tokens(batches, flips, mini_batch=0, cp_group=None)
        add_old_pass(sums, passed, old)
        passed = pass_tokens(batches, flips, mini_batch=0, cp_group=None)
        add_update_pass(sums, passed, old + 0.01, old)
        times.append(time.thread_time() - start)
    return min(times[1:])


if __name__ == "__main__":
    main()
