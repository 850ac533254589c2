"""One episode: turns of the model, and between them what an environment says.  Tokens in, tokens
out.

    async def rollout(session: Session, prompt: Prompt) -> Episode:
        turn = await session.generate()
        while "=" in turn.text:                          # the model asks its calculator
            session.observe(calculate(turn.text))
            turn = await session.generate()
        return session.finish()

What the model sampled is never tokenized again: a turn's input is the tokens of all turns before
it, so the trainer sees exactly what the server saw.  Log-probs, weight versions and routes are
joined turn by turn (rollout/client/response.py). Where the history is edited (compaction,
sub-agents, parallel attempts), an episode has several sequences:

    branch = session.branch([*session.token_ids[:100], *summary])
    turn = await branch.generate()

All of a branch's start is prompt there, also what the model sampled in another one: a token is
learned from where it was sampled, once.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, cast

from megatron_rl.records import Prompt, Rollout
from megatron_rl.reward.function import is_finite
from megatron_rl.rollout.agents.branch import Branch
from megatron_rl.rollout.agents.chat import Chat, Message
from megatron_rl.rollout.agents.conversation import Conversations
from megatron_rl.rollout.agents.episode import (
    Access,
    ContextFull,
    Episode,
    EpisodeError,
    Observation,
    Turn,
)
from megatron_rl.rollout.agents.raw_prompts import RawPrompts
from megatron_rl.rollout.agents.recorded import RecordedTurns
from megatron_rl.rollout.agents.sequences import Sequences
from megatron_rl.rollout.agents.token_ids import check_no_bytes, checked_tokens
from megatron_rl.rollout.agents.tools import Tool, Tools
from megatron_rl.rollout.client.call import Call, SampleTurn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class SessionSettings:
    """The model and the limits that all episodes of a call share."""

    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    chat: Chat | None
    """The model's chat format, None without agent.renderer."""
    max_tokens: int
    """Limit of a sequence: its turns, and the observations between them."""
    max_episode_tokens: int
    """Limit of turns and observations of all sequences, 0 = none."""
    sequence_limit: tuple[int, str] | None
    """(tokens, setting) of the longest sequence, its prompt included, that servers and trainer
    take."""


class Session:
    """The model as one episode sees it.

    Most episodes are one sequence: turns and observations of the session itself, which continue the
    prompt.  `branch` opens further ones.
    """

    def __init__(
        self,
        prompt: Prompt,
        name: str,
        settings: SessionSettings,
        *,
        call: Call,
        sample: SampleTurn,
        open_endpoint: Callable[[Session], Awaitable[Access]],
        recorded: Rollout | None = None,
    ) -> None:
        """recorded: the turns that this episode had when it was cut short."""
        self.prompt, self.name, self.sample = prompt, name, sample
        self.tokenizer, self.vocab_size = settings.tokenizer, settings.vocab_size
        self.chat, self.max_tokens = settings.chat, settings.max_tokens
        self.max_episode_tokens = settings.max_episode_tokens
        self.sequence_limit = settings.sequence_limit
        self.counters, self._call, self._open_endpoint = call.counters, call, open_endpoint
        self.recorded = RecordedTurns(recorded)
        self.server = ""
        """URL of the server that was asked last."""
        self.stopped_by: Exception | None = None
        """The error that ended sampling while the episode ran."""
        self.sampling_seconds = 0.0
        """Time in which the episode waited for the model; turns that are sampled at the same time
        count once."""
        self._num_waiting, self._waiting_since = 0, 0.0
        self.idle_since = time.monotonic()
        """When the last turn of any sequence ended; before the first one, when the episode
        began."""
        self.is_full = False
        """The last turn was cut off at the end of the context, or one that was asked for after it
        had no room, in any sequence."""
        self.episode: Episode | None = None
        """The episode as `finish` returned it last."""
        self._branches: list[Branch] = []  # in the order of their last turns
        self._asked: dict[Branch, None] = {}  # those with turns, in the order of their first ones
        self._is_finished = False

    @cached_property
    def _first(self) -> Branch:
        """The sequence that continues the prompt, unless everything happens in branches."""
        return self.branch(self.prompt.token_ids)

    def branch(self, token_ids: Sequence[int]) -> Branch:
        """Open a further sequence of this episode, which starts with `token_ids`: all of them are
        its prompt.

        It shares the episode's reward and advantage.  Raises EpisodeError where the start is empty,
        outside the vocabulary, or leaves no room for a turn, and after `finish`.
        """
        self.check_open()
        if not len(token_ids):
            raise EpisodeError(f"rollout {self.name}: a branch must start with at least one token")
        ids = self.check_tokens(token_ids, "branched from")
        if self.sequence_limit is not None and len(ids) >= self.sequence_limit[0]:
            most, setting = self.sequence_limit
            raise EpisodeError(
                f"rollout {self.name}: a branch starts with {len(ids)} tokens: must be fewer than"
                f" {most}, the longest sequence that {setting} allows; start it with fewer, or"
                " raise that"
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
        """Number of tokens of turns and observations in all sequences."""
        return sum(branch.num_tokens for branch in self._branches)

    async def generate(
        self,
        inputs: Sequence[Message] | Sequence[int] | None = None,
        *,
        tools: Sequence[Tool] = (),
        max_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> Turn:
        """Sample the model's next turn in the sequence that continues the prompt: see
        Branch.generate.

        inputs: all messages (rollout/agents/conversation.py says which sequence they continue), or
        all token ids of the input, which start a sequence of their own where they do not begin with
        `token_ids`.
        tools: functions or schemas that the model may call; they need messages, whose format
        describes them in the prompt.
        """
        check_no_bytes(inputs, f"rollout {self.name}: given")
        parts: list[object] = [] if inputs is None else list(inputs)
        if parts and isinstance(parts[0], Mapping):
            messages = cast("list[Message]", parts)
            return await self.conversations.generate(
                messages, Tools(tools), max_tokens=max_tokens, stop_token_ids=stop_token_ids
            )
        if tools:
            raise ValueError(
                "tools: must come with messages, whose format describes them; or write them into"
                " the prompt"
            )
        # token ids that continue the first sequence belong to it; others start a sequence
        ids, branch = self.check_tokens(parts, "given"), self._first
        if ids and not branch.starts(ids, size := branch.next_input.end):
            branch = self.branch(ids)
        elif ids:
            branch.check_room(len(ids) - size)
            branch.observe(ids[size:])
        return await branch.generate(max_tokens=max_tokens, stop_token_ids=stop_token_ids)

    @cached_property
    def conversations(self) -> Conversations:
        """Conversations of this episode.  Raises EpisodeError without agent.renderer."""
        if self.chat is None:
            raise EpisodeError(
                f"rollout {self.name}: messages need agent.renderer, the format of the model's"
                " chat; set it"
            )
        return Conversations(self, self.sequences, self.chat)

    @cached_property
    def raw_prompts(self) -> RawPrompts:
        """Prompts of requests that are in no chat format."""
        return RawPrompts(self, self.sequences)

    @cached_property
    def sequences(self) -> Sequences:
        """The sequences that requests begin and continue."""
        return Sequences(self)

    async def call_tools(self, turn: Turn) -> list[Message]:
        """Call the tools that `turn` asks for, one after another; returns their answers as
        messages, [] where it asks for none.

        A call that cannot be made (no such tool, arguments against its type hints) is answered by
        what is wrong with it.
        """
        answers: list[Message] = []
        for call in turn.reply.tool_calls:
            text, is_error = await turn.tools.answer(call)
            # calls that cannot be made are counted when the turn is accepted
            self.counters.tool_errors += is_error and not turn.tools.problem_of(call)
            named = {"tool_call_id": call.id, "name": call.name} if call.name else {}
            answers.append({"role": "tool", "content": text, **named})
        return answers

    async def open_endpoint(self) -> Access:
        """Return the address and the key with which an OpenAI client finds the model of this
        episode until it ends; the same for every call.
        """
        return await self._open_endpoint(self)

    def observe(self, observation: Observation) -> None:
        """Append an observation to the sequence that continues the prompt: see Branch.observe."""
        self._first.observe(observation)

    def reward_turn(self, reward: float, turn: Turn | None = None) -> None:
        """Add to the reward of `turn`, as `generate` returned it; without one, of the turn that
        ended last, in any sequence.
        """
        sampled = [branch for branch in self._branches if branch.turns]
        if turn is not None:
            sampled = [branch for branch in sampled if any(turn is other for other in branch.turns)]
            if not sampled:
                raise EpisodeError(
                    f"rollout {self.name}: the turn to reward is none of this episode's"
                )
        (sampled[-1] if sampled else self._first).reward_turn(reward, turn)

    def finish(
        self, reward: float | None = None, metrics: Mapping[str, float] | None = None
    ) -> Episode:
        """Return the episode, each sequence up to its last turn: observations after it are dropped,
        as nothing follows from them.

        Ends all branches; a branch without a turn is left out.
        Without a `reward` it is the sum of reward_turn, and without that the reward function's.
        Raises EpisodeError where the model was never asked, and for a reward or metric that is not
        finite.
        """
        results = [result for branch in self._branches if (result := branch.result) is not None]
        if not results:
            raise EpisodeError(
                f"rollout {self.name}: nothing was sampled; await session.generate() at least once"
            )
        # without a reward of the function or of a turn, the reward function scores the episode
        rewards = [value for branch in self._branches for value in branch.rewards]
        if reward is None and rewards:
            # exact: the sum does not depend on the order of the branches
            reward = math.fsum(rewards)
        for name, value in {"reward": reward, **(metrics or {})}.items():
            if value is not None:
                self.check_finite(name, value)
        self._is_finished = True
        values = {name: float(value) for name, value in (metrics or {}).items()}

        def join() -> Rollout:
            # the record of an episode is its last sequence, which holds the earlier ones
            *earlier, last = (result() for result in results)
            return last.after(earlier).named(self.name)

        self.episode = Episode(join, None if reward is None else float(reward), values)
        return self.episode

    @property
    def num_route_bytes(self) -> int:
        """Number of bytes of the expert ids of all turns."""
        parts = [part for branch in self._branches for part in branch.parts]
        return sum(0 if p.routed_experts is None else p.routed_experts.nbytes for p in parts)

    def end(self) -> None:
        """Give no further turn: the function returned or failed, and its tasks may still run."""
        self._is_finished = True

    def release(self) -> None:
        """Forget the records of the turns, which the finished episode has.

        A session is part of reference cycles: the garbage collector would free those of many
        sessions at once, and hold the event loop meanwhile.
        """
        self.episode = None
        for branch in self._branches:
            branch.release()

    def unfinished(self) -> Rollout | None:
        """Return the sequences that a later run of the episode continues (finish_reason abort),
        None where nothing was sampled.
        """
        parts = [branch.unfinished() for branch in self._asked]
        sampled = self.recorded.with_left([part for part in parts if part is not None])
        sequences = [replace(sequence, finish_reason="abort") for sequence in sampled]
        return sequences[-1].after(sequences[:-1]).named(self.name) if sequences else None

    @property
    def is_stopped(self) -> bool:
        """True where sampling ended while the episode ran: a later run may continue its turns."""
        return self.stopped_by is not None or self._call.is_over

    def span(self, name: str, kind: str) -> AbstractContextManager[object]:
        """Return a span of the trace, on the lane of this episode."""
        return self._call.trace.span(name, kind, thread="episode", key=self.name)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the block as waiting for the model."""
        # turns of several branches overlap: the clock runs from the first to the last of them
        if not self._num_waiting:
            self._waiting_since = time.monotonic()
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1
            if not self._num_waiting:
                self.sampling_seconds += time.monotonic() - self._waiting_since

    def asked(self, branch: Branch) -> None:
        """Note that a turn of `branch` is asked for."""
        self._asked[branch] = None

    def ended(self, branch: Branch, *, is_full: bool) -> None:
        """Note that a turn of `branch` ended: it is the last of the sequences now.

        is_full: it was cut off at the end of the context.
        """
        self.is_full = is_full
        self._branches.remove(branch)
        self._branches.append(branch)
        self.idle_since = time.monotonic()

    def check_finite(self, name: str, value: object) -> None:
        if not is_finite(value):
            raise EpisodeError(
                f"rollout {self.name}: {name} = {value!r}: must be a finite number of float32"
            )

    def full(self, why: str) -> ContextFull:
        """Return the error of a turn that has no room, and note it."""
        self.is_full = True
        return ContextFull(f"rollout {self.name}: {why}")

    def check_open(self) -> None:
        """Raise EpisodeError after `finish`."""
        if self._is_finished:
            raise EpisodeError(
                f"rollout {self.name}: the episode is finished; no sequence of it can be continued"
            )

    def check_tokens(self, tokens: Sequence[object], what: str) -> array[int]:
        """Return `tokens` as ints.  Raises EpisodeError for what is no token id of the model."""
        return checked_tokens(tokens, self.vocab_size, f"rollout {self.name}: {what}")
