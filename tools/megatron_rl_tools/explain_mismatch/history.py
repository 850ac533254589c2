"""The history of a trained run: at which step the mismatch began, and what else changed there.

Reads metrics.jsonl, and for runs with saved tensors the two halves of every sequence:
rollouts/ (the server's) and trained/ (the trainer's).
Shapes: S tokens, R sampled, L MoE layers, K top-k.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NotRequired, TypedDict

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from megatron_rl.config.run_paths import RunFolder, replica_of
from megatron_rl.metrics.sinks import read_metrics
from megatron_rl.records import Rollout
from megatron_rl.records.packed import StepResult
from megatron_rl.rollout.saved.recorded_rollouts import RecordedRollout, read_rollouts
from megatron_rl_tools.explain_mismatch import evidence as ev
from megatron_rl_tools.explain_mismatch.evidence import Evidence
from megatron_rl_tools.explain_mismatch.ladder import EXACT_LIMIT
from megatron_rl_tools.explain_mismatch.token_inputs import (
    MOST_ROLLOUTS,
    run_config,
    single_sequence,
)
from megatron_rl_tools.explain_mismatch.trainer_side import Half
from megatron_rl_tools.explain_mismatch.verdicts import (
    NOT_FINITE,
    PROOF,
    SYMPTOM,
    Verdict,
    VerdictRule,
    verdicts_of,
)

DIFFERENCE = "train/logratio_abs_mean"
SHOWN = (
    DIFFERENCE,
    "train/kl_mu_pi_k3",
    "routing/router_mismatch",
    "routing/replayed_mismatch",
    "routing/flipped_margin",
    "routing/kept_margin",
    "rollout/staleness_mean",
)
"""Metrics whose medians before and after the beginning are compared."""
TIMES = 2.0
SPREADS = 6.0
LASTING = 3
"""The mismatch begins where this many steps in a row lie above EXACT_LIMIT nats, TIMES x the median
before, and that median plus SPREADS x its spread; as many steps must precede."""
NO_BEGINNING = "the difference of the two engines did not begin to grow at any step"

RULES: tuple[VerdictRule, ...] = (
    *NOT_FINITE,
    VerdictRule(
        "routes_shifted", PROOF, ("routes.row_shift != 0",),
        "{history.since}the server's routes are those of other rows: row j has the experts of "
        "row j {routes.row_offset:+.0f}",
        "rollout.urls", "a server that returns row j for the forward of token j",
    ),
    VerdictRule(
        "logprobs_shifted", PROOF, ("logprobs.shift != 0",),
        "{history.since}the server's log-probs are those of other tokens, by "
        "{logprobs.offset:+.0f}",
        "rollout.urls", "a server that returns each log-prob with its token",
    ),
    VerdictRule(
        "not_replayed", PROOF, ("r3.replayed_mismatch > 0",),
        "{r3.replayed_mismatch:.2%} of the experts used in training are not the rollout's, "
        "although replay.mode = R3",
        "replay.mode", "check its layout: megatron-rl verify-replay",
    ),
    VerdictRule(
        "age", PROOF,
        (
            "after.rollout/staleness_mean > 0.5",
            "after.rollout/staleness_mean > 2 * before.rollout/staleness_mean",
        ),
        "responses became older at step {history.began:.0f}: {before.rollout/staleness_mean:.2g} "
        "to {after.rollout/staleness_mean:.2g} weight syncs between sampling and training",
        "rollout.max_staleness", "0, to see the engines alone",
    ),
    VerdictRule(
        "clear_flips", SYMPTOM,
        (
            "history.began >= 1", "after.routing/flipped_margin > 0.5 * after.routing/kept_margin",
            "ratio.routing/router_mismatch > 2",
        ),
        "routers disagree about clear choices from step {history.began:.0f} on "
        "({after.routing/router_mismatch:.2%} of them, before "
        "{before.routing/router_mismatch:.2%}): the two engines have other weights",
        "rollout.verify_push", "checksum: it names the tensor; or compare now with --url",
    ),
    VerdictRule(
        "rounding_grows", SYMPTOM, ("history.began >= 1", "ratio.routing/router_mismatch > 1.5"),
        "log-ratios and close choices of routers grow together from step {history.began:.0f} on: "
        "precision, at weights that became larger or sharper",
        "rollout.dtype", "a more precise one; replay.mode = R3 takes the part of the routes away",
    ),
    VerdictRule(
        "began", SYMPTOM, ("history.began >= 1",),
        "|log mu - log pi_old| began to grow at step {history.began:.0f}: {history.before:.2e} "
        "to {history.after:.2e} nats; routers agree as before",
        "rollout.temperature",
        "equal for requests and trainer; then compare precision and the output head with --url",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class History:
    """The difference of the two engines over a run's steps, and where it began to grow."""

    steps: np.ndarray
    """Steps with the metric DIFFERENCE, counted from 1."""
    differences: np.ndarray
    """The metric DIFFERENCE of these steps, in nats."""
    began: int | None
    """The first step from which the difference stays larger; None if there is none."""
    evidence: Evidence
    verdicts: tuple[Verdict, ...]
    events: tuple[str, ...] = ()
    """Lines of events.jsonl near `began`."""
    flips_by_layer: Mapping[int, Sequence[float]] = field(default_factory=dict)
    """Step -> share of tokens that flip, for each MoE layer."""
    notes: tuple[str, ...] = ()

    @property
    def accuses(self) -> bool:
        """Return whether a cause or a beginning is known.

        A cause that exists from the first step on has no beginning.
        """
        return bool(self.verdicts) or self.began is not None

    def lines(self) -> list[str]:
        lines = [
            f"steps {int(self.steps[0])} to {int(self.steps[-1])}: {DIFFERENCE}"
            f" {self.differences[0]:.2e} to {self.differences[-1]:.2e}"
        ]
        lines += self.notes
        if self.began is None:
            lines.append(NO_BEGINNING)
        else:
            lines.append(
                f"BEGAN at step {self.began}: {self.evidence['history.before']:.2e} before, "
                f"{self.evidence['history.after']:.2e} after"
            )
        lines += [f"  event {event}" for event in self.events]
        for verdict in self.verdicts:
            lines += [
                f"CAUSE {verdict.name}: {verdict.cause}",
                f"  change {verdict.key}: {verdict.value}",
            ]
        return lines

    def as_json(self) -> dict[str, object]:
        return {
            "steps": self.steps.tolist(),
            "differences": self.differences.tolist(),
            "began": self.began,
            "evidence": dict(self.evidence),
            "verdicts": [vars(verdict) for verdict in self.verdicts],
            "events": list(self.events),
            "notes": list(self.notes),
        }


def read_history(folder: Path) -> History:
    """Read the history of a run's folder.  Raises ValueError if it has no metrics of steps."""
    path = RunFolder(folder).metrics
    if not path.is_file():
        raise ValueError(
            f"{folder}: no {path.name}; must be the folder of a run, or of a mini-batch in its"
            " batches/"
        )
    # the metric is NaN if no token of the step was counted
    results = [
        result
        for result in read_metrics(path)
        if math.isfinite(result.metrics.get(DIFFERENCE, math.nan))
    ]
    if not results:
        raise ValueError(
            f"{path}: no step has {DIFFERENCE}; the run must have finished a training step"
        )
    # counted from 1, as on the console and in rollouts
    steps = np.array([result.step + 1 for result in results])
    differences = np.array([result.metrics[DIFFERENCE] for result in results], float)
    at = since_when(differences)
    evidence, began = Evidence(), None if at is None else int(steps[at])
    evidence.add("history", since="" if began is None else f"from step {began} on ")
    if at is not None:
        evidence.add(
            "history",
            began=float(steps[at]),
            before=median(differences[:at]),
            after=median(differences[at:]),
        )
        compare_metrics(evidence, results, at)
    notes: list[str] = []
    try:
        mode = run_config(folder).replay.mode
    except ValueError as error:  # the metrics say enough without it
        notes.append(f"replay.mode is not known: {error}")
        mode = "none"
    if mode == "R3":
        add_replayed(evidence, results[at or 0 :])
    compared = steps[-3:] if at is None else steps[at:]
    read_halves(folder, [int(step) for step in compared], evidence, notes)
    flips = {
        result.step + 1: result.per_layer["routing/flip_rate"]
        for result in results
        if "routing/flip_rate" in result.per_layer
    }
    events = () if began is None else tuple(events_near(folder, began))
    return History(
        steps=steps,
        differences=differences,
        began=began,
        evidence=evidence,
        verdicts=tuple(verdicts_of(evidence, RULES)),
        events=events,
        flips_by_layer=flips,
        notes=tuple(notes),
    )


def since_when(values: np.ndarray) -> int | None:
    """Return the index of the first of LASTING values in a row that stand out of all values before
    them, at least LASTING; None if there is none.
    """
    for at in range(LASTING, len(values) - LASTING + 1):
        before, after = values[:at], values[at : at + LASTING]
        usual = float(np.median(before))
        spread = float(np.median(np.abs(before - usual)))
        if (after > max(EXACT_LIMIT, TIMES * usual, usual + SPREADS * spread)).all():
            return at
    return None


def median(values: np.ndarray) -> float:
    return float(np.median(values)) if len(values) else math.nan


def ratio(before: float, after: float) -> float:
    """Return after / before, or 1 if both are 0."""
    if before == 0:
        return math.inf if after > 0 else 1.0
    return after / before


def compare_metrics(evidence: Evidence, results: Sequence[StepResult], at: int) -> None:
    for name in SHOWN:
        values = np.array([result.metrics.get(name, math.nan) for result in results], float)
        before, after = (median(part[np.isfinite(part)]) for part in (values[:at], values[at:]))
        compared = (("before", before), ("after", after), ("ratio", ratio(before, after)))
        for prefix, value in compared:
            if not math.isnan(value):
                evidence.add(prefix, **{name: value})


def add_replayed(evidence: Evidence, results: Sequence[StepResult]) -> None:
    """Add the median share of experts that were not replayed: of all steps where nothing began to
    grow, as replay may be broken from the first step on.
    """
    name = "routing/replayed_mismatch"
    values = np.array([result.metrics.get(name, math.nan) for result in results], float)
    finite = values[np.isfinite(values)]
    evidence.add("r3", replayed_mismatch=median(finite) if len(finite) else None)


def events_near(folder: Path, step: int) -> list[str]:
    """Return the lines of events.jsonl of this step and the one before, as text."""
    try:
        lines = (folder / "events.jsonl").read_bytes().splitlines()
    except OSError:
        return []
    events = []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:  # the last line of a run that was killed
            continue
        if event.get("step") in (step - 1, step):
            events.append(f"step {event['step']}, {event.get('kind')}: {event.get('text', '')}")
    return events


def read_halves(folder: Path, steps: Sequence[int], evidence: Evidence, notes: list[str]) -> None:
    """Add evidence and notes from both halves of the sequences of the first step that has them."""
    lines = trained_lines(folder)
    for step in steps:
        if step not in lines:
            continue
        try:
            pairs = read_pairs(folder, step, lines[step])
        except (SafetensorError, OSError) as error:
            notes.append(f"step {step}: the trainer's half cannot be read: {error}")
            return
        if pairs:
            rollouts, halves = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            notes.append(f"step {step}: {len(pairs)} sequences with the halves of both engines")
            evidence.update(ev.route_evidence(rollouts, halves))
            evidence.update(ev.logprob_evidence(rollouts, halves))
            evidence.add(
                "kl",
                live=ev.kl([r.rollout_logprobs for r in rollouts], [h.logprobs for h in halves]),
            )
        return


class TrainedLine(TypedDict):
    """The fields of a line in trained/ that are read here."""

    step: int
    id: str
    sampled_by: str
    tensors: str | None
    key: NotRequired[str]


def trained_lines(folder: Path) -> dict[int, list[TrainedLine]]:
    """Return step -> the sequences of all replicas whose trainer's half was saved.

    A cut last line is left out.
    """
    lines_of_step: dict[int, list[TrainedLine]] = {}
    for file in RunFolder(folder).line_files("trained"):
        for text in file.path.read_bytes().splitlines():
            try:
                line: TrainedLine = json.loads(text)
            except ValueError:
                continue
            if line.get("tensors"):
                lines_of_step.setdefault(line["step"], []).append(line)
    return lines_of_step


def read_pairs(folder: Path, step: int, lines: Sequence[TrainedLine]) -> list[tuple[Rollout, Half]]:
    """Return (the server's half, the trainer's half) of each sequence.

    A group may be trained by another replica than the one that sampled it.
    """
    ours = {name: load_file(folder / name) for name in {str(line["tensors"]) for line in lines}}
    theirs: dict[str, tuple[dict[str, RecordedRollout], dict[str, np.ndarray]]] = {}
    pairs = list[tuple[Rollout, Half]]()
    for line in lines[:MOST_ROLLOUTS]:
        name, source = line["id"], line["sampled_by"]
        if source not in theirs:
            run, replica = RunFolder(folder), replica_of(source)
            records = {
                record.id: record
                for record in read_rollouts(run.lines_of("rollouts", step, replica))
                if record.step == step
            }
            theirs[source] = records, load_file(run.tensors_of("rollouts", step, replica))
        records, tensors = theirs[source]
        trained = ours[str(line["tensors"])]
        key = line.get("key", name)  # present where two replicas sampled equal ids
        old, experts = trained.get(f"{key}:old_logprobs"), trained.get(f"{key}:own_experts")
        if old is None or name not in records:
            continue
        rollout = single_sequence(records[name], tensors)
        if experts is None:
            experts = np.zeros((len(rollout.tokens) - 1, 0, 0))
        routes = experts.astype(np.int64)
        gap = np.zeros(routes.shape[:2], np.float32)  # scores are not saved
        margin = trained.get(f"{key}:margin", gap).astype(np.float32)
        pairs.append((rollout, Half(old, routes, gap, margin)))
    return pairs
