"""The KL to a frozen reference policy, a term of the loss that does not come from the reward.

Shapes: T packed tokens.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from megatron_rl.loss.ratios import MAX_LOG_RATIO, bounded_exp

KLEstimator = Literal["k1", "k2", "k3"]


def kl_to_reference(
    logprobs: Float[Tensor, " T"], reference_logprobs: Float[Tensor, " T"], estimator: KLEstimator
) -> Float[Tensor, " T"]:
    """Return an estimate of KL(pi || pi_ref) at every sampled token, differentiable in `logprobs`.
    With x = log(pi_ref / pi):

    k1 = -x              unbiased as a value; its gradient is zero in expectation, so it penalises
                         nothing and is only for looking at
    k2 = x^2 / 2         its gradient, -x grad log pi, is the gradient of the KL for samples of pi
    k3 = e^x - 1 - x     unbiased, never negative (GRPO); its gradient, (1 - e^x) grad log pi, is
                         that of KL(pi_ref || pi)
    """
    x = (reference_logprobs.detach() - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return -x
    if estimator == "k2":
        return x.square() / 2
    if estimator == "k3":
        # expm1 is exact for the small x of a policy near its reference, where e^x - 1 cancels
        return torch.expm1(x) - x
    raise ValueError(f"loss.kl_estimator = {estimator!r} is unknown; use k1, k2 or k3")


def weighted_by_sampler(
    kl: Float[Tensor, " T"], logprobs: Float[Tensor, " T"], sampler_logprobs: Float[Tensor, " T"]
) -> Float[Tensor, " T"]:
    """Return pi/sampler * kl with the gradient of both factors, the KL estimate of DeepSeek-V3.2
    (arXiv 2512.02556).

    Its expectation over samples of the sampler is that of `kl` over samples of pi: with k3, the
    value of KL(pi || pi_ref) and its gradient.
    """
    return bounded_exp(logprobs - sampler_logprobs.detach()) * kl
