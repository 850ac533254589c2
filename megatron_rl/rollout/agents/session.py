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
import operator
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property
from numbers import Real
from typing import cast

from transformers import PreTrainedTokenizerBase

from megatron_rl.launch.trace import OFF, Trace
from megatron_rl.records import Prompt, Rollout
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
from megatron_rl.rollout.agents.recorded import RecordedTurns
from megatron_rl.rollout.agents.tools import Tool, Tools
from megatron_rl.rollout.client.call import SampleTurn
from megatron_rl.rollout.client.counters import RolloutCounters


class Session:
    """The model as one episode sees it.  `max_tokens` bounds a sequence: all its turns with what
    the environment says.

    Most episodes are one sequence: turns and observations of the session itself, which continue the
    prompt.  `branch` opens further ones.
    max_episode_tokens: bounds turns and observations of all sequences; 0 = none.
    sequence_limit: (tokens, setting) of the longest sequence, its prompt included, that servers and
    trainer take.
    server: URL of the one that was asked last.
    recorded: what this episode had when it was cut short.  stopped_by: what ended sampling
    meanwhile.
    sampling_seconds: in which it waited for the model, for turns of several branches at the same
    time once.
    is_refused: the last messages were longer than a sequence can be.
    episode: what `finish` returned last.
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
        recorded: Rollout | None = None,
        counters: RolloutCounters | None = None,
        trace: Trace = OFF,
        open_endpoint: Callable[[Session], Awaitable[Access]] | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self.prompt, self.name, self.max_tokens, self.vocab_size = (
            prompt,
            name,
            max_tokens,
            vocab_size,
        )
        self.tokenizer, self.chat, self.sample = tokenizer, chat, sample
        self.max_episode_tokens, self.sequence_limit = max_episode_tokens, sequence_limit
        self.server, self.recorded = "", RecordedTurns(recorded)
        self.stopped_by: Exception | None = None
        self.sampling_seconds, self._num_waiting, self._waiting_since = 0.0, 0, 0.0
        self.counters, self._open_endpoint = counters or RolloutCounters(), open_endpoint
        self._is_over = is_over
        self._trace = trace
        self.is_refused = False
        self.episode: Episode | None = None
        self._branches: list[Branch] = []  # in the order of their last turns
        self._is_finished = False

    @cached_property
    def _first(self) -> Branch:
        """What continues the prompt, unless everything happens in branches."""
        return self.branch(self.prompt.token_ids)

    def branch(self, token_ids: Sequence[int]) -> Branch:
        """A further sequence of this episode, which starts with `token_ids`: all of them are its
        prompt.

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
        """Of turns and observations in all sequences."""
        return sum(branch.num_tokens for branch in self._branches)

    @property
    def is_full(self) -> bool:
        """Whether the sequence of the last turn was cut off, or found no room for another."""
        sampled = [branch for branch in self._branches if branch.turns]
        return bool(sampled) and sampled[-1].is_full

    async def generate(
        self,
        given: Sequence[Message] | Sequence[int] | None = None,
        *,
        tools: Sequence[Tool] = (),
        max_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> Turn:
        """The model's next turn, of the sequence that continues the prompt: see Branch.generate.

        given: all messages (rollout/agents/conversation.py says which sequence they continue), or
        all token ids of the input, which start a sequence of their own where they do not begin with
        `token_ids`.
        tools: what the model may call; needs messages, whose format describes them in the prompt.
        """
        parts: list[object] = [] if given is None else list(given)
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
        ids, branch = self.check_tokens(parts, "given"), self._first
        if ids and tuple(ids[: len(branch.token_ids)]) != branch.token_ids:
            branch = self.branch(ids)
        elif ids:
            branch.observe(ids[len(branch.token_ids) :])
        return await branch.generate(max_tokens=max_tokens, stop_token_ids=stop_token_ids)

    @cached_property
    def conversations(self) -> Conversations:
        """Messages of this episode.  Raises EpisodeError without agent.renderer."""
        if self.chat is None:
            raise EpisodeError(
                f"rollout {self.name}: messages need agent.renderer, the format of the model's"
                " chat; set it"
            )
        return Conversations(self, self.chat, self.counters)

    async def call_tools(self, turn: Turn) -> list[Message]:
        """Call the tools that `turn` asks for, one after another: their answers, as messages; []
        where it asks for none.

        What cannot be called (no such tool, arguments against its type hints) is answered by what
        is wrong.
        """
        answers: list[Message] = []
        for call in turn.reply.tool_calls:
            text, is_error = await turn.tools.answer(call)
            # those are counted already
            self.counters.tool_errors += is_error and not turn.tools.problem_of(call)
            named = {"tool_call_id": call.id, "name": call.name} if call.name else {}
            answers.append({"role": "tool", "content": text, **named})
        return answers

    async def open_endpoint(self) -> Access:
        """Where an OpenAI client finds the model of this episode, until it ends; the same for every
        call.
        """
        if self._open_endpoint is None:
            raise EpisodeError(f"rollout {self.name}: this session has no endpoint")
        return await self._open_endpoint(self)

    def observe(self, observation: Observation) -> None:
        """What the environment says to it: see Branch.observe."""
        self._first.observe(observation)

    def reward_turn(self, reward: float, turn: Turn | None = None) -> None:
        """Add to the reward of `turn`, as `generate` returned it; without one, of the turn that
        ended last, in any sequence.
        """
        sampled = [branch for branch in self._branches if branch.turns]
        if turn is not None:
            sampled = [branch for branch in sampled if any(each is turn for each in branch.turns)]
            if not sampled:
                raise EpisodeError(
                    f"rollout {self.name}: the turn to reward is none of this episode's"
                )
        (sampled[-1] if sampled else self._first).reward_turn(reward, turn)

    def finish(
        self, reward: float | None = None, metrics: Mapping[str, float] | None = None
    ) -> Episode:
        """The episode, each sequence up to its last turn: what was observed after it is dropped, as
        nothing follows from it.

        Ends all branches; those without a turn are left out.
        Without a `reward` it is the sum of reward_turn, and without that the reward function's.
        Raises EpisodeError where the model was never asked, and for a reward or metric that is not
        finite.
        """
        sequences = [rollout for branch in self._branches if (rollout := branch.result) is not None]
        if not sequences:
            raise EpisodeError(
                f"rollout {self.name}: nothing was sampled; await session.generate() at least once"
            )
        if reward is None and any(rollout.episode.turn_rewards for rollout in sequences):
            reward = math.fsum(
                value for rollout in sequences for value in rollout.episode.turn_rewards
            )
        for name, value in {"reward": reward, **(metrics or {})}.items():
            if value is not None:
                self.check_finite(name, value)
        self._is_finished = True
        values = {name: float(value) for name, value in (metrics or {}).items()}
        *earlier, last = sequences
        rollout = last.after(earlier).named(self.name)
        self.episode = Episode(rollout, None if reward is None else float(reward), values)
        return self.episode

    def end(self) -> None:
        """Its function returned or failed: tasks that still run get no further turn."""
        self._is_finished = True

    def unfinished(self) -> Rollout | None:
        """What a later run of the episode continues (finish_reason abort); None for nothing."""
        found = [
            sequence for branch in self._branches if (sequence := branch.unfinished()) is not None
        ]
        sequences = [
            replace(sequence, finish_reason="abort") for sequence in self.recorded.with_left(found)
        ]
        return sequences[-1].after(sequences[:-1]).named(self.name) if sequences else None

    @property
    def is_stopped(self) -> bool:
        """True where sampling ended while the episode ran: a later run may continue what there is."""
        return self.stopped_by is not None or self._is_over()

    def span(self, name: str, kind: str) -> AbstractContextManager[object]:
        """Of the trace, on a lane of this episode."""
        return self._trace.span(name, kind, thread="episode", key=self.name)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A turn is sampled inside."""
        if not self._num_waiting:
            self._waiting_since = time.monotonic()
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1
            if not self._num_waiting:
                self.sampling_seconds += time.monotonic() - self._waiting_since

    def ended(self, branch: Branch) -> None:
        """A turn of `branch` ended."""
        self._branches.remove(branch)
        self._branches.append(branch)

    def check_finite(self, name: str, value: object) -> None:
        if not (isinstance(value, Real) and math.isfinite(value)):
            raise EpisodeError(f"rollout {self.name}: {name} = {value!r}: must be a finite number")

    def full(self, why: str) -> ContextFull:
        return ContextFull(f"rollout {self.name}: {why}")

    def check_open(self) -> None:
        """Raise EpisodeError after `finish`."""
        if self._is_finished:
            raise EpisodeError(
                f"rollout {self.name}: the episode is finished; no sequence of it can be continued"
            )

    def check_tokens(self, given: Sequence[object], what: str) -> list[int]:
        """`given` as ints.  Raises EpisodeError for what is no token id (the digits of a text are
        none), and for one outside the vocabulary, which kills an SGLang server."""
        try:
            ids = [operator.index(cast("int", token)) for token in given]
        except TypeError as error:
            raise EpisodeError(
                f"rollout {self.name}: {what}: must be integers, got {given!r:.80}: {error}"
            ) from error
        wrong = [token for token in ids if not 0 <= token < self.vocab_size]
        if wrong:
            raise EpisodeError(
                f"rollout {self.name}: {what} token id {wrong[0]}, the model's vocabulary has"
                f" {self.vocab_size}"
            )
        return ids
