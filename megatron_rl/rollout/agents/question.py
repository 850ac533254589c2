"""A request of the endpoint without its protocol: what is asked of the model, and what went wrong.

A protocol (completions.py, text_completions.py, responses.py, messages.py) reads its requests into
a DoorRequest, and writes turns and ApiErrors in its own form.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol

from megatron_rl.rollout.agents.chat import Message, Schema, text_of
from megatron_rl.rollout.agents.episode import ContextFull, EpisodeError, EpisodeStopped, Turn
from megatron_rl.rollout.agents.prefill import encoded
from megatron_rl.rollout.agents.raw_prompts import RawPrompt
from megatron_rl.rollout.agents.sequences import Answer
from megatron_rl.rollout.agents.session import Session
from megatron_rl.rollout.agents.tools import Tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Json = dict[str, object]

MODEL = "policy"
"""The model that /v1/models names; requests may name any."""
CONTEXT_FULL = "context_length_exceeded"
"""Code of the error of a full context, in every protocol."""


class ApiError(Exception):
    """An answer with a status other than 200."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


@dataclass(frozen=True)
class Limits:
    """The limits of a request: the length of its turns, and their number."""

    limit: int | None = field(default=None, kw_only=True)
    """Longest turn; None: as long as the context allows."""
    stops: Sequence[str] = field(default=(), kw_only=True)
    """Texts that end the turn."""
    n: int = field(default=1, kw_only=True)
    """Number of turns for one input."""


@dataclass(frozen=True)
class Question(Limits):
    """The next turn of a conversation."""

    input_name: ClassVar = "messages"
    """The field of the request that errors of the input name."""

    messages: Sequence[Message]
    tools: Sequence[Schema] = ()
    must_call: str | None = None
    """The tool that the turn must call, see Tools."""
    prefill: str = ""
    """Text with which the answer begins."""
    template: Mapping[str, object] = field(default_factory=dict)
    """Values of the format's own settings: chat_template_kwargs."""

    def turns(self, session: Session, answers: list[Answer]) -> list[Coroutine[None, None, Turn]]:
        """Return what samples the turns and adds them to `answers`.  Raises ValueError."""
        tools, sample = Tools(self.tools, self.must_call), session.conversations.sample
        return [
            sample(
                answers,
                self.messages,
                tools,
                max_tokens=self.limit,
                stops=self.stops,
                prefill=self.prefill,
                template=self.template,
            )
            for _ in range(self.n)
        ]


@dataclass(frozen=True)
class RawQuestion(Limits):
    """The turns that continue prompts without a chat format."""

    input_name: ClassVar = "prompt"

    prompts: Sequence[RawPrompt]
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the turn."""
    add_special_tokens: bool = True
    """The tokenizer adds its special tokens to a text that begins a sequence."""

    def turns(self, session: Session, answers: list[Answer]) -> list[Coroutine[None, None, Turn]]:
        """Return what samples `n` turns for each prompt, which are added to `answers`.

        Raises ValueError for a token to stop at that is outside the vocabulary, and what
        RawPrompts.begin raises.
        """
        for token in self.stop_token_ids:
            if not 0 <= token < session.vocab_size:
                raise ValueError(
                    f"stop_token_ids: {token}: the model's vocabulary has {session.vocab_size}"
                )
        # all of them first: a request with a wrong prompt samples nothing
        begun = [
            session.raw_prompts.begin(answers, prompt, add_special_tokens=self.add_special_tokens)
            for prompt in self.prompts
            for _ in range(self.n)
        ]
        return [
            session.raw_prompts.sample(
                answer,
                max_tokens=self.limit,
                stop_token_ids=self.stop_token_ids,
                stops=self.stops,
            )
            for answer in begun
        ]


class DoorRequest(Protocol):
    """A request in a protocol."""

    stream: bool

    @property
    def question(self) -> Question | RawQuestion: ...

    def answer(self, turns: Sequence[Turn], tokenizer: PreTrainedTokenizerBase) -> Json:
        """Return the body of the answer."""
        ...

    def events(self, turns: Sequence[Turn], tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
        """Yield the answer as server-sent events, for stream = true."""
        ...


@contextlib.asynccontextmanager
async def answers(session: Session, asked: Question | RawQuestion) -> AsyncIterator[list[Turn]]:
    """Sample the turns of `asked` side by side and yield them; they are part of the episode where
    the block, which writes them, ends without an error.  Raises ApiError.
    """
    try:
        if "" in asked.stops:
            raise ApiError(400, "stop = '': must be a text; remove it", param="stop")
        with session.sequences.reading() as read:
            tasks = [asyncio.create_task(turn) for turn in asked.turns(session, read)]
            try:
                turns = await asyncio.gather(*tasks)
            finally:
                # where one failed, the others must not sample on
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            yield turns
    except ContextFull as error:
        raise ApiError(400, str(error), code=CONTEXT_FULL, param=asked.input_name) from error
    except EpisodeStopped as error:  # 410: clients do not try again
        raise ApiError(
            410, "sampling has ended, and with it this episode", code="episode_ended"
        ) from error
    except (ValueError, EpisodeError) as error:
        raise refusal(error, asked) from error


def refusal(error: Exception, asked: Question | RawQuestion) -> ApiError:
    """Return the answer to a request that cannot be sampled, which names the field at fault."""
    names = ("tools", "chat_template_kwargs", "stop_token_ids")
    param = next((name for name in names if str(error).startswith(name)), asked.input_name)
    return ApiError(400, str(error), param=param)


def split_prefill(messages: Sequence[Message]) -> tuple[Sequence[Message], str]:
    """Split off the last message, the assistant's, which the answer continues; returns its text.

    Raises ApiError where it has anything but text.
    """
    *earlier, last = messages
    try:
        text = text_of(last.get("content"))
    except ValueError as error:
        raise ApiError(400, str(error), param="messages") from error
    if not text or last.get("tool_calls") or last.get("reasoning_content"):
        raise ApiError(
            400,
            "messages: the last one is the assistant's, which the answer continues: it must have"
            " text, and neither tool calls nor thinking; remove them, or the message",
            param="messages",
        )
    return earlier, text


def num_tokens(session: Session, asked: Question) -> int:
    """Return the number of tokens of the messages, written from their start with what opens the
    model's turn.

    Raises ApiError for messages that the format cannot hold, and without agent.renderer.
    """
    if session.chat is None:
        raise ApiError(400, "messages need agent.renderer, the format of the model's chat; set it")
    try:
        chat = session.chat.with_template(asked.template)
        number = chat.num_tokens(asked.messages, Tools(asked.tools).schemas)
        return number + len(encoded(asked.prefill, session.tokenizer, None).token_ids)
    except ValueError as error:
        raise refusal(error, asked) from error
