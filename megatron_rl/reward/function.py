"""The reward function in its worker: its form, its call and its results.

    f(prompt, response, label)     three texts
    f(episode: Episode)            a response with everything that is known about it
    f(group: list[Episode])        the responses to a prompt -> a list of as many results
A result is a number, a Score, or {"reward": number, "metrics": {name: number}}.
"""

from __future__ import annotations

import asyncio
import collections.abc
import importlib
import inspect
import math
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, get_args, get_origin

from megatron_rl.reward.failures import Failure, LabelError, Reply, Scored
from megatron_rl.reward.scored_response import Episode, Score
from megatron_rl.workers.protocol import frames_of

MAX_METRICS = 64  # the most metrics of one response
LARGEST = 3.4028234e38  # the largest float32: rewards are kept in it
METRIC_NAME = re.compile(r"[A-Za-z][\w/]{0,63}", re.ASCII)
FORMS = "(prompt, response, label), (episode: Episode) or (group: list[Episode])"
MATH = "megatron_rl.reward.math_answer:score"

Form = Literal["texts", "episode", "group"]
Item = Sequence[Any]
"""The argument of one call: [prompt, response, label], or Episode.to_json() of each response."""


class InvalidResult(ValueError):
    """The function returned a number that is not finite, metrics that cannot be logged, or a list
    of another length.
    """


@dataclass(frozen=True)
class RewardFunction:
    """A user's function, as a worker serves it (megatron_rl/workers/serving.py)."""

    function: Callable[..., Any]
    form: Form
    is_concurrent: bool
    """The function is async."""
    pattern: re.Pattern[str]
    """reward.format_pattern"""
    seconds: float = math.inf
    """reward.timeout_seconds, after which a call of an async function is cancelled."""

    @property
    def description(self) -> tuple[Form, bool]:
        return self.form, self.is_concurrent

    def answer(self, call: str, item: Item) -> list[Reply] | Coroutine[Any, Any, list[Reply]]:
        """Return one reply per response of the item; `call` is always "score"."""
        return self.call_async(item) if self.is_concurrent else self.call(item)

    def call(self, item: Item) -> list[Reply]:
        """One reply per response of the item."""
        responses, arguments = self._arguments(item)
        try:
            return self._replies(self.function(*arguments), responses)
        # sys.exit in a reward function must not end the worker
        except (Exception, SystemExit) as error:
            return [failure(error)] * len(responses)

    async def call_async(self, item: Item) -> list[Reply]:
        responses, arguments = self._arguments(item)
        limit = asyncio.timeout(self.seconds)
        try:
            async with limit:
                return self._replies(await self.function(*arguments), responses)
        # a function may cancel the task that runs it
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            late = Failure(failed="timeouts", why=f"no answer within {self.seconds:g} s", where=[])
            return [late if limit.expired() else failure(error)] * len(responses)

    def _arguments(self, item: Item) -> tuple[list[str], Sequence[Any]]:
        """Return (responses, arguments of the function)."""
        if self.form == "texts":
            return [item[1]], item
        episodes = [Episode.from_json(values) for values in item]
        responses = [episode.response for episode in episodes]
        return responses, episodes if self.form == "episode" else [episodes]

    def _replies(self, result: Any, responses: Sequence[str]) -> list[Reply]:
        if self.form != "group":
            return [self._reply(result, responses[0])]
        if not isinstance(result, list | tuple) or len(result) != len(responses):
            raise InvalidResult(
                f"a function of groups must return a list of {len(responses)}, got {result!r:.200}"
            )
        return [
            self._reply(value, response) for value, response in zip(result, responses, strict=True)
        ]

    def _reply(self, result: object, response: str) -> Reply:
        try:
            value, metrics = parse_result(result)
            return Scored(
                score=value, formatted=self.pattern.search(response) is not None, metrics=metrics
            )
        except Exception as error:  # one result of a group fails, and the others keep their scores
            return failure(error)


def parse_result(result: Any) -> tuple[float, dict[str, float]]:
    """Return (reward, metrics).  Raises InvalidResult for a value that is not finite."""
    metrics: Mapping[str, Any] = {}
    if isinstance(result, Score):
        result, metrics = result.value, result.metrics
    elif isinstance(result, Mapping):
        if not {"reward"} <= set(result) <= {"reward", "metrics"}:
            raise InvalidResult(
                f"keys {list(result)}: must be reward, and metrics where there are any"
            )
        result, metrics = result["reward"], result.get("metrics", {})
    score = float(result)
    if not is_finite(score):
        raise InvalidResult(f"score {score} is not finite in float32")
    if len(metrics) > MAX_METRICS:
        raise InvalidResult(f"{len(metrics)} metrics of a response: must be at most {MAX_METRICS}")
    values = {name: float(value) for name, value in metrics.items()}
    for name, value in values.items():
        if not METRIC_NAME.fullmatch(name) or name.endswith("_total"):
            raise InvalidResult(
                f"metric {name!r}: must be letters, digits, _ and /, 64 at most, and not end in"
                " _total"
            )
        if not math.isfinite(value):
            raise InvalidResult(f"metric {name} = {value} is not finite")
    return score, values


def is_finite(value: object) -> bool:
    """Return True for a number that is finite in float32."""
    return isinstance(value, Real) and bool(value <= LARGEST and not value < -LARGEST)


def failure(error: BaseException) -> Failure:
    kinds = {LabelError: "bad_labels", MemoryError: "memory", InvalidResult: "invalid"}
    kind = next((name for type_, name in kinds.items() if isinstance(error, type_)), "errors")
    if kind == "invalid":
        return Failure(failed=kind, why=str(error)[:500], where=[])
    why = f"{type(error).__name__}: {error}"[:500]
    return Failure(failed=kind, why=why, where=frames_of(error, [__file__]))


def load_reward(name: str, pattern: str, seconds: float) -> RewardFunction:
    """Import `package.module:function`, or math.

    Raises TypeError for a function that does not take one of FORMS.
    """
    module, _, attribute = (MATH if name == "math" else name).partition(":")
    function = getattr(importlib.import_module(module), attribute)
    if not callable(function):
        raise TypeError(f"reward.function = {name!r} is not callable")
    # or an object with __call__
    is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
    form = form_of(function, name)
    return RewardFunction(function, form, is_async, re.compile(pattern), seconds)


def form_of(function: Callable[..., Any], name: str) -> Form:
    """Return the form: from the number of parameters, and the annotation of a single one."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function in C has no signature: its call may fail
        return "texts"
    # three parameters need no annotation, which is the form of most functions
    if takes_arguments(signature, 3):
        return "texts"
    key = f"reward.function = {name!r}"
    if not takes_arguments(signature, 1):
        raise TypeError(f"{key} takes {signature}: must take {FORMS}")
    try:
        # annotations are texts under `from __future__ import annotations`
        parameter = next(iter(inspect.signature(function, eval_str=True).parameters.values()))
    except (NameError, AttributeError, SyntaxError, TypeError) as error:
        raise TypeError(
            f"{key} takes {signature}, an annotation that cannot be read ({error}): must take"
            f" {FORMS}; import Episode from megatron_rl.reward, not under TYPE_CHECKING"
        ) from error
    if parameter.annotation is Episode:
        return "episode"
    is_list = get_origin(parameter.annotation) in (list, collections.abc.Sequence)
    if is_list and get_args(parameter.annotation) == (Episode,):
        return "group"
    raise TypeError(
        f"{key} takes {signature}: must take {FORMS}; annotate its parameter with Episode of"
        " megatron_rl.reward, or with list[Episode] to score the responses to a prompt together"
    )


def takes_arguments(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True
