"""Log-probs of given ids over the entire vocabulary, several for each row, with gradient: what
losses over a teacher's most probable tokens sum (loss/teacher.py).

With z = logits / temperature, p = softmax(z) and g_v = d loss / d log p_v of the ids v of a row:

    log p_v = z_v - logsumexp(z)
    d loss / d z_u = g_u - p_u sum_v g_v, with g_u = 0 for a u that is none of the ids

logprobs.py and fused_logprobs.py call this module.  Ids are sharded over the tensor ranks as the
vocabulary is.

Shapes: T packed tokens, n rows of a chunk of them, v this rank's vocabulary columns, N ids of all
rows.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from megatron_rl.engine.kept_logprobs import find_entries
from megatron_rl.engine.shards import Shard, Slopes, reduce_over_tp
from megatron_rl.records.row_sets import RowSets


def gather_top(
    out: Float[Tensor, " N"], logits: Float[Tensor, "n v"], top: RowSets, first: int, shard: Shard
) -> None:
    """Write the logits of the ids of rows `first` to first + n into `out`; 0 for ids of other
    ranks.
    """
    if not shard.columns:  # the shard is padding only: `out` stays 0
        return
    for rows in top.blocks(first, first + len(logits)):
        entries = find_entries(top, rows, shard)
        values = logits[rows.start - first + entries.rows, entries.columns].double()
        part = slice(int(top.offsets[rows.start]), int(top.offsets[rows.stop]))
        out[part] = values.where(entries.owned, 0.0)


def reduce_top(
    gathered: Float[Tensor, " N"],
    top: RowSets,
    saved: tuple[Tensor, ...],
    shard: Shard,
    dtype: torch.dtype,
) -> Float[Tensor, " N"]:
    """Return the log-probs of the ids, from every rank's logits.  One all-reduce of [N].

    saved: Rows.saved.
    """
    reduce_over_tp(gathered, dist.ReduceOp.SUM, shard.group)
    maximum, log_sum = saved[0][top.rows], saved[1][top.rows]
    return ((gathered - maximum) / shard.temperature - log_sum).to(dtype)


def with_top_slopes(
    slopes: Slopes, grad: Float[Tensor, " N"], top: RowSets, log_sum: Tensor, shard: Shard
) -> Slopes:
    """Return the slopes over the vocabulary with - p_u sum_v g_v of every row.

    grad: g_v.  log_sum: that of Rows.saved.
    """
    total = torch.zeros_like(log_sum).index_add_(0, top.rows, grad.double())
    constant = slopes.constant - torch.exp(-log_sum) / shard.temperature * total
    return replace(slopes, constant=constant)


def add_top_gradient(
    out: Float[Tensor, "n v"],
    grad: Float[Tensor, " N"],
    top: RowSets,
    first: int,
    shard: Shard,
) -> None:
    """Add g_u to d loss / d logits of the rows `first` to first + n, which `out` has."""
    if not shard.columns:
        return
    for rows in top.blocks(first, first + len(out)):
        entries = find_entries(top, rows, shard)
        part = slice(int(top.offsets[rows.start]), int(top.offsets[rows.stop]))
        pull = (grad[part].double() / shard.temperature).where(entries.owned, 0.0)
        # accumulate: ids of other ranks add 0 to the column that they are clamped to
        place = (rows.start - first + entries.rows, entries.columns)
        out.index_put_(place, pull.to(out.dtype), accumulate=True)
