"""Attention and rotary embedding: attention/dot_product_attention/*.py, attention/rope.py.

The kernels are cuDNN's (FusedAttention), which TransformerEngine prefers on Hopper and later; the
workspace of their backward is decided by cuDNN and not counted.  Shapes: [T, heads, D] for packed
sequences (thd), [S, B, heads, D] or [B, S, heads, D] for padded ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from megatron_rl_tools.rehearse.layers.costs import (
    group_size,
    kernel,
    need_cuda,
    recorder,
    refuse,
)
from megatron_rl_tools.rehearse.layers.ring import RingFunction
from megatron_rl_tools.rehearse.layers.scores import Scores, attend, attend_backward
from megatron_rl_tools.rehearse.recorder import place
from megatron_rl_tools.rehearse.values import Values


class AttentionFunction(Function):
    """backends.py, FusedAttnFunc."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, bounds: Tensor | None,
        scores: Scores,
    ) -> Tensor:  # fmt: skip
        out, logsumexp = attend(q, k, v, scores.pairs())
        random_state = q.new_empty(2, dtype=torch.int64)
        ctx.scores = scores
        ctx.save_for_backward(q, k, v, out, sinks, bounds, logsumexp, random_state)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sinks, _, logsumexp, _ = ctx.saved_tensors
        gradients = attend_backward(grad.contiguous(), q, k, v, out, logsumexp, ctx.scores.pairs())
        return *gradients, None if sinks is None else torch.empty_like(sinks), None, None


class DotProductAttention(nn.Module):
    """dot_product_attention.py."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
    ) -> None:
        super().__init__()
        self.qkv_format, self.attn_mask_type = qkv_format, attn_mask_type
        self.window_size, self.softmax_type = window_size, softmax_type
        self.tp_size = tp_size if tp_group is None else group_size(tp_group)
        self.num_gqa_groups = num_gqa_groups or num_attention_heads
        self.return_max_logit = return_max_logit
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
        self.softmax_offset: Tensor | None = None
        if softmax_type == "off-by-one":
            self.softmax_offset = torch.zeros(num_attention_heads // self.tp_size, device="cuda")
        elif softmax_type == "learnable":
            heads = num_attention_heads // self.tp_size
            self.softmax_offset = nn.Parameter(torch.empty(heads, device="cuda"))

    def set_context_parallel_group(
        self,
        cp_group: Any,
        cp_global_ranks: list[int] | None,
        cp_stream: Any,
        cp_comm_type: str = "p2p",
    ) -> None:
        self.cp_group, self.cp_global_ranks = cp_group, cp_global_ranks
        self.cp_stream, self.cp_comm_type = cp_stream, cp_comm_type

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False,
        num_splits: int | None = 1,
    ) -> Tensor:
        layout = qkv_format or self.qkv_format
        mask = (attn_mask_type or self.attn_mask_type).replace(",", "_")
        window = window_size or self.window_size
        q, k, v = same_layout(query_layer, key_layer, value_layer)
        cp_size = group_size(self.cp_group)
        for name, tensor in (("query", q), ("key", k), ("value", v)):
            need_cuda(f"attention's {name}", tensor)
        if self.return_max_logit or core_attention_bias is not None or inference_params is not None:
            refuse("return_max_logit, a bias or inference of attention", "leave it out")
        if layout == "thd":
            bounds = cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded
            check_bounds((cu_seqlens_q, cu_seqlens_kv), (max_seqlen_q, max_seqlen_kv), mask)
            if cu_seqlens_q_padded is not None and pad_between_seqs is None:
                recorder().sync("TransformerEngine compares cu_seqlens with cu_seqlens_padded")
            lengths = lengths_of(bounds, max_seqlen_q, len(q) * cp_size)
        else:
            bounds = None
            lengths = [q.shape[layout.index("s")] * cp_size] * q.shape[layout.index("b")]
        scores = Scores(lengths, is_causal="causal" in mask, window=window)
        if cp_size == 1:
            out = AttentionFunction.apply(q, k, v, self.softmax_offset, bounds, scores)
        else:
            self._check_ring(scores, cp_size, layout)
            out = RingFunction.apply(
                q, k, v, bounds, scores, layout, self.cp_group, self.cp_global_ranks
            )
        return out.flatten(-2)

    def _check_ring(self, scores: Scores, cp_size: int, layout: str) -> None:
        """context_parallel.py, attn_forward_func_with_cp."""
        if self.cp_comm_type != "p2p":
            refuse(f"cp_comm_type = {self.cp_comm_type}", "set megatron.cp_comm_type to p2p")
        if scores.window is not None:
            recorder().problem("TransformerEngine refuses windows with cp_comm_type = p2p")
        if self.softmax_type != "vanilla":
            recorder().problem(
                f"TransformerEngine refuses softmax_type = {self.softmax_type} with p2p"
            )
        if any(length % (2 * cp_size) for length in scores.lengths):
            recorder().problem(
                f"attention under cp = {cp_size} needs lengths that are multiples of {2 * cp_size}"
            )


def same_layout(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """utils.py, get_qkv_layout: copy all three where keys and values have other strides or lie
    inside a larger tensor.
    """
    rows = [tuple(step / x.shape[-1] for step in x.stride()[:-1]) for x in (k, v)]
    if rows[0] == rows[1] and k.storage_offset() == v.storage_offset() == 0:
        return q, k, v
    return q.contiguous(), k.contiguous(), v.contiguous()


def check_bounds(bounds: Sequence[Tensor | None], longest: Sequence[Any], mask: str) -> None:
    """dot_product_attention.py, forward, for qkv_format = thd."""
    for tensor in bounds:
        if tensor is None:
            recorder().problem("TransformerEngine's attention needs cu_seqlens for thd")
            continue
        need_cuda("cu_seqlens", tensor)
        if tensor.dtype is not torch.int32:
            recorder().problem(f"TransformerEngine needs int32 cu_seqlens, not {tensor.dtype}")
    if "padding" not in mask:
        recorder().problem(f"TransformerEngine's attention needs a padding mask for thd: {mask}")
    for number in longest:
        if number is None:
            recorder().sync("TransformerEngine reads max_seqlen, which was not passed")
        elif not isinstance(number, int):
            recorder().problem(f"TransformerEngine needs an int max_seqlen, not {type(number)}")


def lengths_of(bounds: Tensor | None, longest: Any, num_rows: int) -> list[int]:
    """Return the lengths of packed sequences, all of `longest` where the bounds are not known."""
    known = bounds if bounds is None or not bounds.is_cuda else Values(recorder()).of(bounds)
    if known is not None:
        return [end - start for start, end in pairwise(known.tolist())]
    recorder().not_known["lengths of sequences", place()] += 1
    longest = min(longest, num_rows) if isinstance(longest, int) else num_rows
    return [longest] * (num_rows // longest) if longest else []


class RopeFunction(Function):
    """rope.py, FusedRoPEFunc."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, freqs: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        freqs = freqs.float()
        out = t.new_empty(t.shape)
        kernel("rope", t, freqs, out)
        ctx.save_for_backward(freqs, cu_seqlens)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        out = grad.new_empty(grad.shape)
        kernel("rope backward", grad, ctx.saved_tensors[0], out)
        return out, None, None


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """rope.py; core calls the fused form only."""
    for name, tensor in (("RoPE input", t), ("freqs", freqs), ("RoPE's cu_seqlens", cu_seqlens)):
        need_cuda(name, tensor)
    if tensor_format == "thd" and cu_seqlens is None:
        recorder().problem("TransformerEngine's RoPE needs cu_seqlens for thd")
    out: Tensor = RopeFunction.apply(t, freqs, cu_seqlens)
    return out
