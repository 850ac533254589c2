"""The line of a finished step, at most WIDTH columns: a longer one loses parts in a fixed order.

It shows the main values; metrics.jsonl has all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_rl.metrics.left_out_counts import counts_of_step
from megatron_rl.records.packed import StepResult

WIDTH = 120
COUNTS = 2
"""The number of counters that are named; "+N more" stands for the others."""
STAGES = {
    "rollout": "rollout", "reward": "reward", "old_logprob": "old", "update": "update",
    "weight_sync": "sync",
}  # fmt: skip
FIRST_TO_GO = (
    "stages", "environment", "masked", "episode", "clip", "trunc", "entropy", "turns", "gnorm",
    "len", "KL", "router", "teacher",
)  # fmt: skip
"""Parts that a line too long loses, in this order.  The step, its reward, its seconds and what is
wrong always stay.
"""
LENGTH = "rollout/response_length_mean"
ROUTER = "router_mismatch {routing/router_mismatch:.1%} (used {routing/replayed_mismatch:.1%})"


def step_line(result: StepResult, num_steps: int, totals: Mapping[str, float] | None = None) -> str:
    """Return, for instance, `step 12/60  reward 0.430  len 3.4  entropy 0.610 ...  4.1s`, without
    the parts that were not measured.

    totals: the metrics that count since the start, after the step before; by default nothing was
    counted before.
    """
    counts = [
        count for count in counts_of_step(result.metrics, totals or {}) if count.entry.is_alarm
    ]
    most = sum(bool(count.entry.line) for count in counts) + COUNTS
    for named in range(min(most, len(counts)), -1, -1):
        texts = [count.line for count in counts[:named]]
        texts += [f"+{len(counts) - named} more"] if named < len(counts) else []
        parts = dict(parts_of_line(result, num_steps, "  ".join(texts)))
        line = fit({name: text for name, text in parts.items() if text})
        if len(line) <= WIDTH:
            break
    return line


def fit(parts: dict[str, str]) -> str:
    """Join the parts to one line, of at most WIDTH columns where it is enough to leave out parts of
    FIRST_TO_GO.
    """
    for name in FIRST_TO_GO:
        if len("  ".join(parts.values())) <= WIDTH:
            break
        parts.pop(name, None)
    return "  ".join(parts.values()).replace("  (", " (")


def parts_of_line(result: StepResult, num_steps: int, left_out: str) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of every part in the order of the line; the text is empty where nothing
    was measured.
    """
    metrics = result.metrics
    length = f"len {short(metrics[LENGTH])}" if LENGTH in metrics else ""
    clip = fill("clip {train/clip_high_frac:.2f}/{train/clip_low_frac:.2f}", metrics)
    yield "step", f"step {result.step + 1:>{len(str(num_steps))}}/{num_steps}"
    yield "reward", fill("reward {rollout/reward_mean:.3f}", metrics)
    yield "loss", fill("loss {sft/loss:.4f}", metrics)
    yield "len", length
    yield "turns", fill("turns {rollout/turns_mean:.2f}", metrics)
    yield "episode", "  ".join(episode_metrics(metrics))
    yield "masked", fill("masked {rollout/environment_length_mean:.1f}", metrics)
    # less would be shown as 0.00
    if metrics.get("rollout/environment_seconds_mean", 0.0) >= 0.005:
        yield "environment", fill("environment {rollout/environment_seconds_mean:.2f}s", metrics)
    yield "trunc", fill("trunc {rollout/truncated_frac:.2f}", metrics)
    yield "entropy", fill("entropy {train/entropy:.3f}", metrics)
    yield "KL", fill("KL {train/kl_mu_pi:+.1e}", metrics)
    yield "teacher", fill("teacher KL {teacher/reverse_kl:.3f}", metrics)
    yield "clip", clip.replace("0.", ".")
    yield "router", fill(ROUTER, metrics)
    yield "gnorm", fill("gnorm {optim/grad_norm:.2f}", metrics)
    yield "left_out", left_out
    if "time/step" in metrics:
        yield "seconds", f"{short(metrics['time/step'])}s"
        yield "stages", stages(metrics)


def fill(template: str, metrics: Mapping[str, float]) -> str:
    """Fill the template with its metrics; return "" where one was not measured."""
    try:
        return template.format_map(metrics)
    except KeyError:
        return ""


def short(value: float) -> str:
    """Format a number, with one decimal below 1000 and none above."""
    return f"{value:.1f}" if abs(value) < 1000 else f"{value:.0f}"


def episode_metrics(metrics: Mapping[str, float]) -> Iterator[str]:
    """The metrics of the user's rollout function."""
    for name in sorted(name for name in metrics if name.startswith("episode/")):
        yield f"{name.removeprefix('episode/')} {metrics[name]:.3g}"


def stages(metrics: Mapping[str, float]) -> str:
    """Return the seconds of the step's stages, without stages that round to 0.0; `other` is the
    remaining time of the step.
    """
    measured = {
        label: metrics[f"time/{name}"]
        for name, label in STAGES.items()
        if f"time/{name}" in metrics
    }
    measured["other"] = max(0.0, metrics["time/step"] - sum(measured.values()))
    shown = [f"{label} {short(value)}" for label, value in measured.items() if value >= 0.05]
    return f"({' '.join(shown)})"
