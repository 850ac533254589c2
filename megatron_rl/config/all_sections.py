"""All sections of a configuration, and what follows from several of them."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.config.base import Section
from megatron_rl.config.device_limits import Device
from megatron_rl.config.loss_presets import AdvantageKind
from megatron_rl.config.sections.agent import AgentConfig
from megatron_rl.config.sections.objective import (
    AdvantageConfig,
    BatchConfig,
    LossConfig,
    ReplayConfig,
)
from megatron_rl.config.sections.prompt_sets import DataConfig, EvalConfig
from megatron_rl.config.sections.reward import RewardConfig
from megatron_rl.config.sections.rollout import RolloutConfig
from megatron_rl.config.sections.run_folder import CheckpointConfig, RunConfig
from megatron_rl.config.sections.track import TrackConfig
from megatron_rl.config.sections.trained_model import (
    MegatronConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
)


class AllSections(Section):
    """The fields of Config, without its rules, which are functions of this class."""

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
        return (
            self.loss.switches.advantage if self.advantage.kind == "auto" else self.advantage.kind
        )

    @property
    def eval_data(self) -> DataConfig:
        """The way to read evaluation files: [data] with what [eval] overrides."""
        changed = self.eval.model_dump(
            include={"prompt_key", "label_key", "template"}, exclude_none=True
        )
        return DataConfig.model_validate(self.data.model_dump() | changed)

    @property
    def needs_routes(self) -> bool:
        """True if rollouts must carry expert ids."""
        return self.replay.mode == "R3" or self.replay.measure

    @property
    def stage_seconds(self) -> float:
        """Time after which the watchdog ends a run in the same stage.

        It is less than collectives wait, which name no rank.
        """
        return 0.9 * 60 * self.run.collective_timeout_minutes

    def start_seconds(self, device: Device) -> float:
        """Return the time for a server to start.

        With "auto" a server fails, with its log, before the watchdog ends the run.
        """
        default = self.rollout.start_seconds(device)
        is_set = self.rollout.start_timeout_seconds != "auto"
        return default if is_set else min(default, 0.9 * self.stage_seconds)
