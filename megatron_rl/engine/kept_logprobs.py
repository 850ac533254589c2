"""Log-probs over kept sets: the ids S_t that top-k, top-p and min-p left to sample a token from.

With z = logits / temperature and pi~ the policy renormalised over S_t:

    log pi~(y_t) = z_y - logsumexp_{v in S_t} z_v
    d log pi~(y_t) / d z_v = 1[v = y] - pi~(v) for v in S_t, 0 elsewhere

logprobs.py and fused_logprobs.py call this module and compute everything over the vocabulary.  A
row with an empty set (prompt, pad) has its log-prob over the entire vocabulary.  Sets are sharded
over the tensor ranks as the vocabulary is, and read a few ids at a time.

Shapes: T packed tokens, n rows of a chunk of them, v this rank's vocabulary columns, N ids of the
chunk's sets.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from megatron_rl.engine.shards import Rows, Shard, Slopes, make_slopes, reduce_rows, write_gradient
from megatron_rl.records.row_sets import RowSets


class KeptRows(NamedTuple):
    """Results of each row over its set; [T] each."""

    logprobs: Tensor
    """log pi~(label)."""
    entropy: Tensor
    """Entropy of pi~."""
    log_mass: Tensor
    """log pi(S_t); 0 where the set is empty."""
    saved: tuple[Tensor, Tensor, Tensor]
    """Largest logit, log sum and entropy over the set, as in Rows."""


class KeptSlopes(NamedTuple):
    """Coefficients of d loss / d logit for the ids of a row's set; float64 [T] each.

    d loss / d logit_v = scale * (1[v = label] - exp((logit_v - maximum) / temperature - log_sum)).
    """

    maximum: Tensor
    log_sum: Tensor
    scale: Tensor


class Entries(NamedTuple):
    """The ids of the sets of a block of rows."""

    ids: Int[Tensor, " N"]
    rows: Int[Tensor, " N"]
    """Row of each id, counted from the block's first."""
    columns: Int[Tensor, " N"]
    """Column of each id in this rank's shard, clamped to it."""
    owned: Tensor
    """bool [N] True where the id is in this rank's shard."""


def find_entries(kept: RowSets, rows: slice, shard: Shard) -> Entries:
    part = slice(int(kept.offsets[rows.start]), int(kept.offsets[rows.stop]))
    ids = kept.ids[part]
    return Entries(ids, kept.rows[part] - rows.start, *shard.find(ids))


def scan_kept(
    logits: Float[Tensor, "n v"], kept: RowSets, first: int, shard: Shard
) -> Float[Tensor, "3 n"]:
    """Scan the ids of the sets alone: largest logit m, sum e, sum e * z; see shards.scan.

    m is -inf where no id of a set is in this rank's shard.
    first: number of the chunk's first row among the T rows of `kept`.
    """
    result = torch.zeros(3, len(logits), dtype=torch.float64, device=logits.device)
    result[0] = float("-inf")
    for rows in kept.blocks(first, first + len(logits)):
        entries = find_entries(kept, rows, shard)
        here = slice(rows.start - first, rows.stop - first)
        values = logits[here][entries.rows, entries.columns].double()
        largest = result[0, here]  # a view: filled in place
        largest.scatter_reduce_(0, entries.rows, values.where(entries.owned, float("-inf")), "amax")
        z = (values - largest[entries.rows]) / shard.temperature
        # ids of other ranks count nothing here, whatever is in the column that they are clamped to
        e = z.exp().where(entries.owned, 0.0)
        ez = (e * z).where(entries.owned, 0.0)
        result[1, here] = torch.zeros_like(largest).index_add_(0, entries.rows, e)
        result[2, here] = torch.zeros_like(largest).index_add_(0, entries.rows, ez)
    return result


def reduce_kept(
    scanned_kept: Float[Tensor, "3 T"],
    scanned: Float[Tensor, "4 T"],
    labels: Int[Tensor, " T"],
    kept: RowSets,
    rows: Rows,
    shard: Shard,
    dtype: torch.dtype,
) -> KeptRows:
    """Combine every rank's scans over the sets.  Two all-reduces.

    scanned, rows: scan over the vocabulary and its result, for log pi(S_t) and for empty sets.
    """
    # an empty set stands for the whole vocabulary
    # the fourth row, the label's logit, is the same for both
    inside = torch.where(kept.is_empty, scanned, torch.cat([scanned_kept, scanned[3:]]))
    over_set = reduce_rows(inside, labels, shard, dtype)
    (largest, log_sum, _), (largest_of_all, log_sum_of_all, _) = over_set.saved, rows.saved
    log_mass = (largest - largest_of_all) / shard.temperature + log_sum - log_sum_of_all
    return KeptRows(over_set.logprobs, over_set.entropy, log_mass.to(dtype), over_set.saved)


def make_kept_slopes(
    saved: tuple[Tensor, ...],
    kept: RowSets,
    grads: tuple[Tensor | None, Tensor | None],
    shard: Shard,
) -> tuple[Slopes | None, KeptSlopes]:
    """Return (slopes over the vocabulary, slopes over the sets).

    saved: Rows.saved, then maximum and log sum of KeptRows.saved.
    grads: d loss / d log pi~ and d loss / d H, with H the entropy over the vocabulary.
    """
    grad_logprobs, grad_entropy = grads
    maximum, log_sum, entropy, kept_maximum, kept_log_sum = saved
    g = torch.zeros_like(entropy) if grad_logprobs is None else grad_logprobs.double()
    # rows without a set have their log-prob over the entire vocabulary
    outside = None if grad_logprobs is None else torch.where(kept.is_empty, g, 0.0)
    slopes = make_slopes((maximum, log_sum, entropy), outside, grad_entropy, shard)
    return slopes, KeptSlopes(kept_maximum, kept_log_sum, g / shard.temperature)


def write_kept_gradient(
    out: Float[Tensor, "n v"],
    logits: Float[Tensor, "n v"],
    labels: Int[Tensor, " n"],
    slopes: tuple[Slopes, KeptSlopes],
    kept: RowSets,
    first: int,
    shard: Shard,
) -> None:
    """Write d loss / d logits of the n rows from row `first` on into `out`.

    `out` may be `logits` itself; `slopes` are those of all T rows.
    """
    over_all, over_sets = slopes
    for rows in kept.blocks(first, first + len(logits)):
        entries = find_entries(kept, rows, shard)
        here = slice(rows.start - first, rows.stop - first)
        # read before `out` overwrites them
        values = logits[here][entries.rows, entries.columns].double()
        maximum, log_sum, scale = (part[rows][entries.rows] for part in over_sets)
        probability = ((values - maximum) / shard.temperature - log_sum).exp()
        pull = scale * ((entries.ids == labels[here][entries.rows]).double() - probability)
        write_gradient(out[here], logits[here], labels[here], over_all.of(rows), shard)
        # accumulate: ids of other ranks add 0 to the column that they are clamped to
        place = (entries.rows, entries.columns)
        out[here].index_put_(place, pull.where(entries.owned, 0.0).to(out.dtype), accumulate=True)
