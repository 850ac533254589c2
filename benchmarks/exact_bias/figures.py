"""The two figures of docs/concepts/exact_bias.md, from what results/exact_bias.json stores:

python -m benchmarks.exact_bias.figures
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.results import ROOT, output

ASSETS = ROOT / "docs" / "assets"
LINE = re.compile(r"(random|trained) / (\w+) / ([^/]+) / (.+?): (bias .+)")
BLUE, ORANGE, GREEN, RED, PURPLE = "#2f6fb0", "#e07b27", "#3a9a5b", "#c43d4b", "#7d5ba6"
GREY = "#8a8f98"
REPLAYS = {"none": (GREY, "o"), "R2": (BLUE, "s"), "R3": (ORANGE, "^")}
BOUNDS = {
    "exact sequence ratio": ("response ratio, not bounded", BLUE, "-"),
    "sequence ratio, truncated at 2": ("response ratio, truncated at 2", BLUE, "--"),
    "sequence ratio, masked above 2": ("response ratio, masked above 2", BLUE, ":"),
    "token ratio": ("token ratio, not bounded", GREEN, "-"),
    "token ratio, truncated at 1.28": ("token ratio, truncated at 1.28", GREEN, "--"),
    "token ratio, masked outside 0.8, 1.28": ("token ratio, masked outside 0.8, 1.28", GREEN, ":"),
    "minirl": ("MiniRL: truncated at 5, clip 0.2, 0.27", RED, "-"),
    "reinforce": ("no ratio", GREY, "-"),
}

Grid = dict[tuple[str, str, str, str], dict[str, list[float]]]
"""(weights, sampler, replay, loss) -> quantity -> its value at every staleness."""


def main() -> int:
    lines = output("exact_bias")
    grid, staleness = read_grid(lines), read_staleness(lines)
    draw_replay(grid, staleness).savefig(ASSETS / "exact_bias_replay.png", dpi=110)
    draw_bounds(grid, staleness).savefig(ASSETS / "exact_bias_bounds.png", dpi=110)
    return 0


def read_grid(lines: Sequence[str]) -> Grid:
    grid: Grid = {}
    for match in filter(None, map(LINE.fullmatch, lines)):
        kind, sampler, replay, loss, texts = match.groups()
        grid[kind, sampler, replay, loss] = {
            words[0]: [float(word) for word in words[1:]]
            for words in (part.split() for part in texts.split("; "))
        }
    return grid


def read_staleness(lines: Sequence[str]) -> list[int]:
    """Return the numbers of updates, from the first table: its rows of the exact sampler."""
    rows = [int(line.split("|")[2]) for line in lines if line.startswith("| exact |")]
    return sorted(set(rows))


def draw_replay(grid: Grid, staleness: Sequence[int]) -> Figure:
    """Draw the bias of both ratios without a bound, by replay; sampler in fp8."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(1, 2)
    for axis, kind in zip(axes, ("random", "trained"), strict=True):
        for replay, (color, marker) in REPLAYS.items():
            for loss, style, name in (
                ("exact sequence ratio", "-", "response ratio"),
                ("token ratio", "--", "token ratio"),
            ):
                values = grid[kind, "fp8", replay, loss]["bias"]
                label = f"{name}, {'no replay' if replay == 'none' else replay}"
                places = range(len(values))
                axis.plot(places, values, style, color=color, marker=marker, label=label)
        finish(axis, staleness, f"{kind} weights", "bias, relative to the true gradient")
    axes[0].legend(fontsize=8, frameon=False)
    return figure


def draw_bounds(grid: Grid, staleness: Sequence[int]) -> Figure:
    """Draw bias and noise of ways to bound the weight, without replay; sampler in fp8."""
    figure = Figure(figsize=(9, 7.2), layout="constrained")
    rows = figure.subplots(2, 2)
    for row, (quantity, label) in zip(
        rows,
        (("bias", "bias, relative to the true gradient"), ("noise", "noise of one response")),
        strict=True,
    ):
        for axis, kind in zip(row, ("random", "trained"), strict=True):
            for loss, (name, color, style) in BOUNDS.items():
                values = grid[kind, "fp8", "none", loss][quantity]
                places = range(len(values))
                axis.plot(places, values, style, color=color, marker=".", label=name)
            finish(axis, staleness, f"{kind} weights", label)
    handles, names = rows[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figure


def finish(axis: Axes, staleness: Sequence[int], title: str, label: str) -> None:
    axis.set_xticks(range(len(staleness)), [str(number) for number in staleness])
    axis.set_xlabel("updates since pi_old")
    axis.set_ylabel(label)
    axis.set_title(title, fontsize=10)
    axis.set_ylim(bottom=-0.02 * axis.get_ylim()[1])
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    sys.exit(main())
