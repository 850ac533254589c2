"""The results of gpu-check as one JSON file and one Markdown page.  Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from megatron_rl_tools.gpu_check.result import Figure
from megatron_rl_tools.gpu_check.step_runner import StepReport
from megatron_rl_tools.json_output import json_text

RESULTS = ("report.md", "results.json")
SEND_BACK = "Send back the complete folder: this page, results.json, and steps/*/log.txt."


def write_results(folder: Path, machine: Mapping[str, str], reports: Sequence[StepReport]) -> None:
    """Write results.json and report.md in `folder`.

    Called after every step, so that a killed run leaves them.
    """
    everything = {"machine": dict(machine), "steps": [asdict(report) for report in reports]}
    (folder / "results.json").write_text(json_text(everything) + "\n")
    (folder / "report.md").write_text(results_page(machine, reports))


def keep_earlier_results(folder: Path) -> list[str]:
    """Rename the results of an earlier call in `folder` to NAME_N, and return their new names."""
    kept = []
    files = [folder / name for name in RESULTS]
    number = 1
    while any(numbered(file, number).exists() for file in files):
        number += 1
    for file in files:
        if file.exists():
            kept.append(file.rename(numbered(file, number)).name)
    return kept


def numbered(file: Path, number: int) -> Path:
    return file.with_stem(f"{file.stem}_{number}")


def results_page(machine: Mapping[str, str], reports: Sequence[StepReport]) -> str:
    lines = ["# gpu-check", "", totals(reports), "", SEND_BACK, "", "## Machine", ""]
    lines += markdown_lines(("what", "value"), machine.items())
    lines += ["", "## Steps", ""]
    rows = [
        (r.name, r.outcome.verdict, f"{r.seconds:.0f} s of {r.minutes:g} min", r.outcome.reason)
        for r in reports
    ]
    lines += markdown_lines(("step", "verdict", "time", "reason"), rows)
    for report in reports:
        lines += ["", f"## {report.name}", "", report.purpose, ""]
        figures = flat_figures(report.outcome.figures)
        lines += markdown_lines(("figure", "value"), figures) if figures else ["No figures."]
    return "\n".join(lines) + "\n"


def totals(reports: Sequence[StepReport]) -> str:
    counts = Counter(report.outcome.verdict for report in reports)
    return ", ".join(
        f"{counts[verdict]} {verdict}" for verdict in ("passed", "failed", "not possible")
    )


def markdown_lines(head: Sequence[str], rows: object) -> list[str]:
    assert not isinstance(rows, str)
    cells = [head, ["---"] * len(head), *rows]  # type: ignore[misc]  # rows of text
    return ["| " + " | ".join(escaped(str(cell)) for cell in row) + " |" for row in cells]


def escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def flat_figures(figures: Mapping[str, Figure], before: str = "") -> list[tuple[str, str]]:
    """Return (dotted name, value) of nested figures; floats with four digits."""
    rows: list[tuple[str, str]] = []
    for name, value in figures.items():
        if isinstance(value, dict):
            rows += flat_figures(value, f"{before}{name}.")
        else:
            rows.append(
                (f"{before}{name}", f"{value:.4g}" if isinstance(value, float) else str(value))
            )
    return rows
