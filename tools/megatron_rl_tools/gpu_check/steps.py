"""The steps of gpu-check, in order, and the process of one of them.

    python -m megatron_rl_tools.gpu_check.steps NAME ...

A step is a function of a StepPlace that returns its StepOutcome, or raises NotPossible.  Any other
exception is a failure, whose traceback is in the step's log.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from megatron_rl.config.device_limits import Device
from megatron_rl_tools.gpu_check.result import NotPossible, StepOutcome
from megatron_rl_tools.gpu_check.step_runner import StepJob

PACKAGE = "megatron_rl_tools.gpu_check"


@dataclass(frozen=True)
class StepPlace:
    """The device and the folder of a step."""

    device: Device
    folder: Path
    quick: bool
    server_python: Path
    """An interpreter that has SGLang."""
    rehearsal: Path | None = None
    """The folder that `megatron-rl rehearse` wrote, for the step full-layout."""


@dataclass(frozen=True)
class CheckStep:
    """A step of the command."""

    name: str
    purpose: str
    minutes: float
    """Its limit."""
    target: str
    """module:function in this package."""


STEPS = (
    CheckStep("doctor", "Packages, GPUs, memory, disk.", 3, "command_steps:doctor"),
    CheckStep("verify-replay", "Routing replay in one rank, float32: R3 and R2.", 5,
    "command_steps:verify_replay"),
    CheckStep("host-syncs", "Host synchronisations of an update do not grow with layers.", 5,
    "memory_steps:host_syncs"),
    CheckStep("memory", "Peak memory of an update against the dry run.", 10, "memory_steps:peak"),
    CheckStep("logits", "bf16 log-probs, packed and padded, against transformers.", 10,
    "logits:against_transformers"),
    CheckStep("permute-fusion", "Two identical passes give equal log-probs, bit by bit.", 5,
    "logits:identical_passes"),
    CheckStep("replay", "R3 and R2 with each kind of recompute: used experts, gradients.", 10,
    "replay:replay_layouts"),
    CheckStep("checkpoint", "Update, save, resume, convert; peak memory of a save.", 10,
    "replay:checkpoint"),
    CheckStep("weight-sync", "Colocated weight sync into a real SGLang server.", 10,
    "server_steps:weight_sync"),
    CheckStep("weight-sync-group", "Joining and leaving the groups of a weight sync, two GPUs.", 10,
    "group_steps:weight_sync_group"),
    CheckStep("demo", "The demo on this device, with a real SGLang server.", 20,
    "server_steps:demo"),
    CheckStep("full-layout", "A dummy step in the layout of --rehearsal, beside the rehearsed one.",
    10, "layout_steps:full_layout"),
    CheckStep("speed", "Four Qwen3-30B layers: permute fusion, fused LM head, replay, tokens/s.",
    20, "speed:speed"),
)  # fmt: skip


def job(step: CheckStep, place: StepPlace) -> StepJob:
    """Return the process of a step; `place.folder` is the folder of all steps."""
    command = [sys.executable, "-m", f"{PACKAGE}.steps", step.name, "--device", place.device]
    command += ["--folder", str(place.folder / step.name)]
    command += ["--server-python", str(place.server_python)]
    if place.rehearsal is not None:
        command += ["--rehearsal", str(place.rehearsal)]
    return StepJob(step.name, step.purpose, step.minutes, command + ["--quick"] * place.quick)


def main(argv: list[str] | None = None) -> int:
    """Run a step in this process and write its result.  The exit status is 0 unless it raised."""
    parser = argparse.ArgumentParser(description="One step of gpu-check, in this process.")
    parser.add_argument("name", choices=[step.name for step in STEPS])
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--server-python", type=Path, default=Path(sys.executable))
    parser.add_argument("--rehearsal", type=Path)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args(argv)
    place = StepPlace(args.device, args.folder, args.quick, args.server_python, args.rehearsal)
    target = next(step.target for step in STEPS if step.name == args.name)
    module, _, function = target.partition(":")
    try:
        outcome = getattr(import_module(f"{PACKAGE}.{module}"), function)(place)
    except NotPossible as error:
        outcome = StepOutcome("not possible", str(error))
    outcome.write(args.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
