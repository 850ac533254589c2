"""All sections of a configuration, and what follows from several of them."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.config import sections
from megatron_rl.config.base import Section
from megatron_rl.config.device_limits import Device
from megatron_rl.config.loss_presets import AdvantageKind


class AllSections(Section):
    """The fields of Config, without its rules, which are functions of this class."""

    run: sections.RunConfig = sections.RunConfig()
    model: sections.ModelConfig
    lora: sections.LoraConfig = sections.LoraConfig()
    data: sections.DataConfig
    rollout: sections.RolloutConfig = sections.RolloutConfig()
    agent: sections.AgentConfig = sections.AgentConfig()
    reward: sections.RewardConfig = sections.RewardConfig()
    batch: sections.BatchConfig = sections.BatchConfig()
    advantage: sections.AdvantageConfig = sections.AdvantageConfig()
    replay: sections.ReplayConfig = sections.ReplayConfig()
    loss: sections.LossConfig = sections.LossConfig()
    optim: sections.OptimConfig = sections.OptimConfig()
    parallel: sections.ParallelConfig = sections.ParallelConfig()
    megatron: sections.MegatronConfig = sections.MegatronConfig()
    eval: sections.EvalConfig = sections.EvalConfig()
    checkpoint: sections.CheckpointConfig = sections.CheckpointConfig()
    track: sections.TrackConfig = sections.TrackConfig()

    @property
    def run_dir(self) -> Path:
        return self.run.dir / self.run.name

    @property
    def advantage_kind(self) -> AdvantageKind:
        """The kind of advantage, with "auto" resolved."""
        kind = self.advantage.kind
        return self.loss.switches.advantage if kind == "auto" else kind

    @property
    def eval_data(self) -> sections.DataConfig:
        """The way to read evaluation files: [data] with what [eval] overrides."""
        keys = {"prompt_key", "label_key", "template"}
        changed = self.eval.model_dump(include=keys, exclude_none=True)
        return sections.DataConfig.model_validate(self.data.model_dump() | changed)

    @property
    def needs_routes(self) -> bool:
        """True if rollouts must carry expert ids."""
        return self.replay.mode == "R3" or self.replay.measure

    @property
    def stage_seconds(self) -> float:
        """Time after which the watchdog ends a run in the same stage."""
        # less than collectives wait, whose errors name no rank
        return 0.9 * 60 * self.run.collective_timeout_minutes

    def start_seconds(self, device: Device) -> float:
        """Return the time for a server to start."""
        default = self.rollout.start_seconds(device)
        # with "auto" a server fails, with its log, before the watchdog ends the run
        is_set = self.rollout.start_timeout_seconds != "auto"
        # 0.9 x 0.9 = 81 % of run.collective_timeout_minutes
        return default if is_set else min(default, 0.9 * self.stage_seconds)
