"""The terminal output of a run: one line per step, one per evaluation, progress of long work, a
summary at the end.

Progress is a bar on a terminal, and a plain line every PLAIN_PROGRESS_SECONDS in a file or a pipe.
With run.log_format = json every line is a JSON object (launch/log_lines.py).  rich follows the
environment variable NO_COLOR.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from rich.console import Console as RichConsole
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from megatron_rl.launch.log_lines import Event, LogLines, Value
from megatron_rl.metrics.evaluation_names import SCORE, is_of_set
from megatron_rl.metrics.step_line import short, step_line
from megatron_rl.records.packed import StepResult

PLAIN_PROGRESS_SECONDS = 20.0  # between two lines, where no bar can be drawn
Item = TypeVar("Item")


class Advance(Protocol):
    """Count `amount` more items of a job as done."""

    def __call__(self, amount: int = 1) -> None: ...


class ShowProgress(Protocol):
    """The type of Console.progress."""

    def __call__(
        self, text: str, total: int, unit: str = ""
    ) -> AbstractContextManager[Advance]: ...


class Console:
    """The printer of a run: it prints on the one rank where it is enabled."""

    def __init__(self, *, enabled: bool, lines: LogLines | None = None) -> None:
        self.lines = lines or LogLines()
        # soft_wrap: a line is not broken at the width of the terminal, so that it can be searched
        # plain text: an IPv6 address may contain :b:, the name of an emoji
        self._rich = RichConsole(
            quiet=not enabled, highlight=False, markup=False, emoji=False, soft_wrap=True
        )

    def log(self, text: str) -> None:
        """Print one line, without markup."""
        self._write("log", text)

    def step(
        self, result: StepResult, num_steps: int, totals: Mapping[str, float] | None = None
    ) -> None:
        """Print the line of a finished step.  totals: see step_line."""
        values: dict[str, Value] = {"step": result.step + 1, "num_steps": num_steps}
        values |= {"policy_version": result.policy_version, "metrics": result.metrics}
        self._write("step", step_line(result, num_steps, totals), **values)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the line of an evaluation after `step` finished steps (see evaluation_text)."""
        text = f"eval after step {step}: {evaluation_text(metrics)}"
        self._write("evaluation", text, step=step, metrics=metrics)

    def summary(self, text: str, values: Mapping[str, Value]) -> None:
        """Print what a run changed, at its end; `text` has several lines."""
        self._write("summary", text, **values)

    def _write(self, event: Event, text: str, **values: Value) -> None:
        if not self._rich.quiet:
            self._rich.print(self.lines.line(event, text, **values))

    @contextmanager
    def progress(self, text: str, total: int, unit: str = "") -> Iterator[Advance]:
        """Show `text`, how many of `total` items are done, their rate and the time left; yield a
        function that counts more items as done.

        unit: the name of an item, as "MiB"; may be empty.
        """
        job = Job(text, total, unit)
        if self._rich.is_terminal and not self._rich.quiet and not self.lines.is_json:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                Rate(unit),
            )
            times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
            # transient: the bar disappears when the work is done
            with Progress(*columns, *times, console=self._rich, transient=True) as bar:
                task = bar.add_task(text, total=total)
                yield lambda amount=1: bar.advance(task, amount)
        else:
            yield self._plain_progress(job)

    def _plain_progress(self, job: Job) -> Advance:
        next_line = time.monotonic() + PLAIN_PROGRESS_SECONDS

        def advance(amount: int = 1) -> None:
            nonlocal next_line
            job.done += amount
            # no line for the last item: the work's result follows
            if time.monotonic() >= next_line and job.done < job.total:
                self._write("progress", job.line, **job.values)
                next_line = time.monotonic() + PLAIN_PROGRESS_SECONDS

        return advance


def evaluation_text(metrics: Mapping[str, float]) -> str:
    """Return avg@k and pass@k, or the loss, of every evaluation set, without their intervals, and
    the share of responses that could not be scored where it is above 0.
    """
    shown = {
        name: value
        for name, value in sorted(metrics.items())
        if is_of_set(name, rf"{SCORE}|pass@\d+") or (is_of_set(name, "failed_frac") and value > 0)
    }
    return "  ".join(f"{name.removeprefix('eval/')} {value:.3f}" for name, value in shown.items())


class Rate(ProgressColumn):
    """The column of a progress bar with the items per second."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        return Text(rate_of(task.speed or 0.0, self._unit) if task.speed else "")


@dataclass
class Job:
    """Long work, of which `done` of `total` items are done since `started`."""

    text: str
    total: int
    unit: str = ""
    done: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def seconds_left(self) -> float | None:
        """The time left at the rate so far; None before the first item is done."""
        return self.seconds * (self.total - self.done) / self.done if self.done else None

    @property
    def line(self) -> str:
        """The progress as a line: `step 3: sampling 12/16, 1.3/s, 0:03 left`."""
        unit = f" {self.unit}" if self.unit else ""
        rate = rate_of(self.done / max(self.seconds, 1e-9), self.unit)
        left = "" if self.seconds_left is None else f", {clock(self.seconds_left)} left"
        return f"{self.text} {self.done}/{self.total}{unit}, {rate}{left}"

    @property
    def values(self) -> dict[str, Value]:
        left = self.seconds_left
        return {
            "job": self.text, "done": self.done, "total": self.total, "unit": self.unit,
            "seconds": round(self.seconds, 1),
            "seconds_left": None if left is None else round(left, 1),
        }  # fmt: skip


def rate_of(per_second: float, unit: str) -> str:
    # `short` has one decimal: below 1 that is too few
    number = short(per_second) if per_second >= 0.95 else f"{per_second:.2g}"
    return f"{number} {unit}/s" if unit else f"{number}/s"


def clock(seconds: float) -> str:
    """Return the time as on a clock: `0:03`, `12:45`, `3:05:00`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def counted(items: Iterator[Item], advance: Advance) -> Iterator[Item]:
    """Yield the items; an item is counted as done when the next one is requested."""
    for item in items:
        yield item
        advance()
