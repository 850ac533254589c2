"""The answer of the model in a turn, read in its chat format: text, thinking, calls of tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_rl.launch.log_lines import encodable

if TYPE_CHECKING:
    from renderers import ParsedToolCall

MAX_DEPTH = 100
"""Depth of lists and mappings in the arguments of a call."""


@dataclass(frozen=True)
class ToolCall:
    """A call that the model wrote."""

    id: str
    name: str
    """The name of the tool, "" where the call has none."""
    arguments: object
    raw: str
    problem: str = ""
    """Why the call cannot be made, "" where it can."""

    @property
    def arguments_json(self) -> str:
        if isinstance(self.arguments, str):
            return self.arguments
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True)
class Reply:
    """A turn, read in the model's chat format."""

    content: str
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]

    @property
    def message(self) -> dict[str, object]:
        """The turn as a message of OpenAI's API.

        A call without a name is no call there: its text is part of the content.
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


def to_call(call: ParsedToolCall, call_id: str) -> ToolCall:
    problem = "" if call.status == "ok" else call.status.replace("_", " ")
    name, arguments = call.name or "", call.raw if call.arguments is None else call.arguments
    # JSON may hold any value here, and formats cannot write such a call into a prompt
    if not isinstance(name, str):
        name, problem = "", problem or "its name is no text"
    if is_deep(arguments):  # tools and JSON writers recurse into it
        arguments, problem = call.raw, problem or f"arguments nested more than {MAX_DEPTH} deep"
    text = json.dumps([name, arguments], ensure_ascii=False)
    if (clean := encodable(text)) != text:
        name, arguments = json.loads(clean)
    return ToolCall(call_id, name, arguments, call.raw, problem)


def is_deep(value: object, left: int = MAX_DEPTH) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, list) and (not left or any(is_deep(item, left - 1) for item in value))
