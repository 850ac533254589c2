"""A few lines at the end of a run: how reward or loss and evaluations changed, the mismatch, the
time, what was left out, the health.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.config.run_paths import RunFolder
from megatron_rl.metrics.console import clock
from megatron_rl.metrics.evaluation_names import SCORE
from megatron_rl.metrics.health import Finding, examine_results
from megatron_rl.metrics.left_out_counts import Count, counts_of_run
from megatron_rl.metrics.results import evaluations, series
from megatron_rl.records.packed import StepResult

SHOWN = {
    "rollout/reward_mean": ("reward", ".3f"),
    "sft/loss": ("loss", ".3f"),
    "train/entropy": ("entropy", ".3f"),
    "train/kl_mu_pi": ("KL", "+.1e"),
    "teacher/reverse_kl": ("teacher KL", ".3f"),
}
MISMATCH = ("routing/router_mismatch", "routing/replayed_mismatch")
STAGES = {
    "rollout": "rollout", "reward": "reward", "split": "split", "old_logprob": "old log-probs",
    "update": "update", "weight_sync": "weight sync", "other": "other",
}  # fmt: skip


@dataclass(frozen=True)
class Summary:
    """The summary of the steps in metrics.jsonl."""

    steps: int
    """The number of steps."""
    seconds: float
    """The sum of time/step."""
    changed: dict[str, tuple[float, float]]
    """Metric -> (mean of the first fifth of the steps, mean of the last fifth); for an evaluation
    (first value, last value)."""
    stages: dict[str, float]
    """Stage -> its seconds in all steps."""
    counts: list[Count]
    """Counts of things left out, replaced or repeated (left_out.py), without those of 0."""
    health: list[Finding] = field(default_factory=list)
    """Findings of health.py, the worst first."""
    look_at: list[str] = field(default_factory=list)
    """Commands and files that show the run."""

    @property
    def values(self) -> dict[str, Any]:
        counts = {count.entry.label: round(count.amount) for count in self.counts}
        return vars(self) | {
            "counts": counts,
            "health": [finding.to_json() for finding in self.health],
        }

    @property
    def text(self) -> str:
        shares = sorted(self.stages.items(), key=lambda item: -item[1])
        took = [
            f"{name} {seconds / self.seconds:.0%}"
            for name, seconds in shares
            if seconds > 0.005 * self.seconds
        ]
        lines = [
            f"{self.steps} steps in {clock(self.seconds)}{': ' if took else ''}{', '.join(took)}"
        ]
        rows = []
        for name, (before, after) in self.changed.items():
            label, form = SHOWN.get(name, (name.removeprefix("eval/"), ".3f"))
            if name not in MISMATCH:  # these two share a row
                rows.append((label, f"{before:{form}} -> {after:{form}}"))
        if all(name in self.changed for name in MISMATCH):
            alone, used = (self.changed[name][1] for name in MISMATCH)
            rows.append(("router_mismatch", f"{alone:.1%} (used {used:.1%})"))
        rows += [
            (count.entry.label, f"{count.amount:.0f}{count.entry.remark}") for count in self.counts
        ]
        width = max([21, *(len(label) for label, _ in rows)])
        lines += [f"  {label:<{width}} {text}" for label, text in rows]
        if not self.counts:
            lines.append("  nothing skipped or left out")
        lines.append("health")
        for finding in self.health:
            advice = f": {finding.advice}" if finding.advice else ""
            lines.append(f"  {finding.title}{finding.since}{advice}")
        return "\n".join([*lines, "look at", *(f"  {place}" for place in self.look_at)])


def summarize_run(
    results: Sequence[StepResult],
    run_dir: Path,
    commands: Sequence[str],
    page: Path | None,
    settings: Mapping[str, object] | None = None,
) -> Summary:
    """Summarize a run.

    commands: names of the commands `megatron-rl COMMAND RUN` that show a run.
    page: the report.html of the run, if there is one.
    settings: the configuration as {"section.key": value}.
    """
    steps, seconds = series(results, "time/step")
    changed = {}
    for name in (*SHOWN, *MISMATCH):
        _, values = series(results, name)
        if len(values):
            # means of a fifth of the steps, because single steps are noise
            part = max(1, len(values) // 5)
            changed[name] = float(values[:part].mean()), float(values[-part:].mean())
    for name in evaluations(results, SCORE):
        _, values = series(results, name)
        if len(values):  # none where no response of the set was ever scored
            changed[name] = float(values[0]), float(values[-1])
    board = [f"tensorboard --logdir {run_dir}"] if RunFolder(run_dir).tensorboard.is_dir() else []
    return Summary(
        steps=len(steps),
        seconds=float(sum(seconds)),
        changed=changed,
        stages={
            label: float(sum(series(results, f"time/{name}")[1])) for name, label in STAGES.items()
        },
        counts=counts_of_run(results),
        health=examine_results(results, settings),
        look_at=[
            *(f"megatron-rl {command} {run_dir}" for command in commands),
            *board,
            *([] if page is None else [f"{page}"]),
        ],
    )
