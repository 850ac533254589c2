"""The command `megatron-rl check-rollouts`: read the rollouts of a run or a dump, and check them.

options.py parses its arguments.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_rl_tools.check_rollouts.dumped import Dumped, Finding
from megatron_rl_tools.check_rollouts.foreign import FOREIGN_CHECKS, ForeignChecks, ForeignDump
from megatron_rl_tools.check_rollouts.formats import open_dump
from megatron_rl_tools.check_rollouts.model_sizes import Model, open_model
from megatron_rl_tools.check_rollouts.options import parse
from megatron_rl_tools.check_rollouts.rollout_canary import run_canary
from megatron_rl_tools.check_rollouts.rollout_checks import (
    CHECKS,
    Across,
    check_episode_digest,
    check_one,
)
from megatron_rl_tools.check_rollouts.run_files import (
    only_saved,
    read_dumps,
    read_records,
    staleness_budget,
)
from megatron_rl_tools.json_output import json_text

SHOWN = 3
"""Findings per check in the table."""


@dataclass(frozen=True)
class CheckReport:
    """The result of the checks of a run or a dump."""

    rollouts: int
    """Sequences that were read."""
    with_routes: int
    missing_rows: int
    """Rows that are recorded as without a route."""
    checks: tuple[str, ...]
    findings: tuple[Finding, ...]
    canary: dict[str, float] | None
    format: str = "megatron_rl"
    unchecked: dict[str, str] = field(default_factory=dict)
    """Check -> why it was not run."""
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.findings


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        model = None if arguments.model is None else open_model(arguments.model, arguments.dtype)
        which = {"step": arguments.step, "sample": arguments.sample, "seed": arguments.seed}
        dump = open_dump(arguments.run, arguments.format, None if model is None else model.sizes)
        if dump is None:
            report = check_run(arguments.run, model, **which)
        else:
            report = check_dump(dump, model, **which)
    except (ValueError, OSError) as error:
        print(f"megatron-rl check-rollouts: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json_text({"passed": report.passed, **asdict(report)}))
    else:
        show(report, Console(highlight=False, soft_wrap=True))
    return 0 if report.passed else 1


def check_run(
    run: Path,
    model: Model | None = None,
    *,
    step: int | None = None,
    sample: int = 8,
    seed: int = 0,
) -> CheckReport:
    """Check every saved rollout of a run, or of one step.  Raises ValueError if there are none."""
    sizes = None if model is None else model.sizes
    records, note = only_saved(read_records(run, step), run)
    across = Across(sizes, staleness_budget(run))
    findings: list[Finding] = []
    count = with_routes = missing_rows = 0
    episode: list[Dumped] = []
    for dumped in read_dumps(records, findings):
        count += 1
        episode.append(dumped)
        if not dumped.record.episode:
            name = dumped.record.id
            parts = [part for part in episode if name in (part.record.id, part.record.episode)]
            findings += check_episode_digest(parts)
            episode = []
        with_routes += dumped.routes is not None
        missing_rows += int((~dumped.present).sum())
        findings += check_one(dumped, sizes)
        across.add(dumped)
    findings += across.findings()
    checks, canary, unchecked = CHECKS, None, dict[str, str]()
    if model is not None:
        checks = (*checks, "canary")
        first = min(at for _, at in records) if step is None else step
        of_step = {key: lines for key, lines in records.items() if key[1] == first}
        result = run_canary(model, read_dumps(of_step, []), sample=sample, seed=seed)
        if result.unchecked:
            unchecked["canary"] = result.unchecked
        findings += result.findings
        canary = result.agreement
    notes = (*filter(None, [note]), *(model.notes if model else ()))
    counts = count, with_routes, missing_rows
    return CheckReport(*counts, checks, tuple(findings), canary, unchecked=unchecked, notes=notes)


def check_dump(
    dump: ForeignDump,
    model: Model | None = None,
    *,
    step: int | None = None,
    sample: int = 8,
    seed: int = 0,
) -> CheckReport:
    """Check every rollout of another trainer's dump, or of one step.  Raises ValueError if none."""
    sizes = None if model is None else model.sizes
    masks, across, findings = ForeignChecks(), Across(sizes), list[Finding]()
    steps: set[int] = set()
    for rollout in (rollout for file in dump.files for rollout in dump.read(file, findings)):
        if step is None or rollout.record.step == step:
            steps.add(rollout.record.step)
            findings += check_one(rollout, sizes)
            if len(rollout.tokens) and rollout.record.prompt_length < 1:
                continue  # check_one says so: its places mean nothing
            masks.add(rollout)
            if not rollout.has_media:
                across.add(rollout)
    if not steps and not findings:
        of_step = "" if step is None else f" of step {step}"
        raise ValueError(f"{dump.files[0]}: no rollouts{of_step}")
    # the dump does not say how stale rollouts may be: versions are compared within a rollout only
    findings += [finding for finding in across.findings() if finding.check != "versions"]
    findings += masks.findings()
    unchecked = masks.unchecked(text_only=dump.text_only)
    checks, canary = FOREIGN_CHECKS, None
    if model is not None:
        checks = (*checks, "canary")
        first = min(steps, default=0) if step is None else step
        everything = (rollout for file in dump.files for rollout in dump.read(file, []))
        candidates = (rollout for rollout in everything if rollout.record.step == first)
        result = run_canary(model, candidates, sample=sample, seed=seed)
        if result.unchecked:
            unchecked["canary"] = unchecked.get("alignment", result.unchecked)
        findings += result.findings
        canary = result.agreement
    kept = tuple(finding for finding in findings if finding.check not in unchecked)
    notes = (*dump.notes, *masks.notes(), *(model.notes if model else ()))
    return CheckReport(
        masks.rollouts, masks.with_routes, 0, checks, kept, canary, dump.format, unchecked, notes
    )


def show(report: CheckReport, console: Console) -> None:
    rows = report.missing_rows
    missing = f"; {rows} rows recorded as without a route" if rows else ""
    of = "" if report.format == "megatron_rl" else f" of {report.format}"
    console.print(f"{report.rollouts} rollouts{of}, {report.with_routes} with expert ids{missing}")
    table = Table("check", "", "rollouts", "found", "likely cause", box=None, pad_edge=False)
    for check in report.checks:
        if check in report.unchecked:
            table.add_row(
                check, "[yellow]NOT CHECKED[/yellow]", "", escape(report.unchecked[check]), ""
            )
            continue
        findings = [finding for finding in report.findings if finding.check == check]
        if not findings:
            table.add_row(check, "[green]PASS[/green]", "", "", "")
        for index, finding in enumerate(findings[:SHOWN]):
            head = (check, "[red]FAIL[/red]", str(len(findings))) if index == 0 else ("", "", "")
            table.add_row(*head, escape(f"{finding.where}: {finding.found}"), escape(finding.cause))
    console.print(table)
    if report.canary is not None:
        shifts = ", ".join(
            f"{value:.3f} at shift {shift}" for shift, value in report.canary.items()
        )
        console.print(f"canary: agreement with the model's own top-k {shifts}")
    for note in report.notes:
        console.print(escape(note))
    console.print("PASS" if report.passed else f"FAIL: {len(report.findings)} findings")


if __name__ == "__main__":
    sys.exit(main())
