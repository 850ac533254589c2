"""The command `megatron-rl check-rollouts`: reads the rollouts of a run or a dump and checks them; options.py parses."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from safetensors import SafetensorError, safe_open

from megatron_rl.batch.codec import to_spans
from megatron_rl.config import ModelConfig
from megatron_rl.models.families import make_spec
from megatron_rl.models.spec import ModelSpec, load_hf_config
from megatron_rl.rollout.recorder import RecordedRollout, read_episodes, tensors_path
from megatron_rl_tools.check_rollouts.foreign import (
    FOREIGN_CHECKS,
    OURS_ALONE,
    TOKEN_CHECKS,
    ForeignChecks,
    ForeignDump,
)
from megatron_rl_tools.check_rollouts.formats import open_dump
from megatron_rl_tools.check_rollouts.options import parse
from megatron_rl_tools.check_rollouts.rollout_canary import needs, run_canary, usable_rollouts
from megatron_rl_tools.check_rollouts.rollout_checks import CHECKS, Across, Dumped, Finding, check_episode, check_one

SHOWN = 3  # findings per check in the table
KINDS = (
    "tokens",
    "logprobs",
    "environment",
    "routed_experts",
    "missing_routes",
    "routes_digest",
    "mask_sizes",
    "mask_codes",
    "episode_digest",
)  # tensors of a rollout


@dataclass(frozen=True)
class Report:
    """The number of sequences read, and all findings.  unchecked: check -> why the dump's content does not allow it."""

    rollouts: int
    with_routes: int
    missing_rows: int
    checks: tuple[str, ...]
    findings: tuple[Finding, ...]
    canary: dict[str, float] | None
    format: str = "megatron_rl"
    unchecked: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.findings


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        model = None if arguments.model is None else ModelConfig(path=arguments.model, dtype=arguments.dtype)
        which = {"step": arguments.step, "sample": arguments.sample, "seed": arguments.seed}
        spec = None if model is None else make_spec(load_hf_config(model.path))
        dump = open_dump(arguments.run, arguments.format, spec)
        report = check_run(arguments.run, model, **which) if dump is None else check_dump(dump, model, spec, **which)
    except (ValueError, OSError) as error:
        print(f"check_rollouts: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps({"passed": report.passed, **asdict(report)}, indent=1))
    else:
        show(report, Console(highlight=False, soft_wrap=True))
    return 0 if report.passed else 1


def check_run(
    run: Path, model: ModelConfig | None, *, step: int | None = None, sample: int = 8, seed: int = 0
) -> Report:
    """Check every saved rollout of `run` (of `step`, where given).  Raises ValueError where there are none."""
    spec = None if model is None else make_spec(load_hf_config(model.path))
    records, note = only_saved(read_records(run, step), run)
    across = Across(spec, staleness_budget(run))
    findings: list[Finding] = []
    count = with_routes = missing_rows = 0
    episode: list[Dumped] = []
    for dumped in read_dumps(records, findings):
        count += 1
        episode.append(dumped)
        if not dumped.record.episode:
            name = dumped.record.id
            findings += check_episode([each for each in episode if name in (each.record.id, each.record.episode)])
            episode = []
        with_routes += dumped.routes is not None
        missing_rows += int((~dumped.present).sum())
        findings += check_one(dumped, spec)
        across.add(dumped)
    findings += across.findings()
    checks, canary = CHECKS, None
    if model is not None and spec is not None:
        first = min(at for _, at in records) if step is None else step
        of_step = read_dumps({key: value for key, value in records.items() if key[1] == first}, [])
        result = run_canary(model, usable_rollouts(of_step, spec), spec, sample=sample, seed=seed)
        findings += result.findings
        canary = result.agreement
        checks = (*checks, "canary")
    return Report(count, with_routes, missing_rows, checks, tuple(findings), canary, notes=(note,) if note else ())


def check_dump(
    dump: ForeignDump,
    model: ModelConfig | None,
    spec: ModelSpec | None,
    *,
    step: int | None = None,
    sample: int = 8,
    seed: int = 0,
) -> Report:
    """Check every rollout of another trainer's dump (of `step`, where given).  Raises ValueError where there are none."""
    own, across, findings = ForeignChecks(), Across(spec), list[Finding]()
    steps: set[int] = set()
    for rollout in (rollout for file in dump.files for rollout in dump.read(file, findings)):
        if step is None or rollout.record.step == step:
            steps.add(rollout.record.step)
            findings += check_one(rollout, spec)
            own.add(rollout)
            if not rollout.has_media:
                across.add(rollout)
    if not steps and not findings:
        raise ValueError(f"{dump.files[0]}: no rollouts{'' if step is None else f' of step {step}'}")
    # how stale rollouts may be is not in the dump: versions are compared within a rollout only
    findings += [finding for finding in across.findings() if finding.check != "versions"]
    findings += own.findings()
    unchecked = own.unchecked()
    if dump.text_only:
        unchecked |= dict.fromkeys(TOKEN_CHECKS, "the files hold text only, no token ids")
    unchecked |= OURS_ALONE
    checks, canary = FOREIGN_CHECKS, None
    if model is not None and spec is not None:
        checks = (*checks, "canary")
        first = min(steps, default=0) if step is None else step
        read = (rollout for file in dump.files for rollout in dump.read(file, []))
        if usable := usable_rollouts((each for each in read if each.record.step == first), spec):
            result = run_canary(model, usable, spec, sample=sample, seed=seed)
            findings += result.findings
            canary = result.agreement
        else:
            unchecked["canary"] = unchecked.get("alignment", needs(spec))
    kept = tuple(finding for finding in findings if finding.check not in unchecked)
    notes = (*dump.notes, *own.notes())
    return Report(own.rollouts, own.with_routes, 0, checks, kept, canary, dump.format, unchecked, notes)


def staleness_budget(run: Path) -> int:
    """rollout.max_staleness of the run; 0 where its config.toml is missing or older than the key."""
    return int(rollout_settings(run).get("max_staleness", 0))


def rollout_settings(run: Path) -> dict[str, Any]:
    """[rollout] of the run's config.toml; {} where there is none."""
    path = run / "config.toml"
    found: dict[str, Any] = tomllib.loads(path.read_text()).get("rollout", {}) if path.is_file() else {}
    return found


Records = dict[tuple[Path, int], list[RecordedRollout]]
"""(rollouts*.jsonl, step) -> its lines; a step written again after a resume replaces the first."""


def read_records(run: Path, step: int | None) -> Records:
    records: Records = {}
    for path in sorted(run.glob("rollouts*.jsonl")):
        for at, episodes in read_episodes(path).items():
            if step is None or at == step:
                records[path, at] = [record for lines in episodes.values() for record in lines]
    if not records:
        raise ValueError(f"{run}: no rollouts{'' if step is None else f' of step {step}'}; is this a run directory?")
    if not any(tensors_path(path.parent, at, path.stem).is_file() for path, at in records):
        raise ValueError(f"{run}: no side files; save them with rollout.save_tensors = true")
    return records


def only_saved(records: Records, run: Path) -> tuple[Records, str]:
    """Where rollout.save_tensors is a share: the lines of groups with tensors, and a note about the others, else ""."""
    share = rollout_settings(run).get("save_tensors", True)
    if isinstance(share, bool) or share >= 1:
        return records, ""
    kept: Records = {}
    for (path, step), lines in records.items():
        side = tensors_path(path.parent, step, path.stem)
        if not side.is_file():  # the step's groups with tensors are those of other replicas
            continue
        try:
            with safe_open(side, framework="numpy") as file:
                names = set(file.keys())
        except (SafetensorError, OSError):
            kept[path, step] = lines  # `read_dumps` reports it
            continue
        saved = {group_of(record) for record in lines if f"{record.id}:tokens" in names}
        kept[path, step] = [record for record in lines if group_of(record) in saved]
    counts = [sum(map(len, each.values())) for each in (kept, records)]
    note = f"rollout.save_tensors = {share}: {counts[0]} of {counts[1]} sequences have tensors, only these are checked"
    return kept, note


def group_of(record: RecordedRollout) -> str:
    return (record.episode or record.id).rpartition("/")[0]


def read_dumps(records: Records, findings: list[Finding]) -> Iterator[Dumped]:
    """One rollout at a time; adds what is missing in the files to `findings`."""
    for (path, step), lines in sorted(records.items(), key=lambda each: each[0]):
        side = tensors_path(path.parent, step, path.stem)
        if not side.is_file():
            found = f"{side.name} is missing"
            findings.append(Finding("files", f"step {step}", found, "the step was interrupted, or not saved"))
            continue
        try:
            file = safe_open(side, framework="numpy")
        except (SafetensorError, OSError) as error:
            findings.append(
                Finding("files", f"step {step}", f"{side.name}: {error}", "the file is truncated or damaged")
            )
            continue
        names = set(file.keys())
        known = {f"{record.id}:{what}" for record in lines for what in KINDS}
        for name in sorted(names - known):
            findings.append(Finding("files", name, f"{path.name} has no such rollout", "files of two runs mixed"))
        for name, record in ((record.id, record) for record in lines):
            missing = [what for what in ("tokens", "logprobs") if f"{name}:{what}" not in names]
            if missing:
                findings.append(Finding("files", name, f"{side.name} has no {missing}", "files of two runs mixed"))
                continue
            own = {kind: file.get_tensor(f"{name}:{kind}") for kind in KINDS if f"{name}:{kind}" in names}
            yield Dumped(
                record,
                own["tokens"],
                own["logprobs"],
                own.get("routed_experts"),
                own.get("missing_routes"),
                own["routes_digest"].tobytes() if "routes_digest" in own else None,
                to_spans(own.get("environment")),
                own["episode_digest"].tobytes() if "episode_digest" in own else None,
                (own.get("mask_sizes"), own.get("mask_codes")),
            )


def show(report: Report, console: Console) -> None:
    missing = f"; {report.missing_rows} rows recorded as without a route" if report.missing_rows else ""
    of = "" if report.format == "megatron_rl" else f" of {report.format}"
    console.print(f"{report.rollouts} rollouts{of}, {report.with_routes} with expert ids{missing}")
    table = Table("check", "", "rollouts", "found", "likely cause", box=None, pad_edge=False)
    for check in report.checks:
        if check in report.unchecked:
            table.add_row(check, "[yellow]NOT CHECKED[/yellow]", "", report.unchecked[check], "")
            continue
        found = [finding for finding in report.findings if finding.check == check]
        if not found:
            table.add_row(check, "[green]PASS[/green]", "", "", "")
        for index, finding in enumerate(found[:SHOWN]):
            head = (check, "[red]FAIL[/red]", str(len(found))) if index == 0 else ("", "", "")
            table.add_row(*head, f"{finding.where}: {finding.found}", finding.cause)
    console.print(table)
    if report.canary is not None:
        shifts = ", ".join(f"{value:.3f} at shift {shift}" for shift, value in report.canary.items())
        console.print(f"canary: agreement with the model's own top-k {shifts}")
    for note in report.notes:
        console.print(note)
    console.print("PASS" if report.passed else f"FAIL: {len(report.findings)} findings")


if __name__ == "__main__":
    sys.exit(main())
