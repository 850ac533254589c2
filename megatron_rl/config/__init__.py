"""Configuration: sections read from TOML, overridden on the command line, checked, dumped resolved.

Imports no torch.
"""

from megatron_rl.config.base import ConfigError
from megatron_rl.config.config import Config
from megatron_rl.config.loader import dump_config, load_config, plain_values
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
from megatron_rl.config.sections.trained_model import ModelConfig, OptimConfig, ParallelConfig

__all__ = [
    "AdvantageConfig", "AgentConfig", "BatchConfig", "CheckpointConfig", "Config", "ConfigError",
    "DataConfig", "EvalConfig", "LossConfig", "ModelConfig", "OptimConfig", "ParallelConfig",
    "ReplayConfig", "RewardConfig", "RolloutConfig", "RunConfig", "TrackConfig", "dump_config",
    "load_config", "plain_values",
]  # fmt: skip
