"""Tools from Python functions with type hints: their schema for the prompt, and calls of the model
with checked arguments.

    def multiply(a: float, b: float) -> float:
        '''Multiply two numbers.

        Args:
            a: first factor
            b: second factor
        '''
        return a * b

Nothing that the model writes is executed: it names one of these functions, and its arguments are
checked against the hints.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import PydanticUserError, ValidationError, validate_call
from pydantic_core import to_json
from transformers.utils.chat_template_utils import (
    DocstringParsingException,
    TypeHintParsingException,
    get_json_schema,
)

from megatron_rl.rollout.agents.chat import Schema, ToolCall
from megatron_rl.rollout.agents.threads import in_thread

Tool = Callable[..., Any] | Schema
"""A function that is called, or only the schema of a tool that the rollout function serves itself.
"""


class ToolError(Exception):
    """Raised by a tool for what the model should read as its answer; any other exception fails the
    episode.
    """


class Tools:
    """What the model may call.

    Raises ValueError, naming the tool, where it cannot be described to the model.
    """

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        self.schemas: list[Schema] = []
        self._functions: dict[str, Callable[..., Any]] = {}
        for tool in tools:
            if not isinstance(tool, Mapping) and not callable(tool):
                raise ValueError(f"tools: {tool!r} must be a function, or the schema of one")
            schema, function = (tool, None) if isinstance(tool, Mapping) else described(tool)
            name = name_of(schema)
            if name in self.names:
                raise ValueError(f"tools: two are named {name!r}; rename one")
            self.schemas.append(schema)
            if function is not None:
                self._functions[name] = function

    @property
    def names(self) -> list[str]:
        return [name_of(schema) for schema in self.schemas]

    def problem_of(self, call: ToolCall) -> str:
        """Why `call` cannot be made, "" where it can (as far as is known without its arguments)."""
        if call.problem:
            return f"this tool call could not be read: {call.problem}"
        if call.name not in self.names:
            return f"there is no tool {call.name!r}; there are: {', '.join(self.names) or 'none'}"
        return ""

    async def answer(self, call: ToolCall) -> tuple[str, bool]:
        """(what the model reads, whether it is an error).

        Functions that are not async run in a thread of their own.
        """
        if problem := self.problem_of(call):
            return f"error: {problem}", True
        if call.name not in self._functions:
            raise ValueError(
                f"tool {call.name!r} is only a schema: answer its calls yourself, or give its"
                " function"
            )
        function, arguments = self._functions[call.name], call.arguments
        if not isinstance(arguments, Mapping):
            return (
                (
                    f"error: arguments of {call.name} must be an object, got"
                    f" {call.arguments_json[:200]}"
                ),
                True,
            )
        try:
            if inspect.iscoroutinefunction(function):
                found = await function(**arguments)
            else:
                found = await in_thread(function, **arguments)
        except ValidationError as error:
            wrong = "; ".join(
                f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()
            )
            return f"error: arguments of {call.name}: {wrong}", True
        except ToolError as error:
            return f"error: {error}", True
        return found if isinstance(found, str) else to_json(found).decode(), False


@functools.lru_cache(maxsize=256)  # every turn of every episode names the same functions
def described(function: Callable[..., Any]) -> tuple[Schema, Callable[..., Any]]:
    """(schema, the function with checked arguments)."""
    name = getattr(function, "__name__", repr(function))
    try:
        schema = get_json_schema(function)
        # formats write what they get; models were trained without
        schema["function"].pop("return", None)
        return schema, validate_call(function)
    except (
        TypeHintParsingException,
        DocstringParsingException,
        PydanticUserError,
        NameError,
    ) as error:
        raise ValueError(
            f"tools: {name} cannot be described to the model: {error}; it needs a type hint for"
            " every argument, and a docstring with a line for each under 'Args:'"
        ) from error


def name_of(schema: Schema) -> str:
    function = schema.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if schema.get("type") != "function" or not isinstance(name, str) or not name:
        raise ValueError(
            f"tools: {str(dict(schema))[:80]} must be "
            '{"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}'
        )
    return name
