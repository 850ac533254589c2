"""Cost of token data (rollout.save_tensors) in the demo: its share of the two passes of a step.

    OMP_NUM_THREADS=1 python benchmarks/token_data_cost.py --model .cache/tiny_moe-0 [--steps 10] \
[--share 0.05]

One rank trains the demo's model on random sequences of the demo's shape (metric_cost.py).  Every
call of the recorder and of what it writes in its thread is timed, in CPU time of the thread that
runs it, so other processes do not count; and steps with and without it alternate.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.metric_cost import NUM_MINI_BATCHES, RESPONSES, make_batches, timed
from megatron_rl.batch.split import batch_without_routes
from megatron_rl.config import load_config
from megatron_rl.distributed import make_parallel
from megatron_rl.engine.engine import Engine
from megatron_rl.metrics.file_writer import FileWriter
from megatron_rl.metrics.reduce import MetricSums
from megatron_rl.records.packed import MiniBatch, Sample
from megatron_rl.rollout.garbage_collection import postpone_full_collections
from megatron_rl.trainer.recording import token_recorder
from megatron_rl.trainer.recording.token_recorder import TokenRecorder

GROUP_SIZE = 16


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="directory with the demo's checkpoint")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--share", type=float, default=0.05, help="rollout.save_tensors")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        costs, totals = measure(arguments.model, arguments.share, arguments.steps, Path(folder))
    off, on = statistics.median(totals[False]), statistics.median(totals[True])
    for name, seconds in costs.items():
        print(
            f"{name:16} {1e3 * statistics.median(seconds):7.2f} ms,"
            f" {100 * statistics.median(seconds) / off:5.2f} % of a step"
        )
    print(
        f"step without it {off:.3f} s, with it {on:.3f} s of CPU time, {100 * (on / off - 1):.2f} %"
    )


Seconds = dict[str, list[float]]


def measure(
    model: str, share: float, steps: int, folder: Path
) -> tuple[Seconds, dict[bool, list[float]]]:
    """Return CPU seconds per step of each part of the recorder, and of all passes with and without
    it.
    """
    sections: dict[str, dict[str, Any]] = {
        "run": {"dir": str(folder), "name": "run"},
        "model": {"path": model, "dtype": "float32", "recompute": "full"},
        "data": {"train": "unused"},
        "optim": {"lr": 1e-4, "distributed": False},
        "replay": {"mode": "R3", "measure": True},
        "rollout": {"save_tensors": share},
    }
    cfg = load_config(None, [], sections)
    cfg.run_dir.mkdir()
    engine = Engine(cfg, make_parallel(cfg.parallel, device="cpu"), total_updates=100)
    parts: dict[str, list[float]] = defaultdict(lambda: [0.0])
    for name in ("add_routes", "add_flips", "add_tokens", "__init__"):
        setattr(token_recorder.Part, name, timed(getattr(token_recorder.Part, name), parts[name]))
    files = FileWriter()
    recorder = TokenRecorder(cfg, engine, files)
    files.now = timed(files.now, parts["written"])  # type: ignore[method-assign]
    recorder.finish = timed(recorder.finish, parts["finish"])  # type: ignore[method-assign]
    drawn = make_batches(engine)
    postpone_full_collections()  # as a run does
    costs: Seconds = defaultdict(list)
    totals: dict[bool, list[float]] = {False: [], True: []}
    for step in range(2 * (steps + 1)):
        is_on = step % 2 == 1
        for spent in parts.values():
            spent[0] = 0.0
        chosen = recorder.choice.of(step + 1, RESPONSES // GROUP_SIZE)
        batches = [with_choice(batch, chosen if is_on else frozenset()) for batch in drawn]
        gc.collect()
        start = time.process_time()
        sums = MetricSums()
        passes = []
        for batch in batches:
            with (
                recorder.old_pass(batch_without_routes(batch))
                if is_on
                else contextlib.nullcontext()
            ):
                passes.append(engine.old_logprobs(batch, sums, replay="R3"))
        for batch, old in zip(batches, passes, strict=True):
            observe = recorder.observer(batch.index, old.mismatch) if is_on else None
            norm = engine.compute_gradient(batch, old, sums, replay="R3", observe=observe)
            engine.apply_gradient(norm, batch, sums)
        if is_on:
            recorder.finish(step + 1)
            files.wait()
        if step > 1:  # the first two warm up
            totals[is_on].append(time.process_time() - start)
            if is_on:
                for name, spent in parts.items():
                    costs[name].append(spent[0])
    files.close()
    assert files.failed == 0
    return costs, totals


def with_choice(batch: MiniBatch, chosen: frozenset[int]) -> MiniBatch:
    """Return `batch` with the tensors of these groups saved."""
    samples = tuple(
        tuple(
            dataclasses.replace(group, save_tokens=number_of(group) // GROUP_SIZE in chosen)
            for group in part
        )
        for part in batch.samples
    )
    return dataclasses.replace(batch, samples=samples)


def number_of(sample: Sample) -> int:
    """Return its place in the step."""
    batch, number = sample.rollout.id.split(".")
    return int(batch) * RESPONSES // NUM_MINI_BATCHES + int(number)


if __name__ == "__main__":
    main()
