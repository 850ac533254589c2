"""One episode: turns of the model, and between them what an environment says.  Tokens in, tokens out.

    async def rollout(session: Session, prompt: Prompt) -> Episode:
        turn = await session.generate()
        while "=" in turn.text:                          # the model asks its calculator
            session.observe(calculate(turn.text))
            turn = await session.generate()
        return session.finish()

What the model sampled is never tokenized again: a turn's input is the tokens of all turns before it, so the trainer sees
exactly what the server saw.  Log-probs, weight versions and routes are joined turn by turn (rollout/client/response.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import cast

from transformers import PreTrainedTokenizerBase

from megatron_rl.records import Prompt, Rollout
from megatron_rl.rollout.agents.chat import Chat, Message
from megatron_rl.rollout.client.response import join_rollouts
from megatron_rl.rollout.partial import PartialGroup

Observation = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or chat messages (which need agent.renderer)."""
SampleTurn = Callable[[PartialGroup], Awaitable[None]]
"""Fills a group of one response: the client's retries, deadlines and servers."""


class EpisodeError(RuntimeError):
    """An episode that cannot be trained on; agent.on_error says what happens then."""


class EpisodeStopped(BaseException):
    """Sampling ended while the episode ran.  Not an Exception: a function that handles those must not continue without it."""


class ContextFull(EpisodeError):
    """No token is left of rollout.max_response_tokens.  Where the function does not catch it, the episode ends here, as
    truncated."""


@dataclass(frozen=True)
class Turn:
    """What the model said.  text: without special tokens; finish_reason: stop, or length at `max_tokens`."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str


@dataclass(frozen=True)
class Episode:
    """A finished episode.  reward: None leaves it to the reward function.  metrics are averaged and logged as episode/NAME."""

    rollout: Rollout
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class Session:
    """The model as one episode sees it.  `max_tokens` bounds the response: all turns with what the environment says.

    Not for several turns at a time: an episode is one sequence.
    """

    def __init__(
        self,
        prompt: Prompt,
        *,
        name: str,
        max_tokens: int,
        vocab_size: int,
        tokenizer: PreTrainedTokenizerBase,
        chat: Chat | None,
        sample: SampleTurn,
    ) -> None:
        self.prompt = prompt
        self.turns: list[Turn] = []
        self._name, self._max_tokens, self._vocab_size = name, max_tokens, vocab_size
        self._tokenizer, self._chat, self._sample = tokenizer, chat, sample
        self._server, self._is_busy = "", False
        self.sampling_seconds = 0.0  # that it waited for turns
        self.is_full = False
        self._rollout: Rollout | None = None
        self._tokens = list(prompt.token_ids)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt, turns and observations so far: the input of the next turn."""
        return tuple(self._tokens)

    @property
    def remaining(self) -> int:
        """Tokens that turns and observations may still take."""
        return self._max_tokens - (len(self._tokens) - len(self.prompt.token_ids))

    async def generate(self, *, max_tokens: int | None = None) -> Turn:
        """The model's next turn, of at most `max_tokens`; it ends at a stop token.

        Raises ContextFull, ValueError for max_tokens below 1, EpisodeError where a turn is being sampled.
        """
        self._check_idle()
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens = {max_tokens}: must be at least 1")
        if self.remaining < 1:
            self.is_full = True
            raise ContextFull(f"rollout {self._name}: rollout.max_response_tokens = {self._max_tokens} are used up")
        limit = min(self.remaining, max_tokens or self.remaining)
        given = replace(self.prompt, id=self._name, token_ids=self.token_ids)
        group = PartialGroup(given, 1, max_tokens=limit, server=self._server)
        self._is_busy, asked = True, time.monotonic()
        try:
            await self._sample(group)
        finally:
            self._is_busy = False
            self.sampling_seconds += time.monotonic() - asked
        self._server = group.server  # it has these tokens in its cache
        turn = group.closed().rollouts[0]
        self._rollout = turn if self._rollout is None else join_rollouts(self._rollout, turn)
        self._tokens = turn.tokens.tolist()
        response = tuple(self._tokens[turn.prompt_length :])
        text = self._tokenizer.decode(response, skip_special_tokens=True)
        self.turns.append(Turn(text, response, turn.finish_reason))
        return self.turns[-1]

    def observe(self, observation: Observation) -> None:
        """Append what the environment says, for the model to read in its next turn.  It is never learned from.

        Messages are written in the model's own format, with what opens the model's next turn.  Raises EpisodeError for
        messages without a renderer or before the first turn, and for tokens outside the vocabulary.
        """
        self._check_idle()
        parts: list[object] = [] if isinstance(observation, str) else list(observation)
        if isinstance(observation, str):
            ids = self._tokenizer.encode(observation, add_special_tokens=False)
        elif parts and all(isinstance(part, Mapping) for part in parts):
            ids = self._render(cast("list[Message]", parts))
        elif all(isinstance(part, Integral) for part in parts):
            ids = [int(cast("int", part)) for part in parts]
        else:
            raise EpisodeError(
                f"rollout {self._name}: an observation must be text, token ids or messages, got {observation!r}"
            )
        wrong = [token for token in ids if not 0 <= token < self._vocab_size]
        if wrong:
            raise EpisodeError(
                f"rollout {self._name}: observed token id {wrong[0]}, the model's vocabulary has {self._vocab_size}"
            )
        self._tokens += ids

    def finish(self, reward: float | None = None, metrics: Mapping[str, float] | None = None) -> Episode:
        """The episode, up to the model's last turn: what was observed after it is dropped, as nothing follows from it.

        Raises EpisodeError where the model was never asked, and for a reward or metric that is not finite.
        """
        if self._rollout is None:
            raise EpisodeError(f"rollout {self._name}: nothing was sampled; await session.generate() at least once")
        for name, value in {"reward": reward, **(metrics or {})}.items():
            if value is not None and not (isinstance(value, Real) and math.isfinite(value)):
                raise EpisodeError(f"rollout {self._name}: {name} = {value!r}: must be a finite number")
        values = {name: float(value) for name, value in (metrics or {}).items()}
        return Episode(self._rollout, None if reward is None else float(reward), values)

    def _check_idle(self) -> None:
        if self._is_busy:
            raise EpisodeError(
                f"rollout {self._name}: a turn is being sampled; an episode is one sequence: await it first"
            )

    def _render(self, messages: Sequence[Message]) -> list[int]:
        if self._chat is None:
            raise EpisodeError(
                f"rollout {self._name}: messages need agent.renderer, the format of the model's chat; set it, or observe "
                "text or token ids"
            )
        if self._rollout is None:
            raise EpisodeError(f"rollout {self._name}: messages continue a turn; the first input is the data's prompt")
        last = len(self.turns[-1].token_ids)
        size = len(self._rollout.tokens)
        if len(self._tokens) != size:
            raise EpisodeError(f"rollout {self._name}: give all messages between two turns in one observation")
        return self._chat.extend(self._tokens[: size - last], self._tokens[size - last :], messages)
