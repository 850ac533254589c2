"""One training run: what `train` calls, step by step.  build.py makes it and takes it down.

Every method is collective: all ranks call it at the same place.  Steps count from 0; `step` finished ones are named so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from megatron_rl.batch.advantage import with_advantages
from megatron_rl.batch.penalties import with_penalties
from megatron_rl.batch.split import split
from megatron_rl.checkpoint.save_policy import CheckpointPolicy
from megatron_rl.config import Config
from megatron_rl.distributed import Parallel
from megatron_rl.engine.engine import Engine, OldPass
from megatron_rl.launch.signals import StopSignal
from megatron_rl.records import MiniBatch, RolloutGroup, StepResult
from megatron_rl.rollout.inference import SamplingStopped
from megatron_rl.trainer.reporter import Reporter
from megatron_rl.trainer.rollout_metrics import derived, peak_memory_gib
from megatron_rl.trainer.rollout_source import RolloutSource
from megatron_rl.trainer.step_meter import StepMeter
from megatron_rl.weights.hf.export import write_hf_checkpoint


@dataclass
class Trainer:
    """first_step: finished steps at the start, more than 0 where a checkpoint was resumed."""

    cfg: Config
    parallel: Parallel
    engine: Engine
    rollouts: RolloutSource
    checkpoint_policy: CheckpointPolicy
    meter: StepMeter
    reporter: Reporter
    first_step: int = 0

    def listen(self, stop: StopSignal) -> None:
        """From now on a signal ends sampling, saves and stops the run."""
        self.checkpoint_policy.listen(stop, self.rollouts.stop)

    def steps(self) -> Iterator[int]:
        """Every step that is still to be trained.  What is noted here is saved should a signal give the step up."""
        for step in range(self.first_step, self.cfg.run.num_steps):
            self.meter.step = step
            self.checkpoint_policy.begin(step, self.rollouts.progress())
            yield step

    def sample(self, step: int) -> list[RolloutGroup]:
        """The step's scored groups of this replica, on each of its ranks.  StoppedBySignal where a signal ended it."""
        try:
            groups = self.rollouts.sample(step)
        except SamplingStopped:
            self.stop_if_signalled()
            raise
        self.stop_if_signalled()
        return groups

    def sample_ahead(self, step: int) -> None:
        """Start to sample the next step, where rollout.max_staleness allows it."""
        self.rollouts.sample_ahead(step)

    def make_batches(self, groups: Sequence[RolloutGroup], step: int) -> list[MiniBatch]:
        """Penalties, advantages, N mini-batches of packed micro-batches; recorded.  Then servers may release memory."""
        with self.meter.time("split"):
            groups = with_penalties(groups, self.cfg)
            groups = with_advantages(groups, self.cfg.advantage_kind, self.parallel.dp_group)
            batches = split(groups, self.cfg, seed=step, rule=self.engine.pack_rule, dp_group=self.parallel.dp_group)
            self.record(groups, step)
        self.rollouts.release_memory()
        return batches

    def record(self, groups: Sequence[RolloutGroup], step: int) -> None:
        """Write down and count what the step trains on.  Not collective."""
        self.rollouts.record(groups, step)

    def old_logprobs(self, batches: Sequence[MiniBatch]) -> list[OldPass]:
        """log pi_old of every mini-batch; R2 records its routes here, R3 replays the rollouts'."""
        with self.meter.time("old_logprob"):
            mode = self.cfg.replay.mode
            passes = [self.engine.old_logprobs(batch, self.meter.sums, replay=mode) for batch in batches]
        self.stop_if_signalled()  # the last place: from here on the step trains
        return passes

    def update(self, batch: MiniBatch, old: OldPass) -> None:
        """One optimizer update on one mini-batch."""
        with self.meter.time("update"):
            self.engine.update(batch, old, self.meter.sums, replay=self.cfg.replay.mode)

    def sync_weights(self, version: int) -> None:
        """mu_old <- theta: wait for what is being sampled, then send the weights as `version`."""
        self.rollouts.sync_weights(version)

    def report(self, step: int, passes: Sequence[OldPass]) -> StepResult:
        """Reduce the step's metrics over the job and write them down."""
        self.rollouts.finish_step()
        mismatch = self.engine.mismatch(passes)
        self.meter.sums.add_max("perf/peak_memory_gib", peak_memory_gib(self.parallel.device))
        metrics = self.meter.take_sums().reduce(dist.group.WORLD, self.parallel.device)
        metrics |= self.meter.take_times()
        metrics = derived(metrics)
        per_layer: dict[str, list[float]] = {}
        if mismatch is not None:
            values = {f"routing/{name}": value for name, value in vars(mismatch).items()}
            per_layer = {name: value for name, value in values.items() if isinstance(value, list)}
            metrics |= {name: value for name, value in values.items() if name not in per_layer}
        self.checkpoint_policy.add_previous_totals(metrics)
        self.checkpoint_policy.note(step + 1, metrics)
        result = StepResult(step, self.rollouts.policy_version, metrics, per_layer)
        self.reporter.step(result)
        return result

    def evaluate(self, step: int) -> None:
        """avg@k and pass@k with the weights that the servers have after `step` finished steps, where that is due.

        Step 0 is due unless a checkpoint was resumed, the last one is `finish`'s.
        """
        if not (self.is_due(step, self.cfg.eval.every) or step == self.first_step == 0):
            return
        self._evaluate(step)

    def _evaluate(self, step: int) -> None:
        metrics = self.rollouts.evaluate()
        if metrics:
            self.checkpoint_policy.note(step, metrics)
            self.reporter.evaluation(step, self.rollouts.policy_version, metrics)
        self.meter.restart()

    def save(self, step: int) -> None:
        """A checkpoint after `step` finished steps, when it is due or a signal came: then raises StoppedBySignal."""
        self._save(step, is_due=self.is_due(step, self.cfg.checkpoint.every))

    def _save(self, step: int, *, is_due: bool) -> None:
        self.meter.enter("checkpoint")
        self.checkpoint_policy.end(step, self.rollouts.progress(), self.rollouts.files, is_due=is_due)
        self.meter.restart()

    def is_due(self, step: int, every: int) -> bool:
        """Whether something with this period (0: only at the end) is due after `step` finished steps, not the last ones."""
        return every > 0 and 0 < step < self.cfg.run.num_steps and step % every == 0

    def stop_if_signalled(self) -> None:
        """Before the step has trained anything: when a signal came, raises StoppedBySignal once all is saved."""
        self.checkpoint_policy.stop_if_signalled(lambda: self.rollouts.files(is_step_done=False))

    def resume(self) -> None:
        """Continue from a checkpoint, as [checkpoint] says, and say what was restored."""
        restored = self.checkpoint_policy.resume()
        if restored is not None:
            self.first_step = restored.step
            lines = self.rollouts.restore(restored.progress, restored.path, restored.accepted)
            for line in [*restored.lines, *lines]:
                self.reporter.log(line)

    def finish(self) -> None:
        """Last evaluation, checkpoint, HF export, report."""
        self._evaluate(self.cfg.run.num_steps)
        self._save(self.cfg.run.num_steps, is_due=True)
        self.checkpoint_policy.wait()
        self.meter.enter("export")
        if self.cfg.checkpoint.export_hf:
            path = self.cfg.run_dir / "hf"
            write_hf_checkpoint(self.engine.export(), self.cfg.model.path, path)
            self.reporter.log(f"HF checkpoint {path}")
        self.reporter.finish()
        dist.barrier()
