"""The figures of a run, drawn from its results.  They use no global state of matplotlib.

x is the number of finished steps: the policy that sampled step index s had finished s steps, and an
evaluation after n steps is at n.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    LogLocator,
    MaxNLocator,
    NullFormatter,
    PercentFormatter,
    StrMethodFormatter,
)

from megatron_rl.metrics.results import Results, evaluations, series

BLUE, ORANGE, GREEN = "#2f6fb0", "#e07b27", "#3a9a5b"
RED, PURPLE, GREY = "#c43d4b", "#7d5ba6", "#8a8f98"
CYCLE = (BLUE, ORANGE, GREEN, RED, PURPLE, "#17a2a2", "#b5892e", GREY)
STAGE_COLORS = {
    "rollout": BLUE,
    "reward": "#8ab6de",
    "split": "#c9c3dd",
    "old_logprob": "#f2b27a",
    "update": ORANGE,
    "weight_sync": GREEN,
    "other": "#d5d8dc",
}
Color: TypeAlias = str | tuple[float, float, float, float]
Line: TypeAlias = tuple[str, Color, str]
"""(metric, color, label)."""


def draw_run(results: Results, title: str) -> Figure:
    """Draw one run: twelve panels, and two more for rollouts of several turns."""
    panels = PANELS | EPISODES if len(series(results, "rollout/turns_mean")[0]) else PANELS
    figure, axes = make_grid(len(panels) // 2, 2, title)
    for axis, (name, draw) in zip(axes, panels.items(), strict=True):
        draw(axis, results)
        finish_panel(axis, name)
    return figure


def draw_comparison(runs: Mapping[str, Results], title: str) -> Figure:
    """Draw several runs in the same panels, one color for each run."""
    figure, axes = make_grid(3, 2, title)
    panels = (
        ("rollout/reward_mean", "Reward (points: held-out avg@k)"),
        ("train/entropy", "Entropy (nats)"),
        ("train/kl_mu_pi_k3", "KL(mu, pi_old), k3"),
        ("routing/router_mismatch", "Experts: trainer alone vs rollout"),
        ("routing/replayed_mismatch", "Experts: used vs rollout"),
        ("optim/grad_norm", "Gradient norm"),
    )
    points: dict[str, Any] = {"markeredgecolor": "white", "markersize": 7}
    for axis, (metric, label) in zip(axes, panels, strict=True):
        for color, (run, results) in zip(CYCLE * len(runs), runs.items(), strict=False):
            draw_lines(axis, results, [(metric, color, run)])
            if metric == "rollout/reward_mean":
                for evaluation in evaluations(results):
                    axis.plot(*series(results, evaluation), "o", color=color, **points)
        if metric.startswith("routing/"):
            as_percent(axis)
        finish_panel(axis, label)
    return figure


def draw_reward(axis: Axes, results: Results) -> None:
    lines = [("rollout/reward_mean", BLUE, "training prompts"), ("sft/loss", BLUE, "loss of SFT")]
    draw_lines(axis, results, lines)
    for color, name in zip((ORANGE, GREEN, RED, PURPLE), evaluations(results), strict=False):
        steps, values = series(results, name)
        label = name.removeprefix("eval/").replace("/", " ")
        points: dict[str, Any] = {"markersize": 8, "markeredgecolor": "white", "linewidth": 1.2}
        axis.plot(steps, values, "o--", color=color, label=label, **points)
        box = {"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
        style: dict[str, Any] = {
            "textcoords": "offset points",
            "ha": "center",
            "zorder": 5,
            "bbox": box,
        }
        for step, value in zip(steps, values, strict=True):
            axis.annotate(f"{value:.2f}", (step, value), (0, 9), color=color, **style)
    axis.margins(y=0.18)


def draw_turns(axis: Axes, results: Results) -> None:
    """Draw the turns, and the user's counts, which have about the same range."""
    names = sorted(
        {name for result in results for name in result.metrics if name.startswith("episode/")}
    )
    lines = [
        (name, color, name.removeprefix("episode/"))
        for name, color in zip(names, CYCLE[1:], strict=False)
    ]
    draw_lines(axis, results, [("rollout/turns_mean", BLUE, "turns"), *lines])
    axis.set_ylim(bottom=0)


def draw_tokens(axis: Axes, results: Results) -> None:
    sampled, written = "rollout/response_length_mean", "rollout/environment_length_mean"
    lines = [(sampled, BLUE, "sampled"), (written, GREY, "by the environment, masked")]
    draw_lines(axis, results, lines)
    axis.set_ylim(bottom=0)


def draw_from_zero(axis: Axes, results: Results, line: Line) -> None:
    draw_lines(axis, results, [line])
    axis.set_ylim(bottom=0)


def draw_discrepancy(axis: Axes, results: Results) -> None:
    axis.axhline(0, color=GREY, linewidth=0.8)
    k1, k3 = "k1: mean of log mu - log pi_old", "k3 (never negative)"
    draw_lines(axis, results, [("train/kl_mu_pi", BLUE, k1), ("train/kl_mu_pi_k3", RED, k3)])
    axis.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)


def draw_staleness(axis: Axes, results: Results) -> None:
    names = splits(results, "logratio/staleness_std", "mini_batch_")
    colors = shades("YlOrRd", len(names))
    lines = [
        (name, color, label) for (label, name), color in zip(names.items(), colors, strict=True)
    ]
    draw_log_lines(axis, results, [*lines, ("logratio/train_infer_std", BLUE, "discrepancy, all")])


def draw_flips(axis: Axes, results: Results) -> None:
    names = splits(results, "logratio/train_infer_std", "flips_")
    shares = splits(results, "logratio/share", "flips_")
    lines: list[Line] = []
    for (label, name), color in zip(names.items(), shades("YlGnBu", len(names)), strict=True):
        _, share = series(results, shares.get(label, ""))
        if len(share) and share.mean() > 0:
            text = label.replace("_up", "+").replace("_", "-")
            lines.append((name, color, f"{text} ({100 * share.mean():.2g} % of tokens)"))
    draw_log_lines(axis, results, lines)


def draw_tails(axis: Axes, results: Results) -> None:
    lines = [
        ("logratio/train_infer_max", "#8ab6de", "pi_old/mu, max"),
        ("logratio/train_infer_p99", BLUE, "pi_old/mu, p99"),
        ("logratio/staleness_max", "#f2b27a", "pi/pi_old, max"),
        ("logratio/staleness_p99", ORANGE, "pi/pi_old, p99"),
    ]
    draw_log_lines(axis, results, lines)
    for color, tau in ((GREY, 2), (RED, 5)):
        limit, label = math.log(tau), f"F({tau})"
        if axis.lines and axis.get_ylim()[1] > limit:
            axis.axhline(limit, color=color, linewidth=0.9, linestyle=":", label=label)


def draw_clipping(axis: Axes, results: Results) -> None:
    for name, color, label in (
        ("train/clip_high_frac", ORANGE, "clipped, r too high"),
        ("train/clip_low_frac", BLUE, "clipped, r too low"),
        ("train/tis_truncated_frac", RED, "importance weight truncated"),
        ("rollout/truncated_frac", GREY, "responses cut at the length limit"),
    ):
        steps, values = series(results, name)
        if len(steps):
            axis.plot(steps, values, color=color, label=label, linewidth=1.5)
    as_percent(axis)


def draw_experts(axis: Axes, results: Results) -> None:
    draw_lines(axis, results, [("routing/router_mismatch", ORANGE, "trainer alone")])
    steps, values = series(results, "routing/replayed_mismatch")
    if len(steps):
        axis.plot(steps, values, color=GREEN, linewidth=2.2, label="used in training", zorder=4)
    as_percent(axis)


def draw_layers(axis: Axes, results: Results) -> None:
    axis.set_ylabel("MoE layer")
    rows = [
        (r.step + 1, r.per_layer["routing/flip_rate"])
        for r in results
        if r.per_layer.get("routing/flip_rate")
    ]
    if not rows:
        return
    steps, rates = np.array([step for step, _ in rows]), np.array([values for _, values in rows]).T
    edges = np.array([*(steps - 0.5), steps[-1] + 0.5])
    mesh = axis.pcolormesh(edges, np.arange(len(rates) + 1) - 0.5, rates, cmap="YlOrRd", vmin=0)
    bar = axis.figure.colorbar(mesh, ax=axis, pad=0.01, format=PercentFormatter(1.0, decimals=None))
    bar.outline.set_visible(False)
    first, layers = series(results, "routing/first_flip_layer")
    if len(first):
        label = "first layer that flips, mean over tokens"
        axis.plot(first, layers, ".", color=BLUE, markersize=4, label=label)
    axis.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axis.grid(False)


def draw_times(axis: Axes, results: Results) -> None:
    timed = [result for result in results if "time/step" in result.metrics]
    steps, bottom = [result.step + 1 for result in timed], np.zeros(len(timed))
    for name, color in STAGE_COLORS.items():
        if any(f"time/{name}" in result.metrics for result in timed):
            seconds = [max(0.0, result.metrics.get(f"time/{name}", 0.0)) for result in timed]
            values = np.nan_to_num(seconds)
            axis.bar(steps, values, 1.0, bottom, color=color, label=name.replace("_", " "))
            bottom += values
    if bottom.any():
        axis.set_ylim(top=1.45 * bottom.max())  # room for the legend


def draw_lines(axis: Axes, results: Results, lines: Iterable[Line]) -> None:
    """Draw each metric's values, faint, and their centred running mean, because the values of a
    long run are mostly noise.
    """
    for name, color, label in lines:
        noisy_line(axis, *series(results, name), color, label)


def draw_log_lines(axis: Axes, results: Results, lines: Iterable[Line]) -> None:
    """Draw the same on a logarithmic axis, without values of 0, which it cannot show."""
    for name, color, label in lines:
        steps, values = series(results, name)
        noisy_line(axis, steps[values > 0], values[values > 0], color, label)
    if axis.lines:
        axis.set_yscale("log")
        bottom, top = axis.get_ylim()
        axis.set_ylim(bottom, top * (top / bottom) ** 0.4)  # room for the legend
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if top < 30 * bottom else (1,)))
        axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())


def noisy_line(axis: Axes, steps: np.ndarray, values: np.ndarray, color: Color, label: str) -> None:
    window = min(9, len(values) // 6 * 2 + 1)
    if window >= 3:
        padded = np.pad(values, window // 2, mode="reflect")  # zeros would pull the ends down
        smooth = np.convolve(padded, np.ones(window) / window, mode="valid")
        axis.plot(steps, values, color=color, alpha=0.3, linewidth=1.0)
        axis.plot(steps, smooth, color=color, label=label or None, linewidth=2.0)
    elif len(values):
        axis.plot(steps, values, "o-", color=color, label=label or None, markersize=4)


FIRST_ORDER: tuple[Line, ...] = (
    ("first_order/total_p95", RED, "p95, pi / mu"),
    ("first_order/total_median", PURPLE, "median, pi / mu"),
    ("first_order/train_infer_p95", BLUE, "p95, pi_old / mu"),
    ("first_order/staleness_p95", ORANGE, "p95, pi / pi_old"),
)
PANELS: dict[str, Callable[[Axes, Results], None]] = {
    "Reward, or the loss of SFT": draw_reward,
    "Policy entropy (nats per token)": partial(draw_from_zero, line=("train/entropy", PURPLE, "")),
    "Training-inference discrepancy, KL(mu, pi_old) per token": draw_discrepancy,
    "First-order error: |prod(1+d) - (1 + sum d)| per sequence": partial(
        draw_log_lines, lines=FIRST_ORDER
    ),
    "Std of the staleness log pi/pi_old, by mini-batch": draw_staleness,
    "Std of the discrepancy log pi_old/mu, by layers that flipped": draw_flips,
    "Tails of the log-ratio, abs; F(tau) counts the tokens above its line": draw_tails,
    "Tokens clipped, weights and responses truncated": draw_clipping,
    "Experts that differ from the rollout's, of (token, layer) pairs": draw_experts,
    "... by MoE layer (trainer alone)": draw_layers,
    "Gradient norm, before clipping": partial(draw_from_zero, line=("optim/grad_norm", GREEN, "")),
    "Seconds per step": draw_times,
}
"""Title of a panel of draw_run -> the function that draws it."""
EPISODES: dict[str, Callable[[Axes, Results], None]] = {
    "Turns and episode metrics": draw_turns,
    "Tokens per episode": draw_tokens,
}
"""The additional panels of rollouts of several turns."""


def splits(results: Results, name: str, axis: str) -> dict[str, str]:
    """Return label -> metric for the measured parts of a metric along an axis ("mini_batch_",
    "flips_"), in order.
    """
    prefix = f"{name}/{axis}"
    metrics = {
        metric for result in results for metric in result.metrics if metric.startswith(prefix)
    }
    labels = sorted(
        (metric.removeprefix(prefix) for metric in metrics),
        key=lambda label: int(label.split("_")[0]),
    )
    return {label: prefix + label for label in labels}


def shades(name: str, count: int) -> list[Color]:
    """Return `count` colors of a colormap from light to dark, none too pale for a line."""
    return [colormaps[name](0.3 + 0.65 * index / max(1, count - 1)) for index in range(count)]


def make_grid(rows: int, columns: int, title: str) -> tuple[Figure, list[Axes]]:
    figure = Figure(
        figsize=(6.6 * columns, 2.9 * rows + 0.5), layout="constrained", facecolor="white"
    )
    # names of runs and metrics may have a $, which would begin an equation
    style: dict[str, Any] = {"fontweight": "bold", "x": 0.01, "ha": "left", "parse_math": False}
    figure.suptitle(title, fontsize=15, **style)
    axes = list(figure.subplots(rows, columns).flat)
    for axis in axes:
        axis.grid(True, color="#e9ebee", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color("#b9bec6")
        axis.tick_params(colors="#4a4f57", labelsize=9)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, axes


def as_percent(axis: Axes) -> None:
    top = max(axis.get_ylim()[1], 1e-6)
    axis.set_ylim(-0.04 * top, top)  # from below 0: a line at 0 would lie on the frame
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))


def finish_panel(axis: Axes, title: str) -> None:
    """Add title and legend, and a note if nothing was measured."""
    axis.set_title(title, loc="left", fontsize=11, color="#23272e")
    if not axis.lines and not axis.collections and not axis.patches:
        axis.text(
            0.5, 0.5, "not measured in this run", transform=axis.transAxes, ha="center", color=GREY
        )
    labels = axis.get_legend_handles_labels()[1]
    if labels:
        columns = 4 if max(map(len, labels)) < 17 else 2
        if len(labels) <= 4 and axis.get_yscale() == "linear":
            columns = 1
        legend = axis.legend(
            fontsize=8.5, frameon=True, framealpha=0.85, edgecolor="none", ncols=columns
        )
        for text in legend.get_texts():
            text.set_parse_math(False)
        legend.set_in_layout(False)  # a wide legend must not narrow the panels
    axis.set_xlabel("finished steps", fontsize=9, color="#4a4f57")
