"""Policy losses on packed tokens (arXiv 2512.01374, Eq. 7 and Appendix A) in one table.  Shapes: T packed tokens.

Every loss has the form  -(coefficient_t) * log pi(y_t)  or a ratio surrogate, per token; `aggregate` sums it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from megatron_rl.config import LossConfig
from megatron_rl.loss.aggregate import Aggregation
from megatron_rl.loss.ratios import clip_masks, finite_tokens, ratio_of, truncate


@dataclass(frozen=True)
class PolicyLoss:
    """per_token f32 [T]: loss before aggregation, 0 where nothing is learned.  The rest is for the metrics.

    mask bool [T]: response tokens with finite log-probs; is_weight f32 [T]: w before truncation; ratio f32 [T]: r_t;
    clipped_high, clipped_low bool [T]: dropped by M_t (or flat in the PPO surrogate).
    """

    per_token: Float[Tensor, " T"]
    mask: Bool[Tensor, " T"]
    is_weight: Float[Tensor, " T"]
    ratio: Float[Tensor, " T"]
    clipped_high: Bool[Tensor, " T"]
    clipped_low: Bool[Tensor, " T"]


@dataclass(frozen=True)
class LossKind:
    per_token: Callable[[Tensor, Tensor, Tensor, Tensor, LossConfig], Tensor]
    aggregation: Aggregation
    clips: bool


def policy_loss(
    logprobs: Float[Tensor, " T"],
    old_logprobs: Float[Tensor, " T"],
    rollout_logprobs: Float[Tensor, " T"],
    advantages: Float[Tensor, " T"],
    loss_mask: Bool[Tensor, " T"],
    config: LossConfig,
) -> PolicyLoss:
    """Per-token loss of `config.name`; only `logprobs` carries gradient.

    logprobs = log pi_theta, old_logprobs = log pi_old (training engine), rollout_logprobs = log mu_old (inference
    engine).  A token with a non-finite log-prob is masked; the caller counts `loss_mask & ~mask`.
    """
    kind = LOSSES[config.name]
    mask = loss_mask & finite_tokens(logprobs, old_logprobs, rollout_logprobs)
    zero = torch.zeros((), device=logprobs.device)
    logprobs, old_logprobs, rollout_logprobs = (
        torch.where(mask, values.float(), zero) for values in (logprobs, old_logprobs, rollout_logprobs)
    )
    ratio = ratio_of(logprobs, old_logprobs)
    is_weight = ratio_of(logprobs, rollout_logprobs)
    high, low = clip_masks(ratio, advantages, clip_low=config.clip_low, clip_high=config.clip_high)
    if not kind.clips:
        high, low = torch.zeros_like(high), torch.zeros_like(low)
    per_token = kind.per_token(logprobs, old_logprobs, is_weight, advantages, config)
    per_token = torch.where(mask, per_token, zero)
    return PolicyLoss(per_token, mask, is_weight, ratio, high & mask, low & mask)


def minirl(logprobs: Tensor, old_logprobs: Tensor, is_weight: Tensor, advantages: Tensor, config: LossConfig) -> Tensor:
    """-M_t * sg[min(pi/mu, C)] * A * log pi   (Eq. 7; C = tis_cap)."""
    return keep(logprobs, old_logprobs, advantages, config) * minirl_no_clip(
        logprobs, old_logprobs, is_weight, advantages, config
    )


def minirl_no_clip(
    logprobs: Tensor, old_logprobs: Tensor, is_weight: Tensor, advantages: Tensor, config: LossConfig
) -> Tensor:
    """M_t = 1: truncation stays, clipping goes."""
    return -truncate(is_weight, config.tis_cap) * advantages * logprobs


def minirl_no_is(
    logprobs: Tensor, old_logprobs: Tensor, is_weight: Tensor, advantages: Tensor, config: LossConfig
) -> Tensor:
    """No train-inference correction: the weight is the staleness r_t alone, so w = 1 on policy (`wo_train-infer-is`)."""
    ratio = ratio_of(logprobs, old_logprobs)
    return minirl(logprobs, old_logprobs, ratio, advantages, config)


def grpo(logprobs: Tensor, old_logprobs: Tensor, is_weight: Tensor, advantages: Tensor, config: LossConfig) -> Tensor:
    """-min(r A, clip(r, 1 - low, 1 + high) A), r = pi/pi_old with gradient; no KL term (Appendix A)."""
    ratio = (logprobs - old_logprobs).clamp(-20.0, 20.0).exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def cispo(logprobs: Tensor, old_logprobs: Tensor, is_weight: Tensor, advantages: Tensor, config: LossConfig) -> Tensor:
    """-sg[clip(r, 1 - low, 1 + high)] * A * log pi: clipped weights, no token's gradient is zeroed (Appendix A)."""
    weight = ratio_of(logprobs, old_logprobs).clamp(1 - config.clip_low, 1 + config.clip_high)
    return -weight * advantages * logprobs


def keep(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, config: LossConfig) -> Tensor:
    """M_t as 0/1 floats."""
    high, low = clip_masks(
        ratio_of(logprobs, old_logprobs), advantages, clip_low=config.clip_low, clip_high=config.clip_high
    )
    return (~(high | low)).float()


LOSSES: dict[str, LossKind] = {
    "minirl": LossKind(minirl, "sequence_sum", clips=True),
    "minirl_no_is": LossKind(minirl_no_is, "sequence_sum", clips=True),
    "minirl_length_norm": LossKind(minirl, "sequence_mean", clips=True),
    "minirl_no_clip": LossKind(minirl_no_clip, "sequence_sum", clips=False),
    "grpo": LossKind(grpo, "sequence_mean", clips=True),
    "cispo": LossKind(cispo, "token_mean", clips=False),
}
