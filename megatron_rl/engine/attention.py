"""Core attention on torch SDPA for megatron-core's local layer spec, where TransformerEngine is
absent.

core's own local attention supports neither packed sequences nor context parallelism.  Under CP each
rank has two of the 2 x cp chunks of every sequence (replay.layout.zigzag_rows).  Keys and values
are gathered over the CP group, so that each rank's queries see all earlier keys of their sequence;
their gradients are reduce-scattered back.  A plan, which depends on the sequences' bounds alone, is
computed once per micro-batch on the host and shared by all layers.

Shapes: T packed tokens, t = T / cp of this rank, S sequence, B batch, A query heads and G key heads
of this tensor rank, D head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rl.replay.layout import zigzag_rows


@dataclass
class PlannedSeqParams(PackedSeqParams):
    """megatron-core's parameters of a packed micro-batch, with a plan.

    cu_seqlens are on the host for PackedAttention, on the device for TransformerEngine.
    """

    plan: AttentionPlan | None = None
    """Plan of the micro-batch, which the first PackedAttention makes."""
    on_host: PackedSeqParams | None = None
    """The same parameters on the host, for core's unfused RoPE: its loop over sequences would wait
    for the device in every layer."""


class PackedAttention(MegatronModule):
    """Causal attention inside each sequence, in the calling convention of megatron-core's
    SelfAttention.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: object,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection = None,  # core always passes one
        **kwargs: object,
    ) -> None:
        super().__init__(config=config)
        if config.attention_dropout:
            raise ValueError(
                f"attention_dropout = {config.attention_dropout}: the local attention has no"
                " dropout; set it to 0"
            )
        if softmax_scale is None:
            softmax_scale = 1.0 / math.sqrt(config.kv_channels)
        self.softmax_scale = softmax_scale
        has_cp = config.context_parallel_size > 1
        self.cp_group: dist.ProcessGroup | None = pg_collection.cp if has_cp else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: object = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PlannedSeqParams | None = None,
    ) -> Tensor:
        """Return [S, B, A * D] for query [S, B, A, D] and key, value [S, B, G, D].

        With `packed_seq_params`: [t, A * D] for query [t, A, D] and key, value [t, G, D]; its
        cu_seqlens are those of all T rows, as TransformerEngine expects.  Pads after a sequence may
        belong to it, because no earlier row sees them.  `attention_mask` is not read: every
        sequence is causal.
        """
        if packed_seq_params is None:
            return padded_attention(query, key, value, self.softmax_scale, self.cp_group)
        if packed_seq_params.plan is None:  # the first layer of this micro-batch
            packed_seq_params.plan = plan_attention(
                packed_seq_params.cu_seqlens_q, query.device, self.cp_group
            )
        return packed_attention(
            query, key, value, packed_seq_params.plan, self.softmax_scale, self.cp_group
        )


def padded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    cp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Compute causal attention of [S, B, heads, D] tensors -> [S, B, A * D].

    Under CP, S are this rank's rows of every sequence.  Raises ValueError where they are not two
    equal chunks.
    """
    if cp_group is None:
        return causal_attention(query, key, value, scale)
    rows = query.size(0)
    if rows % 2:
        raise ValueError(
            f"sequences of {rows} rows on a CP rank are not two equal chunks: pad to a multiple of"
            " 2 x cp"
        )
    total = rows * cp_group.size()
    key, value = (
        in_sequence_order(gathered, cp_group.size())
        for gathered in gather_keys(key, value, cp_group)
    )
    chunk, outputs = rows // 2, []
    for queries, first in zip(query.split(chunk), first_rows(total, cp_group), strict=True):
        keys = first + chunk  # later keys would be masked: do not compute their scores
        firsts = torch.full((query.size(1),), first, device=query.device)
        outputs.append(causal_attention(queries, key[:keys], value[:keys], scale, firsts))
    return torch.cat(outputs)


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: AttentionPlan,
    scale: float,
    cp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Compute causal attention inside each sequence of the plan, [t, heads, D] -> [t, A * D].

    Nothing is copied from the device to the host.  Raises ValueError where the plan is for another
    number of rows.
    """
    if plan.num_rows != query.size(0):
        cp_size = 1 if cp_group is None else cp_group.size()
        raise ValueError(
            f"cu_seqlens ends at {plan.num_rows * cp_size}, but there are {query.size(0) * cp_size}"
            " packed tokens"
        )
    if cp_group is not None and plan.key_order is not None:
        key, value = (
            gathered.index_select(0, plan.key_order)
            for gathered in gather_keys(key, value, cp_group)
        )
    outputs = []
    for bucket in plan.buckets:
        out = causal_attention(
            take_rows(query, bucket.query_rows),
            take_rows(key, bucket.key_rows),
            take_rows(value, bucket.key_rows),
            scale,
            bucket.first,
        )
        outputs.append(out.transpose(0, 1).flatten(0, 1).index_select(0, bucket.kept))
    return torch.cat(outputs).index_select(0, plan.order)


class QueryBucket(NamedTuple):
    """B runs of queries that one padded SDPA call computes; int64 tensors."""

    query_rows: Tensor
    """[B, longest run] indices of this rank's rows; those past a shorter run's end are padding."""
    key_rows: Tensor
    """[B, longest run] indices of packed rows; those past a shorter run's end are padding."""
    kept: Tensor
    """[n] indices of those of the B x longest queries that are not padding."""
    first: Tensor | None
    """[B] position of a run's first query in its sequence, under CP; None: 0."""


@dataclass(frozen=True)
class AttentionPlan:
    """Indices for the packed attention of a micro-batch, on its device."""

    num_rows: int
    """t."""
    buckets: tuple[QueryBucket, ...]
    """Runs of queries, by size."""
    order: Tensor
    """int64 [t] index of each row in the buckets' concatenated outputs."""
    key_order: Tensor | None
    """int64 [T] index of each packed row in the CP ranks' concatenated keys; None without CP."""


def plan_attention(
    cu_seqlens: Tensor, device: torch.device, cp_group: dist.ProcessGroup | None = None
) -> AttentionPlan:
    """Plan the attention of the sequences at rows cu_seqlens[i]:cu_seqlens[i + 1], on this CP rank.

    Runs of queries whose sizes round up to the same powers of two share a padded SDPA call: for
    dozens of short ones that is four times faster than a call for every run.  Raises ValueError
    where a sequence is not a multiple of 2 x cp.
    """
    cu_seqlens = cu_seqlens.cpu()
    bounds = cu_seqlens.tolist()
    cp_size = 1 if cp_group is None else cp_group.size()
    key_order = None
    if cp_group is not None:
        gathered = [zigzag_rows(cu_seqlens, rank, cp_size) for rank in range(cp_size)]
        # `gathered` says which packed row lies at each place; its inverse, where each packed row
        # lies
        key_order = torch.cat(gathered).argsort().to(device)
    groups: dict[tuple[int, int], list[KeySpan]] = {}
    for span in spans_of(bounds, cp_group):
        # the exponents of the powers of two to which both are rounded up
        size_class = (span.queries - 1).bit_length(), (span.keys - 1).bit_length()
        groups.setdefault(size_class, []).append(span)
    num_rows = bounds[-1] // cp_size
    buckets, rows = [], []
    for spans in groups.values():
        first_query, queries, first_key, keys = torch.tensor(spans).unbind(1)
        steps = torch.arange(int(queries.max()))
        # rows past the end of a shorter run are padding: causal masking hides their keys, and
        # `kept` drops their queries
        query_rows = (first_query[:, None] + steps).clamp(max=num_rows - 1)
        key_rows = (first_key[:, None] + torch.arange(int(keys.max()))).clamp(max=bounds[-1] - 1)
        kept = (steps < queries[:, None]).flatten().nonzero().squeeze(1)
        rows.append(query_rows.flatten()[kept])
        # the last query of a run sees its last key
        first = None if cp_group is None else (keys - queries).to(device)
        buckets.append(
            QueryBucket(query_rows.to(device), key_rows.to(device), kept.to(device), first)
        )
    # `rows` says which row each output belongs to; its inverse, where the output of each row lies
    return AttentionPlan(num_rows, tuple(buckets), torch.cat(rows).argsort().to(device), key_order)


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, first: Tensor | None = None
) -> Tensor:
    """Compute attention in which query i of batch b sees keys 0..first[b] + i.

    [S, B, heads, D] -> [S, B, A * D].  first: None means 0 for all.
    """
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    mask = None
    if first is not None:
        last_key = first[:, None] + torch.arange(q.size(2), device=q.device)
        # [B, 1, S, keys]
        mask = (torch.arange(k.size(2), device=q.device) <= last_key[..., None])[:, None]
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.size(1) != k.size(1),  # several query heads share a key head
    )
    return out.permute(2, 0, 1, 3).flatten(2)


class KeySpan(NamedTuple):
    """A run of this rank's query rows and the packed keys that the last of them sees."""

    first_query: int
    queries: int
    """Number of queries."""
    first_key: int
    keys: int
    """Number of keys."""


def spans_of(bounds: list[int], cp_group: dist.ProcessGroup | None) -> list[KeySpan]:
    """Return one span per sequence, under CP one per chunk on this rank.

    A sequence's two chunks are adjacent among the rank's rows.
    """
    spans: list[KeySpan] = []
    row = 0
    for start, end in pairwise(bounds):
        if start == end:
            continue
        size, firsts = end - start, [0]
        if cp_group is not None:
            firsts = first_rows(size, cp_group)
            size //= 2 * cp_group.size()
        for first in firsts:
            spans.append(KeySpan(row, size, start, first + size))
            row += size
    return spans


def first_rows(length: int, cp_group: dist.ProcessGroup) -> list[int]:
    """Return the positions in a sequence at which this rank's two chunks start."""
    rank, chunks = cp_group.rank(), 2 * cp_group.size()
    chunk = length // chunks
    return [rank * chunk, (chunks - 1 - rank) * chunk]


def gather_keys(key: Tensor, value: Tensor, cp_group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Gather keys and values of all CP ranks, rank after rank: [t, ..., G, D] -> [T, ..., G, D].

    One collective gathers both.  Backward sums and scatters the ranks' gradients, because every
    rank's loss reads all keys.
    """
    gathered = gather_from_sequence_parallel_region(torch.cat([key, value], dim=-2), group=cp_group)
    key, value = gathered.chunk(2, dim=-2)
    return key, value


def in_sequence_order(gathered: Tensor, cp_size: int) -> Tensor:
    """Reorder the rows of one sequence [S, ...] from CP rank after CP rank to their positions.

    Rank r has chunks r and 2 cp - 1 - r.
    """
    chunks = gathered.unflatten(0, (cp_size, 2, -1))
    return torch.cat([chunks[:, 0], chunks[:, 1].flip(0)]).flatten(0, 1)


def take_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """Take rows [B, S] of a tensor [t, heads, D] -> [S, B, heads, D]."""
    return tensor.index_select(0, rows.flatten()).unflatten(0, rows.shape).transpose(0, 1)
