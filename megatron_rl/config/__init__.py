"""Configuration: sections read from TOML, overridden on the command line, checked, dumped resolved.

Keys are in sections/, rules between them in rules/, and config.py joins both.  Imports no torch.
"""

from megatron_rl.config.base import ConfigError
from megatron_rl.config.config import Config
from megatron_rl.config.loader import dump_config, load_config, load_rl_or_sft, plain_values
from megatron_rl.config.sections import (
    AdvantageConfig,
    AgentConfig,
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
    RolloutConfig,
    RunConfig,
    TrackConfig,
)  # fmt: skip

__all__ = [
    "AdvantageConfig", "AgentConfig", "BatchConfig", "CheckpointConfig", "Config", "ConfigError",
    "DataConfig", "EvalConfig", "LossConfig", "ModelConfig", "OptimConfig", "ParallelConfig",
    "ReplayConfig", "RewardConfig", "RolloutConfig", "RunConfig", "TrackConfig", "dump_config",
    "load_config", "load_rl_or_sft", "plain_values",
]  # fmt: skip
