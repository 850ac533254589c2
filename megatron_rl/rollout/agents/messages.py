"""Requests and answers of Anthropic's messages, as far as a sampler for training can serve them.

The conversation is that of chat completions: blocks become messages of OpenAI's form, and turns
become blocks.  Fields that would change how tokens are sampled are refused as there.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, FailFast, Field

from megatron_rl.rollout.agents.chat import Message
from megatron_rl.rollout.agents.episode import Turn
from megatron_rl.rollout.agents.fields import RequestFields
from megatron_rl.rollout.agents.question import (
    CONTEXT_FULL,
    ApiError,
    Json,
    Question,
    split_prefill,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
"""Status -> type of an error; all others are invalid_request_error."""


class ToolChoice(BaseModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: Literal[False] = False


class ToolParam(BaseModel):
    """A tool of the client.  Tools of Anthropic's servers have another `type`."""

    name: Annotated[str, Field(min_length=1)]
    input_schema: Json
    description: str = ""
    type: Literal["custom"] | None = None


class CountRequest(RequestFields):
    """The fields of a conversation."""

    without_effect: ClassVar = {
        **dict.fromkeys(
            ("metadata", "service_tier", "cache_control", "diagnostics", "user_profile_id"),
            "bookkeeping and caches of the service",
        ),
        "thinking": "the model thinks as it was trained to, and the answer's first block has it",
    }
    refused: ClassVar = {
        "container": "nothing is executed here",
        "inference_geo": "the model is where the run is",
        "output_config": "a schema would change the distribution",
    }

    model: str
    """Any name."""
    messages: Annotated[list[Json], FailFast()]
    """Blocks of text, tool calls, tool results (their text) and thinking. A last message of the
    assistant's is continued by the answer."""
    system: str | list[Json] = ""
    """Text."""
    tools: list[ToolParam] = Field(default_factory=list)
    """Tools of the client; those of Anthropic's servers are refused."""
    tool_choice: ToolChoice = ToolChoice(type="auto")
    """The answer is sampled freely, as in chat completions; `disable_parallel_tool_use` is
    refused."""
    chat_template_kwargs: Json = Field(default_factory=dict)
    """Settings that the format of `agent.renderer` has, as in chat completions."""

    @property
    def question(self) -> Question:
        """The conversation in OpenAI's form.  Raises ApiError for a block that has no text."""
        choice, system = self.tool_choice, text_of(self.system)
        schemas = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                },
            }
            for tool in self.tools
        ]
        first = [{"role": "system", "content": system}] if system else []
        parts = [part for message in self.messages for part in parts_of(message)]
        messages: Sequence[Message] = [*first, *merged(parts)]
        prefill = ""
        if messages and messages[-1]["role"] == "assistant":
            messages, prefill = split_prefill(messages)
        return Question(
            messages=messages,
            tools=[] if choice.type == "none" else schemas,
            must_call={"any": "", "tool": choice.name or ""}.get(choice.type),
            prefill=prefill,
            template=self.chat_template_kwargs,
        )


class MessagesRequest(CountRequest):
    """The fields of a request that are read."""

    max_tokens: Annotated[int, Field(ge=1)]
    """At most what is left of the context."""
    stop_sequences: list[str] = Field(default_factory=list)
    """Any texts: the answer ends before the first match."""
    temperature: float | None = None
    """Only the run's (`rollout.temperature`)."""
    stream: bool = False
    """A delta for each block, after the turn was sampled."""

    @property
    def question(self) -> Question:
        return replace(super().question, limit=self.max_tokens, stops=self.stop_sequences)

    def answer(self, turns: Sequence[Turn], tokenizer: PreTrainedTokenizerBase) -> Json:
        (turn,) = turns
        reason = stop_reason(turn)
        return {
            **self._head(),
            "content": blocks_of(turn),
            "stop_reason": reason,
            "stop_sequence": turn.stop,
            "usage": {"input_tokens": turn.num_prompt_tokens, "output_tokens": len(turn.token_ids)},
        }

    def events(self, turns: Sequence[Turn], tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
        """Yield the answer with one delta for each block, after it was sampled."""
        (turn,) = turns
        reason = stop_reason(turn)
        used: Json = {"input_tokens": turn.num_prompt_tokens, "output_tokens": 0}
        start = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None}
        yield event("message_start", message={**start, "usage": used})
        for index, block in enumerate(blocks_of(turn)):
            empty, deltas = opened(block)
            yield event("content_block_start", index=index, content_block=empty)
            for delta in deltas:
                yield event("content_block_delta", index=index, delta=delta)
            yield event("content_block_stop", index=index)
        end = {"stop_reason": reason, "stop_sequence": turn.stop}
        yield event("message_delta", delta=end, usage={"output_tokens": len(turn.token_ids)})
        yield event("message_stop")

    def _head(self) -> Json:
        name = f"msg_{uuid.uuid4().hex}"
        return {"id": name, "type": "message", "role": "assistant", "model": self.model}


def stop_reason(turn: Turn) -> str:
    """Return why the turn ended."""
    if turn.finish_reason == "length":
        return "max_tokens"
    if turn.stop is not None:
        return "stop_sequence"
    return "tool_use" if "tool_calls" in turn.message else "end_turn"


def parts_of(message: Json) -> Iterator[Json]:
    """Yield the messages of OpenAI's form that hold the blocks of one message, in order.

    Raises ApiError for a role or a block that cannot be written as text.
    """
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise ApiError(
            400, f"messages: role = {role!r}, must be user or assistant", param="messages"
        )
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
        raise ApiError(
            400, f"messages: content = {content!r:.80}: must be text or blocks", param="messages"
        )
    if role == "assistant":
        yield assistant(blocks)
        return
    texts: list[Json] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            yield from user(texts)
            texts = []
            answer = text_of(block.get("content") or "")
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": answer}
        else:
            texts.append(block)
    yield from user(texts)


def merged(messages: Sequence[Json]) -> list[Json]:
    """Join the assistant's messages that follow one another, as Anthropic does: a client that gave
    the beginning of an answer may send what followed as a message of its own.
    """
    joined: list[Json] = []
    for message in messages:
        if joined and joined[-1]["role"] == message["role"] == "assistant":
            before: Mapping[str, Any] = joined[-1]
            # texts and lists of calls
            both = before.keys() & message.keys() - {"role"}
            added: Json = {name: before[name] + message[name] for name in both}
            joined[-1] = {**before, **message, **added}
        else:
            joined.append(message)
    return joined


def user(blocks: Sequence[Json]) -> Iterator[Json]:
    if blocks:
        yield {"role": "user", "content": text_of(blocks)}


def assistant(blocks: Sequence[Mapping[str, Any]]) -> Json:
    """Return the model's message: text, thinking, and calls of tools."""
    kinds = ("tool_use", "thinking")
    message: Json = {
        "role": "assistant",
        "content": text_of([block for block in blocks if block.get("type") not in kinds]),
    }
    if thinking := [str(b.get("thinking", "")) for b in blocks if b.get("type") == "thinking"]:
        message["reasoning_content"] = "".join(thinking)
    if calls := [block for block in blocks if block.get("type") == "tool_use"]:
        message["tool_calls"] = [
            {
                "id": call.get("id"),
                "type": "function",
                "function": {
                    "name": call.get("name"),
                    "arguments": unparsed(call.get("input")),
                },
            }
            for call in calls
        ]
    return message


def text_of(content: object) -> str:
    """Return the text of a content.  Raises ApiError for a block that is no text, by its type."""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for block in content if isinstance(content, Sequence) else [content]:
        if isinstance(block, Mapping) and block.get("type") == "text":
            texts.append(str(block.get("text", "")))
        else:
            kind = block.get("type") if isinstance(block, Mapping) else block
            raise ApiError(
                400, f"messages: a block of type {kind!r:.40} is no text; remove it",
                param="messages",
            )  # fmt: skip
    return "".join(texts)


def blocks_of(turn: Turn) -> list[Json]:
    """Return the turn as blocks: thinking, text, calls of tools."""
    message: dict[str, Any] = turn.message
    blocks: list[Json] = []
    if message.get("reasoning_content"):
        # a client sends the signature back, and nothing reads it
        blocks.append(
            {"type": "thinking", "thinking": message["reasoning_content"], "signature": "none"}
        )
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", ()):
        function = call["function"]
        arguments = parsed(function["arguments"])
        blocks.append(
            {"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments}
        )
    return blocks


def parsed(arguments: str) -> Json:
    """Return a call's arguments; those that are no JSON object stay one text, for the client to
    refuse.
    """
    try:
        values = json.loads(arguments)
        json.dumps(values, allow_nan=False)  # NaN and 1e999 are no JSON
    except (ValueError, RecursionError):
        values = None
    return values if isinstance(values, dict) else {"unparsed": arguments}


def unparsed(arguments: object) -> str:
    """Return the text of a call's arguments, the inverse of `parsed`."""
    text = arguments.get("unparsed") if isinstance(arguments, Mapping) else None
    if isinstance(text, str) and parsed(text) == arguments:
        return text
    return json.dumps(arguments, ensure_ascii=False)


def opened(block: Json) -> tuple[Json, list[Json]]:
    """Return a block as its stream begins, and the deltas that complete it."""
    kind = block["type"]
    if kind == "tool_use":
        text = json.dumps(block["input"], ensure_ascii=False)
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": text}]
    if kind == "thinking":
        deltas: list[Json] = [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block["signature"]},
        ]
        return {"type": kind, "thinking": "", "signature": ""}, deltas
    return {"type": kind, "text": ""}, [{"type": "text_delta", "text": block["text"]}]


def event(kind: str, **fields: object) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"


def error_body(error: ApiError) -> Json:
    """Return an error in Anthropic's form; `code` is ours, for a full context."""
    kind = ERRORS.get(error.status, "invalid_request_error")
    details: Json = {"type": kind, "message": str(error)}
    if error.code == CONTEXT_FULL:
        details["code"] = CONTEXT_FULL
    return {"type": "error", "error": details}
