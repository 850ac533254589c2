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
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

from pydantic import PydanticUserError, ValidationError, validate_call
from pydantic_core import to_json

from megatron_rl.rollout.agents.chat import Schema
from megatron_rl.rollout.agents.reply import ToolCall
from megatron_rl.rollout.agents.threads import called

Tool = Callable[..., Any] | Schema
"""A function that is called, or only the schema of a tool that the rollout function serves."""


class ToolError(Exception):
    """A tool's error that the model reads as its answer; any other exception fails the episode."""


class Tools:
    """The tools that the model may call."""

    def __init__(self, tools: Sequence[Tool] = (), must_call: str | None = None) -> None:
        """must_call: the name of the tool that a turn must call, "" for any; None: it need not.
        Turns are sampled freely all the same: `lacks_call` tells the others.

        Raises ValueError, naming the tool, where it cannot be described to the model, and for a
        tool to call that is none of them.
        """
        self.schemas: list[Schema] = []
        self._must_call = must_call
        self._functions: dict[str, CheckedFunction] = {}
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
        if must_call is not None and (not self.schemas or must_call not in ("", *self.names)):
            raise ValueError(
                f"tools: tool_choice = {must_call or 'required'!r}, and there are:"
                f" {', '.join(self.names) or 'none'}; add the tool"
            )

    @property
    def names(self) -> list[str]:
        return [name_of(schema) for schema in self.schemas]

    def lacks_call(self, calls: Sequence[ToolCall]) -> bool:
        """Return True for the calls of a turn that had to call a tool, and did not call it."""
        if self._must_call is None:
            return False
        return not any(self._must_call in ("", call.name) for call in calls)

    def problem_of(self, call: ToolCall) -> str:
        """Return why `call` cannot be made, "" where it can, as far as that is known without its
        arguments.
        """
        if call.problem:
            return f"this tool call could not be read: {call.problem}"
        if call.name not in self.names:
            return f"there is no tool {call.name!r}; there are: {', '.join(self.names) or 'none'}"
        return ""

    async def answer(self, call: ToolCall) -> tuple[str, bool]:
        """Make the call; returns (text that the model reads, True for an error).

        A function that is not async runs in a thread of its own.
        """
        if problem := self.problem_of(call):
            return f"error: {problem}", True
        # an error of the rollout function, which the model cannot mend
        if call.name not in self._functions:
            raise ValueError(
                f"tool {call.name!r} is only a schema: answer its calls yourself, or give its"
                " function"
            )
        tool, arguments = self._functions[call.name], call.arguments
        if not isinstance(arguments, Mapping):
            wrong = call.arguments_json[:200]
            return f"error: arguments of {call.name} must be an object, got {wrong}", True
        try:
            values, named = tool.arguments_of(call.name, arguments)
            answer = await called(tool.function, *values, **named)
        except ToolError as error:
            return f"error: {error}", True
        return answer if isinstance(answer, str) else to_json(answer).decode(), False


@dataclass(frozen=True)
class CheckedFunction:
    """A function, and the check of its arguments.

    They are apart, so that a ValidationError of the function itself fails the episode.
    """

    function: Callable[..., Any]
    check: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]
    """Returns the arguments with which it is called as those of the function's type hints."""

    def arguments_of(
        self, name: str, arguments: Mapping[str, object]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and named arguments.  Raises ToolError for those that do not fit the
        type hints of the function `name`.
        """
        try:
            return self.check(**arguments)
        except ValidationError as error:
            wrong = "; ".join(
                f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()
            )
            raise ToolError(f"arguments of {name}: {wrong}") from error


def described(function: Callable[..., Any]) -> tuple[Schema, CheckedFunction]:
    """Return the schema of a function, and the function with the check of its arguments."""
    if not inspect.ismethod(function):
        return described_function(function, is_method=False)
    # the object is left out of what is kept: it ends with its episode
    schema, checked = described_function(function.__func__, is_method=True)
    # it is the first of the arguments that `check` returns
    return schema, replace(checked, check=functools.partial(checked.check, function.__self__))


@functools.lru_cache(maxsize=256)  # every turn of every episode names the same functions
def described_function(
    function: Callable[..., Any], *, is_method: bool
) -> tuple[Schema, CheckedFunction]:
    """Do what `described` does; a method is described without its first argument, and needs it."""
    # transformers takes a second to import, and the process of an environment may need no schema
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    @functools.wraps(function)
    def check(*values: Any, **named: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return values, named

    name = getattr(function, "__name__", repr(function))
    try:
        schema = get_json_schema(MethodType(function, object()) if is_method else function)
        # formats would write it into the prompt, and models were trained without it
        schema["function"].pop("return", None)
        return schema, CheckedFunction(function, validate_call(check))
    except (
        TypeHintParsingException,
        DocstringParsingException,
        PydanticUserError,
        NameError,
        TypeError,  # an object with __call__, or a partial
    ) as error:
        raise ValueError(
            f"tools: {name} cannot be described to the model: {error}; it must be a function or a"
            " method with a type hint for every argument, and a docstring with a line for each"
            " under 'Args:'"
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
