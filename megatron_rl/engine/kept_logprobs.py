"""Log-probs over kept sets: the part of the vocabulary that a sampled token's set S_t leaves, in
shards, a few ids at a time.

    log pi~(y_t) = z_y - logsumexp_{v in S_t} z_v        d / d z_v = 1[v = y] - pi~(v) for v in S_t, 0 elsewhere

with z = logits / temperature.  Used by logprobs.py and fused_logprobs.py, which compute everything
over the vocabulary.  A row with an empty set (prompt, pad) has its log-prob over the entire
vocabulary.
Shapes: T packed tokens, n rows of a chunk of them, v this rank's vocabulary columns, N ids of the
chunk's sets.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from megatron_rl.engine.shards import Rows, Shard, Slopes, make_slopes, reduce_rows, write_gradient
from megatron_rl.records.sampling_mask import KeptTokens


class KeptRows(NamedTuple):
    """Per row.  logprobs: log pi~(label); entropy: of pi~; log_mass: log of the probability that pi
    gives to the set, 0 where it is empty; saved: as of Rows, over the set."""

    logprobs: Tensor
    entropy: Tensor
    log_mass: Tensor
    saved: tuple[Tensor, Tensor, Tensor]


class KeptSlopes(NamedTuple):
    """d loss / d logit = scale * (1[v = label] - exp(z - log_sum)) for the ids of a row's set;
    float64 [T] each.
    """

    maximum: Tensor
    log_sum: Tensor
    scale: Tensor


class Entries(NamedTuple):
    """The ids of some rows' sets: row (from 0), column here (clamped), whether it is here; [N]
    each.
    """

    ids: Int[Tensor, " N"]
    rows: Int[Tensor, " N"]
    columns: Int[Tensor, " N"]
    owned: Tensor


def find_entries(kept: KeptTokens, rows: slice, shard: Shard) -> Entries:
    part = slice(int(kept.offsets[rows.start]), int(kept.offsets[rows.stop]))
    ids = kept.ids[part]
    return Entries(ids, kept.rows[part] - rows.start, *shard.find(ids))


def scan_kept(
    logits: Float[Tensor, "n v"], kept: KeptTokens, first: int, shard: Shard
) -> Float[Tensor, "3 n"]:
    """`scan` over the ids of the sets alone: largest logit m (-inf: none here), sum e, sum e * z.

    first: of the chunk's rows.
    """
    result = torch.zeros(3, len(logits), dtype=torch.float64, device=logits.device)
    result[0] = float("-inf")
    for rows in kept.blocks(first, first + len(logits)):
        entries, here = (
            find_entries(kept, rows, shard),
            slice(rows.start - first, rows.stop - first),
        )
        values = logits[here][entries.rows, entries.columns].double()
        largest = result[0, here]  # a view: filled in place
        largest.scatter_reduce_(0, entries.rows, values.where(entries.owned, float("-inf")), "amax")
        z = (values - largest[entries.rows]) / shard.temperature
        e = z.exp().where(entries.owned, 0.0)
        result[1, here] = torch.zeros_like(largest).index_add_(0, entries.rows, e)
        result[2, here] = torch.zeros_like(largest).index_add_(
            0, entries.rows, (e * z).where(entries.owned, 0.0)
        )
    return result


def reduce_kept(
    scanned_kept: Float[Tensor, "3 T"],
    scanned: Float[Tensor, "4 T"],
    labels: Int[Tensor, " T"],
    kept: KeptTokens,
    rows: Rows,
    shard: Shard,
    dtype: torch.dtype,
) -> KeptRows:
    """From every rank's scans over the sets and over the vocabulary, and what was reduced of the
    latter.  Two all-reduces.
    """
    inside = torch.where(kept.is_empty, scanned, torch.cat([scanned_kept, scanned[3:]]))
    found = reduce_rows(inside, labels, shard, dtype)
    (largest, log_sum, _), (of_all, log_sum_of_all, _) = found.saved, rows.saved
    log_mass = (largest - of_all) / shard.temperature + log_sum - log_sum_of_all
    return KeptRows(found.logprobs, found.entropy, log_mass.to(dtype), found.saved)


def make_kept_slopes(
    saved: tuple[Tensor, ...],
    kept: KeptTokens,
    grads: tuple[Tensor | None, Tensor | None],
    shard: Shard,
) -> tuple[Slopes | None, KeptSlopes]:
    """(slopes over the vocabulary, slopes over the sets).

    saved: of Rows, then maximum and log sum of KeptRows; grads: d loss / d log pi~ and d loss / d
    H, H over the vocabulary.
    """
    grad_logprobs, grad_entropy = grads
    maximum, log_sum, entropy, kept_maximum, kept_log_sum = saved
    g = torch.zeros_like(entropy) if grad_logprobs is None else grad_logprobs.double()
    outside = None if grad_logprobs is None else torch.where(kept.is_empty, g, 0.0)
    slopes = make_slopes((maximum, log_sum, entropy), outside, grad_entropy, shard)
    return slopes, KeptSlopes(kept_maximum, kept_log_sum, g / shard.temperature)


def write_kept_gradient(
    out: Float[Tensor, "n v"],
    logits: Float[Tensor, "n v"],
    labels: Int[Tensor, " n"],
    slopes: tuple[Slopes, KeptSlopes],
    kept: KeptTokens,
    first: int,
    shard: Shard,
) -> None:
    """d loss / d logits of rows `first`..

    into `out`, which may be `logits` itself; slopes: of all T rows.
    """
    over_all, over_sets = slopes
    for rows in kept.blocks(first, first + len(logits)):
        entries, here = (
            find_entries(kept, rows, shard),
            slice(rows.start - first, rows.stop - first),
        )
        # before `out` overwrites them
        values = logits[here][entries.rows, entries.columns].double()
        maximum, log_sum, scale = (part[rows][entries.rows] for part in over_sets)
        probability = ((values - maximum) / shard.temperature - log_sum).exp()
        pull = scale * ((entries.ids == labels[here][entries.rows]).double() - probability)
        write_gradient(out[here], logits[here], labels[here], over_all.of(rows), shard)
        # adds: ids of other ranks point to a column here, with 0
        place = (entries.rows, entries.columns)
        out[here].index_put_(place, pull.where(entries.owned, 0.0).to(out.dtype), accumulate=True)
