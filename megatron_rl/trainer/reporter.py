"""Writes results of steps and evaluations, on rank 0: terminal, metrics.jsonl, TensorBoard, report."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_rl.config import Config
from megatron_rl.metrics.console import Console
from megatron_rl.metrics.report import write_report
from megatron_rl.metrics.sinks import Sinks
from megatron_rl.records import StepResult


class Reporter:
    """sinks: None on other ranks, which write nothing and whose console is silent."""

    def __init__(self, cfg: Config, console: Console, sinks: Sinks | None) -> None:
        self.cfg, self.console, self.sinks = cfg, console, sinks

    def log(self, text: str) -> None:
        """One line on the terminal."""
        self.console.log(text)

    def step(self, result: StepResult) -> None:
        """A finished step."""
        if self.sinks is not None:
            self.sinks.write(result)
            self.console.step(result, self.cfg.run.num_steps)

    def evaluation(self, step: int, policy_version: int, metrics: Mapping[str, float]) -> None:
        """An evaluation after `step` finished steps."""
        if self.sinks is not None:
            self.sinks.write(StepResult(step - 1, policy_version, dict(metrics)))
            self.console.evaluation(step, metrics)

    def finish(self) -> None:
        """Flush all sinks and write the report."""
        if self.sinks is not None:
            self.sinks.flush()
            self.console.log(f"report {write_report(self.cfg.run_dir)}")
