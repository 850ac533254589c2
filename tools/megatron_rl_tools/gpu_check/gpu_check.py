"""The command `megatron-rl gpu-check`: run the chosen steps and write the page.

options.py parses its arguments.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch

from megatron_rl.config.device_limits import Device
from megatron_rl_tools.doctor.check_packages import installed_versions
from megatron_rl_tools.gpu_check.options import parse
from megatron_rl_tools.gpu_check.results_page import (
    keep_earlier_results,
    totals,
    write_results,
)
from megatron_rl_tools.gpu_check.step_runner import StepReport, check_is_ours, run_job
from megatron_rl_tools.gpu_check.steps import STEPS, CheckStep, StepPlace, job

FOLDER = "steps"
"""Folder of the steps' folders in --out: a step's name, as `demo`, may be a run of the user."""


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            "megatron-rl gpu-check: --device cuda: torch sees no GPU here; start it where the GPU"
            " is, or use --device cpu",
            file=sys.stderr,
        )
        return 2
    place = StepPlace(
        args.device, args.out.resolve() / FOLDER, args.quick, args.server_python, args.rehearsal
    )
    chosen = [step for step in STEPS if step.name in args.steps] if args.steps else list(STEPS)
    try:
        for step in chosen:
            if (place.folder / step.name).exists():
                check_is_ours(place.folder / step.name)
    except ValueError as error:
        print(f"megatron-rl gpu-check: --out {args.out}: {error}", file=sys.stderr)
        return 2
    place.folder.mkdir(parents=True, exist_ok=True)
    if kept := keep_earlier_results(args.out):
        print(f"earlier results in {args.out} are kept as {' and '.join(kept)}")
    reports = run_steps(chosen, place, machine(args.device))
    print(f"{totals(reports)}: {args.out / 'report.md'}")
    return 1 if any(report.outcome.verdict == "failed" for report in reports) else 0


def run_steps(
    steps: Sequence[CheckStep], place: StepPlace, facts: dict[str, str]
) -> list[StepReport]:
    reports: list[StepReport] = []
    for step in steps:
        print(f"{step.name:<15}{step.purpose} At most {step.minutes:g} min ...", flush=True)
        report = run_job(job(step, place), place.folder)
        reports.append(report)
        write_results(place.folder.parent, facts, reports)
        reason = f": {report.outcome.reason}" if report.outcome.reason else ""
        print(f"{'':<15}{report.outcome.verdict} in {report.seconds:.0f} s{reason}", flush=True)
    return reports


def machine(device: Device) -> dict[str, str]:
    """Return hardware, versions and commit, for the page."""
    facts = {"device": device, "host": platform.node(), "system": platform.platform()}
    if device == "cuda":
        properties, count = torch.cuda.get_device_properties(0), torch.cuda.device_count()
        driver = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        facts |= {
            "gpu": f"{count} x {properties.name}, {properties.total_memory / 2**30:.1f} GiB",
            "cuda": str(torch.version.cuda),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "driver": driver.partition("\n")[0],
        }
    facts |= installed_versions() | {"megatron_rl": metadata.version("megatron_rl")}
    commit = output("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")
    return facts | {"commit": commit}


def output(*command: str) -> str:
    """Return what a command prints, or why it prints nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown ({error})"
    return done.stdout.strip() if done.returncode == 0 else f"unknown ({done.stderr.strip()})"


if __name__ == "__main__":
    sys.exit(main())
