"""What a reward function is given, and what it may return.

Loads no torch: reward workers start fast and stay small.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class EpisodeTurn:
    """One turn of the model.

    observation: what an environment answered, "" after the last; finish_reason: stop, length (at
    max_tokens or the context's end), or "" where it was not recorded; reward: that of the rollout
    function or the environment for this turn.
    """

    text: str
    observation: str = ""
    finish_reason: str = ""
    num_tokens: int = 0
    reward: float = 0.0


@dataclass(frozen=True)
class Episode:
    """A response as a reward function sees it; texts are without special tokens.

    response         of all turns, with what an environment wrote between them; of several
                     sequences, of the last
    turns            of the model, in order; one for a response of one turn
    messages         what followed the prompt as chat messages (agent.renderer), else ()
    finish_reason    length: rollout.max_response_tokens are used up
    num_tokens       sampled tokens
    metadata         the further columns of the prompt's row
    metrics          of the rollout function or environment, if it gave any.  One with a reward of
                     its own is not scored here
    """

    prompt: str
    response: str
    label: str
    turns: tuple[EpisodeTurn, ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()
    finish_reason: str = "stop"
    num_tokens: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

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
