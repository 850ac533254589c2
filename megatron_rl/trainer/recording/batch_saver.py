"""Saves mini-batches before their update: those that look wrong, others on request
(run.save_batches).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed as dist

from megatron_rl.checkpoint.batches.bundle_writer import BundleNote, results_of, write_bundle
from megatron_rl.checkpoint.folder import CheckpointError
from megatron_rl.config import Config
from megatron_rl.engine.engine import Engine
from megatron_rl.engine.pass_results import OldPass
from megatron_rl.metrics.events import Events
from megatron_rl.metrics.reduce import MetricSums
from megatron_rl.records import MiniBatch

FOLDER = "batches"
MOST_ANOMALIES = 3
"""Most mini-batches saved because they look wrong: a run that diverges has one in every update."""

logger = logging.getLogger(__name__)


@dataclass
class BatchSaver:
    """Saves mini-batches.  Every method is collective: all ranks see the same norms, and decide
    alike.
    """

    cfg: Config
    engine: Engine
    log: Callable[[str], None] = lambda text: None
    """Prints one line."""
    events: Events = field(default_factory=Events)
    unsaved: int = 0
    """Number of mini-batches that were due and could not be written since this process started."""
    _anomalies: int = 0
    _kl: dict[int, float] = field(default_factory=dict)
    """Index of a mini-batch -> its KL(mu, pi_old) per token."""

    def note_old_pass(self, batch: MiniBatch, sums: MetricSums) -> None:
        """Remember KL(mu, pi_old) per token of a mini-batch.

        sums: those of its old-logprob pass alone.
        """
        if self.cfg.run.save_batches != "off":
            self._kl[batch.index] = sums.mean(
                "train/kl_mu_pi", dist.group.WORLD, self.engine.parallel.device
            )

    def look(
        self, step: int, batch: MiniBatch, old: OldPass, sums: MetricSums, grad_norm: float
    ) -> None:
        """Save the mini-batch if it is due.

        sums: those of its gradient's computation alone.  A bundle that cannot be written is counted
        and reported, and training continues: only people need it.
        """
        run = self.cfg.run
        anomaly = self._anomaly(batch, grad_norm)
        every = run.save_batches_every
        if anomaly:
            self._anomalies += 1
            self.events.add("anomaly", step + 1, f"update {batch.index}: {anomaly}")
        if anomaly and self._anomalies <= MOST_ANOMALIES:
            self._save(step, batch, old, sums, grad_norm, anomaly)
        elif every and batch.index == 0 and (step + 1) % every == 0:
            self._save(step, batch, old, sums, grad_norm, f"run.save_batches = {run.save_batches}")
        elif run.save_batches == "last":
            self._save(step, batch, old, sums, grad_norm, "the latest", name="last")

    def _anomaly(self, batch: MiniBatch, grad_norm: float) -> str:
        """Return why the mini-batch looks wrong, "" if it does not."""
        run = self.cfg.run
        if run.save_batches == "off":
            return ""
        kl = self._kl.pop(batch.index, 0.0)
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
            return f"KL(mu, pi_old) {kl:.4g} above run.anomaly_kl = {run.anomaly_kl:g}"
        return ""

    def _save(
        self,
        step: int,
        batch: MiniBatch,
        old: OldPass,
        sums: MetricSums,
        grad_norm: float,
        reason: str,
        name: str = "",
    ) -> None:
        metrics = sums.reduce(dist.group.WORLD, self.engine.parallel.device)
        folder = self.cfg.run_dir / FOLDER / (name or f"step_{step + 1:06d}_update_{batch.index}")
        weights = f"of step {step + 1}, before update {batch.index}"
        # `last` is written before every update, which weights would make slow
        note = BundleNote(step, reason, with_weights=not name, weights=weights)
        results = results_of(self.engine, metrics, grad_norm)
        try:
            write_bundle(folder, self.engine, batch, old, results, note)
        except CheckpointError as error:
            self.unsaved += 1
            self.log(f"mini-batch of step {step + 1} not saved ({reason}): {error}")
            return
        if not name:
            self.log(f"mini-batch saved, {reason}: megatron-rl replay-batch {folder}")
