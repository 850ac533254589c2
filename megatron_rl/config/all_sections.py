"""All sections of a configuration, and what follows from several of them."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.config import sections
from megatron_rl.config.base import Section
from megatron_rl.config.device_limits import Device
from megatron_rl.config.loss_presets import SFT, AdvantageKind


class AllSections(Section):
    """The fields of Config, without its rules, which are functions of this class."""

    run: sections.RunConfig = sections.RunConfig()
    model: sections.ModelConfig
    lora: sections.LoraConfig = sections.LoraConfig()
    data: sections.DataConfig
    sft: sections.SftConfig = sections.SftConfig()
    rollout: sections.RolloutConfig = sections.RolloutConfig()
    teachers: sections.TeachersConfig = sections.TeachersConfig()
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
    def is_sft(self) -> bool:
        """True for supervised training (`megatron-rl sft`)."""
        return self.loss.name == SFT

    @property
    def eval_data(self) -> sections.DataConfig:
        """The way to read evaluation files: [data] with what [eval] overrides."""
        return self.data_of_set("")

    def data_of_set(self, name: str) -> sections.DataConfig:
        """The way to read an evaluation file: [data], with the keys of the source of the same name,
        and with what [eval] overrides.
        """
        keys = {"prompt_key", "label_key", "template"}
        changed = self.eval.model_dump(include=keys, exclude_none=True)
        data = self.data.of_source(name).model_dump()
        return sections.DataConfig.model_validate(data | changed)

    @property
    def longest_sequence(self) -> int:
        """The most tokens of a sequence that is trained on by itself, a prompt with its response or
        a row of `megatron-rl sft`: it may exceed run.max_tokens_per_micro_batch.
        """
        if self.is_sft:
            return self.sft.max_row_tokens
        response = self.rollout.max_response_tokens
        if self.agent.name:  # sequences of training and of evaluation have one limit
            response = max(response, self.eval.max_response_tokens or 0)
        return self.data.max_prompt_tokens + response

    @property
    def needs_routes(self) -> bool:
        """True if rollouts must carry expert ids."""
        return self.replay.mode == "R3" or self.replay.measure

    @property
    def key_variables(self) -> tuple[str, ...]:
        """Names of the environment variables that hold keys of servers: logs, files and workers do
        not get their values.
        """
        keys = [self.rollout.api_key_env]
        keys += [teacher.api_key_env for teacher in self.teachers.with_servers.values()]
        return tuple(key for key in keys if key is not None)

    @property
    def overlaps_grad_reduce(self) -> bool:
        """True if gradients are reduced in buckets while the last micro-batch's backward runs.

        It is the default on GPUs: on a CPU both share the cores.  Megatron-Bridge's models may have
        parameters without a gradient, at which core's hooks stop.
        """
        default = self.run.device != "cpu" and self.model.provider != "bridge"
        return self.megatron.is_on("overlap_grad_reduce", default=default)

    @property
    def stage_seconds(self) -> float:
        """Time after which the watchdog ends a run in the same stage."""
        # less than collectives wait, whose errors name no rank
        return 0.9 * 60 * self.run.collective_timeout_minutes

    def start_seconds(self, device: Device) -> float:
        """Return the time for a server to start: rollout.start_seconds, with "auto" at most 81 % of
        run.collective_timeout_minutes.
        """
        default = self.rollout.start_seconds(device)
        # with "auto" a server fails, with its log, before the watchdog ends the run
        is_set = self.rollout.start_timeout_seconds != "auto"
        # 0.9 x 0.9 = 81 %
        return default if is_set else min(default, 0.9 * self.stage_seconds)
