"""The terms of a token that a teacher has scored: on-policy distillation.

Shapes: T packed rows of a micro-batch, N tokens that the teacher names for them, K for each row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from megatron_rl.loss.policy import PolicyLoss
from megatron_rl.records.packed import PackedBatch
from megatron_rl.records.row_sets import TopRows


def with_teacher_term(batch: PackedBatch, old_logprobs: Tensor) -> PackedBatch:
    """Return the micro-batch with A_t + beta_t (log pi_T - log pi_old)_t as its advantages.

    old_logprobs: float32 [T], log pi_old, of the trainer's weights before the step's updates.  The
    term has no gradient: neither has log pi_old, nor has the teacher.  Its expectation over samples
    of pi_old is -beta KL(pi_old || pi_T), token by token, and that of its policy gradient is the
    gradient of that (docs/guides/distillation.md).  Tokens with beta = 0 keep their advantage,
    bit for bit.  A micro-batch without a teacher is returned unchanged.
    """
    if batch.teacher_logprobs is None or batch.teacher_weights is None:
        return batch
    gap = batch.teacher_logprobs - old_logprobs
    term = torch.where(batch.teacher_weights > 0, batch.teacher_weights * gap, 0.0)
    return replace(batch, advantages=batch.advantages + term)


def teacher_divergence(
    student: Float[Tensor, " N"],
    top: TopRows,
    form: Literal["token", "reverse", "forward"],
    num_rows: int,
) -> Float[Tensor, " T"]:
    """Return the divergence D_t of student and teacher over the teacher's K most probable tokens;
    0 in rows without a teacher.

        reverse    D_t = sum_v p_S(v) (log p_S(v) - log p_T(v)) - p_S(v) + p_T(v)
        forward    D_t = sum_v p_T(v) (log p_T(v) - log p_S(v)) - p_T(v) + p_S(v)

    with the probabilities over the entire vocabulary, not renormalised.  Every summand is at least
    0, and 0 only where p_S(v) = p_T(v).  K = the vocabulary: KL(p_S || p_T), KL(p_T || p_S).  The
    reverse form is Eq. 5 of MOPD (arXiv 2606.30406), the forward form the same with p_S and p_T
    exchanged.
    student: log p_S of the ids of `top`, with gradient.  One that is not finite adds nothing: its
    row's own log-prob is not finite either, unless the model gives the id probability 0.
    """
    teacher = top.logprobs.to(student.dtype)
    # before anything is computed: NaN * 0 is NaN, and would reach the gradient
    student = torch.where(torch.isfinite(student), student, teacher)
    p, q = (student, teacher) if form == "reverse" else (teacher, student)
    terms = p.exp() * (p - q) - p.exp() + q.exp()
    return terms.new_zeros(num_rows).index_add(0, top.sets.rows, terms)


def with_divergence(
    loss: PolicyLoss, divergence: Float[Tensor, " T"], batch: PackedBatch
) -> PolicyLoss:
    """Return the loss with beta_t D_t as one more of its terms.

    The sum over tokens is the expectation of the next token under the current weights, so that it
    has no importance weight, and no clip and no rejection drops it.
    """
    assert batch.teacher_weights is not None, "a divergence without the teacher's beta"
    term = torch.where(loss.mask, batch.teacher_weights * divergence, 0.0)
    return replace(loss, terms=loss.terms + term)
