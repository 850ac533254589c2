"""Vocab-parallel token log-prob and full-vocabulary entropy of logits, and their gradient, a few
rows at a time.

Backward keeps a few numbers per row and computes probabilities again, in buffers of a few rows:
[T, V] of them in float32 would take twice the memory of the bf16 logits.

Shapes: T packed tokens, v this rank's vocabulary columns (V / tp).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from megatron_rl.engine.kept_logprobs import (
    make_kept_slopes,
    reduce_kept,
    scan_kept,
    write_kept_gradient,
)
from megatron_rl.engine.shards import (
    Shard,
    compute_dtype,
    make_shard,
    make_slopes,
    reduce_rows,
    scan,
    write_gradient,
)
from megatron_rl.engine.top_logprobs import (
    add_top_gradient,
    gather_top,
    reduce_top,
    with_top_slopes,
)
from megatron_rl.records.row_sets import RowSets


class TokenLogprobs(NamedTuple):
    """Log-probs of the labels and entropies; float32 [T] each.

    S_t is the row's kept set (records/token_sets.py), pi~ is pi renormalised over it.
    """

    logprobs: Tensor
    """log pi(label); with kept sets log pi~(label)."""
    entropy: Tensor
    """Entropy of pi, over the vocabulary."""
    kept_entropy: Tensor | None
    """Entropy of pi~, over the set, without gradient; None without kept sets."""
    log_mass: Tensor | None
    """log pi(S_t), without gradient: log pi(label) = logprobs + log_mass; None as kept_entropy."""
    top: Tensor | None = None
    """float32 [N], log pi of the ids of `top`, over the vocabulary; None without them."""


def token_logprobs(
    logits: Float[Tensor, "T v"],
    labels: Int[Tensor, " T"],
    kept: RowSets | None = None,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    overwrite: bool = False,
    top: RowSets | None = None,
) -> TokenLogprobs:
    """Return log pi(labels) and the entropy of pi = softmax(logits / temperature), both
    differentiable.

        logp_t = z_y - lse(z),  H_t = lse(z) - sum_v p_v z_v,  z = logits_t / temperature

    over the true `vocab_size` columns.  Padding columns beyond it get no probability and no
    gradient; a label beyond it gives NaN.  Values are float32 (float64 for float64 logits).  Two
    all-reduces of [T] per call, none in the backward pass.

    kept: the log-probs are over the kept set of each row; None: over the vocabulary.  The sets are
    constants, without gradient.  They take two more all-reduces of [T].
    overwrite: the backward pass writes the gradient over the logits, which saves its memory.
    Nothing may read them after that, and a second backward pass raises RuntimeError.
    top: N ids of the rows whose log-probs are returned besides; one more all-reduce of [N].
    """
    shard = make_shard(logits.shape[1], vocab_size, temperature, tp_group)
    return TokenLogprobs(*_TokenLogprobs.apply(logits, labels, kept, shard, overwrite, top))


class _TokenLogprobs(torch.autograd.Function):
    """Returns the five fields of TokenLogprobs."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        kept: RowSets | None,
        shard: Shard,
        overwrite: bool,
        top: RowSets | None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        dtype = compute_dtype(logits)
        scanned = scan(logits, labels, shard)
        rows = reduce_rows(scanned, labels, shard, dtype)
        ctx.settings = (kept, shard, overwrite, top)
        at_top = None
        if top is not None:
            gathered = torch.zeros(len(top.ids), dtype=torch.float64, device=logits.device)
            gather_top(gathered, logits, top, 0, shard)
            at_top = reduce_top(gathered, top, rows.saved, shard, dtype)
        # with `overwrite` the first backward pass destroys the logits that a second one would need
        ctx.spent = False
        # None, not zeros, for an output without gradient
        ctx.set_materialize_grads(False)
        if kept is None:
            ctx.save_for_backward(logits, labels, *rows.saved)
            return rows.logprobs, rows.entropy, None, None, at_top
        inside = reduce_kept(
            scan_kept(logits, kept, 0, shard), scanned, labels, kept, rows, shard, dtype
        )
        # without the set's entropy, which has no gradient
        ctx.save_for_backward(logits, labels, *rows.saved, *inside.saved[:2])
        ctx.mark_non_differentiable(inside.entropy, inside.log_mass)
        return inside.logprobs, rows.entropy, inside.entropy, inside.log_mass, at_top

    @staticmethod
    def backward(
        ctx: Any,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
        *more: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        kept, shard, overwrite, top = ctx.settings
        grad_top = more[-1]
        if ctx.spent:
            raise RuntimeError(
                "token_logprobs(overwrite=True): the gradient has overwritten the logits; only one"
                " backward pass is possible"
            )
        ctx.spent = overwrite
        logits, labels, *saved = ctx.saved_tensors
        inside = None
        if grad_logprobs is None and grad_top is not None:
            grad_logprobs = torch.zeros_like(saved[0])
        if kept is None:
            slopes = make_slopes(saved, grad_logprobs, grad_entropy, shard)
        else:
            slopes, inside = make_kept_slopes(saved, kept, (grad_logprobs, grad_entropy), shard)
        if slopes is None:
            # no gradient for any argument of `forward`
            return (None,) * 6
        if grad_top is not None:
            slopes = with_top_slopes(slopes, grad_top, top, saved[1], shard)
        # with `overwrite` the gradient is written into them, which autograd must not follow
        logits = logits.detach()
        if overwrite:
            grad = logits
        else:
            grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
        if inside is None:
            write_gradient(grad, logits, labels, slopes, shard)
        else:
            write_kept_gradient(grad, logits, labels, (slopes, inside), kept, 0, shard)
        if grad_top is not None:
            add_top_gradient(grad, grad_top, top, 0, shard)
        return grad, None, None, None, None, None
