"""Chooses the mini-batches that are saved before their update: those that look wrong, others on
request (run.save_batches).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from megatron_rl.checkpoint.batches.bundle_writer import BundleNote
from megatron_rl.checkpoint.folder import CheckpointError
from megatron_rl.config import Config
from megatron_rl.config.run_paths import RunFolder
from megatron_rl.distributed import Parallel
from megatron_rl.metrics.events import Events
from megatron_rl.metrics.reduce import MetricSums

MOST_ANOMALIES = 3
"""Most mini-batches saved because they look wrong: a run that diverges has one in every update."""


@dataclass(frozen=True)
class DueBundle:
    """A mini-batch that is to be saved."""

    folder: Path
    note: BundleNote


@dataclass
class SavedBatches:
    """The mini-batches that the trainer saves, and what it reports of them.  All ranks see the same
    norms, and decide alike.
    """

    cfg: Config
    parallel: Parallel
    log: Callable[[str], None] = lambda text: None
    """Prints one line."""
    events: Events = field(default_factory=Events)
    rollouts_of: str = ""
    """The run whose saved rollouts are trained on; "" where servers sample."""
    unsaved: int = 0
    """Number of mini-batches that were due and could not be written since this process started."""
    _anomalies: int = 0
    _kl: dict[int, float] = field(default_factory=dict)
    """Index of a mini-batch -> its KL(mu, pi_old) per token."""

    def note_old_pass(self, index: int, sums: MetricSums) -> None:
        """Remember KL(mu, pi_old) per token of mini-batch `index`.  Collective.

        sums: those of its old-logprob pass alone.
        """
        if self.cfg.run.save_batches != "off":
            self._kl[index] = sums.mean("train/kl_mu_pi", dist.group.WORLD, self.parallel.device)

    def due(self, step: int, index: int, grad_norm: float) -> DueBundle | None:
        """Return where and why mini-batch `index` is saved now; None for one that is not due.

        Call it between gradient and optimizer: the norm is known, the weights are those before.
        """
        run = self.cfg.run
        anomaly = self._anomaly(index, grad_norm)
        every = run.save_batches_every
        if anomaly:
            self._anomalies += 1
            self.events.add("anomaly", step + 1, f"update {index}: {anomaly}")
        if anomaly and self._anomalies <= MOST_ANOMALIES:
            return self._bundle(step, index, anomaly)
        if every and index == 0 and (step + 1) % every == 0:
            return self._bundle(step, index, f"run.save_batches = {run.save_batches}")
        if run.save_batches == "last":
            return self._bundle(step, index, "the latest", name="last")
        return None

    @contextmanager
    def reported(self, due: DueBundle) -> Iterator[None]:
        """Report the bundle that is written inside.

        One that cannot be written is counted and reported, and training continues: only people need
        it.
        """
        note = due.note
        try:
            yield
        except CheckpointError as error:
            self.unsaved += 1
            self.log(f"mini-batch of step {note.step + 1} not saved ({note.reason}): {error}")
            return
        if note.with_weights:
            self.log(f"mini-batch saved, {note.reason}: megatron-rl replay-batch {due.folder}")

    def _anomaly(self, index: int, grad_norm: float) -> str:
        """Return why the mini-batch looks wrong, "" if it does not."""
        run = self.cfg.run
        if run.save_batches == "off":
            return ""
        kl = self._kl.pop(index, 0.0)
        if not math.isfinite(grad_norm):
            return f"gradient norm {grad_norm}"
        if grad_norm > run.anomaly_grad_norm:
            return (
                f"gradient norm {grad_norm:.4g} above run.anomaly_grad_norm ="
                f" {run.anomaly_grad_norm:g}"
            )
        # NaN does not count as wrong: no token of the mini-batch is in the loss.  A mean of
        # log-ratios may also be far below 0.
        if abs(kl) > run.anomaly_kl:
            limit = f"run.anomaly_kl = {run.anomaly_kl:g}"
            return f"KL(mu, pi_old) {kl:.4g}, its absolute value above {limit}"
        return ""

    def _bundle(self, step: int, index: int, reason: str, name: str = "") -> DueBundle:
        batches = RunFolder(self.cfg.run_dir).batches
        folder = batches / (name or f"step_{step + 1:06d}_update_{index}")
        weights = f"of step {step + 1}, before update {index}"
        note = BundleNote(step, reason, not name, weights, rollouts_of=self.rollouts_of)
        return DueBundle(folder, note)
