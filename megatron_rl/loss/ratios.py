"""Probability ratios of the formulation (arXiv 2512.01374, Eq. 5): pi/mu = (pi_old/mu) *
(pi/pi_old), and their bounds.

Shapes: T packed tokens.  Ratios carry no gradient; they are float64 where the log-probs are, else
float32.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from megatron_rl.config.loss_presets import Level, LossSpec, Ratio, RejectLevel
from megatron_rl.loss.custom import LossInputs

MAX_LOG_RATIO = 20.0  # exp(20) is 5e8: far beyond any bound, and finite


def ratio_of(
    numerator: Float[Tensor, " T"], denominator: Float[Tensor, " T"]
) -> Float[Tensor, " T"]:
    """exp(numerator - denominator) of log-probs, detached, log-ratio clamped to +-20 so that no inf
    enters the loss.
    """
    return bounded_exp(
        at_least_float32(numerator.detach()) - at_least_float32(denominator.detach())
    )


def ratio_at(inputs: LossInputs, which: Ratio, level: Level) -> Float[Tensor, " T"]:
    """The ratio x_t of every token, at a level: token x_t; product prod_t x_t; geometric exp(mean_t
    log x_t).

    Sequence levels run over the response's tokens in `inputs.mask`, on all context-parallel ranks:
    collective over `inputs.sequences.group`.  which = none: 1.
    """
    if which == "none":
        return torch.ones_like(inputs.logprobs)
    numerator, denominator = parts_of(inputs, which)
    if level == "token":
        return ratio_of(numerator, denominator)
    # clamped once, after the sum: clamping every token would change the product of a long response
    # sums over sequences carry no gradient
    log_ratio = torch.where(inputs.mask, numerator - denominator, 0.0)
    is_product, sequences = level == "product", inputs.sequences
    return bounded_exp(
        sequences.sum(log_ratio) if is_product else sequences.mean(log_ratio, inputs.mask)
    )


def ratio_to_anchor(switches: LossSpec) -> Ratio:
    """Which ratio q_t is."""
    return "staleness" if switches.clip_anchor == "old" else "total"


def router_trust(inputs: LossInputs, switches: LossSpec) -> Float[Tensor, " T"]:
    """gamma_t = max(exp(-shift_t), shift_floor) of RSPO (arXiv 2510.23027), in (0, 1]."""
    return unbounded_trust(inputs).clamp(min=switches.shift_floor)


def trust_at_floor(inputs: LossInputs, switches: LossSpec) -> Bool[Tensor, " T"]:
    """Where gamma_t is shift_floor because exp(-shift_t) is below it; never outside the mask, where
    the shift is 0.
    """
    return unbounded_trust(inputs) < switches.shift_floor


def unbounded_trust(inputs: LossInputs) -> Float[Tensor, " T"]:
    if inputs.router_shift is None:
        raise ValueError(
            "loss.router_shift = true needs router_shift: pass the shift of every token"
        )
    return (-inputs.router_shift).exp()


def anchored_ratio(inputs: LossInputs, switches: LossSpec) -> Float[Tensor, " T"]:
    """q_t at clip_level, with router_shift that of the ratios times gamma_t.

    Collective as `ratio_at`.
    """
    ratio = ratio_at(inputs, ratio_to_anchor(switches), switches.clip_level)
    if not switches.router_shift:
        return ratio
    trust = router_trust(inputs, switches)
    if switches.clip_level == "token":
        return ratio * trust
    logs, sequences = torch.where(inputs.mask, trust.log(), 0.0), inputs.sequences
    combined = (
        sequences.sum(logs)
        if switches.clip_level == "product"
        else sequences.mean(logs, inputs.mask)
    )
    return ratio * bounded_exp(combined)


def parts_of(inputs: LossInputs, which: Ratio) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    """Log-probs of the numerator and the denominator of a ratio."""
    numerator = inputs.old_logprobs if which == "train_infer" else inputs.logprobs
    return numerator, inputs.old_logprobs if which == "staleness" else inputs.rollout_logprobs


def response_statistic(inputs: LossInputs, which: Ratio, level: RejectLevel) -> Float[Tensor, " T"]:
    """At every token, what `reject` bounds: the ratio of its response, or the mean of a divergence
    over its tokens.

    mean_shift |x - 1|;  mean_tv, mean_kl: binary divergence of the two policies;  mean_k2 log(x)^2
                         / 2;  mean_k3 x - 1 - log x.
    Collective over `inputs.sequences.group`.
    """
    if level in ("product", "geometric"):
        return ratio_at(inputs, which, level)
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
    weight: Float[Tensor, " T"], switches: LossSpec
) -> tuple[Float[Tensor, " T"], Bool[Tensor, " T"], Bool[Tensor, " T"]]:
    """(bounded weight, where the bound changed it, where mode = mask removed it); the bounds
    themselves are inside.

    truncate: min(w, high).  clip: min(max(w, low), high).  mask: w where low <= w <= high, else 0.
    """
    low = 0.0 if switches.weight_mode == "truncate" else switches.weight_low
    found = outside(weight, low, switches.weight_high)
    nothing = torch.zeros_like(found)
    if switches.weight_mode == "none":
        return weight, nothing, nothing
    if switches.weight_mode == "mask":
        return torch.where(found, 0.0, weight), found, found
    return weight.clamp(low, switches.weight_high), found, nothing


def importance_weight(
    inputs: LossInputs, switches: LossSpec
) -> tuple[Float[Tensor, " T"], Bool[Tensor, " T"], Bool[Tensor, " T"]]:
    """(W_t, where its bounds changed it, where `mask` or weight_mode = mask removed the token).

    Collective as `ratio_at`.
    """
    weight, bounded, removed = bound_weight(
        ratio_at(inputs, switches.weight, switches.weight_level), switches
    )
    masked = outside(
        ratio_at(inputs, switches.mask, "token"), switches.mask_low, switches.mask_high
    )
    return torch.where(masked, 0.0, weight), bounded, removed | masked


def clip_masks(
    inputs: LossInputs, ratio: Float[Tensor, " T"], switches: LossSpec
) -> tuple[Bool[Tensor, " T"], Bool[Tensor, " T"]]:
    """Tokens whose update M_t drops: (high: A > 0 and r > 1 + clip_high, low: A < 0 and r < 1 -
    clip_low); strict.
    """
    high = (inputs.advantages > 0) & (ratio > 1 + switches.clip_high)
    return high, (inputs.advantages < 0) & (ratio < 1 - switches.clip_low)


def divergence_masks(
    inputs: LossInputs, switches: LossSpec
) -> tuple[Bool[Tensor, " T"], Bool[Tensor, " T"]]:
    """Tokens that DPPO drops (arXiv 2602.04879): (A > 0, pi > a and D > clip_high; A < 0, pi < a
    and D > clip_low).

    D is the binary divergence of pi from the anchor a.
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
    """|a - p|: the total variation of "this token" against "any other"."""
    return (anchor_logprobs.exp() - logprobs.exp()).abs()


def binary_kl(
    logprobs: Float[Tensor, " T"], anchor_logprobs: Float[Tensor, " T"]
) -> Float[Tensor, " T"]:
    """a log(a/p) + (1-a) log((1-a)/(1-p)): the KL of "this token" against "any other"."""
    probability, anchor = logprobs.exp(), anchor_logprobs.exp()
    # the probability of any other token; at 0 its logarithm would be -inf
    rest, anchor_rest = (1 - probability).clamp(min=1e-8), (1 - anchor).clamp(min=1e-8)
    return anchor * (anchor_logprobs - logprobs) + anchor_rest * (anchor_rest.log() - rest.log())


def outside(values: Float[Tensor, " T"], low: float, high: float) -> Bool[Tensor, " T"]:
    """Where a value is out of bounds, which are themselves inside."""
    return (values < low) | (values > high)


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
