"""CPU seconds and memory of training with adapters, beside full training.

    OMP_NUM_THREADS=1 python -m benchmarks.lora_time [--repeats 5] [--rows 2048]

One rank with float32 weights and the model of benchmarks/step_time.py, every case in a process of
its own.  The ratios are those to full training.

    pass       seconds of the old log-prob pass, a forward pass: the least of the repeats
    update     seconds of forward and backward pass and optimizer step: the least of the repeats
    memory     MiB: the process's largest resident memory, less that before the engine was made
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from benchmarks.step_time import Case, config, measure
from megatron_rl.config.sections.lora import LoraConfig
from tests.dist.launch import run_ranks

CASES = {
    "full training": LoraConfig(),
    "attention, rank 8": LoraConfig(rank=8, targets=("attention",)),
    "experts, rank 8": LoraConfig(rank=8, targets=("experts",)),
    "all, rank 8": LoraConfig(rank=8),
    "all, rank 64": LoraConfig(rank=64),
}


class Cost(NamedTuple):
    """Seconds, seconds and MiB."""

    old_pass: float
    update: float
    memory: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, default=2048, help="of the micro-batch of an update")
    arguments = parser.parse_args()
    costs = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, lora in CASES.items():
            (costs[name],) = run_ranks(
                cost, 1, lora, arguments.rows, folder, arguments.repeats, timeout=900
            )
    full = costs["full training"]
    print("| | pass, s | ratio | update, s | ratio | memory, MiB | ratio |")
    print("|---|---|---|---|---|---|---|")
    for name, case in costs.items():
        cells = [
            cell
            for value, base, form in zip(case, full, (".2f", ".2f", ",.0f"), strict=True)
            for cell in (f"{value:{form}}", f"{value / base:.2f}")
        ]
        print(f"| {name} | {' | '.join(cells)} |")


def cost(lora: LoraConfig, rows: int, folder: str, repeats: int) -> Cost:
    """Return the cost of a case.  Runs on the only rank."""
    from megatron_rl.distributed import make_parallel

    dist.init_process_group("gloo")
    case = Case("lora", rows=rows)
    cfg = config(case, Path(folder)).model_copy(update={"lora": lora})
    parallel = make_parallel(cfg.parallel, device="cpu", timeout_minutes=5)
    before = peak_mib()
    seconds = measure(cfg, case, parallel, repeats)
    memory = peak_mib() - before
    parallel.destroy()
    dist.destroy_process_group()
    return Cost(*seconds, memory)


def peak_mib() -> float:
    """Return the largest resident memory of this process so far."""
    # ru_maxrss of a forked process is at least that of its parent
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    main()
