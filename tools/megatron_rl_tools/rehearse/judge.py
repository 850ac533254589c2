"""What the rehearsed ranks found, put together: errors, waits, memory and time.

`judge` makes a Findings of plain data, which page.py and the JSON file show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from megatron_rl.config import Config
from megatron_rl.models.cost import active_parameters, attention_width
from megatron_rl.models.spec import ModelSpec
from megatron_rl.plan.hardware import Assumptions, Hardware
from megatron_rl.plan.training_time import Tokens, TrainingModel
from megatron_rl_tools.rehearse.program import RankReport
from megatron_rl_tools.rehearse.switchboard import RankFailed
from megatron_rl_tools.rehearse.timeline import Deadlock, Span, Timeline, phase_seconds

GIB = 1 << 30
STEADY = "second"
"""Phases with this word are repeated in every step; the first update allocates Adam's state."""
SLOW = ("attention with an explicit mask",)
"""Problems that only take time or memory."""
CORE = ("megatron/core/", "transformer_engine/")


@dataclass
class Findings:
    """The result of a rehearsal, as plain data."""

    errors: list[str] = field(default_factory=list)
    """What would fail on GPUs."""
    slow: list[list[Any]] = field(default_factory=list)
    """[phase, text, line, times, ranks] of what only costs time or memory."""
    waits: list[list[Any]] = field(default_factory=list)
    """[whose, phase, what, line, times] of host synchronisations of a step, on the rank
    that has most of them on this line."""
    copies: list[list[Any]] = field(default_factory=list)
    """[phase, kind, line, times, bytes] of copies to the device of a step, on the rank that has
    most of them on this line."""
    memory: list[list[Any]] = field(default_factory=list)
    """[rank, phase of an update's peak, peak, planned, difference in percent], in bytes.  Both have
    the expert ids of all the step's micro-batches, as planned."""
    highest: list[Any] = field(default_factory=list)
    """[rank, phase, bytes] of the highest peak in any phase, from building the model on.  With
    rollout.release_memory without the export, before which a run frees gradients and state."""
    lines: list[list[Any]] = field(default_factory=list)
    """[line, bytes] alive at that peak."""
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    """Phase -> kind -> pretended seconds of the rank that is busy longest."""
    phases: dict[str, float] = field(default_factory=dict)
    """Phase -> pretended seconds, until the last rank ends it."""
    planned_seconds: dict[str, float] = field(default_factory=dict)
    planned_parts: dict[str, dict[str, float]] = field(default_factory=dict)
    """Pass -> part of plan/training_time.py -> seconds."""
    mfu: float = 0.0
    """FLOPs of the model itself / (seconds of the update x peak); recomputation does not count."""
    not_known: list[list[Any]] = field(default_factory=list)
    """[what, line, times]: values that were invented, and sizes that were guessed."""
    ranks: list[int] = field(default_factory=list)
    operations: int = 0
    """On all rehearsed ranks."""
    collectives: int = 0


def judge(
    results: Mapping[int, RankReport | RankFailed | None],
    spec: ModelSpec,
    cfg: Config,
    world_size: int,
    hardware: Hardware,
) -> tuple[Findings, dict[int, list[Span]]]:
    """Return the findings, and rank -> its spans of pretended time."""
    results = dict(sorted(results.items()))
    findings = Findings(ranks=list(results))
    reports = {rank: item for rank, item in results.items() if isinstance(item, RankReport)}
    for rank, item in results.items():
        if isinstance(item, RankFailed):
            findings.errors.append(f"rank {rank}: {item.error}\n{item.trace}")
        elif item is None:
            findings.errors.append(f"rank {rank}: its process died; is there enough memory?")
    if not reports:
        return findings, {}
    add_problems(findings, reports)
    add_waits(findings, reports)
    add_memory(findings, reports, cfg, hardware)
    spans: dict[int, list[Span]] = {}
    if len(reports) == len(results):
        events = {rank: report.record["events"] for rank, report in reports.items()}
        findings.operations = sum(event[0] == "op" for rank in events.values() for event in rank)
        findings.collectives = sum(event[0] == "post" for rank in events.values() for event in rank)
        try:
            spans = Timeline(events, hardware, Assumptions()).run()
        except Deadlock as error:
            findings.errors.append(str(error))
        else:
            add_time(findings, spans)
            add_plan(findings, next(iter(reports.values())), spec, cfg, world_size, hardware)
    return findings, spans


def add_problems(findings: Findings, reports: Mapping[int, RankReport]) -> None:
    times: Counter[tuple[str, str, str]] = Counter()
    ranks: Counter[tuple[str, str, str]] = Counter()
    unknown: Counter[tuple[str, str]] = Counter()
    for report in reports.values():
        for phase, text, line, count in report.record["problems"]:
            times[phase, text, line] += count
            ranks[phase, text, line] += 1
        for phase, what, line, count in report.record["invented"]:
            unknown[f"{what}: a value was invented ({phase})", line] += count
        for name, line, count in report.record["not_known"]:
            unknown[f"{name}: a size was guessed, and what follows from it", line] += count
    for (phase, text, line), count in times.items():
        if text.startswith(SLOW):
            findings.slow.append([phase, text, line, count, ranks[phase, text, line]])
        else:
            findings.errors.append(f"{text}, {count} times on {ranks[phase, text, line]} ranks, in"
                                f" {phase}, at {line}")  # fmt: skip
    findings.not_known = [[what, line, count] for (what, line), count in unknown.items()]


def add_waits(findings: Findings, reports: Mapping[int, RankReport]) -> None:
    """Take, of every line, the rank that waits or copies most there."""
    waits: Counter[tuple[str, str, str]] = Counter()
    copies: dict[tuple[str, str, str], tuple[int, int]] = {}
    for report in reports.values():
        for phase, what, line, count in report.record["syncs"]:
            if STEADY in phase or phase in ("metrics", "export"):
                waits[phase, what, line] = max(waits[phase, what, line], count)
        for phase, kind, line, count, num_bytes in report.record["copies"]:
            if STEADY in phase:
                most = copies.get((phase, kind, line), (0, 0))
                copies[phase, kind, line] = max(most[0], count), max(most[1], num_bytes)
    for (phase, what, line), count in waits.items():
        whose = "core" if line.startswith(CORE) else "megatron_rl"
        findings.waits.append([whose, phase, what, line, count])
    findings.waits.sort(key=lambda row: (row[0] == "core", row[1], -row[4]))
    findings.copies = [[*key, *most] for key, most in copies.items()]
    findings.copies.sort(key=lambda row: -row[4])


def add_memory(
    findings: Findings, reports: Mapping[int, RankReport], cfg: Config, hardware: Hardware
) -> None:
    """Compare the peaks of a steady update with the plan, and those of all phases with the GPU."""
    highest = 0
    for rank, report in reports.items():
        peaks = {
            phase: item["peak"] + ids_not_rehearsed(report, phase)
            for phase, item in report.record["memory"].items()
            if phase not in not_judged(cfg)
        }
        phase = max((name for name in peaks if STEADY in name), key=peaks.__getitem__)
        # without activations, but with copies of a state in 16 bits
        planned = report.planned["in Adam" if phase.startswith("optimizer") else "total"]
        difference = 100 * (planned - peaks[phase]) / peaks[phase]
        findings.memory.append([rank, phase, peaks[phase], planned, difference])
        # of equal peaks the one of a steady update
        worst = max(peaks, key=lambda name: (peaks[name], STEADY in name))
        if peaks[worst] > highest:
            highest = peaks[worst]
            findings.highest = [rank, worst, highest]
            places = dict(report.record["memory"][worst]["by_place"])
            if more := ids_not_rehearsed(report, worst):
                places["expert ids of the step's other micro-batches, by the plan"] = more
            by_size = sorted(places.items(), key=lambda item: -item[1])
            findings.lines = [list(item) for item in by_size[:25]]
    if highest > hardware.memory:
        rank, phase, _ = findings.highest
        findings.errors.append(
            f"memory: {highest / GIB:.2f} GiB at the peak, on rank {rank} in {phase}, without CUDA"
            f" and NCCL; a {hardware.name} has {hardware.memory / GIB:.1f}"
        )


def ids_not_rehearsed(report: RankReport, phase: str) -> int:
    """Return the bytes of expert ids that a run has beside those of the rehearsed micro-batches."""
    kinds = {
        f"gradient, {STEADY}": "ids not rehearsed",
        f"optimizer, {STEADY}": "recorded, not rehearsed",
    }
    return report.planned[kinds[phase]] if phase in kinds else 0


def not_judged(cfg: Config) -> tuple[str, ...]:
    """Return the phases whose memory is not that of a run: with rollout.release_memory a run frees
    gradients and Adam's state before it sends weights, which the rehearsal does later.
    """
    return ("export",) if cfg.rollout.release_memory else ()


def add_time(findings: Findings, spans: Mapping[int, Sequence[Span]]) -> None:
    by_rank = {rank: phase_seconds(of_rank) for rank, of_rank in spans.items()}
    ends: dict[str, tuple[float, float]] = {}
    for of_rank in spans.values():
        for span in of_rank:
            start, end = ends.get(span.phase, (span.start, span.end))
            ends[span.phase] = min(start, span.start), max(end, span.end)
    findings.phases = {phase: end - start for phase, (start, end) in ends.items()}
    for phase in findings.phases:
        kinds = [of_rank.get(phase, {}) for of_rank in by_rank.values()]
        findings.seconds[phase] = max(
            kinds, key=lambda kind: sum(value for name, value in kind.items() if name != "wait")
        )


def add_plan(
    findings: Findings,
    report: RankReport,
    spec: ModelSpec,
    cfg: Config,
    world_size: int,
    hardware: Hardware,
) -> None:
    """Compute the plan's seconds of the same micro-batches, and the MFU of the update."""
    lengths, rows = report.lengths, report.tokens
    replicas = world_size // (cfg.parallel.tp * cfg.parallel.cp * cfg.parallel.pp)
    total = sum(lengths)
    tokens = Tokens(
        sequences=len(lengths) * replicas,
        mean=total / len(lengths),
        squared=sum(length**2 for length in lengths) / total,
    )
    fill = total / len(rows) / cfg.run.max_tokens_per_micro_batch
    # replicas have the same micro-batches here
    assumed = replace(Assumptions(), fill=fill, lockstep=1.0)
    model = TrainingModel(spec, cfg, world_size, hardware, assumed)
    old, update = model.old_logprob(tokens), model.update(tokens)
    findings.planned_seconds = {"old-logprob": old.total, "update": update.total}
    findings.planned_parts = {"old-logprob": asdict(old), "update": asdict(update)}
    flops = 6 * active_parameters(spec) * total
    # causal: a token attends to half of its sequence; forward 2 FLOPs, backward twice as many
    flops += 3 * spec.num_layers * attention_width(spec) * sum(length**2 for length in lengths)
    seconds = sum(
        value for phase, value in findings.phases.items()
        if phase in (f"gradient, {STEADY}", f"optimizer, {STEADY}")
    )  # fmt: skip
    if seconds:
        findings.mfu = flops * replicas / (seconds * hardware.flops * world_size)


def as_json(
    findings: Findings, reports: Mapping[int, RankReport | RankFailed | None]
) -> dict[str, Any]:
    """Return the findings, and every rank's memory and plan, for a JSON file."""
    ranks = {
        rank: {
            "planned": report.planned,
            "parameters": report.num_parameters,
            "rows": report.tokens,
            "lengths": report.lengths,
            "exported": report.exported,
            "checkpoint": report.checkpoint,
            "memory": {
                phase: {name: item[name] for name in ("start", "peak", "end")}
                for phase, item in report.record["memory"].items()
            },
        }
        for rank, report in reports.items()
        if isinstance(report, RankReport)
    }
    return asdict(findings) | {"by_rank": ranks}
