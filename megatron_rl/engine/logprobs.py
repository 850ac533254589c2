"""Vocab-parallel token log-prob and full-vocabulary entropy of logits, and their gradient, a few
rows at a time.

Shapes: T packed tokens, v this rank's vocabulary columns (V / tp), c those of them that are real
(not padding). The backward pass keeps a few numbers per row: probabilities are computed again, in
buffers of a few rows, because [T, V] of them in float32 would be twice the memory of the bf16
logits.
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
from megatron_rl.records.sampling_mask import KeptTokens


class TokenLogprobs(NamedTuple):
    """float32 [T] of logits and, where rows have kept sets S_t (megatron_rl/records/sampling_mask.py), over
    these.

    logprobs      log pi(label); with sets log pi~(label), pi~ = pi renormalised over the row's set
    entropy       of pi, over the vocabulary
    kept_entropy  of pi~, over the set, without gradient
    log_mass      log pi(S_t), without gradient: log pi(label) = logprobs + log_mass
    """

    logprobs: Tensor
    entropy: Tensor
    kept_entropy: Tensor | None
    log_mass: Tensor | None


def token_logprobs(
    logits: Float[Tensor, "T v"],
    labels: Int[Tensor, " T"],
    *,
    vocab_size: int,
    temperature: float = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    block_rows: int | None = None,
    overwrite: bool = False,
) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    """(log pi(labels), entropy), both differentiable with respect to `logits`, of softmax(logits /
    temperature).

    logp_t = z_y - lse(z),  H_t = lse(z) - sum_v p_v z_v  with z = logits_t / temperature over the
                            true `vocab_size`
    columns; padding columns beyond it get no probability and no gradient, a label beyond it NaN.
    float32, computed in float32 (float64 for float64 logits).  Two all-reduces of [T] a call, none
    in the backward pass.

    With `overwrite` the backward pass writes the gradient over the logits, which saves its memory:
    nothing may read them after that, and a second backward pass raises RuntimeError.  Otherwise the
    logits do not change.
    block_rows: rows at a time; by default from BLOCK_BYTES.
    """
    found = kept_token_logprobs(
        logits,
        labels,
        None,
        vocab_size=vocab_size,
        temperature=temperature,
        tp_group=tp_group,
        block_rows=block_rows,
        overwrite=overwrite,
    )
    return found.logprobs, found.entropy


def kept_token_logprobs(
    logits: Float[Tensor, "T v"],
    labels: Int[Tensor, " T"],
    kept: KeptTokens | None,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    block_rows: int | None = None,
    overwrite: bool = False,
) -> TokenLogprobs:
    """`token_logprobs` over the kept set of each row (None: there are none).  The sets are
    constants: they have no gradient.

    With sets two more all-reduces of [T].
    """
    shard = make_shard(logits.shape[1], vocab_size, temperature, block_rows, tp_group)
    return TokenLogprobs(*_TokenLogprobs.apply(logits, labels, kept, shard, overwrite))


class _TokenLogprobs(torch.autograd.Function):
    """Returns TokenLogprobs' four, the last two None without kept sets."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        kept: KeptTokens | None,
        shard: Shard,
        overwrite: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        dtype = compute_dtype(logits)
        scanned = scan(logits, labels, shard)
        rows = reduce_rows(scanned, labels, shard, dtype)
        ctx.settings = (kept, shard, overwrite)
        ctx.spent = False
        ctx.set_materialize_grads(False)
        if kept is None:
            ctx.save_for_backward(logits, labels, *rows.saved)
            return rows.logprobs, rows.entropy, None, None
        inside = reduce_kept(
            scan_kept(logits, kept, 0, shard), scanned, labels, kept, rows, shard, dtype
        )
        ctx.save_for_backward(logits, labels, *rows.saved, *inside.saved[:2])
        ctx.mark_non_differentiable(inside.entropy, inside.log_mass)
        return inside.logprobs, rows.entropy, inside.entropy, inside.log_mass

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, *unused: None
    ) -> tuple[Tensor | None, ...]:
        kept, shard, overwrite = ctx.settings
        if ctx.spent:
            raise RuntimeError(
                "token_logprobs(overwrite=True): the gradient has overwritten the logits; only one"
                " backward pass"
            )
        ctx.spent = overwrite
        logits, labels, *saved = ctx.saved_tensors
        inside = None
        if kept is None:
            slopes = make_slopes(saved, grad_logprobs, grad_entropy, shard)
        else:
            slopes, inside = make_kept_slopes(saved, kept, (grad_logprobs, grad_entropy), shard)
        if slopes is None:
            return (None,) * 5
        grad = (
            logits.detach()
            if overwrite
            else torch.empty_like(logits, memory_format=torch.contiguous_format)
        )
        if inside is None:
            write_gradient(grad, logits.detach(), labels, slopes, shard)
        else:
            write_kept_gradient(grad, logits.detach(), labels, (slopes, inside), kept, 0, shard)
        return grad, None, None, None, None
