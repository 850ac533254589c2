"""The fields of a request, in every protocol: those that are read, those that have no effect, and
why others are refused.

A field that would change how tokens are sampled is refused, unless its value is that of the run:
log-probs of the trainer would be those of another distribution.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from megatron_rl.config.sections.rollout import Truncation
from megatron_rl.rollout.agents.question import ApiError

FULL_SOFTMAX = {"top_p": (1,), "top_k": (-1, 0), "min_p": (0,)}
"""Field -> allowed values, where the run does not truncate (rollout.top_p, top_k, min_p)."""
ANY_TEXT = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "top_logprobs": (0,),
    "parallel_tool_calls": (True,),
}
"""Field -> allowed values, in every run."""


class RequestFields(BaseModel):
    """The fields of a request that are read; the text under a field is its description."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    without_effect: ClassVar[Mapping[str, str]] = {}
    """Field that a client may send, and that changes no token -> why."""
    refused: ClassVar[Mapping[str, str]] = {}
    """Field of the protocol that is refused -> why.  Those that are in no table are unknown."""


Request = TypeVar("Request", bound=RequestFields)


def checked(
    kind: type[Request],
    content: object,
    temperature: float = 1.0,
    truncation: Truncation | None = None,
) -> Request:
    """Read the body of a request of any protocol.

    temperature, truncation: those of the run.  Raises ApiError, naming the field.
    """
    if not isinstance(content, Mapping):
        raise ApiError(400, f"body: must be a JSON object, got {type(content).__name__}")
    asked = {
        name: value
        for name, value in content.items()
        if value is not None and name not in kind.without_effect
    }
    of_run = FULL_SOFTMAX
    if truncation is not None:
        of_run = {name: (value,) for name, value in truncation._asdict().items()}
    # the fields of these tables are checked here; the model below knows all others
    for name, allowed in {**of_run, **ANY_TEXT}.items():
        if name in asked and (value := asked.pop(name)) not in allowed:
            raise ApiError(
                400,
                f"{name} = {value!r}: must be {allowed[0]!r} in training; remove it",
                param=name,
            )
    for name, why in kind.refused.items():
        if name in asked:
            raise ApiError(400, f"{name} = {asked[name]!r:.80}: {why}; remove it", param=name)
    # rho would compare distributions of two temperatures
    if (other := asked.get("temperature")) not in (None, temperature):
        raise ApiError(
            400,
            f"temperature = {other!r:.40}: must be the run's, {temperature:g}"
            " (rollout.temperature); remove it",
            param="temperature",
        )
    try:
        return kind.model_validate(asked)
    except ValidationError as error:
        first = error.errors()[0]
        # without the alternatives of a union, such as literal['auto','none','required']
        name = ".".join(str(part) for part in first["loc"] if "[" not in str(part))
        why = "is not known here; remove it" if first["type"] == "extra_forbidden" else first["msg"]
        raise ApiError(400, f"{name} = {first['input']!r:.80}: {why}", param=name) from error
