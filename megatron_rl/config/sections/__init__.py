"""The sections of a configuration: their keys, what these mean, and rules between few of them."""

from megatron_rl.config.sections.agent import AgentConfig
from megatron_rl.config.sections.lora import LoraConfig
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
from megatron_rl.config.sections.supervised import SftConfig
from megatron_rl.config.sections.teachers import Teacher, TeachersConfig
from megatron_rl.config.sections.track import TrackConfig
from megatron_rl.config.sections.trained_model import (
    MegatronConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
)

__all__ = [
    "AdvantageConfig", "AgentConfig", "BatchConfig", "CheckpointConfig", "DataConfig", "EvalConfig",
    "LoraConfig", "LossConfig", "MegatronConfig", "ModelConfig", "OptimConfig", "ParallelConfig",
    "ReplayConfig", "RewardConfig", "RolloutConfig", "RunConfig", "SftConfig", "Teacher",
    "TeachersConfig", "TrackConfig",
]  # fmt: skip
