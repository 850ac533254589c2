"""Replies of a worker for a response: a score, or why it could not be scored.

A failure is counted as reward/KIND_total, and the response gets reward.on_error.
"""

from __future__ import annotations

from typing import TypedDict, final

# the kinds of CallFailed (workers/protocol.py), and those that function.py knows
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
    """The score of a response."""

    score: float
    formatted: bool
    """reward.format_pattern matches somewhere."""
    metrics: dict[str, float]
    """Metrics that the function returned, by name."""


@final
class Failure(TypedDict):
    """The reason why a response has no score."""

    failed: str
    """A key of KINDS."""
    why: str
    where: list[str]
    """The last frames of the user's code, innermost last."""


Reply = Scored | Failure


class LabelError(ValueError):
    """Raise it from a reward function when the label, not the response, cannot be read."""


class RewardError(RuntimeError):
    """The reward function cannot be loaded, fails on everything, or failed where reward.on_error =
    raise.
    """
