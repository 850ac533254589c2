"""The terminal output of a run: one line per step, one per evaluation, and a progress bar while it samples.

The bar needs a terminal; into a file or a pipe progress is a plain line every PLAIN_PROGRESS_SECONDS.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from megatron_rl.records import StepResult

STAGES = {"rollout": "rollout", "reward": "reward", "old_logprob": "old", "update": "update", "weight_sync": "sync"}
PLAIN_PROGRESS_SECONDS = 20.0


class Console:
    """Prints on the one rank where it is enabled; silent elsewhere."""

    def __init__(self, *, enabled: bool) -> None:
        self._rich = RichConsole(quiet=not enabled, highlight=False, markup=False, soft_wrap=True)

    def log(self, text: str) -> None:
        """One line, without markup."""
        self._rich.print(text)

    def step(self, result: StepResult, num_steps: int) -> None:
        """The line of a finished step."""
        self.log(step_line(result, num_steps))

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """The line of an evaluation after `step` finished steps: avg@k and pass@k, without their intervals."""
        shown = {name: value for name, value in sorted(metrics.items()) if re.search(r"/(avg|pass)@\d+$", name)}
        values = "  ".join(f"{name.removeprefix('eval/')} {value:.3f}" for name, value in shown.items())
        self.log(f"eval after step {step}: {values}")

    @contextmanager
    def progress(self, text: str, total: int) -> Iterator[Callable[[], None]]:
        """Show `text` and how many of `total` items are done; yields a function that counts one more."""
        if self._rich.is_terminal and not self._rich.quiet:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            with Progress(*columns, console=self._rich, transient=True) as bar:
                task = bar.add_task(text, total=total)
                yield lambda: bar.advance(task)
        else:
            yield self._plain_progress(text, total)

    def _plain_progress(self, text: str, total: int) -> Callable[[], None]:
        done, next_line = 0, time.monotonic() + PLAIN_PROGRESS_SECONDS

        def advance() -> None:
            nonlocal done, next_line
            done += 1
            if time.monotonic() >= next_line and done < total:
                self.log(f"{text} {done}/{total}")
                next_line = time.monotonic() + PLAIN_PROGRESS_SECONDS

        return advance


def step_line(result: StepResult, num_steps: int) -> str:
    """E.g. `step 12/60  reward 0.430  KL +1.2e-03  clip .02/.01 ...  4.1s (rollout 1.2 old 0.6 ...)`, without what was not
    measured."""
    metrics = result.metrics
    width = len(str(num_steps))
    parts = [
        f"step {result.step + 1:>{width}}/{num_steps}",
        fill("reward {rollout/reward_mean:.3f}", metrics),
        fill("len {rollout/response_length_mean:.1f}", metrics),
        *episodes(metrics),
        fill("trunc {rollout/truncated_frac:.2f}", metrics),
        fill("entropy {train/entropy:.3f}", metrics),
        fill("KL {train/kl_mu_pi:+.1e}", metrics),
        fill("clip {train/clip_high_frac:.2f}/{train/clip_low_frac:.2f}", metrics).replace("0.", "."),
        fill("router_mismatch {routing/router_mismatch:.1%} (used {routing/replayed_mismatch:.1%})", metrics),
        missing_routes(metrics),
        fill("gnorm {optim/grad_norm:.2f}", metrics),
        f"NONFINITE {100 * nonfinite:.2g}% of tokens"
        if (nonfinite := metrics.get("train/nonfinite_frac", 0.0)) > 0
        else "",
        "UPDATE SKIPPED" if metrics.get("optim/skipped_updates", 0.0) > 0 else "",
        times(metrics),
    ]
    return "  ".join(part for part in parts if part)


def fill(template: str, metrics: Mapping[str, float]) -> str:
    """The template with its metrics; empty where one was not measured."""
    try:
        return template.format_map(metrics)
    except KeyError:
        return ""


def episodes(metrics: Mapping[str, float]) -> Iterator[str]:
    """Turns, tokens that the environment wrote (masked: not learned from) and its seconds, and the metrics of the user's
    function; nothing for rollouts of one turn."""
    yield fill("turns {rollout/turns_mean:.2f}", metrics)
    for name in sorted(name for name in metrics if name.startswith("episode/")):
        yield f"{name.removeprefix('episode/')} {metrics[name]:.3g}"
    yield fill("masked {rollout/environment_length_mean:.1f}", metrics)
    yield fill("environment {rollout/environment_seconds_mean:.2f}s", metrics)


def missing_routes(metrics: Mapping[str, float]) -> str:
    """Rows for which the server sent no route, and what was left out for that; empty where there was none."""
    counts = {
        "{:.0f} rows": metrics.get("replay/missing_rows_total", 0.0),
        "{:.0f} tokens masked": metrics.get("replay/masked_tokens_total", 0.0),
        "{:.0f} samples dropped": metrics.get("replay/dropped_samples_total", 0.0),
    }
    named = ", ".join(form.format(count) for form, count in counts.items() if count > 0)
    return f"missing_routes {named}" if named else ""


def times(metrics: Mapping[str, float]) -> str:
    """Seconds of the step and of its stages; `other`: the rest."""
    if "time/step" not in metrics:
        return ""
    total = metrics["time/step"]
    stages = {label: metrics[f"time/{name}"] for name, label in STAGES.items() if f"time/{name}" in metrics}
    stages["other"] = max(0.0, total - sum(stages.values()))
    return f"{total:.1f}s ({' '.join(f'{label} {seconds:.1f}' for label, seconds in stages.items())})"
