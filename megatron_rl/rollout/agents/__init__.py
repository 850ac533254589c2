"""Rollouts of several turns: a user's function (agent.function) that talks to the model through a
Session, or an environment (agent.environment) that answers its turns."""

from megatron_rl.rollout.agents.branch import Branch
from megatron_rl.rollout.agents.episode import (
    Access,
    ContextFull,
    Environment,
    Episode,
    EpisodeError,
    Step,
    Turn,
)
from megatron_rl.rollout.agents.session import Session
from megatron_rl.rollout.agents.tools import ToolError

__all__ = [
    "Access",
    "Branch",
    "ContextFull",
    "Environment",
    "Episode",
    "EpisodeError",
    "Session",
    "Step",
    "ToolError",
    "Turn",
]
