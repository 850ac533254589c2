"""Messages <-> tokens in a model's own chat format, by the `renderers` library: sampled tokens are
kept as they are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
from transformers import PreTrainedTokenizerBase

if TYPE_CHECKING:
    from renderers import Message as FormatMessage
    from renderers import ParsedToolCall, RenderedTokens, Renderer, ToolSpec

NOT_NAMED = ("auto", "default", "custom")
"""Names that guess the format: a wrong guess trains on text that the model never sees when it is
served.
"""
ROLES = ("system", "developer", "user", "assistant", "tool")
RENDER_ERRORS = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    AssertionError,
    NotImplementedError,
)
"""What renderers raise for messages that their format cannot hold."""

CHARACTERS_PER_TOKEN = 16
"""More than most texts have; one that has more is encoded twice."""
MAX_DEPTH = 100
"""Of lists and mappings in the arguments of a call."""
KNOWN_CHARACTERS, MAX_KNOWN = 32, 1024
WITH_PLACES = {"add_special_tokens": False, "return_offsets_mapping": True}

Message = Mapping[str, object]
"""E.g. {"role": "tool", "content": "4"}; keys as in OpenAI's API."""
Schema = Mapping[str, object]
"""A tool, as in OpenAI's API: {"type": "function", "function": {"name": ..., "description": ...,
"parameters": ...}}.
"""


@dataclass(frozen=True)
class ToolCall:
    """A call that the model wrote.

    problem: why it cannot be made, "" where it can; name: "" where it has none.
    """

    id: str
    name: str
    arguments: object
    raw: str
    problem: str = ""

    @property
    def arguments_json(self) -> str:
        return (
            self.arguments
            if isinstance(self.arguments, str)
            else json.dumps(self.arguments, ensure_ascii=False)
        )


@dataclass(frozen=True)
class Reply:
    """A turn, read in the model's chat format."""

    content: str
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]

    @property
    def message(self) -> dict[str, object]:
        """As a message of OpenAI's API.

        A call without a name can be none there: its text is part of the content.
        """
        nameless = [call.raw for call in self.tool_calls if not call.name]
        message: dict[str, object] = {
            "role": "assistant",
            "content": "\n".join(filter(None, [self.content, *nameless])),
        }
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if calls := [call for call in self.tool_calls if call.name]:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments_json},
                }
                for call in calls
            ]
        return message


class KnownTexts:
    """`tokenizer`, which encodes a short text once: formats write the same headers before and after
    every message, and ask with one letter, each time, whether the tokenizer can tell where tokens
    lie in a text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._known = lru_cache(MAX_KNOWN)(partial(tokenizer.encode, add_special_tokens=False))
        self._located = lru_cache(MAX_KNOWN)(partial(tokenizer, **WITH_PLACES))

    def encode(self, text: str, *, add_special_tokens: bool = True, **named: object) -> list[int]:
        if add_special_tokens or named or len(text) > KNOWN_CHARACTERS:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens, **named)
        return list(self._known(text))

    def __call__(self, text: object, **named: object) -> object:
        if named != WITH_PLACES or not isinstance(text, str) or len(text) > KNOWN_CHARACTERS:
            return self._tokenizer(text, **named)
        return copy(self._located(text))

    def __getattr__(self, name: str) -> object:
        return getattr(self._tokenizer, name)


class Chat:
    """agent.renderer with the model's tokenizer.  Raises ValueError, naming the key, where it does
    not know the format.

    history: agent.history; split follows the format, which may drop the thinking of earlier turns.
    longest: tokens of the longest sequence, None where that is not known.
    """

    def __init__(
        self,
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        history: Literal["keep", "split"] = "keep",
        longest: int | None = None,
    ) -> None:
        from renderers import create_renderer  # here: it takes a second
        from renderers.configs import config_from_name

        self.name, self._tokenizer, self._longest = name, tokenizer, longest
        try:
            if name in NOT_NAMED:
                raise ValueError("must be the name of one format")
            # many templates drop the thinking of earlier turns, but a sequence cannot lose tokens
            # that were sampled
            config = type(config_from_name(name))(
                thinking_retention="all" if history == "keep" else None
            )
            self._renderer: Renderer = create_renderer(KnownTexts(tokenizer), config)
        # renderers asserts that tokens exist
        except (ValueError, KeyError, AttributeError, AssertionError) as error:
            raise ValueError(
                f"agent.renderer = {name!r}: {error}; it must be the format of the model at"
                " model.path"
            ) from error

    @property
    def stop_token_ids(self) -> list[int]:
        """What ends a turn."""
        return list(self._renderer.get_stop_token_ids())

    def render(self, messages: Sequence[Message], tools: Sequence[Schema] = ()) -> list[int]:
        """The tokens of a conversation from its start, with what opens the model's turn.

        Raises ValueError.
        """
        given = [self._shortened(to_format(message)) for message in messages]
        try:
            found = self._renderer.render(given, tools=to_specs(tools), add_generation_prompt=True)
        except RENDER_ERRORS as error:
            raise ValueError(
                f"agent.renderer = {self.name!r} cannot write these messages: {error}"
            ) from error
        self._check_all_written(given, found)
        return list(found.token_ids)

    def continuation(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Schema] = (),
    ) -> list[int] | None:
        """The tokens that follow `prompt` and the turn `completion`: `messages`, and what opens the
        next turn.

        None where the format would change what was sampled.  Raises ValueError for messages that it
        cannot hold.
        """
        given, added = (
            [*prompt, *completion],
            [self._shortened(to_format(each)) for each in messages],
        )
        try:
            found = self._renderer.bridge_to_next_turn(
                list(prompt), list(completion), added, tools=to_specs(tools)
            )
        except RENDER_ERRORS as error:
            raise ValueError(
                f"agent.renderer = {self.name!r} cannot write these messages: {error}"
            ) from error
        if found is None or list(found.token_ids[: len(given)]) != given:
            return None
        self._check_all_written(added, found)
        return list(found.token_ids[len(given) :])

    def _shortened(self, message: FormatMessage) -> FormatMessage:
        """Of a text that no sequence can hold, as much as no sequence can hold either: megabytes
        take seconds, in which no episode continues."""
        text = text_of(message["content"])
        if self._longest is None or len(text) <= CHARACTERS_PER_TOKEN * (self._longest + 1):
            return message
        start = text[: CHARACTERS_PER_TOKEN * (self._longest + 1)]
        fits = len(self._tokenizer.encode(start, add_special_tokens=False)) <= self._longest
        return message if fits else cast("FormatMessage", {**message, "content": start})

    def _check_all_written(self, messages: Sequence[FormatMessage], found: RenderedTokens) -> None:
        """Raise ValueError for a message that left nothing: formats skip roles that they do not
        know.
        """
        written = set(found.message_indices)
        for index, message in enumerate(messages):
            text = text_of(message["content"]).strip()
            if (
                text
                and index not in written
                and text not in self._tokenizer.decode(found.token_ids)
            ):
                raise ValueError(
                    f"messages: agent.renderer = {self.name!r} does not write the one with role ="
                    f" {message['role']!r} ({text[:40]!r}); give it another role"
                )

    def extend(
        self, prompt: Sequence[int], completion: Sequence[int], messages: Sequence[Message]
    ) -> list[int]:
        """`continuation`; ValueError where there is none."""
        found = self.continuation(prompt, completion, messages)
        if found is None:
            raise ValueError(
                f"agent.renderer = {self.name!r} cannot continue the"
                f" {len(prompt) + len(completion)} tokens so far with"
                f" {[message.get('role') for message in messages]} without changing sampled tokens"
            )
        return found

    def parse(
        self, prompt: Sequence[int], completion: Sequence[int], tools: Sequence[Schema] = ()
    ) -> Reply:
        """What the model said in the turn `completion`, which follows `prompt`."""
        # formats number their calls, or do not name them: a client needs names that differ in the
        # whole episode; some formats write them into the prompt, so that an episode which continues
        # needs those that it had
        turn = hashlib.blake2b(
            np.asarray([*prompt, *completion], "<i8").data, digest_size=8
        ).hexdigest()
        try:
            found = self._renderer.parse_response(
                list(completion), tools=to_specs(tools), prompt_ids=list(prompt)
            )
        # thousands of brackets or digits: json raises, and renderers too
        except (ValueError, RecursionError) as error:
            text = self._tokenizer.decode(completion, skip_special_tokens=True)
            return Reply("", None, (ToolCall(f"call_{turn}_0", "", text, text, str(error)),))
        calls = tuple(
            to_call(call, f"call_{turn}_{number}") for number, call in enumerate(found.tool_calls)
        )
        return Reply(found.content, found.reasoning_content, calls)


def to_call(call: ParsedToolCall, call_id: str) -> ToolCall:
    problem = "" if call.status == "ok" else call.status.replace("_", " ")
    name, arguments = call.name or "", call.raw if call.arguments is None else call.arguments
    # JSON may hold anything, and formats cannot write such a call into a prompt
    if not isinstance(name, str):
        name, problem = "", problem or "its name is no text"
    if is_deep(arguments):  # tools, and what writes JSON, recurse into it
        arguments, problem = call.raw, problem or f"arguments nested more than {MAX_DEPTH} deep"
    text = json.dumps([name, arguments], ensure_ascii=False)
    if (clean := encodable(text)) != text:
        name, arguments = json.loads(clean)
    return ToolCall(call_id, name, arguments, call.raw, problem)


def is_deep(value: object, left: int = MAX_DEPTH) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, list) and (not left or any(is_deep(each, left - 1) for each in value))


def encodable(text: str) -> str:
    """`text` with "?" for each half of a surrogate pair: of file names, and of what a model
    escapes.
    """
    return text.encode(errors="replace").decode()


def to_format(message: Message) -> FormatMessage:
    """`message` with the keys that formats read.  Raises ValueError, naming what is wrong."""
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"messages: role = {role!r}, must be one of {', '.join(ROLES)}")
    clean: dict[str, object] = {"role": role, "content": text_of(message.get("content"))}
    if calls := message.get("tool_calls"):
        clean["tool_calls"] = calls
    for key in ("tool_call_id", "name", "reasoning_content"):
        if message.get(key) is not None:
            clean[key] = message[key]
    return cast("FormatMessage", clean)


def text_of(content: object) -> str:
    """Of text, or of OpenAI's list of parts.  Raises ValueError for anything else."""
    if content is None:
        return ""
    if isinstance(content, str):
        return encodable(content)
    if isinstance(content, Sequence) and all(
        isinstance(part, Mapping) and part.get("type") == "text" for part in content
    ):
        return encodable("".join(str(part.get("text", "")) for part in content))
    raise ValueError(
        f"messages: content = {str(content)[:80]!r}, must be text or a list of text parts"
    )


def to_specs(tools: Sequence[Schema]) -> list[ToolSpec] | None:
    """In the form that chat templates get."""
    return cast("list[ToolSpec]", [dict(tool) for tool in tools]) if tools else None
