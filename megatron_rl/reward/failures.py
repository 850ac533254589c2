"""What a worker answers for a response, and why one could not be scored: counted as
reward/KIND_total, gets reward.on_error.
"""

from __future__ import annotations

from typing import TypedDict, final

KINDS = {
    "timeouts": "not scored within reward.timeout_seconds",
    "crashes": "the worker process died",
    "memory": "the worker ran out of memory",
    "bad_labels": "the function cannot read the label: an error in the data",
    "invalid": "the function returned no finite number, or a metric that is none",
    "errors": "the function raised",
}


@final
class Scored(TypedDict):
    """formatted: whether reward.format_pattern was found; metrics: of the function, by name."""

    score: float
    formatted: bool
    metrics: dict[str, float]


@final
class Failure(TypedDict):
    """failed: one of KINDS; where: the last frames of the function's own code, innermost last."""

    failed: str
    why: str
    where: list[str]


Reply = Scored | Failure


class LabelError(ValueError):
    """Raise it from a reward function when the label, not the response, cannot be read."""


class RewardError(RuntimeError):
    """The reward function cannot be loaded, fails on everything, or failed where reward.on_error =
    raise.
    """
