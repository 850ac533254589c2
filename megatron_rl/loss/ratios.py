"""Probability ratios of the formulation (arXiv 2512.01374, Eq. 5): pi/mu = (pi_old/mu) * (pi/pi_old), and their bounds.

Shapes: T packed tokens.  Ratios carry no gradient; they are float64 where the log-probs are, else float32.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from megatron_rl.config.loss_presets import Level, LossSpec, Ratio
from megatron_rl.loss.custom import LossInputs

MAX_LOG_RATIO = 20.0  # exp(20) is 5e8: far beyond any bound, and finite


def ratio_of(numerator: Float[Tensor, " T"], denominator: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """exp(numerator - denominator) of log-probs, detached, log-ratio clamped to +-20 so that no inf enters the loss."""
    return bounded_exp(at_least_float32(numerator.detach()) - at_least_float32(denominator.detach()))


def ratio_at(inputs: LossInputs, which: Ratio, level: Level) -> Float[Tensor, " T"]:
    """The ratio x_t of every token, at a level: token x_t; product prod_t x_t; geometric exp(mean_t log x_t).

    Sequence levels run over the response's tokens in `inputs.mask`, on all context-parallel ranks: collective over
    `inputs.sequences.group`.  which = none: 1.
    """
    if which == "none":
        return torch.ones_like(inputs.logprobs)
    numerator = inputs.old_logprobs if which == "train_infer" else inputs.logprobs
    denominator = inputs.old_logprobs if which == "staleness" else inputs.rollout_logprobs
    if level == "token":
        return ratio_of(numerator, denominator)
    # clamped once, after the sum: clamping every token would change the product of a long response
    log_ratio = torch.where(inputs.mask, numerator - denominator, 0.0)  # sums over sequences carry no gradient
    is_product, sequences = level == "product", inputs.sequences
    return bounded_exp(sequences.sum(log_ratio) if is_product else sequences.mean(log_ratio, inputs.mask))


def bound_weight(
    weight: Float[Tensor, " T"], switches: LossSpec
) -> tuple[Float[Tensor, " T"], Bool[Tensor, " T"], Bool[Tensor, " T"]]:
    """(bounded weight, where the bound changed it, where mode = mask removed it); the bounds themselves are inside.

    truncate: min(w, high).  clip: min(max(w, low), high).  mask: w where low <= w <= high, else 0.
    """
    low = 0.0 if switches.weight_mode == "truncate" else switches.weight_low
    outside = (weight < low) | (weight > switches.weight_high)
    if switches.weight_mode == "none":
        outside = torch.zeros_like(outside)
        return weight, outside, outside
    if switches.weight_mode == "mask":
        return torch.where(outside, 0.0, weight), outside, outside
    return weight.clamp(low, switches.weight_high), outside, torch.zeros_like(outside)


def clip_masks(
    inputs: LossInputs, ratio: Float[Tensor, " T"], switches: LossSpec
) -> tuple[Bool[Tensor, " T"], Bool[Tensor, " T"]]:
    """Tokens whose update M_t drops: (high: A > 0 and r > 1 + clip_high, low: A < 0 and r < 1 - clip_low); strict."""
    high = (inputs.advantages > 0) & (ratio > 1 + switches.clip_high)
    return high, (inputs.advantages < 0) & (ratio < 1 - switches.clip_low)


def divergence_masks(inputs: LossInputs, switches: LossSpec) -> tuple[Bool[Tensor, " T"], Bool[Tensor, " T"]]:
    """Tokens that DPPO drops (arXiv 2602.04879): (A > 0, pi > a and D > clip_high; A < 0, pi < a and D > clip_low).

    D compares "this token" against "any other": tv |a - pi|;  kl a log(a/pi) + (1-a) log((1-a)/(1-pi)), a the anchor.
    """
    logprobs, advantages = inputs.logprobs.detach(), inputs.advantages
    anchor_logprobs = inputs.old_logprobs if switches.clip_anchor == "old" else inputs.rollout_logprobs
    probability, anchor = logprobs.exp(), anchor_logprobs.exp()
    if switches.clip == "tv":
        divergence = (anchor - probability).abs()
    else:
        # the probability of any other token; at 0 its logarithm would be -inf
        rest, anchor_rest = (1 - probability).clamp(min=1e-8), (1 - anchor).clamp(min=1e-8)
        divergence = anchor * (anchor_logprobs - logprobs) + anchor_rest * (anchor_rest.log() - rest.log())
    high = (advantages > 0) & (logprobs > anchor_logprobs) & (divergence > switches.clip_high)
    low = (advantages < 0) & (logprobs < anchor_logprobs) & (divergence > switches.clip_low)
    return high, low


def finite_tokens(*logprobs: Float[Tensor, " T"]) -> Bool[Tensor, " T"]:
    """True where every given log-prob is finite."""
    finite = torch.ones_like(logprobs[0], dtype=torch.bool)
    for values in logprobs:
        finite &= values.detach().isfinite()
    return finite


def at_least_float32(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
