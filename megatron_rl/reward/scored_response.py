"""Arguments and results of a reward function.

This file imports no torch: reward workers start fast and stay small.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class EpisodeTurn:
    """One turn of the model."""

    text: str
    observation: str = ""
    """The environment's answer, "" after the last turn."""
    finish_reason: str = ""
    """stop, length (at max_tokens or the context's end), or "" where it was not recorded."""
    num_tokens: int = 0
    reward: float = 0.0
    """Reward of the rollout function or the environment for this turn."""


@dataclass(frozen=True)
class Episode:
    """A response as a reward function sees it; texts are without special tokens.

    An episode that has a reward, from its rollout function or environment, is not scored.
    """

    prompt: str
    response: str
    """All turns, with the environment's texts between them; those of the last sequence, where an
    episode has several."""
    label: str
    turns: tuple[EpisodeTurn, ...] = ()
    """The model's turns, in order; one for a response of one turn."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The chat messages after the prompt, () without agent.renderer."""
    finish_reason: str = "stop"
    """stop, or length: rollout.max_response_tokens are used up."""
    num_tokens: int = 0
    """Number of sampled tokens."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The further columns of the prompt's row."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the rollout function or environment."""
    source: str = ""
    """Name of the prompt's source in data.train, or of its evaluation set; "" where data.train is
    one file."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Episode:
        turns = tuple(EpisodeTurn(**turn) for turn in values["turns"])
        return cls(**{**values, "turns": turns, "messages": tuple(values["messages"])})


@dataclass(frozen=True)
class Score:
    """A reward with metrics, which are averaged over responses and logged as reward/NAME."""

    value: float
    metrics: Mapping[str, float] = field(default_factory=dict)
