"""The advantage of a token that a teacher has scored: on-policy distillation.

Shapes: T packed rows of a micro-batch.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron_rl.records import PackedBatch


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
