"""Rollouts of several turns: a user's function (rollout.function) that talks to the model through a Session."""

from megatron_rl.rollout.agents.session import ContextFull, Episode, EpisodeError, Session, Turn

__all__ = ["ContextFull", "Episode", "EpisodeError", "Session", "Turn"]
