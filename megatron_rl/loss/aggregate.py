"""Sums with global denominators: the same loss for every data-parallel, context-parallel or
micro-batch split.

Shapes: T packed tokens.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from megatron_rl.config import LossConfig
from megatron_rl.loss.policy import PolicyLoss
from megatron_rl.loss.sequences import Sequences


def aggregate(
    loss: PolicyLoss,
    sequences: Sequences,
    config: LossConfig,
    *,
    num_responses: int,
    num_response_tokens: int,
) -> Float[Tensor, ""]:
    """Return this micro-batch's share of the mini-batch loss.  The shares of all micro-batches and
    ranks add up to the loss, which is loss.scale times

    sequence_sum   1/N sum_i sum_t l_it           N = num_responses (MiniRL, Eq. 7)
    sequence_mean  1/N sum_i 1/|y_i| sum_t l_it   (GRPO, MiniRL with length norm)
    kept_mean      1/N sum_i 1/n_i sum_t l_it     n_i: the tokens of y_i that the masks kept,
                   sequences.kept_lengths (IcePop)
    token_mean     1/num_response_tokens sum_i sum_t l_it   (DAPO, CISPO)

    where i runs over responses and t over their tokens.  The counts num_responses and
    num_response_tokens are those of the global mini-batch; |y_i| and n_i count the tokens of all
    sequences of a response.  Tokens that contribute nothing (clipped, rejected, not finite) stay in
    every denominator but n_i, which lacks tokens whose pi_old/mu is out of bounds or not finite.
    Penalty, entropy bonus and KL are terms of all tokens, so they are divided by |y_i| where the
    loss is divided by n_i.  A mini-batch without responses (counts of 0) gives 0.  Raises
    ValueError for kept_mean without kept_lengths.
    """
    counts = {"num_responses": num_responses, "num_response_tokens": num_response_tokens}
    return config.scale * token_shares(loss, sequences, config, **counts).sum()


def token_shares(
    loss: PolicyLoss,
    sequences: Sequences,
    config: LossConfig,
    *,
    num_responses: int,
    num_response_tokens: int,
) -> Float[Tensor, " T"]:
    """Return the term of every token in the mini-batch loss, before the scale; see `aggregate`."""
    # at least 1, so that a mini-batch without responses gives 0 and not NaN
    aggregation, responses = config.switches.aggregation, max(num_responses, 1)
    if aggregation == "token_mean":
        divisor: Tensor | float = float(max(num_response_tokens, 1))
    elif aggregation == "sequence_sum":
        divisor = float(responses)
    else:
        divisor = responses * sequences.lengths
    loss_divisor = divisor
    if aggregation == "kept_mean":
        if sequences.kept_lengths is None:
            raise ValueError(
                "loss.aggregation = kept_mean needs Sequences.kept_lengths: pass what count_kept"
                " returns"
            )
        loss_divisor = responses * sequences.kept_lengths
    return torch.where(loss.mask, loss.per_token / loss_divisor + loss.terms / divisor, 0.0)
