"""One episode: turns of the model, and between them what an environment says.  Tokens in, tokens out.

    async def rollout(session: Session, prompt: Prompt) -> Episode:
        turn = await session.generate()
        while "=" in turn.text:                          # the model asks its calculator
            session.observe(calculate(turn.text))
            turn = await session.generate()
        return session.finish()

What the model sampled is never tokenized again: a turn's input is the tokens of all turns before it, so the trainer sees
exactly what the server saw.  Log-probs, weight versions and routes are joined turn by turn (rollout/client/response.py).
Where the history is edited (compaction, sub-agents, parallel attempts), an episode has several sequences:

    branch = session.branch([*session.token_ids[:100], *summary])
    turn = await branch.generate()

All of a branch's start is prompt there, also what the model sampled in another one: a token is learned from where it was
sampled, once.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
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
    """No token is left of rollout.max_response_tokens, agent.max_episode_tokens or what servers and trainer take.  Where the
    function does not catch it, the episode ends here, as truncated."""


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


class Branch:
    """One sequence of an episode: its turns follow one another.  Several branches may generate at the same time.

    turns: what the model said here.  rollout: the sequence up to its last turn, None before the first.
    is_full: a turn found no room, or was cut off at the end of it.
    """

    def __init__(self, session: Session, token_ids: Sequence[int]) -> None:
        self.turns: list[Turn] = []
        self.rollout: Rollout | None = None
        self.is_full = False
        self._session, self._start, self._tokens = session, len(token_ids), list(token_ids)
        self._server, self._is_busy = session.server, False

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The start, turns and observations so far: the input of the next turn."""
        return tuple(self._tokens)

    @property
    def num_tokens(self) -> int:
        """Of turns and observations."""
        return len(self._tokens) - self._start

    @property
    def remaining(self) -> int:
        """Tokens that turns and observations may still take."""
        return self._room()[0]

    async def generate(self, *, max_tokens: int | None = None, stop_token_ids: Sequence[int] = ()) -> Turn:
        """The model's next turn, of at most `max_tokens`; it ends at a stop token of the run or of `stop_token_ids`.

        Turns that are sampled at the same time may each take what is left of agent.max_episode_tokens.
        Raises ContextFull, ValueError for max_tokens below 1, EpisodeError where a turn of this branch is being sampled or the
        episode is finished.
        """
        session = self._session
        self._check_idle()
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens = {max_tokens}: must be at least 1")
        left, setting = self._room()
        if left < 1:
            self.is_full = True
            raise ContextFull(f"rollout {session.name}: {setting} are used up")
        given = replace(session.prompt, id=session.name, token_ids=self.token_ids)
        limit = min(left, max_tokens or left)
        group = PartialGroup(
            given,
            1,
            max_tokens=limit,
            stop_token_ids=tuple(stop_token_ids),
            server=self._server,
            known=self.rollout,
        )
        self._is_busy = True
        try:
            await session.sample(group)
        finally:
            self._is_busy = False
        session.check_open()
        self._server = session.server = group.server  # it has these tokens in its cache
        turn = group.closed().rollouts[0]
        self.rollout = turn if self.rollout is None else join_rollouts(self.rollout, turn)
        self._tokens = turn.tokens.tolist()
        response = tuple(self._tokens[turn.prompt_length :])
        text = session.tokenizer.decode(response, skip_special_tokens=True)
        self.turns.append(Turn(text, response, turn.finish_reason))
        self.is_full = turn.finish_reason == "length" and self.remaining < 1
        session.ended(self)
        return self.turns[-1]

    def observe(self, observation: Observation) -> None:
        """Append what the environment says, for the model to read in its next turn.  It is never learned from.

        Messages are written in the model's own format, with what opens the model's next turn.  Raises EpisodeError for
        messages without a renderer or before the first turn, and for tokens outside the vocabulary.
        """
        session = self._session
        self._check_idle()
        parts: list[object] = [] if isinstance(observation, str) else list(observation)
        if isinstance(observation, str):
            ids = session.tokenizer.encode(observation, add_special_tokens=False)
        elif parts and all(isinstance(part, Mapping) for part in parts):
            ids = self._render(cast("list[Message]", parts))
        elif all(isinstance(part, Integral) for part in parts):
            ids = [int(cast("int", part)) for part in parts]
        else:
            raise EpisodeError(
                f"rollout {session.name}: an observation must be text, token ids or messages, got {observation!r}"
            )
        session.check_tokens(ids, "observed")
        self._tokens += ids

    def _room(self) -> tuple[int, str]:
        """The tokens that are left of the tightest limit, and which one that is."""
        session = self._session
        room = [(session.max_tokens - self.num_tokens, f"rollout.max_response_tokens = {session.max_tokens}")]
        if session.max_episode_tokens:
            setting = f"agent.max_episode_tokens = {session.max_episode_tokens}"
            room.append((session.max_episode_tokens - session.num_tokens, setting))
        if session.sequence_limit is not None:
            most, setting = session.sequence_limit
            room.append((most - len(self._tokens), setting))
        return min(room, key=lambda each: each[0])

    def _check_idle(self) -> None:
        self._session.check_open()
        if self._is_busy:
            raise EpisodeError(
                f"rollout {self._session.name}: a turn is being sampled; a sequence grows turn by turn: await it first, or "
                "open another with session.branch()"
            )

    def _render(self, messages: Sequence[Message]) -> list[int]:
        session = self._session
        if session.chat is None:
            raise EpisodeError(
                f"rollout {session.name}: messages need agent.renderer, the format of the model's chat; set it, or observe "
                "text or token ids"
            )
        if self.rollout is None:
            raise EpisodeError(
                f"rollout {session.name}: messages continue a turn; the first input is the data's prompt"
            )
        last = len(self.turns[-1].token_ids)
        size = len(self.rollout.tokens)
        if len(self._tokens) != size:
            raise EpisodeError(f"rollout {session.name}: give all messages between two turns in one observation")
        return session.chat.extend(self._tokens[: size - last], self._tokens[size - last :], messages)


class Session:
    """The model as one episode sees it.  `max_tokens` bounds a sequence: all its turns with what the environment says.

    Most episodes are one sequence: turns and observations of the session itself, which continue the prompt.  `branch` opens
    further ones.
    max_episode_tokens: bounds turns and observations of all sequences; 0 = none.
    sequence_limit: (tokens, setting) of the longest sequence, its prompt included, that servers and trainer take.
    server: URL of the one that was asked last.
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
        max_episode_tokens: int = 0,
        sequence_limit: tuple[int, str] | None = None,
    ) -> None:
        self.prompt, self.name, self.max_tokens, self.vocab_size = prompt, name, max_tokens, vocab_size
        self.tokenizer, self.chat, self.sample = tokenizer, chat, sample
        self.max_episode_tokens, self.sequence_limit = max_episode_tokens, sequence_limit
        self.server = ""
        self._branches: list[Branch] = []  # in the order of their last turns
        self._is_finished = False

    @cached_property
    def _first(self) -> Branch:
        """What continues the prompt, unless everything happens in branches."""
        return self.branch(self.prompt.token_ids)

    def branch(self, token_ids: Sequence[int]) -> Branch:
        """A further sequence of this episode, which starts with `token_ids`: all of them are its prompt.

        It shares the episode's reward and advantage.  Raises EpisodeError where the start is empty, outside the vocabulary, or
        leaves no room for a turn, and after `finish`.
        """
        self.check_open()
        if not len(token_ids):
            raise EpisodeError(f"rollout {self.name}: a branch must start with at least one token")
        ids = [int(token) for token in token_ids]
        self.check_tokens(ids, "branched from")
        if self.sequence_limit is not None and len(ids) >= self.sequence_limit[0]:
            most, setting = self.sequence_limit
            raise EpisodeError(
                f"rollout {self.name}: a branch starts with {len(ids)} tokens: must be fewer than {most}, the longest sequence "
                f"that {setting} allows; start it with fewer, or raise that"
            )
        self._branches.append(Branch(self, ids))
        return self._branches[-1]

    @property
    def turns(self) -> list[Turn]:
        return self._first.turns

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt, turns and observations so far: the input of the next turn."""
        return self._first.token_ids

    @property
    def remaining(self) -> int:
        """Tokens that turns and observations may still take."""
        return self._first.remaining

    @property
    def num_tokens(self) -> int:
        """Of turns and observations in all sequences."""
        return sum(branch.num_tokens for branch in self._branches)

    @property
    def is_full(self) -> bool:
        """Whether the sequence of the last turn was cut off, or found no room for another."""
        sampled = [branch for branch in self._branches if branch.turns]
        return bool(sampled) and sampled[-1].is_full

    async def generate(self, *, max_tokens: int | None = None, stop_token_ids: Sequence[int] = ()) -> Turn:
        """The next turn of the sequence that continues the prompt: see Branch.generate."""
        return await self._first.generate(max_tokens=max_tokens, stop_token_ids=stop_token_ids)

    def observe(self, observation: Observation) -> None:
        """What the environment says to it: see Branch.observe."""
        self._first.observe(observation)

    def finish(self, reward: float | None = None, metrics: Mapping[str, float] | None = None) -> Episode:
        """The episode, each sequence up to its last turn: what was observed after it is dropped, as nothing follows from it.

        Ends all branches; those without a turn are left out.
        Raises EpisodeError where the model was never asked, and for a reward or metric that is not finite.
        """
        sequences = [branch.rollout for branch in self._branches if branch.rollout is not None]
        if not sequences:
            raise EpisodeError(f"rollout {self.name}: nothing was sampled; await session.generate() at least once")
        for name, value in {"reward": reward, **(metrics or {})}.items():
            if value is not None and not (isinstance(value, Real) and math.isfinite(value)):
                raise EpisodeError(f"rollout {self.name}: {name} = {value!r}: must be a finite number")
        self._is_finished = True
        values = {name: float(value) for name, value in (metrics or {}).items()}
        rollout = replace(sequences[-1], earlier=tuple(sequences[:-1])).named(self.name)
        return Episode(rollout, None if reward is None else float(reward), values)

    def ended(self, branch: Branch) -> None:
        """A turn of `branch` ended."""
        self._branches.remove(branch)
        self._branches.append(branch)

    def check_open(self) -> None:
        """Raise EpisodeError after `finish`."""
        if self._is_finished:
            raise EpisodeError(f"rollout {self.name}: the episode is finished; no sequence of it can be continued")

    def check_tokens(self, ids: Sequence[int], what: str) -> None:
        """Raise EpisodeError for a token outside the vocabulary: such an id kills an SGLang server."""
        wrong = [token for token in ids if not 0 <= token < self.vocab_size]
        if wrong:
            raise EpisodeError(
                f"rollout {self.name}: {what} token id {wrong[0]}, the model's vocabulary has {self.vocab_size}"
            )
