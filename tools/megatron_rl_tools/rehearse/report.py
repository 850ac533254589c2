"""The report of a rehearsal: a page, a JSON file, a trace, and a summary on the terminal."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from megatron_rl.config import Config
from megatron_rl.config.loader import plain_values
from megatron_rl.models.spec import ModelSpec
from megatron_rl.plan.hardware import Hardware
from megatron_rl_tools.rehearse.judge import GIB, STEADY, Findings, as_json, judge
from megatron_rl_tools.rehearse.timeline import Span, chrome_trace
from megatron_rl_viewer.report_style import STYLE

NOTE = (
    "Computed from the operations of this run on pretended GPUs; nothing was measured on a GPU."
    " Not shown: values, NCCL itself, fragmentation, CUDA's context, and what kernels assert."
    " Seconds and MFU leave out copies between host and GPU and Adam on the host: with"
    " optimizer_cpu_offload an update takes longer than this says."
)
UPDATE = (f"gradient, {STEADY}", f"optimizer, {STEADY}")


def write_report(
    results: Mapping[int, Any] | str,
    spec: ModelSpec,
    cfg: Config,
    args: argparse.Namespace,
    world_size: int,
    hardware: Hardware,
    hf_config: Mapping[str, Any],
) -> int:
    """Write the files to args.out, print a summary and return the exit status.

    results: rank -> RankReport or RankFailed, or the text of a disagreement.  `hf_config` is
    config.json of the rehearsed model: with it, gpu-check runs the same step on GPUs.
    """
    if isinstance(results, str):
        reports: dict[int, Any] = {}
        spans: dict[int, list[Span]] = {}
        findings = Findings(errors=[results])
    else:
        reports = dict(results)
        findings, spans = judge(reports, spec, cfg, world_size, hardware)
    title = f"{args.config}: {spec.num_layers} layers on {world_size} x {hardware.name}"
    args.out.mkdir(parents=True, exist_ok=True)
    rehearsed = {
        "world_size": world_size,
        "turns": args.turns,
        "config": plain_values(cfg, exclude_none=True),
        "model": dict(hf_config),
    }
    content = {"title": title, "rehearsed": rehearsed, **as_json(findings, reports)}
    write(args.out / "rehearsal.json", content)
    write(args.out / "trace.json", chrome_trace(spans))
    (args.out / "rehearsal.html").write_text(page(title, findings), encoding="utf-8")
    print("\n".join(summary(findings)))
    print(f"report: {args.out / 'rehearsal.html'}, trace for ui.perfetto.dev: trace.json beside it")
    return 1 if findings.errors else 0


def write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, default=float))


def summary(findings: Findings) -> Iterable[str]:
    """Yield the lines that the terminal shows."""
    yield from (f"ERROR {error}" for error in findings.errors)
    if findings.memory:
        rank, phase, peak, planned, percent = max(findings.memory, key=lambda row: row[2])
        yield (
            f"memory: {peak / GIB:.2f} GiB on rank {rank} in {phase}; planned"
            f" {planned / GIB:.2f} ({percent:+.1f} %)"
        )
    if findings.phases:
        old, update = seconds_of(findings)
        yield (
            f"time, computed: old-logprob {old:.3f} s (planned"
            f" {findings.planned_seconds['old-logprob']:.3f}), update {update:.3f} s (planned"
            f" {findings.planned_seconds['update']:.3f}), MFU {findings.mfu:.1%}; without copies"
            " between host and GPU and Adam on the host"
        )
    waits = sum(row[4] for row in findings.waits if row[0] != "core")
    yield (
        f"{findings.operations:,} operations and {findings.collectives:,} collectives on"
        f" {len(findings.ranks)} ranks; {waits} host synchronisations of megatron_rl in a step"
    )
    if findings.not_known:
        yield f"{len(findings.not_known)} places with invented or guessed values: see the report"


def seconds_of(findings: Findings) -> tuple[float, float]:
    """Return the pretended seconds of an old-logprob pass and of an update."""
    old = findings.phases.get(f"old-logprob, {STEADY}", 0.0)
    return old, sum(findings.phases.get(phase, 0.0) for phase in UPDATE)


def page(title: str, findings: Findings) -> str:
    """Return the page; every text in it is escaped."""
    parts = [f"<h1>Rehearsal: {escape(title)}</h1>", f'<p class="note">{escape(NOTE)}</p>']
    parts += errors(findings)
    parts += table(
        "Memory at the peak of an update",
        ["rank", "phase", "GiB", "planned GiB", "plan, difference"],
        [[r, p, gib(a), gib(b), f"{d:+.1f} %"] for r, p, a, b, d in findings.memory],
    )
    where = "rank {}, {}".format(*findings.highest[:2]) if findings.highest else ""
    parts += table(
        f"What is alive at the highest peak: {where}",
        ["line", "GiB"],
        [[line, gib(size)] for line, size in findings.lines],
    )
    if findings.phases:
        old, update = seconds_of(findings)
        parts += [
            f"<p>An old-logprob pass takes {old:.3f} s (planned"
            f" {findings.planned_seconds['old-logprob']:.3f}), an update {update:.3f} s (planned"
            f" {findings.planned_seconds['update']:.3f}); MFU of the update {findings.mfu:.1%}.</p>"
        ]
    kinds = sorted({kind for of_phase in findings.seconds.values() for kind in of_phase})
    parts += table(
        "Milliseconds by phase and kind, on the rank that is busy longest",
        ["phase", "all ranks", *kinds],
        [
            [phase, ms(findings.phases[phase]), *(ms(of_phase.get(kind, 0.0)) for kind in kinds)]
            for phase, of_phase in findings.seconds.items()
        ],
    )
    parts += table("Slow, or large", ["phase", "what", "line", "times", "ranks"], findings.slow)
    parts += table(
        "The host waits for the GPU", ["whose", "phase", "what", "line", "times"], findings.waits
    )
    parts += table(
        "Copies to the GPU",
        ["phase", "kind", "line", "times", "KiB"],
        [[*row[:4], f"{row[4] / 1024:,.1f}"] for row in findings.copies[:30]],
    )
    parts += table("Not known", ["what", "line", "times"], findings.not_known)
    # words stay whole where a column is narrow
    style = f"{STYLE} td, th {{ overflow-wrap: break-word; }}"
    head = f"<meta charset=utf-8><title>Rehearsal</title><style>{style}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(parts)}</body></html>"


def errors(findings: Findings) -> list[str]:
    if not findings.errors:
        text = (
            f"No error on {len(findings.ranks)} ranks, {findings.collectives:,} collectives agree."
        )
        return [f'<div class="finding">{text}</div>']
    return [f'<div class="finding bad"><pre>{escape(text)}</pre></div>' for text in findings.errors]


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    if not rows:
        return []
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = [f"<tr>{''.join(cell(value) for value in row)}</tr>" for row in rows]
    return [f"<h2>{escape(title)}</h2><table><tr>{cells}</tr>{''.join(lines)}</table>"]


def cell(value: object) -> str:
    text = str(value)
    is_number = text.lstrip("+-")[:1].isdigit()
    return f"<td{' class=number' if is_number else ''}>{escape(text)}</td>"


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f}"


def ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f}" if seconds else ""
