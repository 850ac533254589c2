"""The inputs of a loss, and the loss of a user: `loss.name = "package.module:function"`.

Shapes: T packed tokens.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from megatron_rl.config import ConfigError, LossConfig
from megatron_rl.loss.sequences import Sequences


@dataclass(frozen=True)
class LossInputs:
    """Values of the T tokens of one micro-batch, from which `policy_loss` computes its loss.

    A user's function gets them in float32 (float64 where the log-probs are float64), 0 outside
    `mask`; only `logprobs` and `entropy` carry gradient.
    """

    logprobs: Float[Tensor, " T"]
    """log pi, of the current weights."""
    old_logprobs: Float[Tensor, " T"]
    """log pi_old, of the training engine before the step's updates."""
    rollout_logprobs: Float[Tensor, " T"]
    """log mu, of the inference engine."""
    advantages: Float[Tensor, " T"]
    mask: Bool[Tensor, " T"]
    """Response tokens.  A user's function gets it without tokens that have a value not finite."""
    sequences: Sequences
    selected: Bool[Tensor, " T"] | None = None
    """Tokens that loss.select chose (loss/covariance.py)."""
    router_shift: Float[Tensor, " T"] | None = None
    """Mean shift of the router's log-probabilities, with loss.router_shift
    (replay/router_shift.py)."""
    entropy: Float[Tensor, " T"] | None = None
    """Entropy of pi over the vocabulary, in nats; a user's function gets it where
    loss.entropy_coef is not 0."""
    reference_logprobs: Float[Tensor, " T"] | None = None
    """log pi_ref, of the frozen model as loaded; a user's function gets it where loss.kl_coef is
    not 0."""


LossFunction = Callable[[LossInputs, LossConfig], Tensor]
"""(inputs, LossConfig) -> loss of every token [T], to be minimised, differentiable in
inputs.logprobs.
"""


def check_loss(config: LossConfig) -> None:
    """Raise ConfigError for a user's loss that cannot be loaded."""
    if ":" in config.name:  # else the name of a preset, which the configuration has checked
        load_loss(config.name)


@functools.cache
def load_loss(name: str) -> LossFunction:
    """Import the loss `package.module:function`.  Raises ConfigError where there is none."""
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"loss.name = {name!r} cannot be loaded: {error}") from error
    if not callable(function):
        raise ConfigError(f"loss.name = {name!r} is not a function")
    return function
