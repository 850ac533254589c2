"""The page of one explanation: verdict, rungs, layers, positions and history, in one HTML file."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from megatron_rl_tools.explain_mismatch.history import DIFFERENCE, NO_BEGINNING, History
from megatron_rl_tools.explain_mismatch.ladder import Explanation
from megatron_rl_tools.explain_mismatch.verdicts import Verdict
from megatron_rl_viewer.figure import BLUE, GREY, ORANGE, RED
from megatron_rl_viewer.report import STYLE, html_table

MORE_STYLE = """
.verdict { border-left: 4px solid #c43d4b; background: #f6f7f9; padding: .7em 1em; margin: 1em 0; }
.healthy { border-color: #3a9a5b; } .verdict p { margin: .3em 0; overflow-wrap: anywhere; } \
td { overflow-wrap: anywhere; }
img { background: #fff; border-radius: 4px; }
@media (prefers-color-scheme: dark) { .verdict { background: #22252b; } \
img { filter: invert(.9) hue-rotate(180deg); } }
"""
LEAST_NATS = 1e-8
"""Smaller differences are drawn as this one: the axes are logarithmic."""


def write_page(
    path: Path, explanation: Explanation | None, history: History | None, *, title: str
) -> Path:
    """Write the page to `path` and return it.

    Everything that a run or a server wrote is escaped.
    """
    parts = [f"<h1>Mismatch: {html.escape(title)}</h1>"]
    if history is not None:
        parts += history_parts(history)
    if explanation is not None:
        parts += explanation_parts(explanation)
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}{MORE_STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8", errors="replace")
    return path


def explanation_parts(explanation: Explanation) -> Iterator[str]:
    evidence = explanation.evidence
    yield "<h2>Verdict</h2>"
    if not explanation.verdicts:
        live, limit = evidence["diff.live"], evidence["limit.diff"]
        yield (
            '<div class="verdict healthy"><p><b>Healthy.</b> The engines differ by rounding: mean '
            f"{live:.1e} nats, limit {limit:.1e}.</p></div>"
        )
    yield from map(verdict_part, explanation.verdicts)
    if "limit.note" in evidence:
        yield f'<p class="note">{html.escape(str(evidence["limit.note"]))}</p>'
    yield "<h2>Ladder</h2>"
    rows = [
        [
            html.escape(rung.name),
            html.escape(rung.what),
            f"{rung.kl:.2e}",
            f"{rung.difference:.2e}",
            f"{rung.share:.0%}",
        ]
        for rung in explanation.rungs
    ]
    yield html_table(
        ["rung", "", "KL(mu, pi)", "mean abs(log-ratio)", "taken off"], rows, numbers_from=2
    )
    yield picture(ladder_figure(explanation), "KL on every rung")
    if explanation.layers:
        yield "<h2>Routers, layer by layer</h2>"
        yield (
            '<p class="note">With the server\'s routes in the layers below. A flip is clear where'
            " its gap exceeds a tenth of the usual margin.</p>"
        )
        yield picture(layer_figure(explanation.layers), "flips by layer")
    if len(explanation.places):
        yield "<h2>Positions</h2>" + picture(position_figure(explanation), "difference by position")
    cells = [
        [
            f"<code>{html.escape(name)}</code>",
            html.escape(value if isinstance(value, str) else f"{value:.6g}"),
        ]
        for name, value in sorted(evidence.items())
    ]
    yield f"<h2>Evidence</h2>{html_table(['', ''], cells, numbers_from=2)}"


def history_parts(history: History) -> Iterator[str]:
    yield "<h2>When it began</h2>"
    if history.began is None:
        kind = "verdict" if history.accuses else "verdict healthy"
        yield f'<div class="{kind}"><p>{NO_BEGINNING[0].upper()}{NO_BEGINNING[1:]}.</p></div>'
    else:
        before, after = history.evidence["history.before"], history.evidence["history.after"]
        yield (
            f'<p class="big">Step <b>{history.began}</b>: {before:.2e} nats before, {after:.2e}'
            " after.</p>"
        )
    yield from (
        f'<p class="note">{html.escape(line)}</p>' for line in (*history.events, *history.notes)
    )
    yield from map(verdict_part, history.verdicts)
    yield picture(history_figure(history), "difference by step")


def verdict_part(verdict: Verdict) -> str:
    part = "not measured" if verdict.share is None else f"{verdict.share:.0%}"
    return (
        f'<div class="verdict"><p><b>{html.escape(verdict.name)}</b></p>'
        f"<p>{html.escape(verdict.cause)}</p>"
        f"<p>Share of KL(mu, pi_old): <b>{part}</b></p>"
        f"<p>Change <code>{html.escape(verdict.key)}</code>: {html.escape(verdict.value)}</p></div>"
    )


# Figures


def ladder_figure(explanation: Explanation) -> Figure:
    figure = Figure(figsize=(9, 0.45 * len(explanation.rungs) + 1), layout="constrained")
    axis = figure.add_subplot()
    # no bar for a rung without a finite log-ratio
    rungs = [rung for rung in explanation.rungs if math.isfinite(rung.kl)]
    values = [max(rung.kl, LEAST_NATS**2) for rung in rungs]
    names = [rung.name for rung in rungs]
    axis.barh(names, values, color=[ORANGE, *[BLUE] * (len(values) - 1)][: len(values)])
    if values:
        axis.set_xscale("log")
        axis.set_xlim(min(values) / 3, max(values) * 3)
    axis.invert_yaxis()
    axis.set_xlabel("KL(mu, pi), nats")
    return figure


def layer_figure(layers: Sequence[dict[str, float]]) -> Figure:
    figure = Figure(figsize=(9, 3), layout="constrained")
    axis = figure.add_subplot()
    places = [row["layer"] for row in layers]
    axis.bar(places, [100 * row["flips"] for row in layers], color=GREY, label="all flips")
    axis.bar(places, [100 * row["clear"] for row in layers], color=RED, label="clear flips")
    axis.set_xlabel("MoE layer")
    axis.set_ylabel("% of tokens")
    axis.legend()
    return figure


def position_figure(explanation: Explanation) -> Figure:
    figure = Figure(figsize=(9, 3), layout="constrained")
    axis = figure.add_subplot()
    finite = np.isfinite(explanation.sizes)
    sizes = np.maximum(explanation.sizes[finite], LEAST_NATS)
    axis.plot(explanation.places[finite], sizes, ".", color=BLUE, markersize=4)
    axis.set_yscale("log")
    axis.set_xlabel("position of the row that predicts the token")
    axis.set_ylabel("abs(log mu - log pi), nats")
    return figure


def history_figure(history: History) -> Figure:
    has_layers = bool(history.flips_by_layer)
    figure = Figure(figsize=(9, 5.5 if has_layers else 3), layout="constrained")
    axes = figure.subplots(2 if has_layers else 1, 1, squeeze=False)[:, 0]
    axes[0].plot(history.steps, np.maximum(history.differences, LEAST_NATS), color=BLUE)
    axes[0].set_yscale("log")
    axes[0].set_ylabel(DIFFERENCE)
    if has_layers:
        steps = list(history.flips_by_layer)
        percents = 100 * np.array([history.flips_by_layer[step] for step in steps]).T
        shown = axes[1].pcolormesh(steps, range(len(percents)), percents)
        axes[1].set_ylabel("MoE layer")
        figure.colorbar(shown, ax=axes[1], label="% of tokens that flip")
    for axis in axes:
        axis.set_xlabel("step")
        if history.began is not None:
            axis.axvline(history.began, color=RED, linestyle="--")
    return figure


def picture(figure: Figure, text: str) -> str:
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=110)
    return (
        f'<img alt="{html.escape(text)}"'
        f' src="data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}">'
    )
