"""Rollouts of a run that saved them (rollout.save_tensors), for --from-rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from megatron_rl.config import Config
from megatron_rl.data.prompt_stream import PromptStream
from megatron_rl.distributed import Parallel
from megatron_rl.metrics.console import Console
from megatron_rl.models.spec import ModelSizes
from megatron_rl.records import RolloutGroup, with_routes, without_routes
from megatron_rl.rollout.missing_routes import (
    MissingRouteCounts,
    MissingRoutes,
    count_missing_routes,
)
from megatron_rl.rollout.saved.rollout_recorder import Recorder
from megatron_rl.rollout.saved.saved_steps import SavedSteps
from megatron_rl.rollout.scheduler import num_prompts
from megatron_rl.rollout.scoring import with_text
from megatron_rl.rollout.unique_ids import with_unique_ids
from megatron_rl.trainer.rollout_metrics import count_step
from megatron_rl.trainer.rollout_source import SourceWithoutServers
from megatron_rl.trainer.step_meter import StepMeter


@dataclass
class SavedRollouts(SourceWithoutServers):
    """Rollouts that are read from a run directory: no server, no evaluation, no weight sync."""

    cfg: Config
    parallel: Parallel
    spec: ModelSizes
    prompts: PromptStream
    folder: Path
    """Run directory that has the rollouts."""
    meter: StepMeter
    console: Console
    tokenizer: PreTrainedTokenizerBase
    recorder: Recorder | None = None
    """With rollout.save_tensors: writes what this run trains on into its own directory, too."""
    policy_version: int = 0

    def start(self, first_step: int) -> None:
        """Check that the folder has all steps from `first_step`.

        Raises ValueError, see SavedSteps.
        """
        self.steps = SavedSteps(self.folder, self.cfg, self.spec, first_step=first_step)
        self.console.log(f"training on the rollouts of {self.folder}: no server, no evaluation")

    def sample(self, step: int) -> list[RolloutGroup]:
        # Advance in the data by as many prompts as the saved step used up, so that a later run with
        # servers continues after them.  Unknown, and not counted, is what batch.dynamic_sampling
        # drew beyond its first draw, and which prompts partial = resume had not finished.
        count = self.cfg.run.prompts_per_step
        if not self.cfg.rollout.trains_on_all:
            count = num_prompts(self.cfg, self.parallel.dp_size)
        self.prompts.take(self.prompts.num_available(count))
        with self.meter.time("rollout"):
            groups = self.steps.groups(step, self.parallel.dp_rank, self.parallel.dp_size)
            plain = without_routes(groups)
            is_counted = self.parallel.is_replica_leader
            counts = count_missing_routes(plain) if is_counted else MissingRouteCounts()
            MissingRoutes(self.cfg).check(self.meter.sums, plain, counts)
        # two replicas of the saved run may have drawn the same prompt
        return with_routes(with_unique_ids(plain), groups)

    def record(self, groups: Sequence[RolloutGroup], step: int) -> None:
        plain = without_routes(groups)
        if self.recorder is not None and self.parallel.is_replica_leader:
            texts = [with_text(group, self.tokenizer) for group in plain]
            self.recorder.record(step + 1, with_routes(texts, groups))
        count_step(self.cfg, self.parallel, self.meter.sums, plain, self.policy_version)
