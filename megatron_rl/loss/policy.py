"""The one policy-loss kernel: every preset (megatron_rl/config/loss_presets.py) is a position of
its switches.
Shapes: T packed tokens.

    loss of a token = -keep_i * sg[W_t] * A_t * f_t  +  penalty_t  -  entropy_coef * H_t  +  kl_coef * KL_t

with f_t = M_t log pi (form = logp: arXiv 2512.01374, Eq. 7), PPO's clipped ratio (form = ratio) or
a soft function of it (loss/surrogate.py); `aggregate` sums it.
A ratio that carries gradient is written sg[q_t] * pi/sg[pi]: its gradient is q_t grad log pi, at
any level of q_t.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from megatron_rl.config import LossConfig
from megatron_rl.config.loss_presets import LossSpec
from megatron_rl.loss.custom import LossInputs, load_loss
from megatron_rl.loss.kl import kl_to_reference, weighted_by_sampler
from megatron_rl.loss.ratios import (
    MAX_LOG_RATIO,
    anchored_ratio,
    at_least_float32,
    clip_masks,
    divergence_masks,
    finite_tokens,
    importance_weight,
    outside,
    parts_of,
    ratio_at,
    ratio_of,
    ratio_to_anchor,
    response_statistic,
    router_trust,
    trust_at_floor,
)
from megatron_rl.loss.sequences import Sequences
from megatron_rl.loss.surrogate import surrogate


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of every token, and what aggregation and the metrics need besides."""

    per_token: Float[Tensor, " T"]  # of the policy, before aggregation, 0 where nothing is learned
    terms: Float[Tensor, " T"]  # added to it: penalty, entropy bonus and KL, which nothing drops
    mask: Bool[Tensor, " T"]  # response tokens with finite log-probs
    weight: Float[Tensor, " T"]  # W_t: at its level, after its bounds
    is_weight: Float[Tensor, " T"]  # pi/mu, unbounded
    ratio: Float[Tensor, " T"]  # r_t = pi/pi_old
    clipped_high: Bool[Tensor, " T"]
    """Dropped by M_t, or flat in the PPO surrogate (dual_clip counts as high)."""
    clipped_low: Bool[Tensor, " T"]
    bounded: Bool[Tensor, " T"]  # W_t was changed by its bounds
    in_weight_mask: Bool[Tensor, " T"]
    """`mask` without what weight_mode = mask, or loss.mask, removed."""
    rejected: Bool[Tensor, " T"]  # dropped by `reject` or `veto`
    selected: Bool[Tensor, " T"]  # by loss.select
    gate: Float[Tensor, " T"] | None = None
    """What a soft form multiplies the gradient by; None: no soft form."""
    penalty_tokens: Bool[Tensor, " T"] | None = None
    """Tokens that the penalty applies to; None without one."""
    penalised: Bool[Tensor, " T"] | None = None  # those of them whose penalty is not 0
    trust: Float[Tensor, " T"] | None = None  # gamma_t; None without router_shift
    at_floor: Bool[Tensor, " T"] | None = None
    """gamma_t was held at shift_floor; None without router_shift."""
    kl: Float[Tensor, " T"] | None = None  # estimate of KL(pi || reference)


def policy_loss(
    logprobs: Float[Tensor, " T"],
    old_logprobs: Float[Tensor, " T"],
    rollout_logprobs: Float[Tensor, " T"],
    advantages: Float[Tensor, " T"],
    loss_mask: Bool[Tensor, " T"],
    sequences: Sequences,
    config: LossConfig,
    *,
    entropy: Float[Tensor, " T"] | None = None,
    reference_logprobs: Float[Tensor, " T"] | None = None,
    selected: Bool[Tensor, " T"] | None = None,
    router_shift: Float[Tensor, " T"] | None = None,
) -> PolicyLoss:
    """Per-token loss of `config`; only `logprobs` and `entropy` carry gradient.

    logprobs = log pi_theta, old_logprobs = log pi_old (training engine), rollout_logprobs = log
    mu_old (inference engine), reference_logprobs = log pi_ref (frozen), selected = `select_tokens`
    of the mini-batch, router_shift: see replay/router_shift.py.  Computed in float64 where the
    log-probs are, else in float32.  A token with a non-finite one is masked; the caller counts
    `loss_mask & ~mask`.  Collective over `sequences.group` where the loss uses sums over responses.
    Raises ValueError where config asks for an entropy bonus, a KL, a selection or the router shift
    and its argument is missing.
    """
    if config.switches.select != "none" and selected is None:
        raise ValueError(
            f"loss.select = {config.switches.select} needs selected: pass what select_tokens chose"
        )
    given = [
        logprobs,
        old_logprobs,
        rollout_logprobs,
        *extra_terms(config, entropy, reference_logprobs),
    ]
    mask = loss_mask & finite_tokens(*given, *([] if router_shift is None else [router_shift]))
    zero = torch.zeros((), dtype=at_least_float32(logprobs).dtype, device=logprobs.device)
    # select before computing: a NaN outside the mask would reach the gradient even when multiplied
    # by 0
    values = [torch.where(mask, at_least_float32(value), zero) for value in given]
    masked_advantages = torch.where(mask, advantages.to(zero.dtype), zero)
    shift = (
        None
        if router_shift is None
        else torch.where(mask, router_shift.detach().to(zero.dtype), zero)
    )
    inputs = LossInputs(
        values[0], values[1], values[2], masked_advantages, mask, sequences, selected, shift
    )
    loss = user_loss(inputs, config) if ":" in config.name else kernel(inputs, config.switches)
    terms, kl, extra = loss.terms, None, values[3:]
    if config.entropy_coef:
        terms = terms - config.entropy_coef * extra.pop(0)
    if config.kl_coef:
        kl = kl_to_reference(inputs.logprobs, extra.pop(0), config.kl_estimator)
        if config.kl_weight != "none":
            kl = weighted_by_sampler(kl, *parts_of(inputs, config.kl_weight))
        terms = terms + config.kl_coef * kl
    return replace(
        loss,
        per_token=torch.where(mask, loss.per_token, zero),
        terms=torch.where(mask, terms, zero),
        kl=kl,
    )


def kernel(inputs: LossInputs, switches: LossSpec) -> PolicyLoss:
    """-keep_i * sg[W_t] * A_t * f_t, and the penalty, for every token, from the switches."""
    advantages, mask = inputs.advantages, inputs.mask
    weight, bounded, removed = importance_weight(inputs, switches)
    selected = torch.zeros_like(mask) if inputs.selected is None else inputs.selected & mask
    if switches.select == "cov_band":
        weight = torch.where(selected, 0.0, weight)
    rejected = rejected_tokens(inputs, switches) | vetoed_tokens(inputs, switches)
    anchored = anchored_ratio(inputs, switches)
    high, low = dropped_tokens(inputs, anchored, switches)
    found = surrogate(inputs, anchored, high | low, switches)
    added, penalty_tokens = torch.zeros_like(inputs.logprobs), None
    if switches.penalty != "none":
        penalty_tokens = selected if switches.select == "cov_top" else mask
        added = torch.where(penalty_tokens, switches.penalty_coef * penalty(inputs, switches), 0.0)
    return PolicyLoss(
        per_token=torch.where(rejected, 0.0, -weight * advantages * found.term),
        terms=added,
        mask=mask,
        weight=weight,
        is_weight=ratio_of(inputs.logprobs, inputs.rollout_logprobs),
        ratio=ratio_of(inputs.logprobs, inputs.old_logprobs),
        clipped_high=(high | found.beyond_dual_clip) & mask,
        clipped_low=low & mask,
        bounded=bounded & mask,
        in_weight_mask=mask & ~removed,
        rejected=rejected & mask,
        selected=selected,
        gate=found.gate,
        penalty_tokens=penalty_tokens,
        penalised=None if penalty_tokens is None else added.detach() != 0,
        trust=router_trust(inputs, switches) if switches.router_shift else None,
        at_floor=trust_at_floor(inputs, switches) if switches.router_shift else None,
    )


def rejected_tokens(inputs: LossInputs, switches: LossSpec) -> Bool[Tensor, " T"]:
    """Tokens that `reject` drops: all, or some, of responses whose statistic is out of bounds."""
    if switches.reject == "none":
        return torch.zeros_like(inputs.mask)
    statistic = response_statistic(inputs, switches.reject, switches.reject_level)
    rejected = outside(statistic, switches.reject_low, switches.reject_high)
    if switches.reject_only == "negative":
        return rejected & (inputs.advantages < 0)
    if switches.reject_only == "diverging":  # the update would move the numerator further away
        numerator, denominator = parts_of(inputs, switches.reject)
        return rejected & (inputs.advantages * (numerator.detach() - denominator) > 0)
    return rejected


def vetoed_tokens(inputs: LossInputs, switches: LossSpec) -> Bool[Tensor, " T"]:
    """Tokens of responses with at least one token whose ratio is out of bounds."""
    if switches.veto == "none":
        return torch.zeros_like(inputs.mask)
    found = (
        outside(ratio_at(inputs, switches.veto, "token"), switches.veto_low, switches.veto_high)
        & inputs.mask
    )
    return inputs.sequences.sum(found.to(inputs.logprobs.dtype)) > 0


def penalty(inputs: LossInputs, switches: LossSpec) -> Float[Tensor, " T"]:
    """log(q)^2 or |log q| of every token, differentiable in log pi; |log q| is 0 in the dead zone."""
    logprobs, anchor_logprobs = parts_of(inputs, ratio_to_anchor(switches))
    log_ratio = (logprobs - anchor_logprobs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if switches.penalty == "square":
        return log_ratio.square()
    distance = log_ratio.abs()
    return torch.where(distance > switches.penalty_dead_zone, distance, 0.0)


def dropped_tokens(
    inputs: LossInputs, anchored: Float[Tensor, " T"], switches: LossSpec
) -> tuple[Bool[Tensor, " T"], Bool[Tensor, " T"]]:
    """(too high, too low): where M_t = 0."""
    if switches.clip == "none":
        return torch.zeros_like(inputs.mask), torch.zeros_like(inputs.mask)
    if switches.clip == "ratio":
        return clip_masks(inputs, anchored, switches)
    return divergence_masks(inputs, switches)


def user_loss(inputs: LossInputs, config: LossConfig) -> PolicyLoss:
    """The user's function, with nothing clipped, bounded or rejected as far as the metrics know."""
    per_token = load_loss(config.name)(inputs, config)
    if per_token.shape != inputs.logprobs.shape:
        raise ValueError(
            f"loss.name = {config.name!r} returned shape {tuple(per_token.shape)}, must be one loss"
            f" per token, {tuple(inputs.logprobs.shape)}; loss.aggregation sums it"
        )
    return replace(kernel(inputs, LossSpec()), per_token=per_token)


def extra_terms(
    config: LossConfig, entropy: Tensor | None, reference_logprobs: Tensor | None
) -> list[Tensor]:
    """The additional per-token values that config needs.

    Raises ValueError where one is missing.
    """
    terms = []
    for key, what, value in (
        ("entropy_coef", "entropy", entropy), ("kl_coef", "reference_logprobs", reference_logprobs)
    ):  # fmt: skip
        if getattr(config, key):
            if value is None:
                raise ValueError(
                    f"loss.{key} = {getattr(config, key)} needs {what}; pass it, or set"
                    f" loss.{key} = 0"
                )
            terms.append(value)
    return terms
