"""Rollouts of several turns: a user's function (agent.function) that talks to the model through a Session, or an
environment (agent.environment) that answers its turns."""

from megatron_rl.rollout.agents.environment import Environment, Step
from megatron_rl.rollout.agents.session import Branch, ContextFull, Episode, EpisodeError, Session, Turn

__all__ = ["Branch", "ContextFull", "Environment", "Episode", "EpisodeError", "Session", "Step", "Turn"]
