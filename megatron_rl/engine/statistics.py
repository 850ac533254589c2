"""Per-token statistics of the two passes, added to sums that are reduced once per step.

No host sync here: everything stays on the device until `MetricSums.reduce`.  Formulas: docs/metrics.md.
Shapes: T packed rows of a micro-batch.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from megatron_rl.loss.policy import PolicyLoss
from megatron_rl.loss.ratios import finite_tokens, ratio_of
from megatron_rl.metrics.reduce import MetricSums
from megatron_rl.records import PackedBatch


def add_discrepancy(sums: MetricSums, old_logprobs: Float[Tensor, " T"], batch: PackedBatch) -> None:
    """Training-inference discrepancy of one micro-batch of the old-logprob pass: pi_old against mu_old."""
    mask = batch.loss_mask & finite_tokens(old_logprobs, batch.rollout_logprobs)
    gap = masked(batch.rollout_logprobs - old_logprobs.detach(), mask)
    rho = ratio_of(old_logprobs, batch.rollout_logprobs)
    count = mask.sum()
    sums.add("train/kl_mu_pi", gap.sum(), count)
    sums.add("train/kl_mu_pi_k3", masked(rho - 1 + gap, mask).sum(), count)
    sums.add("train/mismatch_abs_mean", gap.abs().sum(), count)
    sums.add_max("train/mismatch_abs_max", gap.abs().max())


def add_update(
    sums: MetricSums,
    share_of_loss: Float[Tensor, ""],
    share_of_responses: float,
    loss: PolicyLoss,
    entropy: Float[Tensor, " T"],
    micro_batch: PackedBatch,
) -> None:
    """Statistics of this rank's rows of one micro-batch of an update.

    share_of_loss: their part of the mini-batch loss; share_of_responses: a weight, over a mini-batch and all ranks that
    count, DP x CP, these sum to one.
    """
    mask, count = loss.mask, loss.mask.sum()
    sums.add("train/loss", share_of_loss.detach(), share_of_responses)
    ratio, weight = masked(loss.ratio, mask), masked(loss.is_weight, mask)
    sums.add("train/entropy", masked(entropy.detach(), mask).sum(), count)
    sums.add("train/ratio_mean", ratio.sum(), count)
    sums.add_max("train/ratio_max", ratio.max())
    sums.add("train/is_weight_mean", weight.sum(), count)
    sums.add("train/is_weight_square_mean", weight.square().sum(), count)
    sums.add("train/tis_truncated_frac", loss.bounded.sum(), count)
    sums.add("train/clip_high_frac", loss.clipped_high.sum(), count)
    sums.add("train/clip_low_frac", loss.clipped_low.sum(), count)
    sums.add("train/rejected_frac", loss.rejected.sum(), count)
    if loss.kl is not None:
        sums.add("train/kl_reference", masked(loss.kl.detach(), mask).sum(), count)
    all_tokens = micro_batch.loss_mask.sum()
    sums.add("train/nonfinite_frac", all_tokens - count, all_tokens)


def masked(values: Float[Tensor, " T"], mask: Bool[Tensor, " T"]) -> Float[Tensor, " T"]:
    """`values` with 0 outside the mask; indexing by a mask would wait for the device."""
    return torch.where(mask, values, 0.0)
