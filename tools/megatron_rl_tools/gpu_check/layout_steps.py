"""The step that runs a rehearsed step on the real devices and compares, phase by phase."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from megatron_rl_tools.gpu_check.memory_steps import PEAK_LIMIT
from megatron_rl_tools.gpu_check.result import Findings, NotPossible, StepOutcome
from megatron_rl_tools.gpu_check.results_page import markdown_lines
from megatron_rl_tools.gpu_check.steps import StepPlace

GIB = 1 << 30
PAGE = "beside.md"
SAME = ("rows", "parameters")
"""What a rank of both must have in common."""


class Line(NamedTuple):
    """A phase, measured and rehearsed; bytes are the highest peak of the rehearsed ranks."""

    phase: str
    seconds: float
    rehearsed_seconds: float | None
    """None: the rehearsal has no time for the phase."""
    peak: int | None
    """None on a CPU, whose memory torch does not count."""
    rehearsed_peak: int


def full_layout(place: StepPlace) -> StepOutcome:
    if place.rehearsal is None:
        raise NotPossible(
            "needs --rehearsal DIR, which `megatron-rl rehearse --config F.toml --out DIR` writes"
            " where torch is a CPU build"
        )
    file = place.rehearsal / "rehearsal.json"
    rehearsal = json.loads(file.read_text())
    world_size = rehearsal["rehearsed"]["world_size"]
    if place.device == "cuda" and torch.cuda.device_count() < world_size:
        raise NotPossible(
            f"the rehearsed layout has {world_size} ranks; torch sees"
            f" {torch.cuda.device_count()} GPUs here"
        )
    if not rehearsal["by_rank"]:
        raise NotPossible(f"{file} has no rank that ended: {rehearsal['errors'][:1]}")
    (place.folder / "model").mkdir()
    (place.folder / "model" / "config.json").write_text(json.dumps(rehearsal["rehearsed"]["model"]))
    command = [sys.executable, "-m", "megatron_rl.launch", "--standalone"]
    command += [
        "--nproc-per-node",
        str(world_size),
        "-m",
        "megatron_rl_tools.gpu_check.layout_rank",
    ]
    command += ["--rehearsal", str(file.resolve()), "--device", place.device]
    command += ["--folder", str(place.folder)]
    # as examples/launch/train.sh
    environ = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", **os.environ}
    subprocess.run(command, env=environ, check=True)
    measured = {
        rank: json.loads((place.folder / f"rank{rank}.json").read_text())
        for rank in range(world_size)
    }
    findings = Findings(figures={"rehearsal": rehearsal["title"]})
    lines = compare(rehearsal, measured, findings)
    (place.folder / PAGE).write_text(page(place.device, rehearsal["title"], lines))
    return findings.outcome


def compare(
    rehearsal: Mapping[str, Any], measured: Mapping[int, Mapping[str, Any]], findings: Findings
) -> list[Line]:
    """Return a line for each phase, and note figures, and what is more than the limit.

    rehearsal: rehearsal.json.  measured: rank -> what layout_rank wrote.  Raises ValueError where
    the step was another one than the rehearsed.
    """
    rehearsed = {int(rank): item for rank, item in rehearsal["by_rank"].items()}
    for rank, item in rehearsed.items():
        for name in SAME:
            if measured[rank][name] != item[name]:
                raise ValueError(
                    f"rank {rank} has {name} = {measured[rank][name]}, the rehearsal"
                    f" {item[name]}: rehearse again with this version"
                )
    lines = []
    for phase in measured[0]["seconds"]:
        peaks = [item["memory"][phase]["peak"] for item in rehearsed.values()]
        here = [measured[rank]["memory"].get(phase, {}).get("peak") for rank in rehearsed]
        line = Line(
            phase,
            max(item["seconds"][phase] for item in measured.values()),
            rehearsal["phases"].get(phase),
            None if None in here else max(here),
            max(peaks),
        )
        lines.append(line)
        note(line, findings)
    return lines


def note(line: Line, findings: Findings) -> None:
    findings.figures[line.phase] = {
        "seconds": line.seconds,
        "rehearsed seconds": line.rehearsed_seconds,
        "GiB": None if line.peak is None else line.peak / GIB,
        "rehearsed GiB": line.rehearsed_peak / GIB,
    }
    if line.peak is not None and line.rehearsed_peak:
        ratio = line.peak / line.rehearsed_peak
        findings.check(
            ratio <= PEAK_LIMIT,
            f"{line.phase}: {ratio:.2f} of the rehearsed peak (limit {PEAK_LIMIT})",
        )


def page(device: str, title: str, lines: Sequence[Line]) -> str:
    """Return both beside each other, as Markdown.

    A rehearsal computes the seconds of a GPU, so on a CPU their difference says nothing.
    """
    head = ("phase", "GiB", "rehearsed", "difference", "seconds", "rehearsed", "difference")
    rows = [
        (
            line.phase,
            *cells(line.peak, line.rehearsed_peak, GIB),
            *cells(line.seconds, line.rehearsed_seconds, 1),
        )
        for line in lines
    ]
    return "\n".join(
        [f"# Measured on {device}, beside the rehearsal: {title}", "", *markdown_lines(head, rows)]
    )


def cells(measured: float | None, rehearsed: float | None, unit: int) -> tuple[str, str, str]:
    """Return both in this unit, and by how much the measured one is more."""
    difference = f"{100 * (measured / rehearsed - 1):+.1f} %" if measured and rehearsed else ""
    texts = ["" if value is None else f"{value / unit:.3f}" for value in (measured, rehearsed)]
    return texts[0], texts[1], difference
