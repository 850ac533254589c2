"""Core attention on torch SDPA for megatron-core's local layer spec, where TransformerEngine is absent.

core's own local attention knows no packed sequences.  Shapes: T packed tokens, S sequence, B batch, A query heads and
G key heads of this tensor rank, D head size.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class PackedAttention(MegatronModule):
    """Causal attention inside each sequence, in the calling convention of megatron-core's SelfAttention."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(config=config)
        if config.context_parallel_size > 1:
            raise ValueError(
                f"parallel.cp = {config.context_parallel_size}: the local attention has no context parallelism; "
                "use cp = 1, or a GPU with TransformerEngine"
            )
        if config.attention_dropout:
            raise ValueError(f"attention_dropout = {config.attention_dropout}: the local attention has no dropout")
        self.softmax_scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Return [S, B, A * D] for query [S, B, A, D] and key, value [S, B, G, D].

        With `packed_seq_params`: [T, A * D] for query [T, A, D] and key, value [T, G, D].
        `attention_mask` is not read: every sequence is causal.
        """
        if packed_seq_params is None:
            return padded_attention(query, key, value, self.softmax_scale)
        return packed_attention(query, key, value, packed_seq_params.cu_seqlens_q, self.softmax_scale)


def padded_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of [S, B, heads, D] tensors -> [S, B, A * D]."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.size(1) != k.size(1))
    return out.permute(2, 0, 1, 3).flatten(2)


def packed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor, scale: float
) -> torch.Tensor:
    """Causal attention inside each sequence, rows cu_seqlens[i]:cu_seqlens[i + 1], of [T, heads, D] -> [T, A * D].

    Sequences whose lengths round up to the same power of two go through one padded SDPA call, four times faster than a
    call each for dozens of short ones.  Padding sits behind a sequence, where its causal rows never look: no mask.
    Raises ValueError where cu_seqlens does not end at T.
    """
    bounds = cu_seqlens.tolist()
    if bounds[-1] != query.size(0):
        raise ValueError(f"cu_seqlens ends at {bounds[-1]}, but there are {query.size(0)} packed tokens")
    buckets: dict[int, list[tuple[int, int]]] = {}
    for start, end in pairwise(bounds):
        if end > start:
            buckets.setdefault((end - start - 1).bit_length(), []).append((start, end - start))
    outputs, rows = [], []
    for spans in buckets.values():
        starts, lengths = torch.tensor(spans, device=query.device).unsqueeze(-1).unbind(1)
        steps = torch.arange(max(length for _, length in spans), device=query.device)
        index = (starts + steps).clamp(max=bounds[-1] - 1)  # [sequences, longest]
        kept = (steps < lengths).flatten().nonzero().squeeze(1)
        q, k, v = (
            x.index_select(0, index.flatten()).unflatten(0, index.shape).transpose(0, 1) for x in (query, key, value)
        )
        out = padded_attention(q, k, v, scale)
        outputs.append(out.transpose(0, 1).flatten(0, 1).index_select(0, kept))
        rows.append(index.flatten()[kept])
    return torch.cat(outputs).index_select(0, torch.cat(rows).argsort())
