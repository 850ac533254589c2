"""Configuration: pydantic sections, read from TOML, overridden on the command line, dumped resolved.  Imports no torch."""

from megatron_rl.config.agent import AgentConfig
from megatron_rl.config.base import ConfigError
from megatron_rl.config.config import Config
from megatron_rl.config.loader import dump_config, load_config, plain_values
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
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    ReplayConfig,
)
from megatron_rl.config.track import TrackConfig

__all__ = [
    "AdvantageConfig", "AgentConfig", "BatchConfig", "CheckpointConfig", "Config", "ConfigError", "DataConfig", "EvalConfig",
    "LossConfig", "ModelConfig", "OptimConfig", "ParallelConfig", "ReplayConfig", "RewardConfig", "RolloutConfig", "RunConfig",
    "TrackConfig", "dump_config", "load_config", "plain_values",
]  # fmt: skip
