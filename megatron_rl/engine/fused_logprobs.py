"""Token log-prob and entropy from hidden states and the LM head, with logits for a chunk of rows at
a time.

It takes four matrix products instead of three: the backward pass computes the logits of a chunk
again and overwrites them with their gradient; then d hidden = d logits @ weight and
d weight += d logits' @ hidden.

Shapes: T packed tokens, H hidden size, v this rank's vocabulary columns (V / tp), c those of them
that are real (not padding), n rows of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megatron_rl.engine.kept_logprobs import (
    make_kept_slopes,
    reduce_kept,
    scan_kept,
    write_kept_gradient,
)
from megatron_rl.engine.logprobs import TokenLogprobs
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
from megatron_rl.models.spec import ModelError
from megatron_rl.records.row_sets import RowSets

CHUNK_BYTES = {"cpu": 40 << 20, "cuda": 256 << 20}
"""Size of a chunk of logits: enough rows for the matrix products to be efficient."""


@dataclass(frozen=True)
class HeadSettings:
    """Settings of the fused LM head."""

    vocab_size: int
    """True vocabulary; columns from it on are padding."""
    temperature: float = 1.0
    tp_group: dist.ProcessGroup | None = None
    sequence_parallel: bool = False
    """True: each tensor rank has its part of the sequence in `hidden`."""
    into_main_grad: bool = False
    """True: add d weight to weight.main_grad, chunk by chunk, in its precision, and set
    `grad_added_to_main_grad` for Megatron's DDP, as core's gradient accumulation fusion does.
    False: autograd gets d weight."""
    needs_grad: bool = False
    """True: with `into_main_grad`, autograd gets a tensor in place of d weight.  DDP's hook with
    overlap_grad_reduce refuses a parameter without weight.grad, and adds it to nothing."""
    chunk_rows: int | None = None
    """Rows whose logits exist at a time; None: as many as CHUNK_BYTES allow."""


def fused_logprobs(
    hidden: Float[Tensor, "*b t H"],
    weight: Float[Tensor, "v H"],
    labels: Int[Tensor, " T"],
    kept: RowSets | None,
    settings: HeadSettings,
    top: RowSets | None = None,
) -> TokenLogprobs:
    """Return token_logprobs of the logits hidden @ weight', differentiable in both factors.

    hidden: [b, t, H] as a model returns it, or [t, H], with T = b * t rows.  With
    `sequence_parallel`, T = b * t * tp: hidden states are gathered over the tensor ranks and their
    gradient is reduce-scattered, as in core's output layer.  Without it, d hidden is summed over
    the tensor ranks.

    Raises ValueError where the dtypes of `hidden` and `weight` differ, where the numbers of rows
    and labels differ, and for a weight without main_grad.
    """
    group, into_main_grad = settings.tp_group, settings.into_main_grad
    if hidden.dtype != weight.dtype:
        raise ValueError(
            f"hidden is {hidden.dtype}, weight {weight.dtype}: the LM head needs one dtype"
        )
    if into_main_grad and weight.requires_grad and not hasattr(weight, "main_grad"):
        raise ValueError(
            "into_main_grad = True, but weight has no main_grad: wrap the model in Megatron's DDP"
        )
    shard = make_shard(len(weight), settings.vocab_size, settings.temperature, group)
    rows = gather_hidden(hidden, group, settings.sequence_parallel)
    if len(rows) != len(labels):
        raise ValueError(
            f"{len(rows)} rows of hidden states, {len(labels)} labels: every row needs one label"
        )
    chunk_bytes = CHUNK_BYTES.get(weight.device.type, CHUNK_BYTES["cpu"])
    size = settings.chunk_rows or max(1, chunk_bytes // (weight.itemsize * len(weight)))
    chunks = shard.split(len(rows), size)
    sets = (kept, top)
    return TokenLogprobs(*_FusedLogprobs.apply(rows, weight, labels, sets, shard, chunks, settings))


def defer_lm_head(model: GPTModel) -> None:
    """Make a last stage return hidden states [b, t, H] in place of logits [b, t, V / tp].

    core's output layer keeps its weight, sharding and tying, but its forward returns its input.
    Raises ModelError for an output layer that is more than a matrix product, such as one that caps
    the logits (Gemma).
    """

    def identity(
        hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        return hidden, None

    if not model.post_process:
        return
    forward = type(model.output_layer).forward
    if not forward.__module__.startswith("megatron.core."):
        raise ModelError(
            f"model.fused_lm_head = true: the model's output layer ({forward.__qualname__}) does"
            " more than multiply by the weight, and the rest would be skipped; set it to false"
        )
    model.output_layer.forward = identity


def lm_head_weight(model: GPTModel) -> Float[Tensor, "v H"]:
    """Return the output layer's weight on a last stage; the embedding's where they are tied."""
    tied = model.share_embeddings_and_output_weights
    return model.shared_embedding_or_output_weight() if tied else model.output_layer.weight


def gather_hidden(
    hidden: Float[Tensor, "*b t H"], group: dist.ProcessGroup | None, sequence_parallel: bool
) -> Float[Tensor, "T H"]:
    """Return all rows, batch-major, on every tensor rank.

    The backward pass sums the gradients that the tensor ranks' columns contribute.
    """
    if group is not None and group.size() > 1:
        if sequence_parallel:
            # core gathers along dim 0: move the sequence there and back
            hidden = gather_from_sequence_parallel_region(
                hidden.transpose(0, -2), group=group
            ).transpose(0, -2)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
    return hidden.reshape(-1, hidden.shape[-1])


class _FusedLogprobs(torch.autograd.Function):
    """Returns the five fields of TokenLogprobs."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        sets: tuple[RowSets | None, RowSets | None],
        shard: Shard,
        chunks: list[slice],
        head: HeadSettings,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        kept, top = sets
        scanned = torch.zeros(4, len(hidden), dtype=torch.float64, device=hidden.device)
        scanned[0] = float("-inf")  # stays where the shard is padding only: there are no chunks
        scanned_kept = scanned[:3].clone() if kept is not None else None
        gathered = scanned.new_zeros(0 if top is None else len(top.ids))
        logits = make_logits_buffer(chunks, weight, shard)
        for rows in chunks:
            part = torch.mm(
                hidden[rows], weight[: shard.columns].t(), out=logits[: rows.stop - rows.start]
            )
            scanned[:, rows] = scan(part, labels[rows], shard)
            if kept is not None and scanned_kept is not None:
                scanned_kept[:, rows] = scan_kept(part, kept, rows.start, shard)
            if top is not None:
                gather_top(gathered, part, top, rows.start, shard)
        dtype = compute_dtype(weight)
        result = reduce_rows(scanned, labels, shard, dtype)
        at_top = None if top is None else reduce_top(gathered, top, result.saved, shard, dtype)
        ctx.settings = (kept, top, shard, chunks)
        ctx.needs_grad = head.needs_grad
        into_main_grad = head.into_main_grad and weight.requires_grad
        # Megatron's DDP adds this attribute
        ctx.main_grad = weight.main_grad if into_main_grad else None  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)  # None, not zeros, for an output without gradient
        if kept is None or scanned_kept is None:
            ctx.save_for_backward(hidden, weight, labels, *result.saved)
            return result.logprobs, result.entropy, None, None, at_top
        inside = reduce_kept(scanned_kept, scanned, labels, kept, result, shard, dtype)
        # without the set's entropy, which has no gradient
        ctx.save_for_backward(hidden, weight, labels, *result.saved, *inside.saved[:2])
        ctx.mark_non_differentiable(inside.entropy, inside.log_mass)
        return inside.logprobs, result.entropy, inside.entropy, inside.log_mass, at_top

    @staticmethod
    def backward(
        ctx: Any,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
        *more: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, *saved = ctx.saved_tensors
        kept, top, shard, chunks = ctx.settings
        inside, grad_top = None, more[-1]
        if grad_logprobs is None and grad_top is not None:
            grad_logprobs = torch.zeros_like(saved[0])
        if kept is None:
            slopes = make_slopes(saved, grad_logprobs, grad_entropy, shard)
        else:
            slopes, inside = make_kept_slopes(saved, kept, (grad_logprobs, grad_entropy), shard)
        if slopes is None:
            # no gradient for any argument of `forward`
            return (None,) * 7
        if grad_top is not None:
            slopes = with_top_slopes(slopes, grad_top, top, saved[1], shard)
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = make_weight_gradient(ctx, weight)
        used = weight[: shard.columns]
        logits = make_logits_buffer(chunks, weight, shard)
        for rows in chunks:
            part = torch.mm(hidden[rows], used.t(), out=logits[: rows.stop - rows.start])
            if inside is None:
                write_gradient(part, part, labels[rows], slopes.of(rows), shard)
            else:
                write_kept_gradient(
                    part, part, labels[rows], (slopes, inside), kept, rows.start, shard
                )
            if grad_top is not None:
                add_top_gradient(part, grad_top, top, rows.start, shard)
            if grad_hidden is not None:
                torch.mm(part, used, out=grad_hidden[rows])
            if grad_weight is not None:
                add_product(grad_weight[: shard.columns], part, hidden[rows])
        if ctx.main_grad is not None:
            # it is in the buffer: neither autograd nor DDP may add it again
            weight.grad_added_to_main_grad = True
            del logits
            grad_weight = unread_gradient(weight) if ctx.needs_grad else None
        elif grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, *(None,) * 5


def unread_gradient(weight: Tensor) -> Float[Tensor, "v H"]:
    """Return a gradient that DDP's hook drops, as core's LinearWithGradAccumulation does.

    With tied embeddings it is added to the embedding's, which DDP reads: it is zero.
    """
    make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
    return make(weight)


def make_logits_buffer(chunks: list[slice], weight: Tensor, shard: Shard) -> Float[Tensor, "n c"]:
    """Return memory for the logits of the largest chunk, which all chunks share."""
    return weight.new_empty(chunks[0].stop if chunks else 0, shard.columns)


def make_weight_gradient(ctx: Any, weight: Tensor) -> Float[Tensor, "v H"] | None:
    """Return the accumulator of d weight: Megatron's buffer, or one of at least float32.

    It is None where no gradient is needed.
    """
    if not ctx.needs_input_grad[1] or ctx.main_grad is not None:
        return ctx.main_grad
    return torch.zeros_like(weight, dtype=compute_dtype(weight))


def add_product(
    total: Float[Tensor, "c H"], grad: Float[Tensor, "n c"], hidden: Float[Tensor, "n H"]
) -> None:
    """Add grad' @ hidden to `total`."""
    if total.dtype == grad.dtype:
        total.addmm_(grad.t(), hidden)
        return
    # addmm_ needs one dtype: multiply in pieces, so that the product is no larger than `grad`
    size = max(1, grad.numel() // hidden.shape[1])
    for start in range(0, len(total), size):
        columns = slice(start, start + size)
        total[columns].add_(grad[:, columns].t() @ hidden)
