"""A user's own loss, `loss.name = "package.module:function"`.  Shapes: T packed tokens."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from megatron_rl.config import LossConfig
from megatron_rl.loss.sequences import Sequences


@dataclass(frozen=True)
class LossInputs:
    """Inputs of a loss; float32 (float64 where the log-probs are) [T], and 0 outside `mask`.

    Only `logprobs` has gradient.
    """

    logprobs: Float[Tensor, " T"]  # log pi
    old_logprobs: Float[Tensor, " T"]  # log pi_old
    rollout_logprobs: Float[Tensor, " T"]  # log mu_old
    advantages: Float[Tensor, " T"]
    mask: Bool[Tensor, " T"]  # response tokens, all of them finite
    sequences: Sequences
    selected: Bool[Tensor, " T"] | None = None
    """The tokens that loss.select chose (loss/covariance.py)."""
    router_shift: Float[Tensor, " T"] | None = None
    """With loss.router_shift (replay/router_shift.py), 0 outside `mask`."""


LossFunction = Callable[[LossInputs, LossConfig], Tensor]
"""(inputs, LossConfig) -> loss per token [T], to be minimised, differentiable in inputs.logprobs.
"""


def check_loss(config: LossConfig) -> None:
    """Raise ValueError for a user's loss that cannot be loaded."""
    if ":" in config.name:
        load_loss(config.name)


@functools.cache
def load_loss(name: str) -> LossFunction:
    """Import `package.module:function`.

    Raises ValueError, naming the key, where there is no such function.
    """
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"loss.name = {name!r} cannot be loaded: {error}") from error
    if not callable(function):
        raise ValueError(f"loss.name = {name!r} is not a function")
    return function
