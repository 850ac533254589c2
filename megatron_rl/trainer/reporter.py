"""Writes the results of steps and evaluations, on rank 0: terminal, metrics.jsonl, trackers,
status.json, report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path

from megatron_rl import commands
from megatron_rl.config import Config, dump_config, plain_values
from megatron_rl.config.redact import Redactor
from megatron_rl.config.run_paths import RunFolder
from megatron_rl.launch.status import SHOWN, StatusWriter
from megatron_rl.metrics.console import Console
from megatron_rl.metrics.reduce import MetricSums
from megatron_rl.metrics.results import read_run_settings
from megatron_rl.metrics.samples import best_and_worst, last_rollouts
from megatron_rl.metrics.sinks import Sinks, read_metrics
from megatron_rl.metrics.summary import summarize_run
from megatron_rl.metrics.trackers.registry import Trackers
from megatron_rl.metrics.trackers.run_versions import versions
from megatron_rl.metrics.trackers.tracker import TrackedRun, Tracker
from megatron_rl.records.packed import StepResult

VIEWS = ("view", "top")
"""Commands that show a run."""
REPORT = "megatron_rl.report"
"""Group of the entry point that writes a run's page: a function that takes the run's folder and
returns the page's path.
"""


class Reporter:
    """Writer of results on rank 0.

    sinks, status: None on other ranks, which write nothing and whose console is silent.
    """

    def __init__(
        self, cfg: Config, console: Console, sinks: Sinks | None, status: StatusWriter | None = None
    ) -> None:
        self.cfg, self.console, self.sinks, self.status = cfg, console, sinks, status

    def log(self, text: str) -> None:
        """Print one line on the terminal."""
        self.console.log(text)

    def count(self, sums: MetricSums) -> None:
        """Add the trackers' failures to the metrics of the step."""
        if self.sinks is not None and self.sinks.trackers is not None:
            for name, failures in self.sinks.trackers.failures.items():
                sums.add_total(f"track/{name}_failures_total", failures)

    def state_dict(self) -> dict[str, dict[str, str]]:
        """Return the state that a checkpoint keeps: tracker -> id of its run."""
        trackers = None if self.sinks is None else self.sinks.trackers
        return {"trackers": {} if trackers is None else trackers.ids}

    def step(self, result: StepResult, totals: Mapping[str, float]) -> None:
        """Write a finished step.

        totals: the metrics that count since the run began, as the step before left them.
        """
        if self.sinks is None:
            return
        self.sinks.write(result)
        self.console.step(result, self.cfg.run.num_steps, totals)
        every, finished = self.cfg.track.samples_every, result.step + 1
        if every and finished % every == 0:
            self.sinks.track(partial(send_samples, cfg=self.cfg, step=finished))
        if self.status is not None:
            shown = {name: result.metrics[name] for name in SHOWN if name in result.metrics}
            seconds = result.metrics.get("time/step", 0.0)
            self.status.note(
                step=finished,
                step_seconds=seconds,
                policy_version=result.policy_version,
                metrics=shown,
            )

    def evaluation(self, step: int, policy_version: int, metrics: Mapping[str, float]) -> None:
        """Write an evaluation after `step` finished steps."""
        if self.sinks is not None:
            # StepResult counts from 0: the evaluation before the first step gets -1, written as
            # step 0
            self.sinks.write(StepResult(step - 1, policy_version, dict(metrics)))
            self.console.evaluation(step, metrics)

    def finish(self, num_steps: int | None = None) -> None:
        """Write the report, the trackers' last tables, and the summary.

        num_steps: number of finished steps; default: run.num_steps.
        """
        if self.sinks is None:
            return
        run_dir = self.cfg.run_dir
        page = self._write_page()
        last = self.cfg.run.num_steps if num_steps is None else num_steps
        self.sinks.track(partial(send_samples, cfg=self.cfg, step=last))
        if page is not None:
            self.sinks.track(lambda tracker: tracker.report(page))
        views = [name for name in VIEWS if name in commands.installed()]
        results, settings = read_metrics(RunFolder(run_dir).metrics), read_run_settings(run_dir)
        summary = summarize_run(results, run_dir, views, page, settings)
        self.console.summary(summary.text, summary.values)

    def _write_page(self) -> Path | None:
        """Have the installed viewer write the run's report; None where it is not installed."""
        for writer in entry_points(group=REPORT):
            try:
                page: Path = writer.load()(self.cfg.run_dir)
            # any error: what was trained and exported must not fail for a page
            except Exception as error:
                again = f"megatron-rl report {self.cfg.run_dir}"
                self.console.log(f"WARNING no report page: {error!r}; mend it, then: {again}")
                return None
            self.console.log(f"report {page}")
            return page
        self.console.log(
            "no report page: megatron_rl_viewer is not installed; in a checkout: pip install"
            " ./viewer"
        )
        return None


def send_samples(tracker: Tracker, *, cfg: Config, step: int) -> None:
    """Send the best and the worst of the last recorded responses, without secrets that an
    environment may have printed.

    Called on the trackers' threads.
    """
    tables, _ = best_and_worst(last_rollouts(cfg.run_dir))
    if tables:
        tracker.samples(step, Redactor(hidden=cfg.key_variables).tree(tables))


def make_sinks(
    cfg: Config,
    stack: ExitStack,
    log: Callable[[str], None],
    ids: Mapping[str, str],
    first_step: int,
    *,
    is_new: bool,
) -> Sinks:
    """Write config.toml; return the writers of metrics.jsonl and of the trackers.

    ids: tracker -> id of the run that it continues after `first_step` steps (Trackers).
    is_new: the run begins, and repeats the evaluation before its first step.
    """
    RunFolder(cfg.run_dir).config.write_text(dump_config(cfg))
    track, trackers = cfg.track, None
    if track.to:
        run = TrackedRun(
            name=cfg.run.name,
            folder=cfg.run_dir,
            project=track.project,
            entity=track.entity,
            mode=track.mode,
            first_step=first_step,
            config=plain_values(cfg),
            versions=versions(),
        )
        trackers = Trackers(track, run, log, ids)
    last_step = -1 if is_new else first_step
    return stack.enter_context(Sinks(cfg.run_dir, trackers, last_step=last_step))
