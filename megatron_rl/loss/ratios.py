"""Probability ratios of the formulation (arXiv 2512.01374, Eq. 5): pi/mu = (pi_old/mu) * (pi/pi_old).

Shapes: T packed tokens.  All ratios are float32 and carry no gradient.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) is 5e8: far beyond any bound, and finite


def ratio_of(numerator: Float[Tensor, " T"], denominator: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """exp(numerator - denominator) of log-probs, detached, log-ratio clamped to +-20 so that no inf enters the loss."""
    return (numerator.detach().float() - denominator.detach().float()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def truncate(weight: Float[Tensor, " T"], cap: float) -> Float[Tensor, " T"]:
    """Truncated importance sampling: min(weight, cap); no lower bound."""
    return weight.clamp(max=cap)


def clip_masks(
    ratio: Float[Tensor, " T"], advantages: Float[Tensor, " T"], *, clip_low: float, clip_high: float
) -> tuple[Bool[Tensor, " T"], Bool[Tensor, " T"]]:
    """Tokens whose update M_t drops: (high: A > 0 and r > 1 + clip_high, low: A < 0 and r < 1 - clip_low); strict."""
    return (advantages > 0) & (ratio > 1 + clip_high), (advantages < 0) & (ratio < 1 - clip_low)


def finite_tokens(*logprobs: Float[Tensor, " T"]) -> Bool[Tensor, " T"]:
    """True where every given log-prob is finite."""
    finite = torch.ones_like(logprobs[0], dtype=torch.bool)
    for values in logprobs:
        finite &= values.detach().isfinite()
    return finite
