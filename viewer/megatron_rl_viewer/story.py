"""The run's story: one sentence each about its progress, reward or loss, held-out sets and health,
for the top of its page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.metrics.evaluation_names import SCORE, is_of_set
from megatron_rl_viewer.run_folder import Run

LEARNED = {"sft/loss": "loss", "rollout/reward_mean": "reward"}
"""The metric that a run shows first, and its name: the loss of SFT, which has no rewards, else the
reward."""
STEADY = 0.02
"""The largest change, as a share of its range, that counts as none."""


def story(run: Run) -> list[dict[str, str]]:
    """Return the sentences as {"title", "text", "level"}; level: ok, watch or bad."""
    table = run.metrics.table()
    parts = [
        ("Run", progress(run), "ok"),
        (*learned(table), "ok"),
        ("Held out", held_out(table["evaluations"]), "ok"),
        ("Health", *health(run)),
    ]
    return [{"title": title, "text": text, "level": level} for title, text, level in parts]


def progress(run: Run) -> str:
    """Say how far the run is, and how it ended."""
    done, total = run.metrics.last_step, run.num_steps
    steps = f"{done} of {total} steps" if total else f"{done} steps"
    events = run.events.events
    if events and events[-1]["kind"] == "stop":
        reason = str(events[-1]["text"])
        if reason == "finished":
            return f"It finished: {steps}."
        return f"It stopped after {steps}: {reason.rstrip('.')}."
    if done == total:
        steps = f"all {total} steps are done"
    if not run.is_live():
        return f"Nothing was written for a while: {steps}."
    # the last evaluation, checkpoint and export come after the last step
    last = "; what follows the last step may still be at work" if done == total else ""
    return f"It runs: {steps}{last}."


def learned(table: Mapping[str, Any]) -> tuple[str, str]:
    """Return (title, sentence) about the loss of a run of SFT, or the reward of any other.

    table: of MetricsFile.
    """
    metrics = table["metrics"]
    name = next((name for name in LEARNED if name in metrics), "rollout/reward_mean")
    what = LEARNED[name]
    return what.capitalize(), trend(what, table["steps"], metrics.get(name, []))


def trend(what: str, steps: Sequence[int], values: Sequence[float]) -> str:
    """Compare the means of the first and the last fifth of the steps: single steps are noise.

    values: of `steps`, or none.
    """
    pairs = zip(steps, values, strict=True) if values else ()
    known = [(step, value) for step, value in pairs if is_number(value)]
    if not known:
        return f"No step has a {what} yet."
    part = max(1, len(known) // 5)
    first, last = (mean([value for _, value in some]) for some in (known[:part], known[-part:]))
    if len(known) < 2:
        return f"The mean {what} is {last:.3f}."
    spread = max(value for _, value in known) - min(value for _, value in known)
    verb = "stays at" if abs(last - first) <= STEADY * max(spread, abs(first)) else (
        "rises from" if last > first else "falls from"
    )  # fmt: skip
    values_of = f"{last:.3f}" if verb == "stays at" else f"{first:.3f} to {last:.3f}"
    return f"The mean {what} {verb} {values_of} over steps {known[0][0]} to {known[-1][0]}."


def held_out(evaluations: dict) -> str:
    """Say how each held-out set changed, from its first to its last evaluation."""
    texts = []
    for name, values in sorted(evaluations["metrics"].items()):
        if not is_of_set(name, SCORE):
            continue
        known = [
            (step, value)
            for step, value in zip(evaluations["steps"], values, strict=True)
            if is_number(value)
        ]
        if not known:
            continue
        (first_step, first), (last_step, last) = known[0], known[-1]
        label = name.removeprefix("eval/").replace("/", " ")
        if len(known) == 1:
            texts.append(f"{label} is {last:.3f} after step {last_step}")
        else:
            change = (
                f"from {first:.3f} after step {first_step} to {last:.3f} after step {last_step}"
            )
            texts.append(f"{label} goes {change}")
    return f"{'; '.join(texts)}." if texts else "No held-out set was evaluated yet."


def health(run: Run) -> tuple[str, str]:
    """Return (a sentence that names the worst finding, its level)."""
    findings = [finding for finding in run.health() if finding["level"] != "ok"]
    if not findings:
        has_steps = bool(run.metrics.table()["steps"])
        return ("Nothing stands out." if has_steps else "No step is finished yet."), "ok"
    worst = findings[0]
    since = worst.get("since_step")
    text = f"{worst['title']}{f', since step {since}' if since is not None else ''}"
    others = len(findings) - 1
    more = f", and {others} more {'thing' if others == 1 else 'things'} below" if others else ""
    return f"{text}{more}.", str(worst["level"])


def is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
