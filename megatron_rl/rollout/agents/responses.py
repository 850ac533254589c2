"""Requests and answers of OpenAI's Responses, as far as a sampler for training can serve them.

The conversation is that of chat completions: input items become messages of OpenAI's form, and
turns become output items.  An answer is kept under its id for previous_response_id, as long as its
episode runs.  Fields that would change how tokens are sampled are refused as in chat completions.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from megatron_rl.rollout.agents.chat import Message
from megatron_rl.rollout.agents.episode import Turn
from megatron_rl.rollout.agents.fields import RequestFields
from megatron_rl.rollout.agents.question import MODEL, ApiError, Json, Question

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Answered = dict[str, Sequence[Message]]
"""Id of an answer -> the messages up to it, itself included, without instructions: each request
brings its own."""
TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
"""Types of parts that are text."""
ORDER = {"reasoning": 0, "message": 1, "function_call": 2}
"""Type -> place of the assistant's items in one answer."""


class FunctionTool(BaseModel):
    """A tool of the client.  Tools of OpenAI's servers have another `type`."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None
    """Without effect: a grammar would change the distribution."""

    @property
    def schema_of_chat(self) -> Json:
        """The tool as chat completions write it."""
        function = {
            "name": self.name,
            "description": self.description or "",
            "parameters": self.parameters or {"type": "object", "properties": {}},
        }
        return {"type": "function", "function": function}


Includable = Literal[
    "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url",
    "computer_call_output.output.image_url", "code_interpreter_call.outputs",
]  # fmt: skip


class NamedTool(BaseModel):
    """A tool_choice that names a function."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1)]


class TextConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: dict[Literal["type"], Literal["text"]] | None = None
    verbosity: str | None = None
    """Without effect: the model writes as it was trained to."""


class ResponsesRequest(RequestFields):
    """The fields of a request that are read."""

    without_effect: ClassVar = {
        **dict.fromkeys(
            ("user", "metadata", "service_tier", "safety_identifier"), "bookkeeping of the service"
        ),
        **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention"), "caches of the service"),
        "stream_options": "padding of a stream",
        "max_tool_calls": "a limit for tools of a server",
        "reasoning": "the model thinks as it was trained to, and the answer's first item has it",
    }
    refused: ClassVar = {
        "conversation": "send the items again, or previous_response_id",
        "prompt": "no templates of a service are here: send their text",
    }

    model: str = MODEL
    """Any name."""
    input: str | list[Json] = Field(default_factory=list)
    """Text, or items: messages of text, reasoning, function calls and their outputs. Others are
    refused by their type."""
    instructions: str = ""
    """The system's message, of this request alone."""
    previous_response_id: str | None = None
    """An answer of this episode that was read to its end; `input` follows it."""
    store: bool = True
    """False: the answer is not kept for `previous_response_id`."""
    tools: list[FunctionTool] = Field(default_factory=list)
    """Tools of type function; `strict` has no effect."""
    tool_choice: Literal["auto", "none", "required"] | NamedTool = "auto"
    """The answer is sampled freely, as in chat completions."""
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    """At most what is left of the context."""
    temperature: float | None = None
    """Only the run's (`rollout.temperature`)."""
    stream: bool = False
    """A delta for each item, after the turn was sampled."""
    text: TextConfig = TextConfig()
    """Format text only; `verbosity` has no effect."""
    truncation: Literal["disabled"] = "disabled"
    """Only disabled: a full context is an error."""
    background: Literal[False] = False
    """Only false."""
    include: list[Includable] = Field(default_factory=list)
    """Nothing is included: neither results of tools of a server, nor encrypted reasoning, which is
    returned as text. `message.output_text.logprobs` is refused; chat completions have them."""
    chat_template_kwargs: Json = Field(default_factory=dict)
    """Settings that the format of `agent.renderer` has, as in chat completions."""
    _id: str = PrivateAttr(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    _created: float = PrivateAttr(default_factory=time.time)
    _messages: list[Message] = PrivateAttr(default_factory=list)

    @property
    def question(self) -> Question:
        instructions, choice = [{"role": "system", "content": self.instructions}], self.tool_choice
        must_call = choice.name if isinstance(choice, NamedTool) else None
        return Question(
            [*(instructions if self.instructions else []), *self._messages],
            [] if choice == "none" else [tool.schema_of_chat for tool in self.tools],
            "" if choice == "required" else must_call,
            limit=self.max_output_tokens,
            template=self.chat_template_kwargs,
        )

    def continue_from(self, answered: Answered) -> None:
        """Read the input, after the messages of previous_response_id.

        Raises ApiError for an id that is none of this episode, and for an item that is no text.
        """
        earlier: Sequence[Message] = ()
        if (name := self.previous_response_id) is not None:
            if name not in answered:
                raise ApiError(
                    404,
                    f"previous_response_id = {name!r:.80}: is that of no answer of this episode"
                    " that was read to its end and stored; send its items as input",
                    code="previous_response_not_found",
                    param="previous_response_id",
                )
            earlier = answered[name]
        self._messages = [*earlier, *messages_of(self.input)]

    def keep(self, answered: Answered, turns: Sequence[Turn]) -> None:
        """Keep the answer for previous_response_id, unless store is false."""
        if self.store:
            (turn,) = turns
            answered[self._id] = [*self._messages, turn.message]

    def answer(self, turns: Sequence[Turn], tokenizer: PreTrainedTokenizerBase) -> Json:
        (turn,) = turns
        return self._ended(turn, items_of(turn))

    def events(self, turns: Sequence[Turn], tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
        """Yield the answer with one delta for each item, after it was sampled."""
        for number, event in enumerate(self._events(turns)):
            data = json.dumps({**event, "sequence_number": number})
            yield f"event: {event['type']}\ndata: {data}\n\n"

    def _events(self, turns: Sequence[Turn]) -> Iterator[Json]:
        (turn,) = turns
        items = items_of(turn)
        start = {**self._head(), "status": "in_progress", "output": [], "usage": None}
        yield {"type": "response.created", "response": start}
        yield {"type": "response.in_progress", "response": start}
        for index, item in enumerate(items):
            yield from ({**event, "output_index": index} for event in events_of(item))
        end = self._ended(turn, items)
        yield {"type": f"response.{end['status']}", "response": end}

    def _head(self) -> Json:
        """Return the fields that are known before the answer is sampled."""
        return {
            **self.model_dump(exclude={"input", "stream", "include"}),
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "error": None,
            "incomplete_details": None,
            "parallel_tool_calls": True,
        }

    def _ended(self, turn: Turn, items: Sequence[Json]) -> Json:
        """Return the whole answer."""
        is_cut = turn.finish_reason == "length"
        prompt, sampled = turn.num_prompt_tokens, len(turn.token_ids)
        return {
            **self._head(),
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": items,
            "usage": {
                "input_tokens": prompt,
                # clients need both details; neither is counted here
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + sampled,
            },
        }


def messages_of(content: str | Sequence[Json]) -> list[Message]:
    """Return the messages of chat completions that hold the input items, in order.

    Reasoning, text and calls of one answer become one message.  Raises ApiError, naming the type,
    for an item or a part that is no text.
    """
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    messages: list[Json] = []
    last: int | None = None  # the place in an answer of the item before
    for item in content:
        kind = item.get("type", "message")
        place = ORDER.get(str(kind))
        if kind == "message" and item.get("role") != "assistant":
            place = None
        if place is None:
            messages.append(input_message(item))
        else:
            # the items of an answer come in this order, and its text is one item
            if last is None or place < last or place == last == ORDER["message"]:
                messages.append({"role": "assistant", "content": ""})
            add_to_answer(messages[-1], item)
        last = place
    return list(messages)


def input_message(item: Json) -> Json:
    """Return the message of an item that the model did not write."""
    kind, role = item.get("type", "message"), item.get("role")
    if kind == "function_call_output":
        output = text_of(item.get("output") or "")
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    if kind != "message":
        raise refused(f"an item of type {kind!r:.40} is not known here; remove it")
    if role not in ("user", "system", "developer"):
        raise refused(f"role = {role!r:.40}, must be user, assistant, system or developer")
    return {"role": role, "content": text_of(item.get("content"))}


def add_to_answer(message: Json, item: Mapping[str, Any]) -> None:
    """Add an item of the assistant to its message."""
    if item.get("type") == "reasoning":
        text = text_of(item.get("content") or item.get("summary") or "")
        message["reasoning_content"] = f"{message.get('reasoning_content', '')}{text}"
    elif item.get("type") == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        calls = message.setdefault("tool_calls", [])
        assert isinstance(calls, list)
        calls.append(call)
    else:
        message["content"] = text_of(item.get("content"))


def text_of(content: object) -> str:
    """Return the text of a content.  Raises ApiError for a part that is no text, by its type."""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, Mapping) else part
        if not isinstance(part, Mapping) or kind not in TEXTS:
            raise refused(f"a part of type {kind!r:.40} is no text; remove it")
        texts.append(str(part.get("text", "")))
    return "".join(texts)


def items_of(turn: Turn) -> list[Json]:
    """Return the turn as items: reasoning, text, calls of functions."""
    message: dict[str, Any] = turn.message
    items: list[Json] = []
    if thinking := message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": thinking}]
        items.append({"type": "reasoning", "id": new_id("rs"), "summary": [], "content": content})
    calls = message.get("tool_calls", ())
    if message["content"] or not calls:
        content = [{"type": "output_text", "text": message["content"], "annotations": []}]
        items.append(
            {"type": "message", "id": new_id("msg"), "role": "assistant", "content": content}
        )
    items += [
        {"type": "function_call", "id": new_id("fc"), "call_id": call["id"], **call["function"]}
        for call in calls
    ]
    # what comes before the last item is complete
    status = "incomplete" if turn.finish_reason == "length" else "completed"
    return [{**item, "status": status if item is items[-1] else "completed"} for item in items]


def events_of(item: Mapping[str, Any]) -> Iterator[Json]:
    """Yield the events of one item, with one delta for its text or its arguments."""
    named = {"item_id": item["id"]}
    is_call = item["type"] == "function_call"
    empty: Json = {"arguments": ""} if is_call else {"content": []}
    start = {**item, **empty, "status": "in_progress"}
    yield {"type": "response.output_item.added", "item": start}
    if is_call:
        kind, text = "response.function_call_arguments", item["arguments"]
        yield {"type": f"{kind}.delta", **named, "delta": text}
        yield {"type": f"{kind}.done", **named, "arguments": text, "name": item["name"]}
    else:
        (part,) = item["content"]
        named["content_index"] = 0
        kind, text = f"response.{part['type']}", part["text"]
        logprobs: Json = {"logprobs": []} if part["type"] == "output_text" else {}
        yield {"type": "response.content_part.added", **named, "part": {**part, "text": ""}}
        yield {"type": f"{kind}.delta", **named, **logprobs, "delta": text}
        yield {"type": f"{kind}.done", **named, **logprobs, "text": text}
        yield {"type": "response.content_part.done", **named, "part": part}
    yield {"type": "response.output_item.done", "item": item}


def refused(why: str) -> ApiError:
    return ApiError(400, f"input: {why}", param="input")


def new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
