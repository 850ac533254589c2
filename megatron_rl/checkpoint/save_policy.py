"""Decides when the training loop saves, where it resumes, and what is saved of an aborted step.

Every method is collective: all ranks call it at the same place.
"""

from __future__ import annotations

import difflib
import logging
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import isfinite, nan
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from megatron_rl.batch.collectives import all_reduce_ints
from megatron_rl.checkpoint.checkpoint_loader import Restored
from megatron_rl.checkpoint.checkpointer import Checkpointer, Snapshot
from megatron_rl.checkpoint.folder import (
    STATE,
    STOPPED,
    Progress,
    choose_checkpoint,
    origin,
    value_of,
    write_text,
)
from megatron_rl.config.renamed import new_metric
from megatron_rl.distributed import from_rank_0
from megatron_rl.launch.signals import StoppedBySignal, StopSignal
from megatron_rl.metrics.events import Events
from megatron_rl.metrics.left_out_counts import totals_of
from megatron_rl.records import Files

logger = logging.getLogger(__name__)
PROGRESS = {"policy_version", "prompts", "totals"}
"""Keys of the progress that every resume needs, beside the engine."""


class CheckpointPolicy:
    """Checkpoints and signals for the training loop.

    Steps are counted as finished ones.  `files` are those that this rank adds to a checkpoint
    (Snapshot.files).
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        before_save: Callable[[], None] = lambda: None,
        events: Events | None = None,
    ) -> None:
        """Save nothing yet.

        All ranks call `before_save` before each save, to have the weights and the optimizer state
        in place.
        """
        self.checkpointer = checkpointer
        self._events = events or Events()
        self._before_save = before_save
        self._saved_step: int | None = None
        self._saved_value: float | None = None
        """Value of checkpoint.best_metric in the checkpoint of `_saved_step`."""
        self._stop: StopSignal | None = None
        self._start: Snapshot | None = None
        """State at the start of this step."""
        self._measured: tuple[int | None, dict[str, float]] = (None, {})
        """A step, and its known metrics."""
        self._totals: dict[str, float] = {}
        """Counts since the run's first start, as last reported."""
        self._carried: dict[str, float] = {}
        """The part of `_totals` that earlier processes counted."""

    def listen(self, stop: StopSignal, on_signal: Callable[[], None] = lambda: None) -> None:
        """Save on a signal from now on.  StopSignal.hold explains `on_signal`."""
        stop.hold(on_signal)
        self._stop = stop

    def begin(self, step: int, progress: Progress) -> None:
        """Note the state after `step` finished steps, which is saved if the next step is aborted.

        Completes a background save that is done.
        """
        self.checkpointer.poll()
        # only what changes before the first update is noted: until then the engine is as the last
        # step left it
        self._start = self._snapshot(step, progress)

    def stop_if_signalled(self, files: Callable[[], Files] = dict) -> None:
        """Save and raise StoppedBySignal when a signal came.

        Called between stages of a step that has trained nothing yet.
        """
        if self._start is not None and (name := self._asked()):
            self._save_and_stop(name, replace(self._start, files=files()))

    def end(
        self, step: int, progress: Progress, files: Callable[[], Files] = dict, *, is_due: bool
    ) -> None:
        """Save after `step` finished steps if that is due.

        On a signal, save and raise StoppedBySignal.
        """
        if name := self._asked():
            self._save_and_stop(name, replace(self._snapshot(step, progress), files=files()))
        if is_due:
            self.save(step, progress, files)

    def save(self, step: int, progress: Progress, files: Callable[[], Files] = dict) -> None:
        """Save unless this step is saved already."""
        self._save(replace(self._snapshot(step, progress), files=files()))

    def wait(self) -> None:
        """Wait until a background save is complete."""
        self.checkpointer.wait()

    def note(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Remember metrics of the weights after `step` finished steps (checkpoint.best_metric).

        Returns True if these weights were saved before that metric was known, as a signal had ended
        their evaluation: then they must be saved again, or a better checkpoint could be removed.
        """
        # several reporters note metrics of one step
        known = self._measured[1] if self._measured[0] == step else {}
        self._measured = step, known | dict(metrics)
        value = metrics.get(self.checkpointer.cfg.best_metric or "", nan)
        lacks_value = step == self._saved_step and self._saved_value is None and isfinite(value)
        if lacks_value:
            self._saved_step = None
        return lacks_value

    def add_previous_totals(self, metrics: dict[str, float]) -> dict[str, float]:
        """Add what earlier processes counted to the metrics that count since the run's first start.

        left_out.py lists them.  Returns these metrics as the step before left them.
        """
        before = self._totals
        metrics |= {
            name: value + self._carried.get(name, 0.0) for name, value in totals_of(metrics).items()
        }
        self._totals = self._carried | totals_of(metrics)
        return before

    def resume(self) -> Restored | None:
        """Load the checkpoint that the configuration selects; return None where there is none.

        Raises ValueError where checkpoint.require is set and there is none, and what
        Checkpointer.load raises.
        """
        folder, cfg = self.checkpointer.folder, self.checkpointer.cfg
        name = from_rank_0(lambda: choose_checkpoint(folder, cfg))
        if name is None:
            return None
        restored = self.checkpointer.load(Path(name))
        if missing := PROGRESS - restored.progress.keys():
            names = ", ".join(sorted(missing))
            raise ValueError(
                f"{name}/{STATE}: progress without {names}; resume from another checkpoint"
            )
        # a checkpoint of another run's folder is not saved here yet
        if Path(name).parent.resolve() == folder.resolve():
            self._saved_step = restored.step
            self._saved_value = from_rank_0(lambda: value_of(Path(name), cfg.best_metric))
        self._totals = self._carried = {
            new_metric(k): total for k, total in restored.progress["totals"].items()
        }
        restored.lines.insert(0, f"resumed from {name}: step {restored.step}")
        return restored

    def _asked(self) -> str | None:
        """Return the name of the signal that any rank received."""
        if self._stop is None:
            return None
        name = self._stop.name
        # ranks agree by one all-reduce, which takes integers
        (number,) = all_reduce_ints(
            [signal.Signals[name].value if name else 0], dist.ReduceOp.MAX, dist.group.WORLD
        )
        return signal.Signals(number).name if number else None

    def _snapshot(self, step: int, progress: Progress) -> Snapshot:
        cfg, (measured_at, values) = self.checkpointer.cfg, self._measured
        value = values.get(cfg.best_metric or "") if measured_at == step else None
        return Snapshot(
            step, progress | {"totals": self._totals, "origin": origin(cfg)}, value=value
        )

    def _save(self, snapshot: Snapshot) -> None:
        # the step may be saved already: it was resumed from, or was due before a signal came
        if self._saved_step != snapshot.step:
            self._before_save()
            with self._events.timed("checkpoint", snapshot.step, f"after step {snapshot.step}"):
                self.checkpointer.save(snapshot)
            self._saved_step, self._saved_value = snapshot.step, snapshot.value
            self._warn_without_value(snapshot)

    def _warn_without_value(self, snapshot: Snapshot) -> None:
        """Warn where checkpoint.best_metric is none of the metrics that this step has: names of
        users' functions are not known before, so the configuration may have a wrong one.
        """
        best, (measured_at, values) = self.checkpointer.cfg.best_metric, self._measured
        if not best or snapshot.value is not None or measured_at != snapshot.step:
            return
        # a step without an evaluation lacks all metrics of evaluations
        is_eval = best.startswith("eval/")
        alike = [name for name in values if name.startswith("eval/") == is_eval]
        if alike and dist.get_rank() == 0:
            close = difflib.get_close_matches(best, alike, n=1, cutoff=0.6)
            logger.warning(
                "checkpoint.best_metric = %s is no metric of step %d: its checkpoint cannot be the"
                " best%s",
                best, snapshot.step, f"; did you mean {close[0]}?" if close else "",
            )  # fmt: skip

    def _save_and_stop(self, name: str, snapshot: Snapshot) -> NoReturn:
        (has_files,) = all_reduce_ints(
            [int(bool(snapshot.files))], dist.ReduceOp.MAX, dist.group.WORLD
        )
        if has_files:
            # if this step was saved, these rollouts came after it, and that checkpoint lacks them
            self._saved_step = None
        self._save(snapshot)
        self.wait()
        text = (
            f"{name}: stopped after step {snapshot.step}, which is saved; the same command"
            " continues from there"
        )
        from_rank_0(lambda: write_text(self.checkpointer.folder / STOPPED, f"{text}\n"))
        raise StoppedBySignal(text)
