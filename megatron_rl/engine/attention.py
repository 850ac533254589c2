"""Core attention on torch SDPA for megatron-core's local layer spec, where TransformerEngine is absent.

core's own local attention knows neither packed sequences nor context parallelism.  Under CP each rank holds two of the
2 x cp chunks of every sequence (replay.layout.zigzag_rows); keys and values are gathered over the CP group, so each rank's
queries see all earlier keys of their own sequence, and their gradients are reduce-scattered back.
Shapes: T packed tokens, t = T / cp of this rank, S sequence, B batch, A query heads and G key heads of this tensor rank,
D head size.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.replay.layout import zigzag_rows


class PackedAttention(MegatronModule):
    """Causal attention inside each sequence, in the calling convention of megatron-core's SelfAttention."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(config=config)
        if config.attention_dropout:
            raise ValueError(f"attention_dropout = {config.attention_dropout}: the local attention has no dropout")
        self.softmax_scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)
        self.cp_group: dist.ProcessGroup | None = pg_collection.cp if config.context_parallel_size > 1 else None

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

        With `packed_seq_params`: [t, A * D] for query [t, A, D] and key, value [t, G, D]; its cu_seqlens are those of all
        T rows, as TransformerEngine has it.  Pads behind a sequence may count as part of it: no earlier row sees them.
        `attention_mask` is not read: every sequence is causal.
        """
        if packed_seq_params is None:
            return padded_attention(query, key, value, self.softmax_scale, self.cp_group)
        cu_seqlens = packed_seq_params.cu_seqlens_q_padded  # core's RoPE prefers these too
        if cu_seqlens is None:
            cu_seqlens = packed_seq_params.cu_seqlens_q
        return packed_attention(query, key, value, cu_seqlens, self.softmax_scale, self.cp_group)


def padded_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    cp_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Causal attention of [S, B, heads, D] tensors -> [S, B, A * D]; under CP, S are the rank's rows of each sequence.

    Raises ValueError where a CP rank's rows are not two equal chunks.
    """
    if cp_group is None:
        return causal_attention(query, key, value, scale)
    rows = query.size(0)
    if rows % 2:
        raise ValueError(f"sequences of {rows} rows on a CP rank are not two equal chunks: pad to a multiple of 2 x cp")
    total = rows * cp_group.size()
    key, value = gather_keys(key, value, torch.tensor([0, total]), cp_group)
    chunk, outputs = rows // 2, []
    for half, first in enumerate(first_rows(total, cp_group)):
        keys = first + chunk
        outputs.append(
            causal_attention(
                query[half * chunk : (half + 1) * chunk],
                key[:keys],
                value[:keys],
                scale,
                torch.full((query.size(1),), first, device=query.device),
            )
        )
    return torch.cat(outputs)


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
    cp_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Causal attention inside each sequence, rows cu_seqlens[i]:cu_seqlens[i + 1] of T, of [t, heads, D] -> [t, A * D].

    Runs of queries whose sizes round up to the same powers of two go through one padded SDPA call, four times faster than
    a call each for dozens of short ones.  Padding sits behind a sequence, where its causal rows never look.
    Raises ValueError where cu_seqlens does not end at T, or a sequence is no multiple of 2 x cp.
    """
    bounds = cu_seqlens.tolist()
    cp_size = 1 if cp_group is None else cp_group.size()
    if bounds[-1] != query.size(0) * cp_size:
        raise ValueError(f"cu_seqlens ends at {bounds[-1]}, but there are {query.size(0) * cp_size} packed tokens")
    if cp_group is not None:
        key, value = gather_keys(key, value, cu_seqlens, cp_group)
    buckets: dict[tuple[int, int], list[Span]] = {}
    for span in spans_of(bounds, cp_group):
        buckets.setdefault(((span.queries - 1).bit_length(), (span.keys - 1).bit_length()), []).append(span)
    outputs, rows = [], []
    for spans in buckets.values():
        first_query, queries, first_key, keys = torch.tensor(spans, device=query.device).unbind(1)
        steps = torch.arange(max(span.queries for span in spans), device=query.device)
        query_rows = (first_query[:, None] + steps).clamp(max=query.size(0) - 1)  # [spans, longest]
        steps_k = torch.arange(max(span.keys for span in spans), device=query.device)
        key_rows = (first_key[:, None] + steps_k).clamp(max=key.size(0) - 1)
        kept = (steps < queries[:, None]).flatten().nonzero().squeeze(1)
        out = causal_attention(
            take_rows(query, query_rows),
            take_rows(key, key_rows),
            take_rows(value, key_rows),
            scale,
            None if cp_group is None else keys - queries,
        )
        outputs.append(out.transpose(0, 1).flatten(0, 1).index_select(0, kept))
        rows.append(query_rows.flatten()[kept])
    return torch.cat(outputs).index_select(0, torch.cat(rows).argsort())


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, first: torch.Tensor | None = None
) -> torch.Tensor:
    """Query i of batch b sees keys 0..first[b] + i (first: 0 where None), [S, B, heads, D] -> [S, B, A * D]."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    mask = None
    if first is not None:
        last_key = first[:, None] + torch.arange(q.size(2), device=q.device)
        mask = (torch.arange(k.size(2), device=q.device) <= last_key[..., None])[:, None]  # [B, 1, S, keys]
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.size(1) != k.size(1)
    )
    return out.permute(2, 0, 1, 3).flatten(2)


class Span(NamedTuple):
    """A run of this rank's query rows and the packed keys that the last of them sees."""

    first_query: int
    queries: int
    first_key: int
    keys: int


def spans_of(bounds: list[int], cp_group: dist.ProcessGroup | None) -> list[Span]:
    """Each sequence whole; under CP its two chunks on this rank, which lie end to end among the rank's rows."""
    spans: list[Span] = []
    row = 0
    for start, end in pairwise(bounds):
        if start == end:
            continue
        size, firsts = end - start, [0]
        if cp_group is not None:
            firsts = first_rows(size, cp_group)
            size //= 2 * cp_group.size()
        for first in firsts:
            spans.append(Span(row, size, start, first + size))
            row += size
    return spans


def first_rows(length: int, cp_group: dist.ProcessGroup) -> list[int]:
    """Where this rank's two chunks begin in a sequence."""
    rank, chunks = cp_group.rank(), 2 * cp_group.size()
    chunk = length // chunks
    return [rank * chunk, (chunks - 1 - rank) * chunk]


def gather_keys(
    key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor, cp_group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of all CP ranks in the packed order: [t, ..., G, D] -> [T, ..., G, D] each, in one collective.

    Backward: the ranks' gradients are summed and scattered, since each rank's loss reads all of them.
    """
    size = cp_group.size()
    gathered = gather_from_sequence_parallel_region(torch.cat([key, value], dim=-2), group=cp_group)
    order = torch.cat([zigzag_rows(cu_seqlens, rank, size) for rank in range(size)]).argsort()
    key, value = gathered.index_select(0, order.to(key.device)).chunk(2, dim=-2)
    return key, value


def take_rows(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[t, heads, D] at rows [B, S] -> [S, B, heads, D]."""
    return tensor.index_select(0, rows.flatten()).unflatten(0, rows.shape).transpose(0, 1)
