"""Core attention on torch SDPA for megatron-core's local layer spec, where TransformerEngine is absent.

core's own local attention knows no packed sequences.  Shapes: T packed tokens, S sequence, B batch, A query heads and G key
heads of this tensor rank, D head size.
"""

from __future__ import annotations

import math
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
        """Return [S, B, A * D] for query [S, B, A, D] and key, value [S, B, G, D], or, with `packed_seq_params`, [T, A * D] for
        query [T, A, D] and key, value [T, G, D].  `attention_mask` is not read: every sequence is causal.
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
    """Block-diagonal causal attention of [T, heads, D] tensors -> [T, A * D]; sequence i is rows cu_seqlens[i]:cu_seqlens[i + 1]."""
    bounds = cu_seqlens.tolist()
    lengths = [end - start for start, end in zip(bounds, bounds[1:], strict=False)]
    parts = [
        padded_attention(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), scale).squeeze(1)
        for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
    ]
    return torch.cat(parts)
