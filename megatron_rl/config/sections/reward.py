"""[reward]: how responses are scored."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from pydantic import field_validator

from megatron_rl.config.base import AboveZero, Finite, NotNegative, Positive, Section


class RewardConfig(Section):
    """R(x, y) = function(x, y), less format_penalty where the response lacks format_pattern."""

    function: str = "math"
    """`math` (math-verify) or `package.module:function`, which may be async
    (docs/guides/data_and_reward.md)."""
    num_workers: Positive = 1
    """Processes per data-parallel replica that score responses."""
    concurrency: Positive = 16
    """Calls of an async function that run at a time in a worker; others run one at a time."""
    timeout_seconds: AboveZero = 5.0
    """Time limit of one call.  Its worker is then killed and replaced; a call of an async function
    is cancelled."""
    memory_gib: Literal["auto"] | NotNegative = "auto"
    """Address space of a worker, in GiB; 0 = no limit, as CUDA needs; auto: 4 for math, 0 for other
    functions."""
    on_error: Literal["raise", "drop"] | Finite = 0.0
    """Reward of a response that could not be scored: a number; or raise = stop the run; or drop =
    no reward: the response leaves its group's baseline and the loss."""
    format_pattern: str = ""
    """Python regular expression ((?s): . matches newlines) that a response should match; searched
    with the same timeout."""
    format_penalty: NotNegative = 0.0
    """Subtracted from the reward of a response without format_pattern; set both or none."""

    @field_validator("function")
    @classmethod
    def check_function(cls, value: str) -> str:
        module, _, name = value.partition(":")
        if value != "math" and not (
            name.isidentifier() and all(part.isidentifier() for part in module.split("."))
        ):
            raise ValueError(
                "must be math or package.module:function; write it like rewards.mine:score"
            )
        return value

    def problems(self) -> Iterator[str]:
        if bool(self.format_pattern) != bool(self.format_penalty):
            yield (
                f"format_pattern = {self.format_pattern!r} and format_penalty = "
                f"{self.format_penalty} have no effect without one another; set both, or none"
            )
        try:
            re.compile(self.format_pattern)  # here, not in a worker process after the first rollout
        except re.error as error:
            yield f"format_pattern = {self.format_pattern!r} is not a regular expression: {error}"
