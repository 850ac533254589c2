"""Run the demo for several seeds and print one table row each: accuracy before and after, time,
peak memory, step times.

    .venv/bin/python benchmarks/demo_seeds.py --seeds 0 1 2            # about five minutes a seed \
on two idle cores

Peak memory is the largest sum of resident sizes (RSS) over the demo's process tree, sampled every
half second; shared pages count once per process, so it is an upper bound.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
STAGES = ("rollout", "reward", "split", "old_logprob", "update", "weight_sync", "other")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--args", default="", help="further overrides, e.g. '--rollout.dtype float32'"
    )
    parser.add_argument("--name", default="seed", help="runs are runs/NAME-SEED")
    arguments = parser.parse_args()
    print(
        "| seed | held-out avg@4 before | after | rise | checkpoint s | run s | peak GiB | s/step |"
        " other |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for seed in arguments.seeds:
        print(run_seed(seed, f"{arguments.name}-{seed}", arguments.args.split()), flush=True)


def run_seed(seed: int, name: str, overrides: list[str]) -> str:
    model = ROOT / f".cache/tiny_moe-{seed}"
    start = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "megatron_rl_tools.make_tiny_moe", model, "--seed", str(seed)],
        cwd=ROOT,
        check=True,
    )
    made = time.monotonic() - start
    environment = os.environ | {"SEED": str(seed), "NAME": name}
    start = time.monotonic()
    demo = subprocess.Popen(
        ["bash", "examples/tiny_cpu/run.sh", *overrides],
        cwd=ROOT,
        env=environment,
        stdout=sys.stderr,
    )
    peak = 0
    while demo.poll() is None:
        peak = max(peak, tree_rss(demo.pid))
        time.sleep(0.5)
    if demo.returncode:
        raise SystemExit(f"seed {seed}: the demo ended with status {demo.returncode}")
    seconds = time.monotonic() - start
    rows = [
        json.loads(line)
        for line in (ROOT / "runs" / name / "metrics.jsonl").read_text().splitlines()
    ]
    before, after = (row["eval/heldout/avg@4"] for row in rows if "eval/heldout/avg@4" in row)
    steps = [row for row in rows if "time/step" in row][1:]  # the first holds one-time work
    print(breakdown(steps), file=sys.stderr)
    step = statistics.median(row["time/step"] for row in steps)
    other = sum(row["time/other"] + row["time/split"] for row in steps) / sum(
        row["time/step"] for row in steps
    )
    return (
        f"| {seed} | {before:.3f} | {after:.3f} | {after - before:+.3f} | {made:.0f} |"
        f" {seconds:.0f} | {peak / 2**30:.1f} | {step:.2f} | {other:.1%} |"
    )


def breakdown(steps: list[dict[str, float]]) -> str:
    total = sum(row["time/step"] for row in steps)
    return "  ".join(
        f"{stage} {sum(row[f'time/{stage}'] for row in steps) / total:.1%}" for stage in STAGES
    )


def tree_rss(pid: int) -> int:
    total = 0
    try:
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            try:
                total += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
    except psutil.NoSuchProcess:
        return total
    return total


if __name__ == "__main__":
    main()
