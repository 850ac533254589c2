"""A picture of a step's merged trace: the stages and collectives of every rank, sampling, and the
servers' requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megatron_rl.launch.trace_file import RANKS, Event
from megatron_rl_tools.trace.gpu import FIRST_GPU
from megatron_rl_tools.trace.trace_summary import TraceSummary
from megatron_rl_viewer.figure import GREY, PURPLE, RED, STAGE_COLORS

MOST_RANKS = 16
SHORTEST = 1e-3
"""Share of the step below which a stage is not in the legend."""
TEAL = "#17a2a2"
ROW_INCHES, WIDTH_INCHES = 0.36, 11.0
OUTSIDE = {"evaluate": "#efe3b4", "checkpoint": PURPLE}
"""Colours of the stages between steps."""


def draw(events: Sequence[Event], summary: TraceSummary) -> Figure:
    """Draw a row per thread of the first MOST_RANKS ranks, and one per server with its largest
    number of requests at a time; x is seconds from the beginning of the step.
    """
    (first, *_) = [
        event
        for event in events
        if event["ph"] == "X" and event["cat"] == "step" and event["pid"] < RANKS
    ]
    spans = [event for event in events if event["ph"] == "X"]
    start, length = first["ts"], first["dur"] / 1e6
    rows = picture_rows(spans, names_of(events))
    figure = Figure(figsize=(WIDTH_INCHES, 1.3 + ROW_INCHES * len(rows)), layout="constrained")
    axis = figure.add_subplot()
    for number, (name, kind, members) in enumerate(rows):
        if kind == "server":
            draw_in_flight(axis, number, members, start)
        else:
            bars = [((event["ts"] - start) / 1e6, event["dur"] / 1e6) for event in members]
            axis.broken_barh(
                bars,
                (number - 0.4, 0.8),
                facecolors=[color_of(event) for event in members],
                linewidth=0,
            )
        axis.text(
            -0.006,
            number,
            name,
            transform=axis.get_yaxis_transform(),
            ha="right",
            va="center",
            fontsize=8,
        )
    axis.set(xlim=(-0.01 * length, 1.03 * length), ylim=(len(rows) - 0.4, -0.6), xlabel="seconds")
    axis.set_yticks([])
    axis.axvline(length, color=GREY, linewidth=0.8, linestyle=":")
    axis.spines[["top", "right", "left"]].set_visible(False)
    stages = [event for _, kind, members in rows if kind == "stage" for event in members]
    used = {event["name"] for event in stages if event["dur"] > SHORTEST * first["dur"]}
    shown = {name: color for name, color in (STAGE_COLORS | OUTSIDE).items() if name in used}
    kinds = {kind for _, kind, _ in rows}
    shown |= {"in a collective": RED} if "collective" in kinds else {}
    shown |= {"sampling, requests in flight": TEAL} if "server" in kinds else {}
    legend = [Patch(color=color, label=name) for name, color in shown.items()]
    figure.legend(
        handles=legend, loc="outside lower center", ncols=len(legend), fontsize=8, frameon=False
    )
    figure.suptitle(
        f"step {summary.step}: {summary.seconds:.2f} s, sampling {summary.sampling:.2f} s, training"
        f" {summary.training:.2f} s, other {summary.other:.1%}",
        fontsize=10,
    )
    return figure


def picture_rows(
    spans: Sequence[Event], names: dict[int, str]
) -> list[tuple[str, str, list[Event]]]:
    """Return (label, kind, spans) of every row."""
    rows = []
    ranks = sorted({span["pid"] for span in spans if span["pid"] < RANKS})[:MOST_RANKS]
    for rank in ranks:
        of_rank = [span for span in spans if span["pid"] == rank]
        for kind, label in (
            ("stage", f"rank {rank}"),
            ("collective", "collectives"),
            ("sampling", "sampling thread"),
        ):
            if of_kind := [span for span in of_rank if span["cat"] == kind]:
                rows.append((label, kind, of_kind))
    for gpu in sorted({span["pid"] for span in spans if span["pid"] >= FIRST_GPU})[:MOST_RANKS]:
        rows.append((names[gpu], "gpu", [span for span in spans if span["pid"] == gpu]))
    for server in sorted({span["pid"] for span in spans if RANKS <= span["pid"] < FIRST_GPU}):
        requests = [span for span in spans if span["pid"] == server and span["name"] == "request"]
        name = names[server].replace("server http://", "")
        rows.append((f"{name}: {most_at_once(requests)}", "server", requests))
    return rows


def most_at_once(requests: Sequence[Event]) -> int:
    changes = sorted(
        [(e["ts"], 1) for e in requests] + [(e["ts"] + e["dur"], -1) for e in requests]
    )
    return max(accumulate(change for _, change in changes), default=0)


def draw_in_flight(axis: Axes, row: int, requests: Sequence[Event], start: float) -> None:
    """Draw the number of requests in flight as an area that fills the row at its maximum."""
    changes = sorted(
        [(e["ts"], 1) for e in requests] + [(e["ts"] + e["dur"], -1) for e in requests]
    )
    times, counts = [0.0], [0]
    for at, change in changes:
        times.append((at - start) / 1e6)
        counts.append(counts[-1] + change)
    most = max(counts) or 1
    tops = [row + 0.4 - 0.8 * count / most for count in counts]
    axis.fill_between(times, row + 0.4, tops, step="post", color=TEAL, linewidth=0)


def color_of(event: Event) -> str:
    if event["cat"] == "stage":
        return (STAGE_COLORS | OUTSIDE).get(event["name"], GREY)
    return RED if event["cat"] == "collective" else TEAL


def names_of(events: Sequence[Event]) -> dict[int, str]:
    """Return process id -> its name."""
    return {
        event["pid"]: event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["name"] == "process_name"
    }
