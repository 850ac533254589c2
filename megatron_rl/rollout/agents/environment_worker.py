"""agent.environment in its worker process: how calls and answers are written as JSON.

    call           argument                          answer
    reset          fields of a Prompt                what reset observed
    step           fields_of_turn() of a Turn        {"step": fields of a Step}
The object is made when the worker starts (megatron_rl/workers/serving.py).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, fields
from numbers import Integral, Real
from typing import Any

import numpy as np

from megatron_rl.records import Prompt
from megatron_rl.rollout.agents.episode import Environment, Step, Turn
from megatron_rl.rollout.agents.reply import Reply, ToolCall


def load_environment(name: str) -> Callable[[], EnvironmentService]:
    """Import the class `package.module:Class`; returns what makes an environment of it."""
    module, _, attribute = name.partition(":")
    make = getattr(importlib.import_module(module), attribute)
    return lambda: EnvironmentService(make())


class EnvironmentService:
    """An environment, as a worker serves it: one call after another."""

    is_concurrent = False
    description = None

    def __init__(self, environment: Environment) -> None:
        self.environment = environment

    def answer(self, call: str, argument: Mapping[str, Any]) -> object:
        """Call `reset` or `step`; returns what it returned as JSON holds it, or a coroutine."""
        read = prompt_of_fields if call == "reset" else turn_of
        value = getattr(self.environment, call)(read(argument))
        return plain_later(value) if inspect.isawaitable(value) else plain(value)


async def plain_later(value: Awaitable[object]) -> object:
    return plain(await value)


def prompt_of_fields(values: Mapping[str, Any]) -> Prompt:
    return Prompt(**{**values, "token_ids": tuple(values["token_ids"])})


def fields_of_turn(turn: Turn) -> dict[str, object]:
    """Return `turn` as JSON holds it, read in the model's chat format where there is one; the
    inverse of turn_of.
    """
    return {
        "text": turn.text,
        "token_ids": turn.token_ids,
        "finish_reason": turn.finish_reason,
        "num_prompt_tokens": turn.num_prompt_tokens,
        "logprobs": turn.logprobs,
        "reply": None if turn.read is None else asdict(turn.reply),
    }


def turn_of(values: Mapping[str, Any]) -> Turn:
    tuples = {name: tuple(values[name]) for name in ("token_ids", "logprobs")}
    arguments = {**values, **tuples}
    if (reply := arguments.pop("reply")) is None:
        return Turn(**arguments)
    calls = tuple(ToolCall(**call) for call in reply["tool_calls"])
    return Turn(**arguments, read=lambda: Reply(reply["content"], reply["reasoning"], calls))


def plain(value: object) -> object:
    """Return `value` as JSON holds it, numbers and truth values of numpy included.  Raises
    TypeError for what is no observation.
    """
    if isinstance(value, Step):
        return {"step": {item.name: plain(getattr(value, item.name)) for item in fields(value)}}
    if isinstance(value, np.bool_):
        return bool(value)
    # bool before Integral, which it is, too
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if hasattr(value, "__iter__") and not isinstance(value, bytes):
        return [plain(item) for item in value]
    raise TypeError(
        f"answered {type(value).__name__}: must be text, numbers, lists, mappings or a Step"
    )
