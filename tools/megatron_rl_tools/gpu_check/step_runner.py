"""Run steps one after another as processes with a time limit, so that a failing or hanging step
does not stop the following ones.

A step writes result.json (result.py) into its folder, and its output goes to log.txt there.
Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rl_tools.gpu_check.result import StepOutcome, read_outcome

LOG = "log.txt"
TORCHRUN = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@dataclass(frozen=True)
class StepJob:
    """A step as a process."""

    name: str
    purpose: str
    minutes: float
    """Its limit."""
    command: Sequence[str]


@dataclass(frozen=True)
class StepReport:
    """A finished step."""

    name: str
    purpose: str
    minutes: float
    seconds: float
    outcome: StepOutcome


def run_job(job: StepJob, folder: Path) -> StepReport:
    """Run the job in folder/name, which is emptied first.  Its processes have ended on return.

    Raises ValueError where folder/name is not the folder of an earlier run.
    """
    place = folder / job.name
    if place.exists():
        check_is_ours(place)
        shutil.rmtree(place)
    place.mkdir(parents=True)
    environ = {key: value for key, value in os.environ.items() if key not in TORCHRUN}
    start = time.monotonic()
    with open(place / LOG, "wb") as log:
        process = subprocess.Popen(
            job.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environ,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(60 * job.minutes)
        except subprocess.TimeoutExpired:
            status = None
        # also after Ctrl-C, with its ranks and workers; SGLang servers end with their parent
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return StepReport(
        job.name, job.purpose, job.minutes, time.monotonic() - start, judge(job, place, status)
    )


def check_is_ours(place: Path) -> None:
    """Raise ValueError unless a step was run in this folder, which would be removed."""
    if not (place / LOG).is_file():
        raise ValueError(
            f"{place} exists and holds no {LOG}: a step would replace it; give another --out"
        )


def judge(job: StepJob, place: Path, status: int | None) -> StepOutcome:
    """Return the outcome of a process with this exit status, None if it exceeded its limit.

    The figures that it wrote before are kept.
    """
    outcome = read_outcome(place)
    figures = outcome.figures if outcome else {}
    if status is None:
        return StepOutcome(
            "failed", f"over its limit of {job.minutes:g} minutes; {last_line(place)}", figures
        )
    if outcome is None or status != 0:
        return StepOutcome("failed", f"exit status {status}: {last_line(place)}", figures)
    return outcome


def last_line(place: Path) -> str:
    """Return the last line of the log that has text: in a traceback, the error."""
    lines = (place / LOG).read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "no output")[:500]
