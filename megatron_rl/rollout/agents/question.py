"""A request of the endpoint without its protocol: what is asked of the model, and what went wrong.

A protocol (completions.py, responses.py, messages.py) reads its requests into a DoorRequest, and
writes turns and ApiErrors in its own form.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from megatron_rl.rollout.agents.chat import Message, Schema, text_of
from megatron_rl.rollout.agents.episode import ContextFull, EpisodeError, EpisodeStopped, Turn
from megatron_rl.rollout.agents.prefill import encoded
from megatron_rl.rollout.agents.session import Session
from megatron_rl.rollout.agents.tools import Tools

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
class Question:
    """The next turn of a conversation."""

    messages: Sequence[Message]
    tools: Sequence[Schema] = ()
    must_call: str | None = None
    """The tool that the turn must call, see Tools."""
    limit: int | None = None
    """Longest turn; None: as long as the context allows."""
    stops: Sequence[str] = ()
    """Texts that end the turn."""
    n: int = 1
    """Number of turns, side by side."""
    prefill: str = ""
    """Text with which the answer begins."""
    template: Mapping[str, object] = field(default_factory=dict)
    """Values of the format's own settings: chat_template_kwargs."""


class DoorRequest(Protocol):
    """A request in a protocol."""

    stream: bool

    @property
    def question(self) -> Question: ...

    def answer(self, turns: Sequence[Turn], tokenizer: PreTrainedTokenizerBase) -> Json:
        """Return the body of the answer."""
        ...

    def events(self, turns: Sequence[Turn], tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
        """Yield the answer as server-sent events, for stream = true."""
        ...


@contextlib.asynccontextmanager
async def answers(session: Session, asked: Question) -> AsyncIterator[list[Turn]]:
    """Sample `asked.n` turns side by side and yield them; they are part of the episode where the
    block, which writes them, ends without an error.  Raises ApiError.
    """
    try:
        tools = Tools(asked.tools, asked.must_call)
        if "" in asked.stops:
            raise ApiError(400, "stop = '': must be a text; remove it", param="stop")
        sample = session.conversations.sample
        with session.sequences.reading() as read:
            tasks = [
                asyncio.create_task(
                    sample(
                        read,
                        asked.messages,
                        tools,
                        max_tokens=asked.limit,
                        stops=asked.stops,
                        prefill=asked.prefill,
                        template=asked.template,
                    )
                )
                for _ in range(asked.n)
            ]
            try:
                turns = await asyncio.gather(*tasks)
            finally:
                # where one failed, the others must not sample on
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            yield turns
    except ContextFull as error:
        raise ApiError(400, str(error), code=CONTEXT_FULL, param="messages") from error
    except EpisodeStopped as error:  # 410: clients do not try again
        raise ApiError(
            410, "sampling has ended, and with it this episode", code="episode_ended"
        ) from error
    except (ValueError, EpisodeError) as error:
        names = ("tools", "chat_template_kwargs")
        param = next((name for name in names if str(error).startswith(name)), "messages")
        raise ApiError(400, str(error), param=param) from error


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
        tokens = session.chat.render(asked.messages, Tools(asked.tools).schemas)
        return len(tokens) + len(encoded(asked.prefill, session.tokenizer, None).token_ids)
    except ValueError as error:
        raise ApiError(400, str(error), param="messages") from error
