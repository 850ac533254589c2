"""The types that a user's function or environment meets: observations, turns, the finished episode,
and the exceptions that end it early.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

from megatron_rl.records import Prompt, Rollout
from megatron_rl.rollout.agents.chat import Message
from megatron_rl.rollout.agents.reply import Reply
from megatron_rl.rollout.agents.tools import Tools

Observation = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or chat messages (which need agent.renderer)."""
NO_TOOLS = Tools()


class EpisodeError(RuntimeError):
    """The episode cannot be trained on; agent.on_error says what happens then."""


class EpisodeStopped(BaseException):
    """Sampling ended while the episode ran.

    Not an Exception: a function that handles those must not continue without it.
    """


class ContextFull(EpisodeError):
    """No token is left of rollout.max_response_tokens, agent.max_episode_tokens, or of the longest
    sequence that servers and trainer take.

    Where the function does not catch it, the episode ends here, as truncated.
    """


class Input(NamedTuple):
    """The input of a turn: tokens of its sequence."""

    window: int
    """First of the tokens that a chat format needs to read the turn: it wrote all that follow the
    turn before."""
    end: int
    """Number of tokens of the input."""


@dataclass(frozen=True)
class Turn:
    """One response of the model in an episode."""

    text: str
    """The response without special tokens."""
    token_ids: tuple[int, ...]
    finish_reason: str
    """stop, or length at `max_tokens`."""
    num_prompt_tokens: int = 0
    """Number of tokens of its input."""
    read: Callable[..., Reply] | None = field(default=None, repr=False, compare=False)
    """Parses it in the model's chat format, when `reply` is first asked for.  It takes the `tools`
    that the prompt described."""
    tools: Tools = field(default=NO_TOOLS, repr=False, compare=False)
    """The tools that its prompt described."""
    logprobs: tuple[float, ...] = field(default=(), repr=False)
    """log mu of its tokens."""
    stop: str | None = None
    """The text of the request's stops that ended it.  It is not part of `text` and `reply`, and its
    tokens are the last of `token_ids`."""
    prefill: str = field(default="", repr=False)
    """The beginning of the answer that the request gave.  It is part of the input, and not of
    `text` and `reply`."""
    read_input: Callable[[], tuple[int, ...]] | None = field(
        default=None, repr=False, compare=False
    )
    """Returns the tokens of its input: a turn keeps no copy of them."""

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
    def prompt_token_ids(self) -> tuple[int, ...]:
        """Tokens of its input, () for a turn that no sequence sampled."""
        return () if self.read_input is None else self.read_input()

    @property
    def message(self) -> dict[str, object]:
        """The turn as the assistant's message, for the list of messages of the next one."""
        return self.reply.message


@dataclass(frozen=True)
class Access:
    """An endpoint for one episode, for clients of OpenAI and of Anthropic."""

    base_url: str
    """URL for OpenAI's clients; it ends in /v1."""
    api_key: str = field(repr=False)
    """Names the episode, and is valid as long as it runs."""

    @property
    def root_url(self) -> str:
        """URL for Anthropic's clients, which add /v1 themselves."""
        return self.base_url.removesuffix("/v1")


@dataclass(frozen=True)
class Episode:
    """A finished episode."""

    join: Callable[[], Rollout] = field(repr=False)
    """Joins the records of the turns."""
    reward: float | None = None
    """None leaves it to the reward function."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Averaged over episodes and logged as episode/NAME."""

    @cached_property
    def rollout(self) -> Rollout:
        """The record of the episode."""
        return self.join()


@dataclass(frozen=True)
class Step:
    """The environment's answer to a turn."""

    observation: Observation = ""
    reward: float = 0.0
    """Rewards of all steps are added."""
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The last step's metrics are the episode's."""


class Environment(Protocol):
    """An environment of one episode; `reset` may add an observation to the prompt.

    Either method may be async; others run in a thread, or all of them in a process of the episode
    (agent.isolation).
    """

    def reset(self, prompt: Prompt) -> Observation | None: ...

    def step(self, turn: Turn) -> Step: ...
