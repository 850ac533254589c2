"""One sequence of an episode, turn by turn."""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

from megatron_rl.records import Prompt, Rollout
from megatron_rl.rollout.agents.chat import Chat, Message, Schema, text_of
from megatron_rl.rollout.agents.episode import ContextFull, EpisodeError, Input, Observation, Turn
from megatron_rl.rollout.agents.long_texts import encoded_up_to
from megatron_rl.rollout.agents.prefill import NO_PREFILL, Prefill
from megatron_rl.rollout.agents.recorded import RecordedTurns, with_rewards
from megatron_rl.rollout.agents.reply import Reply
from megatron_rl.rollout.agents.sequence_limit import Limits, room
from megatron_rl.rollout.agents.stops import Match, Stops, reply_before
from megatron_rl.rollout.agents.token_ids import check_no_bytes
from megatron_rl.rollout.client.counters import RolloutCounters
from megatron_rl.rollout.client.response import check_continues, join_parts
from megatron_rl.rollout.group import Group

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OBSERVED_ROLES = ("tool", "user")
"""Roles of messages between turns: the model's own messages are sampled, and formats have no place
for a system message there."""


class EpisodeOfBranch(Limits, Protocol):
    """The part of a Session that a branch needs."""

    prompt: Prompt
    name: str
    server: str
    tokenizer: PreTrainedTokenizerBase
    chat: Chat | None
    counters: RolloutCounters
    recorded: RecordedTurns
    sample: Callable[[Group], Awaitable[None]]
    idle_since: float

    def waiting(self) -> AbstractContextManager[None]: ...
    def span(self, name: str, kind: str) -> AbstractContextManager[object]: ...
    def asked(self, branch: Branch) -> None: ...
    def ended(self, branch: Branch, *, is_full: bool) -> None: ...
    def full(self, why: str) -> ContextFull: ...
    def check_open(self) -> None: ...
    def check_finite(self, name: str, value: object) -> None: ...
    def check_tokens(self, tokens: Sequence[object], what: str) -> array[int]: ...


class Branch:
    """One sequence of an episode: its turns follow one another.  Several branches may generate at
    the same time.
    """

    def __init__(self, session: EpisodeOfBranch, token_ids: Sequence[int]) -> None:
        self.turns: list[Turn] = []
        """The model's turns in this sequence."""
        self.parts: list[Rollout] = []
        """The record of each turn, a part of the sequence; they are joined once, at the end."""
        self.rewards: list[float] = []
        """Rewards of reward_turn, one a turn; [] without any."""
        self._messages: list[Message] = []
        self._session, self._start = session, len(token_ids)
        # not a list or tuple, in which the garbage collector visits every int
        self._tokens = array("q")
        self._digest = hashlib.blake2b(digest_size=8)
        """Digest of the tokens, from which calls of the model get their ids."""
        self._append(token_ids)
        self._spans: list[tuple[int, int]] = []  # Rollout.turn_spans of the joined parts
        self._window = 0  # Input.window of the next turn
        # the server that was asked last may have the start of this sequence in its cache
        self._server, self._is_busy = session.server, False
        self._idle_since = session.idle_since  # then the environment began to work for this turn
        self._asked: Group | None = None  # the request of the turn that is not accepted yet

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Start, turns and observations so far: the input of the next turn."""
        return tuple(self._tokens)

    def _append(self, token_ids: Sequence[int]) -> None:
        start = len(self._tokens)
        self._tokens.extend(token_ids)
        self._digest.update(self.span(start))

    def span(self, start: int, end: int | None = None) -> array[int]:
        """Return a copy of these tokens of the sequence."""
        return self._tokens[start:end]

    def starts(self, token_ids: array[int], end: int) -> bool:
        """Return True where `token_ids` begin with the first `end` tokens of the sequence."""
        if len(token_ids) < end or token_ids[end - 1] != self._tokens[end - 1]:
            return False
        # views, without copies
        return np.array_equal(np.asarray(token_ids)[:end], np.asarray(self._tokens)[:end])

    @property
    def next_input(self) -> Input:
        """The input of a turn that follows now."""
        return Input(self._window, len(self._tokens))

    @property
    def rollout(self) -> Rollout | None:
        """The sequence up to its last turn, None before the first."""
        return join_parts(*self.parts) if self.parts else None

    @property
    def _end(self) -> int:
        """Number of tokens up to the end of the last turn."""
        return self._spans[-1][1] if self._spans else 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens of turns and observations."""
        return len(self._tokens) - self._start

    @property
    def remaining(self) -> int:
        """Tokens that turns and observations may still take."""
        return room(self._session, self.num_tokens, len(self._tokens))[0]

    def check_room(self, observed: int = 0) -> int:
        """Return the tokens that a turn may take after so many more observed ones.  Raises
        ContextFull where there is no room for one.
        """
        session = self._session
        left, setting = room(session, self.num_tokens, len(self._tokens))
        left -= observed
        if left < 1:
            over = f", and {-left} more observed tokens have no room" if left else ""
            raise session.full(f"{setting} are used up{over}")
        return left

    async def generate(
        self, *, max_tokens: int | None = None, stop_token_ids: Sequence[int] = ()
    ) -> Turn:
        """Sample the model's next turn, of at most `max_tokens`; it ends at a stop token of the run
        or of `stop_token_ids`.

        Turns that are sampled at the same time may each take what is left of
        agent.max_episode_tokens.  Raises ContextFull, ValueError for max_tokens below 1,
        EpisodeError where a turn of this branch is being sampled or the episode is finished.
        """
        turn = await self.sample(max_tokens=max_tokens, stop_token_ids=stop_token_ids)
        self.accept(turn)
        return turn

    async def sample(
        self,
        *,
        max_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
        stops: Sequence[str] = (),
    ) -> Turn:
        """Sample a turn as `generate` does, which also ends at one of the texts `stops`; it becomes
        part of the sequence by `accept`, or is dropped by `drop`.
        """
        session = self._session
        self._check_idle()
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens = {max_tokens}: must be at least 1")
        left = self.check_room()
        prompt = replace(session.prompt, id=session.name, token_ids=self.span(0))
        limit, texts = min(left, max_tokens or left), Stops(stops, session.tokenizer)
        stop_token_ids = (*stop_token_ids, *texts.by_token)
        group = Group(
            prompt,
            1,
            max_tokens=limit,
            stop_token_ids=stop_token_ids,
            server=self._server,
            turn=len(self.parts) + 1,
            start=max(self._end - 1, 0),
        )
        session.asked(self)
        # an episode that was cut short has this turn, or its beginning: it is not sampled again
        last = self.parts[-1] if self.parts else None
        if known := session.recorded.take(self._tokens, limit, stop_token_ids, last, group.start):
            group.put(0, self._cut(texts, known)[0])
        self._is_busy, self._asked, asked = True, group, time.monotonic()
        seconds = () if known is None else known.episode.turn_seconds
        try:
            if not group.is_complete:
                with session.waiting(), session.span(f"turn {len(self.turns) + 1}", "turn"):
                    await session.sample(group)
                seconds = ((asked - self._idle_since, time.monotonic() - asked),)
            session.check_open()  # the function may have finished the episode meanwhile
        except BaseException:
            self._is_busy = False
            raise
        self._server = session.server = group.server  # it has these tokens in its cache
        self._idle_since = time.monotonic()
        turn, match = self._cut(texts, group.rollouts[0])
        group.put(0, turn.with_episode(turn_seconds=seconds))
        response = tuple(turn.tokens[turn.prompt_length :].tolist())
        asked_for, read = self.next_input, None
        if session.chat is not None:
            told = asked_for, response, match.after, self._name_of(response)
            read = partial(self._read, *told, chat=session.chat)
        return Turn(
            match.before, response, turn.finish_reason, asked_for.end, read,
            logprobs=tuple(turn.rollout_logprobs.tolist()), stop=match.stop,
            read_input=lambda: tuple(self.span(0, asked_for.end)),
        )  # fmt: skip

    def _name_of(self, response: Sequence[int]) -> str:
        """Return a name that no other turn of the episode has: a digest of all its tokens."""
        digest = self._digest.copy()
        digest.update(np.asarray(response, np.int64).data)
        return digest.hexdigest()

    def _cut(self, stops: Stops, turn: Rollout) -> tuple[Rollout, Match]:
        """Cut the turn at its first stop text, and count what is left out."""
        cut, match = stops.cut(turn)
        self._session.counters.after_stop_tokens += turn.response_length - cut.response_length
        return cut, match

    def accept(self, turn: Turn) -> None:
        """Continue the sequence with `turn`, which `sample` returned."""
        assert self._asked is not None
        part = self._ended(self._asked.rollouts[0])
        if self.parts:
            check_continues(self.parts[-1], part)
        self.parts.append(part)
        self._is_busy, self._asked = False, None
        start, end = len(self._tokens), len(self._tokens) + len(turn.token_ids)
        if self._spans and self._end == start:  # nothing was observed since the turn before
            start = self._spans.pop()[0]
        self._spans.append((start, end))
        self._append(turn.token_ids)
        self.turns.append(turn)
        self._messages.append({"role": "assistant", "content": turn.prefill + turn.text})
        # a turn that ended at its own max_tokens leaves room for another one
        self._session.ended(self, is_full=turn.finish_reason == "length" and self.remaining < 1)

    def release(self) -> None:
        """Forget the records of the turns."""
        self.parts, self._asked = [], None

    def drop(self) -> int:
        """Forget the turn that was sampled and is not accepted; returns its number of tokens."""
        dropped, self._is_busy, self._asked = self._unaccepted, False, None
        return 0 if dropped is None else dropped.response_length

    def _read(
        self,
        asked_for: Input,
        response: Sequence[int],
        after: str,
        name: str,
        *,
        chat: Chat,
        tools: Sequence[Schema] = (),
        prefill: Prefill = NO_PREFILL,
    ) -> Reply:
        """Parse the turn `response`, which follows `asked_for`: a turn keeps no copy of its input.

        after: the end of its text that is no part of the reply.  name: the turn's, for the ids of
        its calls.  prefill: the beginning of the answer, the last of the tokens of the input.
        """
        prompt = self.span(asked_for.window, asked_for.end - len(prefill.token_ids))
        if prefill.text:
            return prefill.read(chat, prompt, response, after, tools, name)
        return reply_before(chat.parse(prompt, response, tools, name), after)

    def _ended(self, turn: Rollout) -> Rollout:
        """Return the record of a turn with its end.  One that is cut short has none: it ends where
        the request that continues it does.
        """
        if turn.finish_reason == "abort":
            return turn
        return turn.with_episode(turns=((len(turn.tokens), turn.finish_reason),))

    @property
    def _unaccepted(self) -> Rollout | None:
        """The turn that is not part of the sequence yet, as far as it is sampled."""
        asked = self._asked
        return None if asked is None else asked.rollouts.get(0) or asked.prefixes.get(0)

    def unfinished(self) -> Rollout | None:
        """Return the sequence with its last turn, as far as that is sampled; None without a token
        of the model.
        """
        last = self._unaccepted
        return self.rollout if last is None else join_parts(*self.parts, self._ended(last))

    def observe(self, observation: Observation) -> None:
        """Append text, token ids or messages of the environment, which the model reads in its next
        turn.  They are never learned from.

        Messages are written in the model's own format, with the tokens that open its next turn.
        Raises EpisodeError for messages without a renderer or before the first turn, and for tokens
        outside the vocabulary.
        """
        session = self._session
        self._check_idle()
        check_no_bytes(observation, f"rollout {session.name}: observed")
        parts: list[object] = [] if isinstance(observation, str) else list(observation)
        messages: list[Message] = []
        if isinstance(observation, str):
            ids = encoded_up_to(session.tokenizer, observation, max(self.remaining, 0))
        elif parts and all(isinstance(part, Mapping) for part in parts):
            ids = self._render(messages := cast("list[Message]", parts))
        elif all(type(part) is int or isinstance(part, Integral) for part in parts):
            ids = [int(cast("int", part)) for part in parts]
        else:
            raise EpisodeError(
                f"rollout {session.name}: an observation must be text, token ids or messages, got"
                f" {observation!r:.200}"
            )
        self._append(session.check_tokens(ids, "observed"))
        self._window = 0  # the format did not write these tokens
        if messages:
            self.note(messages)

    def note(self, messages: Sequence[Message]) -> None:
        """Record messages that follow the last turn, and whose tokens were observed."""
        self._window = self.turns[-1].num_prompt_tokens
        self._messages += [
            {"role": message["role"], "content": text_of(message.get("content"))}
            for message in messages
        ]

    def reward_turn(self, reward: float, turn: Turn | None = None) -> None:
        """Add to the reward of `turn`, by default the last one.  The episode's reward is the sum of
        all, unless `finish` gets another.
        """
        session = self._session
        if not self.parts:
            raise EpisodeError(f"rollout {session.name}: no turn to reward; await generate() first")
        if turn is None:
            self._check_idle()
            turn = self.turns[-1]
        session.check_open()
        session.check_finite("turn reward", reward)
        spans, end = self._spans, turn.num_prompt_tokens + len(turn.token_ids)
        self.rewards += [0.0] * (len(spans) - len(self.rewards))
        # the turn's span in the rollout is the one in which its last token lies
        place = next(i for i, (start, stop) in enumerate(spans) if start < end <= stop)
        self.rewards[place] += float(reward)

    @property
    def result(self) -> Callable[[], Rollout] | None:
        """A call that joins the turns up to now, with rewards and messages; None without a turn."""
        if not self.parts:
            return None
        messages = tuple(self._messages) if self._session.chat is not None else ()
        return partial(with_rewards, tuple(self.parts), tuple(self.rewards), messages)

    def _check_idle(self) -> None:
        self._session.check_open()
        if self._is_busy:
            raise EpisodeError(
                f"rollout {self._session.name}: a turn is being sampled; a sequence grows turn by"
                " turn: await it first, or open another with session.branch()"
            )

    def _render(self, messages: Sequence[Message]) -> list[int]:
        session = self._session
        if session.chat is None:
            raise EpisodeError(
                f"rollout {session.name}: messages need agent.renderer, the format of the model's"
                " chat; set it, or observe text or token ids"
            )
        if not self.turns:
            raise EpisodeError(
                f"rollout {session.name}: messages continue a turn; the first input is the data's"
                " prompt"
            )
        roles = [str(message.get("role")) for message in messages]
        if wrong := [role for role in roles if role not in OBSERVED_ROLES]:
            raise EpisodeError(
                f"rollout {session.name}: observed a message with role {wrong[0]!r:.80}: must be"
                f" one of {OBSERVED_ROLES}; another history is a branch: session.branch(token_ids)"
            )
        # the format continues a turn of the model, so that it cannot continue an observation
        if len(self._tokens) != self._end:
            raise EpisodeError(
                f"rollout {session.name}: give all messages between two turns in one observation"
            )
        start = self.turns[-1].num_prompt_tokens
        return session.chat.extend(self.span(self._window, start), self.span(start), messages)
