"""Read the rollouts of a run of megatron-rl; docs/reference/token_data.md describes its files."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from megatron_rl_tools.check_rollouts.dumped import Dumped, Finding, RecordedRollout, Spans

KINDS = (
    *("tokens", "logprobs", "environment", "routed_experts", "missing_routes", "routes_digest"),
    *("mask_sizes", "mask_codes", "episode_digest", "teacher_logprobs"),
    *("teacher_top_sizes", "teacher_top_codes", "teacher_top_logprobs"),
)
"""Kinds of tensors of a sequence."""
Records = dict[tuple[Path, int], list[RecordedRollout]]
"""(file of lines, step) -> its lines, episode by episode."""
STEP_FILES, FORMER_FILES = "rollouts/step_[0-9]*.jsonl", "rollouts*.jsonl"
"""Lines of one step, and of all steps as versions up to 0.3 wrote them: the names are those of
megatron_rl's RunFolder, which this tool does without (tests/unit/tools/test_check_alone.py).
"""


def line_files(run: Path) -> list[Path]:
    """Return the files of rollouts that a run wrote, in both layouts."""
    return sorted([*run.glob(FORMER_FILES), *run.glob(STEP_FILES)])


def read_records(run: Path, step: int | None) -> Records:
    """Read the lines of every step, or of one.

    Raises ValueError if there are none, or no tensors.
    """
    records = {
        (path, at): lines
        for path in line_files(run)
        for at, lines in read_steps(path).items()
        if step is None or at == step
    }
    if not records:
        of_step = "" if step is None else f" of step {step}"
        raise ValueError(f"{run}: no rollouts{of_step}; is this a run directory?")
    if not any(side_file(path, at).is_file() for path, at in records):
        raise ValueError(f"{run}: no side files; save them with rollout.save_tensors = true")
    return records


def read_steps(path: Path) -> dict[int, list[RecordedRollout]]:
    """Read the lines of every step.

    Runs of older versions may have an episode twice, because a resumed run wrote its step again:
    the last one counts.  Lines without the end of their episode are left out: the run was killed
    there.
    """
    steps: dict[int, dict[str, list[RecordedRollout]]] = {}
    lines: list[RecordedRollout] = []
    for record in read_lines(path):
        lines.append(record)
        if not record.episode:  # the last of its episode
            episodes = steps.setdefault(record.step, {})
            episodes.pop(record.id, None)  # a dict keeps the place of the first
            episodes[record.id] = [line for line in lines if record.id in (line.id, line.episode)]
            lines = []
    return {
        step: [line for lines in episodes.values() for line in lines]
        for step, episodes in steps.items()
    }


def read_lines(path: Path) -> Iterator[RecordedRollout]:
    """Yield the lines.  Raises ValueError, with file and line number, for one that is no record."""
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                fields = json.loads(line)
                # older files have one version for the entire response
                if "policy_version" in fields:
                    fields["policy_versions"] = [
                        [fields.pop("policy_version"), fields.get("response_length")]
                    ]
                record = RecordedRollout(**fields)
                if not are_versions(spans := record.policy_versions):
                    raise ValueError(f"policy_versions = {spans}: must be [[version, tokens], ...]")
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}:{number}: not a rollout record: {error}") from error
            yield record


def are_versions(spans: object) -> bool:
    """Return whether these are [[version, tokens], ...]."""
    return isinstance(spans, list) and all(
        isinstance(span, list) and [type(value) for value in span] == [int, int] and span[1] > 0
        for span in spans
    )


def side_file(path: Path, step: int) -> Path:
    """Return the file with the tensors of a step, beside its lines."""
    if path.match(STEP_FILES):
        return path.with_suffix(".safetensors")
    return path.with_name(f"{path.stem}_{step:06d}.safetensors")


def only_saved(records: Records, run: Path) -> tuple[Records, str]:
    """Return the lines of groups with tensors, and a note if rollout.save_tensors is a share."""
    share = settings_of_run(run).get("save_tensors", True)
    if isinstance(share, bool) or share >= 1:
        return records, ""
    kept: Records = {}
    for (path, step), lines in records.items():
        side = side_file(path, step)
        if not side.is_file():  # the step's groups with tensors are those of other replicas
            continue
        try:
            with safe_open(side, framework="numpy") as file:
                names = set(file.keys())
        except (SafetensorError, OSError):
            kept[path, step] = lines  # `read_dumps` reports it
            continue
        saved = {group_id(record) for record in lines if f"{record.id}:tokens" in names}
        kept[path, step] = [record for record in lines if group_id(record) in saved]
    some, total = (sum(map(len, lines.values())) for lines in (kept, records))
    counts = f"{some} of {total} sequences have tensors, only these are checked"
    return kept, f"rollout.save_tensors = {share}: {counts}"


def group_id(record: RecordedRollout) -> str:
    return (record.episode or record.id).rpartition("/")[0]


def staleness_budget(run: Path) -> int:
    """Return rollout.max_staleness, or 0 if config.toml is missing or older than the key."""
    return int(settings_of_run(run).get("max_staleness", 0))


def settings_of_run(run: Path) -> dict[str, Any]:
    """Return [rollout] of the run's config.toml, or {} if there is none."""
    path = run / "config.toml"
    settings: dict[str, Any] = tomllib.loads(path.read_text()) if path.is_file() else {}
    return settings.get("rollout", {})


def read_dumps(records: Records, findings: list[Finding]) -> Iterator[Dumped]:
    """Yield one sequence at a time, and add what is missing in the files to `findings`."""

    def add(where: str, text: str, cause: str) -> None:
        findings.append(Finding("files", where, text, cause))

    for (path, step), lines in sorted(records.items(), key=lambda item: item[0]):
        side = side_file(path, step)
        if not side.is_file():
            cause = "the step was interrupted, or not saved"
            add(f"step {step}", f"{side.name} is missing", cause)
            continue
        try:
            file = safe_open(side, framework="numpy")
        except (SafetensorError, OSError) as error:
            add(f"step {step}", f"{side.name}: {error}", "the file is truncated or damaged")
            continue
        names = set(file.keys())
        known = {f"{record.id}:{kind}" for record in lines for kind in KINDS}
        for name in sorted(names - known):
            add(name, f"{path.name} has no such rollout", "files of two runs mixed")
        for record in lines:
            kinds = [kind for kind in KINDS if f"{record.id}:{kind}" in names]
            missing = [kind for kind in ("tokens", "logprobs") if kind not in kinds]
            if missing:
                add(record.id, f"{side.name} has no {missing}", "files of two runs mixed")
                continue
            tensors = {kind: file.get_tensor(f"{record.id}:{kind}") for kind in kinds}
            yield to_dumped(record, tensors)


def to_dumped(record: RecordedRollout, tensors: dict[str, np.ndarray]) -> Dumped:
    return Dumped(
        record,
        tensors["tokens"],
        tensors["logprobs"],
        tensors.get("routed_experts"),
        tensors.get("missing_routes"),
        tensors["routes_digest"].tobytes() if "routes_digest" in tensors else None,
        as_spans(tensors.get("environment")),
        tensors["episode_digest"].tobytes() if "episode_digest" in tensors else None,
        (tensors.get("mask_sizes"), tensors.get("mask_codes")),
    )


def as_spans(environment: np.ndarray | None) -> Spans:
    if environment is None:
        return ()
    return tuple((int(start), int(end)) for start, end in environment)
