"""One training run: the stages that `train` calls, in order.  build.py constructs it and closes
what it uses.

Every method is collective unless it says otherwise: all ranks call it at the same place.  A step in
progress has the index `step`, from 0; after it `step + 1` steps are finished.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist

from megatron_rl.batch.advantage import with_advantages
from megatron_rl.batch.penalties import with_penalties
from megatron_rl.batch.split import batch_without_routes, split
from megatron_rl.batch.teacher_weights import with_teacher_weights
from megatron_rl.checkpoint.batches.bundle_writer import results_of, write_bundle
from megatron_rl.checkpoint.folder import Progress
from megatron_rl.checkpoint.save_policy import CheckpointPolicy
from megatron_rl.config import Config
from megatron_rl.config.run_paths import RunFolder
from megatron_rl.distributed import Parallel
from megatron_rl.distributed.ranks import Ranks
from megatron_rl.engine.engine import Engine
from megatron_rl.engine.pass_results import OldPass
from megatron_rl.launch.signals import StopSignal
from megatron_rl.metrics.console import counted, evaluation_text
from megatron_rl.metrics.reduce import MetricSums
from megatron_rl.records import RolloutGroup, with_routes, without_routes
from megatron_rl.records.packed import MiniBatch, StepResult
from megatron_rl.rollout.inference import SamplingStopped
from megatron_rl.trainer.first_rewards import first_rewards_warning
from megatron_rl.trainer.recording.events_and_files import Recording
from megatron_rl.trainer.recording.saved_batches import DueBundle, SavedBatches
from megatron_rl.trainer.recording.token_recorder import TokenRecorder
from megatron_rl.trainer.reporter import Reporter
from megatron_rl.trainer.rollout_metrics import derived, peak_memory_gib
from megatron_rl.trainer.rollout_source import RolloutSource
from megatron_rl.trainer.step_meter import StepMeter
from megatron_rl.trainer.step_trace import StepTrace
from megatron_rl.weights.hf.files import num_tensors
from megatron_rl.weights.hf.write import write_hf_checkpoint


@dataclass(kw_only=True)
class Trainer:
    """The parts of a run, and its stages as methods."""

    cfg: Config
    parallel: Parallel
    engine: Engine
    rollouts: RolloutSource
    checkpoint_policy: CheckpointPolicy
    meter: StepMeter
    reporter: Reporter
    saved_batches: SavedBatches
    """Chooses the mini-batches that are saved before their update (run.save_batches)."""
    tokens: TokenRecorder
    """Records what the trainer knows of single tokens (rollout.save_tensors)."""
    recording: Recording
    """The writer of events.jsonl, and the thread that writes files of rollouts and tokens."""
    step_trace: StepTrace
    first_step: int
    """Number of finished steps at the start, above 0 when a checkpoint was resumed."""
    evaluated: int
    """Number of finished steps at the last complete evaluation, -1 before any."""
    used_up_after: int | None = None
    """Number of finished steps at which the prompts were used up (when_used_up of [[data.train]]);
    None while there are prompts."""

    @property
    def num_steps(self) -> int:
        """The number of finished steps at which the run ends: run.num_steps, or fewer where the
        prompts are used up.
        """
        return self.cfg.run.num_steps if self.used_up_after is None else self.used_up_after

    def listen(self, stop: StopSignal) -> None:
        """Let a signal end sampling, save a checkpoint and stop the run from now on."""
        self.checkpoint_policy.listen(stop, self.rollouts.stop)

    def steps(self) -> Iterator[int]:
        """Yield the indices of the steps still to train.

        Before each step its state is noted, which is saved if a signal abandons the step.  The run
        ends early where there are no prompts for another step.
        """
        self.meter.begin()  # the time that the run needed to start belongs to no step
        for step in range(self.first_step, self.cfg.run.num_steps):
            if self.rollouts.is_used_up():
                self._end_early(step)
                return
            self.meter.step = step
            if self.step_trace.trace.is_on:
                with self.meter.between_steps("trace"):
                    self.step_trace.begin(step)
            self.checkpoint_policy.begin(step, self._state_dict())
            yield step

    def _end_early(self, step: int) -> None:
        """End the run after `step` finished steps."""
        self.used_up_after = step
        planned = f"run.num_steps = {self.cfg.run.num_steps}"
        text = f"data.train is used up after {step} steps of {planned}: the run ends"
        self.recording.reason = text
        self.reporter.log(text)

    def sample(self, step: int) -> list[RolloutGroup]:
        """Return the step's scored groups of this replica, on each of its ranks.

        Raises StoppedBySignal when a signal ended sampling.
        """
        try:
            groups = self.rollouts.sample(step)
        except SamplingStopped:  # on every rank, whichever got the signal
            self.stop_if_signalled()
            raise
        # also where sampling ended by itself: a signal may have come since
        self.stop_if_signalled()
        return groups

    def add_advantages(self, groups: Sequence[RolloutGroup], step: int) -> list[RolloutGroup]:
        """Return the groups with penalties, advantages and the weights of their teachers.

        Where those of the first step teach nothing, this is said before its update.
        """
        with self.meter.time("split"):
            # replaces the penalties that dynamic sampling may have set already
            plain = with_penalties(without_routes(groups), self.cfg)
            advantage = self.cfg.advantage
            plain = with_advantages(
                plain,
                self.cfg.advantage_kind,
                self.parallel.dp_group,
                reward_weights=advantage.rewards,
                weight=advantage.weight,
            )
            plain = with_teacher_weights(plain, self.cfg, step)
            if step == self.first_step:
                host_group = self.parallel.host_group
                warning = first_rewards_warning(plain, self.cfg.run_dir, host_group)
                if warning is not None:
                    self.reporter.log(warning)
            return with_routes(plain, groups)

    def record(self, groups: Sequence[RolloutGroup], step: int) -> None:
        """Save and count the rollouts that the step trains on.  Not collective."""
        with self.meter.time("split"):
            self.rollouts.record(groups, step)

    def make_batches(self, groups: Sequence[RolloutGroup], step: int) -> list[MiniBatch]:
        """Return N mini-batches of packed micro-batches."""
        with self.meter.time("split"):
            return split(
                groups,
                self.cfg,
                seed=step,  # a step that is repeated is split in the same way
                rule=self.engine.pack_rule,
                dp_group=self.parallel.dp_group,
                save_tokens=self.tokens.choice.of(step + 1, len(groups)),
                # metrics by the age of tokens say nothing where all have the same
                policy_version=self.rollouts.policy_version
                if self.cfg.rollout.max_staleness
                else None,
                node=self.parallel.node,
            )

    def check_recorded(self) -> None:
        """Raise OSError where rollouts could not be saved.  Training continues in that case."""
        self.recording.files.wait()
        if self.recording.files.failed:
            raise OSError(
                f"{self.recording.files.failed} files of rollouts in {self.cfg.run_dir} could not"
                " be written"
            )

    def old_logprobs(self, batches: Sequence[MiniBatch]) -> list[OldPass]:
        """Return log pi_old of every mini-batch; R2 records routes, R3 replays the rollouts'.

        With rollout.release_memory the servers first give the GPUs' memory to the trainer.
        """
        self.rollouts.give_memory_to_trainer()
        with self.meter.time("old_logprob"):
            passes = [self._old_pass(batch) for batch in batches]
        # the last chance: after its first update a step must finish
        self.stop_if_signalled()
        return passes

    def _old_pass(self, batch: MiniBatch) -> OldPass:
        sums = MetricSums()
        with self.tokens.old_pass(batch_without_routes(batch)):
            old = self.engine.old_logprobs(batch, sums, replay=self.cfg.replay.mode)
        # its KL(mu, pi_old), by which `due` judges the mini-batch
        self.saved_batches.note_old_pass(batch.index, sums)
        self.meter.sums.merge(sums)
        return old

    def update(self, batch: MiniBatch, old: OldPass) -> None:
        """Make one optimizer update on one mini-batch.

        A mini-batch that looks wrong is saved before the update (run.save_batches).
        """
        with self.meter.time("update"):
            # sums of its own: the saver must see this mini-batch alone
            sums = MetricSums()
            # records the loss terms of tokens for rollout.save_tensors; None without it
            observe = self.tokens.observer(batch.index, old.mismatch)
            with self.meter.part("gradient"):
                grad_norm = self.engine.compute_gradient(
                    batch, old, sums, replay=self.cfg.replay.mode, observe=observe
                )
            # between gradient and optimizer: the norm is known, and the weights are those before
            due = self.saved_batches.due(self.meter.step, batch.index, grad_norm)
            if due is not None:
                self._save_batch(due, batch, old, sums, grad_norm)
            with self.meter.part("optimizer"):
                outcome = self.engine.apply_gradient(grad_norm, batch, sums)
            if outcome.skipped:
                text = f"update {batch.index}: gradient norm {grad_norm}"
                self.recording.events.add("skipped_update", self.meter.step + 1, text)
            self.meter.sums.merge(sums)

    def _save_batch(
        self, due: DueBundle, batch: MiniBatch, old: OldPass, sums: MetricSums, grad_norm: float
    ) -> None:
        """Save a mini-batch with the results of its gradient.

        sums: those of the gradient's computation alone.
        """
        metrics = sums.reduce(dist.group.WORLD, self.parallel.device)
        results = results_of(self.engine, metrics, grad_norm)
        with self.saved_batches.reported(due):
            write_bundle(due.folder, self.engine, batch, old, results, due.note)

    def sync_weights(self, version: int) -> None:
        """Set mu <- pi: end sampling, then send the weights as `version`.

        With rollout.weight_update = in_place, sampling for later steps continues.  With
        rollout.release_memory the weights are sent when the servers sample next.
        """
        self.rollouts.sync_weights(version)

    def report(self, step: int, passes: Sequence[OldPass]) -> StepResult:
        """Reduce the step's metrics over all ranks, log them and return them."""
        with self.meter.part("report"):
            self.rollouts.finish_step()
            with self.meter.part("garbage collection"):
                # full collections wait for the end of a step: rollout/garbage_collection.py
                gc.collect()
            self.tokens.finish(step + 1)
            if failed := self.recording.files.failed:
                self.meter.sums.add_total("run/unwritten_files_total", failed)
            # every rank has the same number
            if self.saved_batches.unsaved and self.parallel.rank == 0:
                self.meter.sums.add_total("run/unsaved_batches_total", self.saved_batches.unsaved)
            mismatch = self.engine.mismatch(passes)
            self.reporter.count(self.meter.sums)
            self.meter.sums.add_max("perf/peak_memory_gib", peak_memory_gib(self.parallel.device))
            metrics = self.meter.take_sums().reduce(dist.group.WORLD, self.parallel.device)
            # not reduced: time/* are rank 0's, which alone reports them
            metrics |= self.meter.take_times()
            totals = self.checkpoint_policy.add_previous_totals(metrics)
            metrics = derived(metrics)
            per_layer: dict[str, list[float]] = {}
            for name, value in ({} if mismatch is None else vars(mismatch)).items():
                if isinstance(value, list):
                    per_layer[f"routing/{name}"] = value
                else:
                    metrics[f"routing/{name}"] = value
            self.checkpoint_policy.note(step + 1, metrics)
            result = StepResult(step, self.rollouts.policy_version, metrics, per_layer)
            self.reporter.step(result, totals)
            return result

    def evaluate(self, step: int, *, is_last: bool = False) -> None:
        """Evaluate the servers' weights after `step` finished steps, if due: avg@k and pass@k.

        An evaluation is due before the first step of a run, every eval.every steps, and at the end
        (is_last).  One that the checkpoint of a resumed run records is not repeated, except at the
        end.
        """
        is_first = step == self.first_step and self.evaluated < 0
        is_due = step != self.evaluated and self.is_due(step, self.cfg.eval.every)
        if not (is_last or is_first or is_due):
            return
        lacks_value = False
        with self.meter.between_steps("evaluate"):
            start = time.monotonic()
            metrics = self.rollouts.evaluate()
            if metrics:  # otherwise a signal ended it, or there is nothing to evaluate
                self.evaluated = step
                self.recording.events.add(
                    "evaluation", step, evaluation_text(metrics), time.monotonic() - start
                )
                lacks_value = self.checkpoint_policy.note(step, metrics)
                self.reporter.evaluation(step, self.rollouts.policy_version, metrics)
        if lacks_value:
            self.save(step, is_last=True)

    def save(self, step: int, *, is_last: bool = False) -> None:
        """Save a checkpoint after `step` finished steps, if due or if a signal came.

        Raises StoppedBySignal after a signal.
        """
        with self.meter.between_steps("checkpoint"):
            is_due = is_last or self.is_due(step, self.cfg.checkpoint.every)
            files = partial(self.rollouts.files, is_step_done=True)
            self.checkpoint_policy.end(step, self._state_dict(), files, is_due=is_due)

    def _state_dict(self) -> Progress:
        """Return the state that a checkpoint keeps beside the engine's."""
        return (
            self.rollouts.state_dict() | self.reporter.state_dict() | {"evaluated": self.evaluated}
        )

    def is_due(self, step: int, every: int) -> bool:
        """Return True if a task with the period `every` is due after `step` finished steps, the
        run's last one excluded.

        every: 0 for a task that runs at the end only.
        """
        # not after the last step: finish() evaluates and saves then (is_last)
        return every > 0 and 0 < step < self.cfg.run.num_steps and step % every == 0

    def stop_if_signalled(self) -> None:
        """Save everything and raise StoppedBySignal, if a signal came.

        It is called before the first update of a step, which is then abandoned.
        """
        self.checkpoint_policy.stop_if_signalled(lambda: self.rollouts.files(is_step_done=False))

    def finish(self) -> None:
        """Do the last evaluation, checkpoint, HF export and report."""
        last = self.num_steps
        # evaluated first: the checkpoint keeps that, and checkpoint.best_metric may be one of its
        # results.  A run that ends early may have evaluated its last step already.
        if self.used_up_after is None or self.evaluated != last:
            self.evaluate(last, is_last=True)
        self.save(last, is_last=True)
        self.checkpoint_policy.wait()  # a background save: the run is not finished without it
        self.meter.enter("export")
        if self.cfg.checkpoint.export_hf:
            self.rollouts.give_memory_to_trainer()
            path = RunFolder(self.cfg.run_dir).hf
            with self.reporter.console.progress(
                "HF export", num_tensors(self.cfg.model.path), "tensors"
            ) as advance:
                stream = counted(self.engine.export_parts(self.parallel.world_size), advance)
                write_hf_checkpoint(stream, self.cfg.model.path, path, Ranks.of(self.parallel))
            self.reporter.log(f"HF checkpoint {path}")
        self.reporter.finish(last)
        # the other ranks wait for rank 0, which alone writes the report
        dist.barrier()
