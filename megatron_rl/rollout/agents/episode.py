"""The types that a user's function or environment meets: observations, turns, the finished episode,
and what ends it early.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from megatron_rl.records import Prompt, Rollout
from megatron_rl.rollout.agents.chat import Message, Reply
from megatron_rl.rollout.agents.tools import Tools

Observation = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or chat messages (which need agent.renderer)."""
NO_TOOLS = Tools()


class EpisodeError(RuntimeError):
    """An episode that cannot be trained on; agent.on_error says what happens then."""


class EpisodeStopped(BaseException):
    """Sampling ended while the episode ran.

    Not an Exception: a function that handles those must not continue without it.
    """


class ContextFull(EpisodeError):
    """No token is left of rollout.max_response_tokens, agent.max_episode_tokens or what servers and
    trainer take.  Where the function does not catch it, the episode ends here, as truncated."""


@dataclass(frozen=True)
class Turn:
    """What the model said.  text: without special tokens; finish_reason: stop, or length at
    `max_tokens`.

    num_prompt_tokens: of its input.  read: parses it in the model's chat format, when `reply` is
    first asked for.
    tools: that were in its prompt.  logprobs: log mu of its tokens.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    num_prompt_tokens: int = 0
    read: Callable[[], Reply] | None = field(default=None, repr=False, compare=False)
    tools: Tools = field(default=NO_TOOLS, repr=False, compare=False)
    logprobs: tuple[float, ...] = field(default=(), repr=False)

    @cached_property
    def reply(self) -> Reply:
        """Content, thinking and tool calls.  Raises EpisodeError without agent.renderer."""
        if self.read is None:
            raise EpisodeError(
                "a turn's reply and message need agent.renderer, the format of the model's chat;"
                " set it"
            )
        return self.read()

    @property
    def message(self) -> dict[str, object]:
        """The turn as the assistant's message, for the list of messages of the next one."""
        return self.reply.message


@dataclass(frozen=True)
class Access:
    """An OpenAI-compatible endpoint for one episode: its key is the episode."""

    base_url: str
    api_key: str = field(repr=False)


@dataclass(frozen=True)
class Episode:
    """A finished episode.

    reward: None leaves it to the reward function.  metrics are averaged and logged as episode/NAME.
    """

    rollout: Rollout
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """What the environment answers to a turn.

    Rewards of an episode are added; metrics are those of its last step.
    """

    observation: Observation = ""
    reward: float = 0.0
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """`reset` may add an observation to the prompt.  Either method may be async; others run in a
    thread, or all in a process of the episode's own (agent.isolation)."""

    def reset(self, prompt: Prompt) -> Observation | None: ...

    def step(self, turn: Turn) -> Step: ...
