"""n_i, the divisor of loss.aggregation = kept_mean: the number of tokens of response i that the
masks on pi_old/mu keep.  (The kept sets of top-p sampling are in records/token_sets.py.)

It is counted before the update, because the sequences of a response may be in several micro-batches
and on several ranks.
Shapes: T packed tokens of one micro-batch; n rows of all micro-batches of one mini-batch on this
rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor

from megatron_rl.config import LossConfig
from megatron_rl.loss.custom import LossInputs
from megatron_rl.loss.ratios import at_least_float32, finite_tokens, importance_weight
from megatron_rl.loss.sequences import Sequences, sum_over_group


def kept_tokens(
    old_logprobs: Float[Tensor, " T"],
    rollout_logprobs: Float[Tensor, " T"],
    loss_mask: Bool[Tensor, " T"],
    sequences: Sequences,
    config: LossConfig,
) -> Bool[Tensor, " T"]:
    """Tokens with finite log-probs that neither loss.mask nor weight_mode = mask removes; all
    tokens with finite log-probs for a user's loss.

    With `kept_mean` the configuration refuses masks on other ratios than pi_old/mu.  Collective
    over `sequences.group` where the weight is that of a response.
    """
    mask = loss_mask & finite_tokens(old_logprobs, rollout_logprobs)
    if ":" in config.name:
        return mask
    old, mu = (
        torch.where(mask, at_least_float32(value), 0.0)
        for value in (old_logprobs, rollout_logprobs)
    )
    # pi = pi_old: no mask depends on pi
    inputs = LossInputs(old, old, mu, torch.zeros_like(old), mask, sequences)
    *_, removed = importance_weight(inputs, config.switches)
    return mask & ~removed


def count_kept(
    kept: Bool[Tensor, " n"],
    responses: Int[Tensor, " n"],
    num_responses: int,
    group: dist.ProcessGroup | None = None,
) -> Int[Tensor, " n"]:
    """Return, for every row, the number of kept tokens of its response, at least 1, which is
    `Sequences.kept_lengths`.

    responses: 0 .. num_responses - 1, the same number for all sequences of a response; -1
    elsewhere.  Collective over `group`, the ranks that have the other rows of the mini-batch.
    """
    # rows without a response go to one slot more, which no row of a response reads
    slots = torch.where(responses < 0, num_responses, responses)
    counts = torch.zeros(num_responses + 1, dtype=torch.int64, device=kept.device).index_add_(
        0, slots, kept.long()
    )
    return sum_over_group(counts, group)[slots].clamp(min=1)
