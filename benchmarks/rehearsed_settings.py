"""What settings of the update are worth, rehearsed: Qwen3-30B-A3B on H100s, `tp 2 cp 4 ep 8`.

    python -m benchmarks.rehearsed_settings [defaults] [eight]

defaults: gradient reduction and LM head, on 64 GPUs without recompute, 4 layers.
eight: the layout that fits 8 GPUs with Adam's state on them beside the one with most of it on the
host, as 48 layers: a rehearsal of 4 and one of 2 layers give the seconds and bytes of a layer.
Nothing is measured on a GPU; collectives that overlap take no time from the computation.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.rehearsed_plans import RECIPE, run_rehearsal
from megatron_rl.config import load_config
from megatron_rl.models.known import find_spec
from megatron_rl.plan.hardware import Assumptions, find_hardware
from megatron_rl.plan.training_time import TrainingModel

MODEL, LAYERS, GIB = "qwen3-30b-a3b", 48, 1 << 30
LAYOUT = ["--parallel.pp", "1", "--parallel.etp", "1"]
SETTINGS = {
    "defaults": [],
    "overlap_grad_reduce off": ["--megatron.overlap_grad_reduce", "false"],
    "gradient_accumulation_fusion on": ["--megatron.gradient_accumulation_fusion", "true"],
    "fused_lm_head on": ["--model.fused_lm_head", "true"],
}
BEFORE = ["--model.recompute", "full", "--megatron.overlap_grad_reduce", "false"]
NOW = [
    "--model.recompute", "none", "--megatron.use_precision_aware_optimizer", "true",
    "--megatron.optimizer_cpu_offload", "true", "--megatron.optimizer_offload_fraction", "0.6",
]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["defaults", "eight"])
    parts = parser.parse_args().parts
    with tempfile.TemporaryDirectory() as folder:
        if "defaults" in parts:
            compare_settings(Path(folder))
        if "eight" in parts:
            compare_layouts(Path(folder))
    return 0


def compare_settings(folder: Path) -> None:
    print("64 GPUs, 4 layers, recompute none, an update of 2 micro-batches:")
    print("GiB; ms; of them waits for the reduction of gradients and the gathering of parameters")
    for name, options in SETTINGS.items():
        words = ["--gpus", "64", "--layers", "4", *LAYOUT, "--model.recompute", "none", *options]
        found = run_rehearsal(folder, ["--model", MODEL, *words])
        gradient, gather = (
            found["seconds"][phase].get(kind, 0.0)
            for phase, kind in (
                ("gradient, second", "reduce_scatter"), ("optimizer, second", "all_gather"),
            )
        )  # fmt: skip
        print(
            f"{name}: {peak(found) / GIB:.2f} GiB; {1000 * sum(update(found)):.1f} ms;"
            f" {1000 * gradient:.1f} ms, {1000 * gather:.1f} ms",
            flush=True,
        )


def compare_layouts(folder: Path) -> None:
    print("8 GPUs, 48 layers:")
    print("GiB; seconds of 2 micro-batches, of Adam; of an update of all micro-batches")
    totals = []
    for name, options in (("before", BEFORE), ("now", NOW)):
        few, more = (
            run_rehearsal(
                folder, ["--model", MODEL, "--gpus", "8", "--layers", layers, *LAYOUT, *options]
            )
            for layers in ("2", "4")
        )
        gradient, adam, memory = (
            a + (b - a) * (LAYERS - 2) / 2
            for a, b in zip((*update(few), peak(few)), (*update(more), peak(more)), strict=True)
        )
        model = planned(options)
        num = model.micro_batches(model.tokens)
        # the host's part of Adam is in no rehearsal: bytes over the rates of its data sheet
        host = model.host_adam(0)
        totals.append(num * gradient / 2 + adam + host)
        print(
            f"{name}: {memory / GIB:.1f} GiB; {gradient:.3f} s, {adam:.3f} s + {host:.1f} s on the"
            f" host; {num:.0f} micro-batches {totals[-1]:.0f} s",
            flush=True,
        )
        print(f"  {' '.join(options)}")
    print(f"update before / now: {totals[0] / totals[1]:.2f}")


def planned(options: list[str]) -> TrainingModel:
    """Return the plan's model of time of the recipe with these options, on 8 GPUs."""
    spec = find_spec(MODEL)
    cfg = load_config(RECIPE, ["--model.path", MODEL, *LAYOUT, *options])
    return TrainingModel(spec, cfg, 8, find_hardware("h100"), Assumptions())


def update(found: dict[str, Any]) -> tuple[float, float]:
    """Return the pretended seconds of gradients and of the optimizer in the second update."""
    phases = found["phases"]
    return phases["gradient, second"], phases["optimizer, second"]


def peak(found: dict[str, Any]) -> float:
    return float(max(row[2] for row in found["memory"]))


if __name__ == "__main__":
    sys.exit(main())
