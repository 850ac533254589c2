"""The complete configuration, and the rules between its sections."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron_rl.config.agent import AgentConfig
from megatron_rl.config.base import Section
from megatron_rl.config.device_limits import Device
from megatron_rl.config.loss_presets import AdvantageKind
from megatron_rl.config.no_effect import check_no_effect
from megatron_rl.config.reward import RewardConfig
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.config.run import RunConfig
from megatron_rl.config.sections import (
    AdvantageConfig,
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    LossConfig,
    MegatronConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    ReplayConfig,
)
from megatron_rl.config.server_rules import check_can_release
from megatron_rl.config.server_settings import check_options
from megatron_rl.config.track import TrackConfig


class Config(Section):
    run: RunConfig = RunConfig()
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    agent: AgentConfig = AgentConfig()
    reward: RewardConfig = RewardConfig()
    batch: BatchConfig = BatchConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    replay: ReplayConfig = ReplayConfig()
    loss: LossConfig = LossConfig()
    optim: OptimConfig = OptimConfig()
    parallel: ParallelConfig = ParallelConfig()
    megatron: MegatronConfig = MegatronConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    track: TrackConfig = TrackConfig()

    @property
    def run_dir(self) -> Path:
        return self.run.dir / self.run.name

    @property
    def advantage_kind(self) -> AdvantageKind:
        """The kind of advantage, with "auto" resolved."""
        return self.loss.switches.advantage if self.advantage.kind == "auto" else self.advantage.kind

    @property
    def eval_data(self) -> DataConfig:
        """How evaluation files are read: [data] with what [eval] overrides."""
        changed = self.eval.model_dump(include={"prompt_key", "label_key", "template"}, exclude_none=True)
        return DataConfig.model_validate(self.data.model_dump() | changed)

    @property
    def needs_routes(self) -> bool:
        """Whether rollouts must carry expert ids."""
        return self.replay.mode == "R3" or self.replay.measure

    @property
    def stage_seconds(self) -> float:
        """After which the watchdog ends a run in the same stage: less than collectives wait, which name no rank."""
        return 0.9 * 60 * self.run.collective_timeout_minutes

    def start_seconds(self, device: Device) -> float:
        """Time for a server to start.  auto: it fails, with its log, before the watchdog ends the run."""
        default = self.rollout.start_seconds(device)
        return default if self.rollout.start_timeout_seconds != "auto" else min(default, 0.9 * self.stage_seconds)

    def staleness_problems(self) -> Iterator[str]:
        """Of tokens that are older than the weights that are trained."""
        rollout, staleness = self.rollout, f"rollout.max_staleness = {self.rollout.max_staleness}"
        cuts = {"rollout.partial = resume": rollout.partial == "resume"}
        cuts["rollout.weight_update = abort"] = rollout.weight_update == "abort"
        for setting in (name for name, is_set in cuts.items() if is_set):
            if self.agent.name and self.agent.resume == "restart":
                yield (
                    f"{setting} with agent.resume = restart: episodes that were cut short would start again, which favours "
                    "short ones; set agent.resume = continue, or the other to its default"
                )
        if self.agent.name and rollout.weight_update == "in_place":
            yield (
                f"rollout.weight_update = in_place with {self.agent.setting}: an episode is several requests, and one that "
                "became too old between them would not be cut short; set rollout.weight_update = abort"
            )
        if rollout.max_staleness and not self.loss.corrects_age:
            # any other form has the rest of pi/mu
            weight = "total" if self.loss.switches.form == "logp" else "train_infer"
            yield (
                f"{staleness} with loss.name = {self.loss.name}: tokens are of older weights than pi_old, and this loss has no "
                f"importance weight against mu, so its gradient would be biased; set loss.weight = {weight}, another "
                "loss.name (minirl, tis, decoupled_ppo, ...), or rollout.max_staleness = 0"
            )
        if rollout.max_staleness >= max(2, self.run.num_steps):  # a test of few steps may leave it at 1
            yield (
                f"{staleness} can never be used with run.num_steps = {self.run.num_steps}: no token is older than "
                f"{self.run.num_steps - 1} weight syncs; lower it, or raise run.num_steps"
            )

    def problems(self) -> Iterator[str]:
        check_no_effect(self)
        # device auto resolves to cpu only at start-up, which checks this again
        check_can_release(self.rollout.release_memory, self.run.device)
        check_options(self.rollout, needs_routes=self.needs_routes)
        yield from self.staleness_problems()
        start = self.rollout.start_timeout_seconds
        if not self.rollout.urls and start != "auto" and start >= self.stage_seconds:
            yield (
                f"rollout.start_timeout_seconds = {start:g} must be below {self.stage_seconds:g}, 90 % of "
                f"run.collective_timeout_minutes = {self.run.collective_timeout_minutes:g}: the ranks wait for the servers, and "
                "the watchdog would end the run first, without the server's log; lower it, or raise the other"
            )
        run, replay = self.run, self.replay
        if run.prompts_per_step % run.num_mini_batches:
            yield (
                f"run.prompts_per_step = {run.prompts_per_step} must be a multiple of run.num_mini_batches = "
                f"{run.num_mini_batches}: mini-batches hold complete prompt groups"
            )
        yield from self._loss_problems()
        if self.batch.dynamic_sampling and run.group_size < 2:
            yield (
                f"batch.dynamic_sampling needs run.group_size >= 2, got {run.group_size}: rewards of one response never differ"
            )
        if self.batch.overlong_cache > self.rollout.max_response_tokens:
            yield (
                f"batch.overlong_cache = {self.batch.overlong_cache} exceeds rollout.max_response_tokens = "
                f"{self.rollout.max_response_tokens}: it is the last part of a response; lower it"
            )
        best = self.checkpoint.best_metric or ""
        if best.startswith("eval/") and not self.eval.measures(best):
            yield (
                f"checkpoint.best_metric = {best} is never measured: eval.sets names "
                f"{', '.join(self.eval.sets) or 'no file'}; write eval/NAME/avg@{self.eval.samples} with a NAME of eval.sets"
            )
        if replay.on_missing_route != "error" and not self.needs_routes:
            yield (
                f"replay.on_missing_route = {replay.on_missing_route} has no effect: replay.mode = {replay.mode} "
                "without replay.measure asks for no routes; remove it"
            )
        if replay.on_missing_route == "mask_token" and replay.mode != "R3":
            yield (
                f"replay.on_missing_route = mask_token needs replay.mode = R3, got {replay.mode}: otherwise no token "
                "trains on the rollout's routes; use live, or drop_sample"
            )
        if run.device == "cpu" and self.model.layer_spec == "transformer_engine":
            yield "model.layer_spec = transformer_engine needs a GPU; use auto or local with run.device = cpu"

    def _loss_problems(self) -> Iterator[str]:
        """What the loss and its advantages need of a step."""
        run = self.run
        if run.num_mini_batches == 1 and self.loss.switches.router_shift:
            yield (
                f"loss.router_shift = true (loss.name = {self.loss.name}) has no effect with run.num_mini_batches = 1: the only "
                "update of a step has the routers of the old pass, and one forward pass more; set run.num_mini_batches above 1, "
                "or another loss.name (gmpo)"
            )
        # batch_whitened alone has its baseline over the batch, not over the group
        if self.advantage_kind != "batch_whitened" and run.group_size < 2:
            yield (
                f"advantage.kind = {self.advantage_kind} needs run.group_size >= 2, got {run.group_size}: a response alone in "
                "its group has no other to be compared with, and its advantage would be 0; or set advantage.kind = batch_whitened"
            )
        if self.advantage_kind == "per_reward":
            yield from self._per_reward_problems()

    def _per_reward_problems(self) -> Iterator[str]:
        """What acts on the one reward of a response, which advantage.kind = per_reward does not read."""
        for key, is_set in {
            "batch.dynamic_sampling": self.batch.dynamic_sampling,
            "batch.overlong_cache": self.batch.overlong_cache,
            "batch.length_penalty": self.batch.length_penalty,
            "reward.format_penalty": self.reward.format_penalty,
        }.items():
            if is_set:
                yield (
                    f"{key} with advantage.kind = per_reward: it acts on the sum of the rewards, which has no effect there; "
                    "remove it, or return it as a metric of reward.function and name it in advantage.rewards"
                )
        if self.reward.on_error not in ("raise", "drop"):
            yield (
                f"reward.on_error = {self.reward.on_error} with advantage.kind = per_reward: a response that could not be scored "
                "has no metrics; set reward.on_error = drop or raise"
            )
