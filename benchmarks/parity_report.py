"""The tables of parity.py, from its comparisons."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One comparison."""

    model: str
    parameters: float
    """Millions."""
    layers: int
    trainer: str
    server: str
    prompt: int
    wrong: str
    """The change of a wrong model; "" for equal weights."""
    logprob_diff_mean: float
    logprob_diff_max: float
    experts_equal: float | None
    expert_overlap: float | None


def cells(row: Row) -> str:
    shares = [
        "-" if value is None else f"{100 * value:.2f} %"
        for value in (row.experts_equal, row.expert_overlap)
    ]
    values = [f"{row.logprob_diff_mean:.1e}", f"{row.logprob_diff_max:.1e}", *shares]
    name = f"{row.model} ({row.parameters:g} M, {row.layers} layers)"
    head = f"| {name} | {row.trainer} | {row.server} | {row.prompt} | {row.wrong} | "
    return head + " | ".join(values) + " |"


SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "fp8": "fp8"}


def report(rows: Sequence[Row]) -> str:
    """Return the tables of equal weights (worst prompt length), mean difference and expert overlap,
    and the table of wrong models.
    """
    equal = [row for row in rows if not row.wrong]
    with_experts = [row for row in equal if row.expert_overlap is not None]
    tables = [
        table("mean difference", equal, size, largest_mean),
        table("overlap (equal sets), %", with_experts, size, overlap),
        table("wrong model", [row for row in rows if row.wrong], kind, least),
    ]
    return "\n\n".join(tables)


def table(
    title: str,
    rows: Sequence[Row],
    label: Callable[[Row], str],
    cell: Callable[[Sequence[Row]], str],
) -> str:
    """Return a table with a line per label and a column per pair of precisions."""
    pairs = dict.fromkeys((row.trainer, row.server) for row in rows)
    lines = [
        table_row(title, *(f"{SHORT[trainer]} / {SHORT[server]}" for trainer, server in pairs))
    ]
    lines.append(table_row(*["---"] * (len(pairs) + 1)))
    for name in dict.fromkeys(map(label, rows)):
        columns = [
            [row for row in rows if (label(row), row.trainer, row.server) == (name, *pair)]
            for pair in pairs
        ]
        lines.append(table_row(name, *(cell(matching) if matching else "" for matching in columns)))
    return "\n".join(lines)


def size(row: Row) -> str:
    return f"{row.model}: {row.parameters:g} M, {row.layers} layers"


def table_row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def largest_mean(rows: Sequence[Row]) -> str:
    return f"{max(row.logprob_diff_mean for row in rows):.1e}"


def overlap(rows: Sequence[Row]) -> str:
    """Return the smallest overlap, and the share of equal expert sets with it."""
    least_overlap, equal = min(
        (row.expert_overlap or 0.0, row.experts_equal or 0.0) for row in rows
    )
    return f"{100 * least_overlap:.1f} ({100 * equal:.1f})"


def least(rows: Sequence[Row]) -> str:
    """Return the model that is hardest to tell from rounding: its mean difference and overlap."""
    row = min(rows, key=lambda item: item.logprob_diff_mean)
    suffix = "" if row.expert_overlap is None else f", {100 * row.expert_overlap:.1f} %"
    return f"{row.logprob_diff_mean:.2g} ({row.model}{suffix})"


def kind(row: Row) -> str:
    return re.sub(r"layer \d+", "one layer", row.wrong)
