"""Sums with GLOBAL denominators: the same loss for any data-parallel, context-parallel or micro-batch split.

Shapes: T packed tokens.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Aggregation = Literal["sequence_sum", "sequence_mean", "token_mean"]


def aggregate(
    per_token: Float[Tensor, " T"],
    loss_mask: Bool[Tensor, " T"],
    response_lengths: Int[Tensor, " T"],
    how: Aggregation,
    *,
    num_responses: int,
    num_response_tokens: int,
) -> Float[Tensor, ""]:
    """This micro-batch's share of the mini-batch loss; the shares of all micro-batches and ranks ADD UP to the loss.

    sequence_sum   1/N sum_i sum_t l_it           N = num_responses of the global mini-batch (MiniRL, Eq. 7)
    sequence_mean  1/N sum_i 1/|y_i| sum_t l_it   (GRPO, MiniRL with length norm)
    token_mean     1/sum_i |y_i| sum_i sum_t l_it (CISPO)
    Masked tokens contribute exactly 0 but stay in the denominators.
    """
    if how == "sequence_sum":
        weight: Tensor | float = 1.0 / num_responses
    elif how == "sequence_mean":
        weight = 1.0 / (num_responses * response_lengths.to(per_token.dtype))
    elif how == "token_mean":
        weight = 1.0 / num_response_tokens
    else:
        raise ValueError(f"unknown aggregation {how!r}")
    return torch.where(loss_mask, per_token * weight, 0.0).sum()
