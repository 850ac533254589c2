"""The policy loss: one kernel, and every preset of config/loss_presets.py is a setting of its
switches.

Shapes: T packed tokens of one micro-batch.

    l_t = -keep_i * sg[W_t] * A_t * f_t  +  penalty_t  -  entropy_coef * H_t  +  kl_coef * KL_t

    sg      stop-gradient
    keep_i  0 for the tokens that `reject` or `veto` drops: all of response i, or with reject_only
            those of one kind; else 1
    W_t     importance weight: the ratio `weight`, bounded by weight_mode; 0 for a token that the
            switch `mask` or Clip-Cov drops
    M_t     0 for a token that `clip` drops, else 1
    q_t     ratio of pi to the policy of clip_anchor, at clip_level
    f_t     M_t log pi (form = logp: arXiv 2512.01374, Eq. 7), PPO's clipped ratio (form = ratio),
            or a soft function of the ratio (loss/surrogate.py)
    penalty_t  penalty_coef * `penalty`, 0 without one
    H_t     entropy of pi over the vocabulary
    KL_t    estimate of KL(pi || pi_ref) (loss/kl.py)
    gamma_t with router_shift, a factor of q_t (`router_trust`)

`aggregate` sums l_t over the mini-batch.  A q_t with gradient is written sg[q_t] * pi/sg[pi]: its
gradient is q_t grad log pi, also where q_t is the ratio of a response.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from megatron_rl.config import LossConfig
from megatron_rl.config.loss_presets import LossSwitches
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
from megatron_rl.loss.surrogate import surrogate


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of every token, and what aggregation and the metrics read besides."""

    per_token: Float[Tensor, " T"]
    """-keep_i sg[W_t] A_t f_t, before aggregation; 0 outside `mask`."""
    terms: Float[Tensor, " T"]
    """Penalty, entropy bonus and KL.  No clip and no rejection drops them; 0 outside `mask`."""
    mask: Bool[Tensor, " T"]
    """Response tokens whose log-probs are finite."""
    weight: Float[Tensor, " T"]
    """W_t, at its level and after its bounds."""
    is_weight: Float[Tensor, " T"]
    """pi/mu of the token, without bounds."""
    ratio: Float[Tensor, " T"]
    """r_t = pi/pi_old of the token."""
    clipped_high: Bool[Tensor, " T"]
    """Dropped by M_t, or flat in the PPO surrogate (dual_clip counts as high)."""
    clipped_low: Bool[Tensor, " T"]
    bounded: Bool[Tensor, " T"]
    """W_t was changed by its bounds."""
    in_weight_mask: Bool[Tensor, " T"]
    """`mask` without the tokens that weight_mode = mask or the switch `mask` removed."""
    rejected: Bool[Tensor, " T"]
    """Dropped by `reject` or `veto`."""
    selected: Bool[Tensor, " T"]
    """Chosen by loss.select."""
    gate: Float[Tensor, " T"] | None = None
    """Factor of a soft form on the gradient; None for the other forms."""
    penalty_tokens: Bool[Tensor, " T"] | None = None
    """Tokens that the penalty applies to; None without a penalty."""
    penalised: Bool[Tensor, " T"] | None = None
    """Tokens whose penalty is not 0; None without a penalty."""
    trust: Float[Tensor, " T"] | None = None
    """gamma_t; None without router_shift."""
    at_floor: Bool[Tensor, " T"] | None = None
    """gamma_t was raised to shift_floor; None without router_shift."""
    kl: Float[Tensor, " T"] | None = None
    """Estimate of KL(pi || pi_ref); None where kl_coef = 0."""


def policy_loss(inputs: LossInputs, config: LossConfig) -> PolicyLoss:
    """Return the loss of every token; only `inputs.logprobs` and `inputs.entropy` carry gradient.

    It is computed in float64 where the log-probs are float64, else in float32.  A token with a
    value that is not finite is masked: these tokens are `inputs.mask & ~result.mask`, with `result`
    the returned PolicyLoss.  Collective over `inputs.sequences.group` where the loss uses sums over
    responses.  Raises ValueError where `config` needs an input that is None.
    """
    inputs = finite_inputs(used_inputs(inputs, config))
    loss = user_loss(inputs, config) if ":" in config.name else kernel(inputs, config.switches)
    # terms are separate from per_token: neither clips nor rejections drop them, and kept_mean
    # divides them by another number
    terms, kl = loss.terms, None
    if inputs.entropy is not None:
        terms = terms - config.entropy_coef * inputs.entropy
    if inputs.reference_logprobs is not None:
        kl = kl_to_reference(inputs.logprobs, inputs.reference_logprobs, config.kl_estimator)
        if config.kl_weight != "none":
            kl = weighted_by_sampler(kl, *parts_of(inputs, config.kl_weight))
        terms = terms + config.kl_coef * kl
    return replace(
        loss,
        # whatever a custom loss returns outside the mask
        per_token=torch.where(inputs.mask, loss.per_token, 0.0),
        terms=torch.where(inputs.mask, terms, 0.0),
        kl=kl,
    )


def used_inputs(inputs: LossInputs, config: LossConfig) -> LossInputs:
    """Return the inputs that `config` uses: no entropy and no reference where its coefficient is 0.

    A value that is not used must mask no token.  Raises ValueError where an input is missing.
    """
    select = config.switches.select
    if select != "none" and inputs.selected is None:
        raise ValueError(f"loss.select = {select} needs selected: pass what select_tokens chose")
    if config.entropy_coef and inputs.entropy is None:
        raise missing_input("entropy", "entropy_coef", config.entropy_coef)
    if config.kl_coef and inputs.reference_logprobs is None:
        raise missing_input("reference_logprobs", "kl_coef", config.kl_coef)
    return replace(
        inputs,
        entropy=inputs.entropy if config.entropy_coef else None,
        reference_logprobs=inputs.reference_logprobs if config.kl_coef else None,
    )


def missing_input(name: str, key: str, coefficient: float) -> ValueError:
    return ValueError(f"loss.{key} = {coefficient} needs {name}; pass it, or set loss.{key} = 0")


def finite_inputs(inputs: LossInputs) -> LossInputs:
    """Return the inputs with all values 0 outside a mask of finite tokens, at least in float32."""
    columns = (
        inputs.logprobs, inputs.old_logprobs, inputs.rollout_logprobs,
        inputs.entropy, inputs.reference_logprobs, inputs.router_shift,
    )  # fmt: skip
    mask = inputs.mask & finite_tokens(*(column for column in columns if column is not None))
    dtype = at_least_float32(inputs.logprobs).dtype

    # Before anything is computed: NaN * 0 is NaN, and would reach the gradient of the logprobs.
    def inside(values: Tensor) -> Tensor:
        return torch.where(mask, at_least_float32(values), 0.0)

    entropy, reference, shift = inputs.entropy, inputs.reference_logprobs, inputs.router_shift
    return replace(
        inputs,
        logprobs=inside(inputs.logprobs),
        old_logprobs=inside(inputs.old_logprobs),
        rollout_logprobs=inside(inputs.rollout_logprobs),
        advantages=inside(inputs.advantages.to(dtype)),
        mask=mask,
        router_shift=None if shift is None else inside(shift.detach().to(dtype)),
        entropy=None if entropy is None else inside(entropy),
        reference_logprobs=None if reference is None else inside(reference),
    )


def kernel(inputs: LossInputs, switches: LossSwitches) -> PolicyLoss:
    """Return -keep_i * sg[W_t] * A_t * f_t and the penalty of every token, from the switches."""
    advantages, mask = inputs.advantages, inputs.mask
    # W_t
    weight, bounded, removed = importance_weight(inputs, switches)
    selected = torch.zeros_like(mask) if inputs.selected is None else inputs.selected & mask
    if switches.select == "cov_band":  # Clip-Cov drops the selected tokens
        weight = torch.where(selected, 0.0, weight)
    # 1 - keep_i
    rejected = rejected_tokens(inputs, switches) | vetoed_tokens(inputs, switches)
    # q_t, 1 - M_t and f_t
    anchored = anchored_ratio(inputs, switches)
    high, low = dropped_tokens(inputs, anchored, switches)
    f = surrogate(inputs, anchored, high | low, switches)
    added, penalty_tokens = torch.zeros_like(inputs.logprobs), None
    if switches.penalty != "none":
        # KL-Cov penalises the selected tokens only
        penalty_tokens = selected if switches.select == "cov_top" else mask
        added = torch.where(penalty_tokens, switches.penalty_coef * penalty(inputs, switches), 0.0)
    return PolicyLoss(
        per_token=torch.where(rejected, 0.0, -weight * advantages * f.term),
        terms=added,
        mask=mask,
        weight=weight,
        is_weight=ratio_of(inputs.logprobs, inputs.rollout_logprobs),
        ratio=ratio_of(inputs.logprobs, inputs.old_logprobs),
        clipped_high=(high | f.beyond_dual_clip) & mask,
        clipped_low=low & mask,
        bounded=bounded & mask,
        in_weight_mask=mask & ~removed,
        rejected=rejected & mask,
        selected=selected,
        gate=f.gate,
        penalty_tokens=penalty_tokens,
        penalised=None if penalty_tokens is None else added.detach() != 0,
        trust=router_trust(inputs, switches) if switches.router_shift else None,
        at_floor=trust_at_floor(inputs, switches) if switches.router_shift else None,
    )


def rejected_tokens(inputs: LossInputs, switches: LossSwitches) -> Bool[Tensor, " T"]:
    """Tokens that `reject` drops: all, or some, of responses whose statistic is out of bounds."""
    if switches.reject == "none":
        return torch.zeros_like(inputs.mask)
    statistic = response_statistic(inputs, switches.reject, switches.reject_level)
    rejected = outside(statistic, switches.reject_low, switches.reject_high)
    if switches.reject_only == "negative":
        return rejected & (inputs.advantages < 0)
    if switches.reject_only == "diverging":  # the update would increase |log ratio| of the token
        numerator, denominator = parts_of(inputs, switches.reject)
        return rejected & (inputs.advantages * (numerator.detach() - denominator) > 0)
    return rejected


def vetoed_tokens(inputs: LossInputs, switches: LossSwitches) -> Bool[Tensor, " T"]:
    """Tokens of responses that have at least one token whose ratio is out of bounds."""
    if switches.veto == "none":
        return torch.zeros_like(inputs.mask)
    ratio = ratio_at(inputs, switches.veto, "token")
    vetoes = outside(ratio, switches.veto_low, switches.veto_high) & inputs.mask
    # one such token gives all tokens of its response a sum above 0, on every context-parallel rank
    return inputs.sequences.sum(vetoes.to(inputs.logprobs.dtype)) > 0


def penalty(inputs: LossInputs, switches: LossSwitches) -> Float[Tensor, " T"]:
    """Return log(q)^2 or |log q|, with gradient in log pi; |log q| is 0 in the dead zone."""
    logprobs, anchor_logprobs = parts_of(inputs, ratio_to_anchor(switches))
    log_ratio = (logprobs - anchor_logprobs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if switches.penalty == "square":
        return log_ratio.square()
    distance = log_ratio.abs()
    # without the dead zone the gradient in the first update of a step, where log q is the rounding
    # of two passes, would be the sign of the rounding
    return torch.where(distance > switches.penalty_dead_zone, distance, 0.0)


def dropped_tokens(
    inputs: LossInputs, anchored: Float[Tensor, " T"], switches: LossSwitches
) -> tuple[Bool[Tensor, " T"], Bool[Tensor, " T"]]:
    """Return the tokens with M_t = 0: (ratio too high, ratio too low)."""
    if switches.clip == "none":
        return torch.zeros_like(inputs.mask), torch.zeros_like(inputs.mask)
    if switches.clip == "ratio":
        return clip_masks(inputs, anchored, switches)
    return divergence_masks(inputs, switches)


def user_loss(inputs: LossInputs, config: LossConfig) -> PolicyLoss:
    """Return the loss of the user's function; the metrics see no clip, bound or rejection."""
    per_token = load_loss(config.name)(inputs, config)
    if per_token.shape != inputs.logprobs.shape:
        raise ValueError(
            f"loss.name = {config.name!r} returned shape {tuple(per_token.shape)}, must be one loss"
            f" per token, {tuple(inputs.logprobs.shape)}; loss.aggregation sums it"
        )
    # the kernel without switches fills what the metrics read: ratios, and masks that are empty
    return replace(kernel(inputs, LossSwitches()), per_token=per_token)
