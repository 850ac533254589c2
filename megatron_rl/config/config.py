"""The whole configuration, and the rules between its sections."""

from __future__ import annotations

from pathlib import Path

from pydantic import model_validator

from megatron_rl.config.base import Section
from megatron_rl.config.loss_presets import AdvantageKind
from megatron_rl.config.no_effect import check_no_effect
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.config.sections import (
    AdvantageConfig,
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    ReplayConfig,
    RewardConfig,
    RunConfig,
)
from megatron_rl.config.server_rules import check_can_release


class Config(Section):
    run: RunConfig = RunConfig()
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    batch: BatchConfig = BatchConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    replay: ReplayConfig = ReplayConfig()
    loss: LossConfig = LossConfig()
    optim: OptimConfig = OptimConfig()
    parallel: ParallelConfig = ParallelConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @property
    def run_dir(self) -> Path:
        return self.run.dir / self.run.name

    @property
    def advantage_kind(self) -> AdvantageKind:
        """The kind of advantage, with "auto" resolved."""
        return self.loss.switches.advantage if self.advantage.kind == "auto" else self.advantage.kind

    @property
    def eval_data(self) -> DataConfig:
        """How evaluation files are read: as [data] says, but for what [eval] sets."""
        given = {key: getattr(self.eval, key) for key in ("prompt_key", "label_key", "template")}
        return DataConfig.model_validate(
            self.data.model_dump() | {key: value for key, value in given.items() if value is not None}
        )

    @property
    def needs_routes(self) -> bool:
        """Whether rollouts must carry expert ids."""
        return self.replay.mode == "R3" or self.replay.measure

    @model_validator(mode="after")
    def check_combinations(self) -> Config:
        check_no_effect(self)
        run = self.run
        if run.prompts_per_step % run.num_mini_batches:
            raise ValueError(
                f"run.prompts_per_step = {run.prompts_per_step} must be a multiple of run.num_mini_batches = "
                f"{run.num_mini_batches}: mini-batches hold whole prompt groups"
            )
        if self.advantage_kind != "batch_whitened" and run.group_size < 2:
            raise ValueError(
                f"advantage.kind = {self.advantage_kind} needs run.group_size >= 2, got {run.group_size}: a response alone in "
                "its group has no other to be compared with, and its advantage would be 0; or set advantage.kind = batch_whitened"
            )
        if self.batch.dynamic_sampling and run.group_size < 2:
            raise ValueError(
                f"batch.dynamic_sampling needs run.group_size >= 2, got {run.group_size}: rewards of one response never differ"
            )
        if self.batch.overlong_cache > self.rollout.max_response_tokens:
            raise ValueError(
                f"batch.overlong_cache = {self.batch.overlong_cache} exceeds rollout.max_response_tokens = "
                f"{self.rollout.max_response_tokens}: it is the last part of a response; lower it"
            )
        best = self.checkpoint.best_metric or ""
        if best.startswith("eval/") and best.removeprefix("eval/").rpartition("/")[0] not in self.eval.sets:
            raise ValueError(
                f"checkpoint.best_metric = {self.checkpoint.best_metric} is never measured: eval.sets names "
                f"{', '.join(self.eval.sets) or 'no file'}; write eval/NAME/avg@{self.eval.samples} with a NAME of eval.sets"
            )
        if self.replay.on_missing_route != "error" and not self.needs_routes:
            raise ValueError(
                f"replay.on_missing_route = {self.replay.on_missing_route} has no effect: replay.mode = {self.replay.mode} "
                "without replay.measure asks for no routes; remove it"
            )
        if self.replay.on_missing_route == "mask_token" and self.replay.mode != "R3":
            raise ValueError(
                f"replay.on_missing_route = mask_token needs replay.mode = R3, got {self.replay.mode}: otherwise no token "
                "trains on the rollout's routes; use live, or drop_sample"
            )
        check_can_release(self.rollout.release_memory, run.device)
        if run.device == "cpu" and self.model.layer_spec == "transformer_engine":
            raise ValueError(
                "model.layer_spec = transformer_engine needs a GPU; use auto or local with run.device = cpu"
            )
        return self
