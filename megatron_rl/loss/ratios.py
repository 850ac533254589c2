"""Probability ratios of the formulation (arXiv 2512.01374, Eq. 5), pi/mu = (pi_old/mu) *
(pi/pi_old), and their bounds.

A "ratio of a response" or a "statistic of a response" is that of one sequence here: an episode of
several sequences is treated sequence by sequence.  Only the divisors |y| and n_i count them all.

Shapes: T packed tokens.  Ratios carry no gradient; they are float64 where the log-probs are
float64, else float32.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from megatron_rl.config.loss_presets import Level, LossSwitches, Ratio, RejectLevel
from megatron_rl.loss.custom import LossInputs

MAX_LOG_RATIO = 20.0
"""The limit of every |log-ratio|: exp(20) is 5e8, far beyond any bound, and finite."""


def ratio_of(
    numerator: Float[Tensor, " T"], denominator: Float[Tensor, " T"]
) -> Float[Tensor, " T"]:
    """Return exp(numerator - denominator) of log-probs, detached.

    The log-ratio is clamped to +-20, so that no inf enters the loss.
    """
    return bounded_exp(
        at_least_float32(numerator.detach()) - at_least_float32(denominator.detach())
    )


def ratio_at(inputs: LossInputs, which: Ratio, level: Level) -> Float[Tensor, " T"]:
    """Return a ratio at every token.  Level token: x_t; product: prod_t x_t; geometric: exp(mean_t
    log x_t).

    The levels of a response run over its tokens in `inputs.mask` on all context-parallel ranks:
    collective over `inputs.sequences.group`.  The ratio none is 1.
    """
    if which == "none":
        return torch.ones_like(inputs.logprobs)
    numerator, denominator = parts_of(inputs, which)
    if level == "token":
        return ratio_of(numerator, denominator)
    return combined_ratio(inputs, numerator - denominator, level)


def combined_ratio(
    inputs: LossInputs, log_ratio: Float[Tensor, " T"], level: Level
) -> Float[Tensor, " T"]:
    """Return, at every token, the product or the geometric mean of the ratios of its sequence.

    It carries no gradient.  Collective over `inputs.sequences.group`.
    """
    # clamped once, after the sum: clamping every token would change the product of a long response
    log_ratio, sequences = torch.where(inputs.mask, log_ratio, 0.0), inputs.sequences
    return bounded_exp(
        sequences.sum(log_ratio) if level == "product" else sequences.mean(log_ratio, inputs.mask)
    )


def ratio_to_anchor(switches: LossSwitches) -> Ratio:
    """Return the name of q_t, the ratio of pi to the policy that clip_anchor names."""
    return "staleness" if switches.clip_anchor == "old" else "total"


def router_trust(inputs: LossInputs, switches: LossSwitches) -> Float[Tensor, " T"]:
    """Return gamma_t = max(exp(-shift_t), shift_floor) of RSPO (arXiv 2510.23027), in (0, 1]."""
    return unbounded_trust(inputs).clamp(min=switches.shift_floor)


def trust_at_floor(inputs: LossInputs, switches: LossSwitches) -> Bool[Tensor, " T"]:
    """Tokens whose exp(-shift_t) is below shift_floor; none outside the mask, where the shift is
    0.
    """
    return unbounded_trust(inputs) < switches.shift_floor


def unbounded_trust(inputs: LossInputs) -> Float[Tensor, " T"]:
    if inputs.router_shift is None:
        raise ValueError(
            "loss.router_shift = true needs router_shift: pass the shift of every token"
        )
    return (-inputs.router_shift).exp()


def anchored_ratio(inputs: LossInputs, switches: LossSwitches) -> Float[Tensor, " T"]:
    """Return q_t at clip_level; with router_shift the ratio of every token is q_t times gamma_t.

    Collective as `ratio_at`.
    """
    ratio = ratio_at(inputs, ratio_to_anchor(switches), switches.clip_level)
    if not switches.router_shift:
        return ratio
    trust = router_trust(inputs, switches)
    if switches.clip_level == "token":
        return ratio * trust
    return ratio * combined_ratio(inputs, trust.log(), switches.clip_level)


def parts_of(inputs: LossInputs, which: Ratio) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    """Return the log-probs of the numerator and of the denominator of a ratio.

    train_infer = pi_old/mu, staleness = pi/pi_old, total = pi/mu.
    """
    numerator = inputs.old_logprobs if which == "train_infer" else inputs.logprobs
    return numerator, inputs.old_logprobs if which == "staleness" else inputs.rollout_logprobs


def response_statistic(inputs: LossInputs, which: Ratio, level: RejectLevel) -> Float[Tensor, " T"]:
    """Return, at every token, the statistic of its response that `reject` bounds.

    It is the ratio of the response (product, geometric), or a mean over its tokens:
    mean_shift       |x - 1|
    mean_tv, mean_kl the binary divergence of the two policies
    mean_k2          log(x)^2 / 2
    mean_k3          x - 1 - log x
    Collective over `inputs.sequences.group`.
    """
    if level in ("product", "geometric"):
        return ratio_at(inputs, which, level)
    # a statistic decides which tokens are dropped, and is no part of the loss: no gradient
    numerator, denominator = (part.detach() for part in parts_of(inputs, which))
    log_ratio = (numerator - denominator).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if level == "mean_shift":
        values = torch.expm1(log_ratio).abs()
    elif level == "mean_tv":
        values = binary_tv(numerator, denominator)
    elif level == "mean_kl":
        values = binary_kl(numerator, denominator)
    elif level == "mean_k2":
        values = log_ratio.square() / 2
    else:
        values = torch.expm1(log_ratio) - log_ratio
    return inputs.sequences.mean(values, inputs.mask)


def bound_weight(
    weight: Float[Tensor, " T"], switches: LossSwitches
) -> tuple[Float[Tensor, " T"], Bool[Tensor, " T"], Bool[Tensor, " T"]]:
    """Return (bounded weight, tokens whose weight changed, tokens that weight_mode = mask removed).

    truncate: min(w, high).  clip: min(max(w, low), high).  mask: w where low <= w <= high, else 0.
    """
    # no ratio is below 0: truncation bounds it above only
    low = 0.0 if switches.weight_mode == "truncate" else switches.weight_low
    changed = outside(weight, low, switches.weight_high)
    none = torch.zeros_like(changed)
    if switches.weight_mode == "none":
        return weight, none, none
    if switches.weight_mode == "mask":
        return torch.where(changed, 0.0, weight), changed, changed
    return weight.clamp(low, switches.weight_high), changed, none


def importance_weight(
    inputs: LossInputs, switches: LossSwitches
) -> tuple[Float[Tensor, " T"], Bool[Tensor, " T"], Bool[Tensor, " T"]]:
    """Return (W_t, tokens whose weight the bounds changed, tokens that the switch `mask` or
    weight_mode = mask removed).

    Collective as `ratio_at`.
    """
    ratio = ratio_at(inputs, switches.weight, switches.weight_level)
    weight, bounded, removed = bound_weight(ratio, switches)
    masked = masked_tokens(inputs, switches)
    return torch.where(masked, 0.0, weight), bounded, removed | masked


def masked_tokens(inputs: LossInputs, switches: LossSwitches) -> Bool[Tensor, " T"]:
    """Tokens that the switch `mask` drops: their ratio is outside its bounds (IcePop), or the
    binary KL of its two policies exceeds mask_high in one direction or the other (KPop).
    """
    if switches.mask == "none":
        return torch.zeros_like(inputs.mask)
    if switches.mask_kind == "ratio":
        ratio = ratio_at(inputs, switches.mask, "token")
        return outside(ratio, switches.mask_low, switches.mask_high)
    first, second = (part.detach() for part in parts_of(inputs, switches.mask))
    divergence = torch.maximum(binary_kl(first, second), binary_kl(second, first))
    return divergence > switches.mask_high


def clip_masks(
    inputs: LossInputs, ratio: Float[Tensor, " T"], switches: LossSwitches
) -> tuple[Bool[Tensor, " T"], Bool[Tensor, " T"]]:
    """Return the tokens with M_t = 0: (A > 0 and ratio > 1 + clip_high, A < 0 and ratio < 1 -
    clip_low).
    """
    high = (inputs.advantages > 0) & (ratio > 1 + switches.clip_high)
    return high, (inputs.advantages < 0) & (ratio < 1 - switches.clip_low)


def divergence_masks(
    inputs: LossInputs, switches: LossSwitches
) -> tuple[Bool[Tensor, " T"], Bool[Tensor, " T"]]:
    """Return the tokens that DPPO drops (arXiv 2602.04879): (A > 0, pi > a and D > clip_high;
    A < 0, pi < a and D > clip_low), with D the binary divergence of pi from the anchor a.
    """
    logprobs, advantages = inputs.logprobs.detach(), inputs.advantages
    anchor_logprobs = (
        inputs.old_logprobs if switches.clip_anchor == "old" else inputs.rollout_logprobs
    )
    divergence = (binary_tv if switches.clip == "tv" else binary_kl)(logprobs, anchor_logprobs)
    high = (advantages > 0) & (logprobs > anchor_logprobs) & (divergence > switches.clip_high)
    low = (advantages < 0) & (logprobs < anchor_logprobs) & (divergence > switches.clip_low)
    return high, low


def binary_tv(
    logprobs: Float[Tensor, " T"], anchor_logprobs: Float[Tensor, " T"]
) -> Float[Tensor, " T"]:
    """Return |a - p|, the total variation of "this token" against "any other"."""
    return (anchor_logprobs.exp() - logprobs.exp()).abs()


def binary_kl(
    logprobs: Float[Tensor, " T"], anchor_logprobs: Float[Tensor, " T"]
) -> Float[Tensor, " T"]:
    """Return a log(a/p) + (1-a) log((1-a)/(1-p)), the KL of "this token" against "any other"."""
    probability, anchor = logprobs.exp(), anchor_logprobs.exp()
    # the logarithm of 0 is -inf.  1e-8 is below 6e-8, the least 1 - p above 0 in float32: the clamp
    # changes zeros only, and what rounding made negative
    other, anchor_other = (1 - probability).clamp(min=1e-8), (1 - anchor).clamp(min=1e-8)
    this_term = anchor * (anchor_logprobs - logprobs)
    return this_term + anchor_other * (anchor_other.log() - other.log())


def outside(values: Float[Tensor, " T"], low: float, high: float) -> Bool[Tensor, " T"]:
    """Return where a value is below `low` or above `high`."""
    return (values < low) | (values > high)


def finite_tokens(*logprobs: Float[Tensor, " T"]) -> Bool[Tensor, " T"]:
    """Return where all of the columns are finite."""
    finite = torch.ones_like(logprobs[0], dtype=torch.bool)
    for values in logprobs:
        finite &= values.detach().isfinite()
    return finite


def at_least_float32(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
