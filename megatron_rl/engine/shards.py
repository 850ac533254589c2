"""One rank's shard of the vocabulary, and its part of the log-prob, entropy and gradient of every
row, a few rows at a time.

Shapes: T packed tokens, v this rank's vocabulary columns (V / tp), c those of them that are real
(not padding).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

BLOCK_BYTES = {"cpu": 2 << 20, "cuda": 128 << 20}
"""Size of one buffer: on a CPU a few fit into the cache, on a GPU one keeps the device busy."""


@dataclass(frozen=True)
class Shard:
    """This rank's part of the vocabulary."""

    first: int
    """Id of the first column."""
    columns: int
    """Number of columns that are not padding."""
    vocab_size: int
    temperature: float
    group: dist.ProcessGroup | None

    def find(self, labels: Int[Tensor, " T"]) -> tuple[Int[Tensor, " T"], Tensor]:
        """Return (column of each label, clamped to this shard; True where the label is in it)."""
        local = labels - self.first
        owned = (local >= 0) & (local < self.columns)
        # a shard of nothing but padding has no columns
        return local.clamp(0, max(self.columns - 1, 0)), owned

    def blocks(self, num_rows: int, device: torch.device, itemsize: int) -> list[slice]:
        """Cut the rows into blocks of BLOCK_BYTES; see `split`."""
        block_bytes = BLOCK_BYTES.get(device.type, BLOCK_BYTES["cpu"])
        row_bytes = itemsize * max(self.columns, 1)
        return self.split(num_rows, max(1, block_bytes // row_bytes))

    def split(self, num_rows: int, size: int) -> list[slice]:
        """Cut the rows into blocks of `size`; there are none where the shard is padding only."""
        starts = range(0, num_rows, size) if self.columns else ()
        return [slice(start, min(start + size, num_rows)) for start in starts]


class Rows(NamedTuple):
    """Results of each row over the entire vocabulary; [T] each."""

    logprobs: Tensor
    entropy: Tensor
    saved: tuple[Tensor, Tensor, Tensor]
    """Largest logit m, log sum e, and entropy, for the backward pass; float64 [T] each."""


@dataclass(frozen=True)
class Slopes:
    """Coefficients of the gradient; [T] each.

    d loss / d logit = e * (slope * z + constant), plus `at_label` in the label's column, with
    z = (logit - maximum) / temperature and e = exp z.
    """

    maximum: Tensor
    slope: Tensor | None
    """None: 0, because the entropy has no gradient."""
    constant: Tensor
    at_label: Tensor

    def of(self, rows: slice) -> Slopes:
        slope = None if self.slope is None else self.slope[rows]
        return Slopes(self.maximum[rows], slope, self.constant[rows], self.at_label[rows])


def make_shard(
    width: int, vocab_size: int, temperature: float, group: dist.ProcessGroup | None
) -> Shard:
    """Return this rank's shard, where every rank of `group` has `width` columns with padding."""
    first = width * (group.rank() if group is not None else 0)
    columns = max(0, min(width, vocab_size - first))
    return Shard(first, columns, vocab_size, temperature, group)


def scan(
    logits: Float[Tensor, "T v"], labels: Int[Tensor, " T"], shard: Shard
) -> Float[Tensor, "4 T"]:
    """Return, per row over this rank's columns: largest logit m, sum e, sum e * z, and the logit in
    the label's column (clamped), all in float64.

    z = (logit - m) / temperature, e = exp z.  The logits are read once.
    """
    dtype = compute_dtype(logits)
    result = torch.zeros(4, len(logits), dtype=torch.float64, device=logits.device)
    result[0] = float("-inf")  # stays where the shard is padding only
    local, _ = shard.find(labels)
    blocks = shard.blocks(len(logits), logits.device, dtype.itemsize)
    z_buffer, e_buffer = make_buffers(2, blocks, shard, logits, dtype)
    for rows in blocks:
        z, e = z_buffer[: rows.stop - rows.start], e_buffer[: rows.stop - rows.start]
        values = logits[rows, : shard.columns]
        result[3, rows] = values.gather(1, local[rows, None]).squeeze(1).double()
        if values.dtype != dtype:
            values = z.copy_(values)
        maximum = values.amax(dim=1, keepdim=True)
        torch.sub(values, maximum, out=z)
        if shard.temperature != 1:
            z.mul_(1 / shard.temperature)  # after the subtraction, so that z = 0 where logit = m
        torch.exp(z, out=e)
        result[0, rows] = maximum.squeeze(1).double()
        result[1, rows] = e.sum(dim=1).double()
        result[2, rows] = e.mul_(z).sum(dim=1).double()
    return result


def reduce_rows(
    scanned: Float[Tensor, "4 T"], labels: Int[Tensor, " T"], shard: Shard, dtype: torch.dtype
) -> Rows:
    """Combine every rank's scan into log-prob and entropy, in `dtype`.  Two all-reduces of [T].

    Sums are in float64, so that the number of shards does not change the result in `dtype`.
    """
    local_maximum, sum_e, sum_ez, label_logit = scanned
    # reduced in place; the local one is needed below
    maximum = local_maximum.clone()
    reduce_over_tp(maximum, dist.ReduceOp.MAX, shard.group)
    _, owned = shard.find(labels)
    if shard.columns:
        shift = (local_maximum - maximum) / shard.temperature  # <= 0, to the common maximum
        # -inf where no id of a kept set is in this shard: times a sum of 0 it would be NaN
        shift = shift.clamp(min=-1e300)
        factor = shift.exp()
        label_logit = torch.where(owned, label_logit, 0.0)
        sums = torch.stack([factor * sum_e, factor * (sum_ez + shift * sum_e), label_logit])
    else:  # -inf - maximum would give NaN
        sums = torch.zeros(3, len(labels), dtype=torch.float64, device=labels.device)
    reduce_over_tp(sums, dist.ReduceOp.SUM, shard.group)
    log_sum = sums[0].log()
    entropy = log_sum - sums[1] / sums[0]
    logprobs = (sums[2] - maximum) / shard.temperature - log_sum
    logprobs = torch.where((labels >= 0) & (labels < shard.vocab_size), logprobs, float("nan"))
    return Rows(logprobs.to(dtype), entropy.to(dtype), (maximum, log_sum, entropy))


def make_slopes(
    saved: Sequence[Tensor], grad_logprobs: Tensor | None, grad_entropy: Tensor | None, shard: Shard
) -> Slopes | None:
    """Return the coefficients of the gradient from d loss / d logp = g and d loss / d H = h.

        d loss / d z = g (onehot - p) - h p (log p + H),  p = e / sum e,  log p = z - log sum e

    The result is None where g and h are None.
    """
    maximum, log_sum, entropy = saved
    if grad_logprobs is None and grad_entropy is None:
        return None
    scale = -torch.exp(-log_sum) / shard.temperature
    zero = torch.zeros_like(entropy)
    g = zero if grad_logprobs is None else grad_logprobs.double()
    slope, constant = None, g
    if grad_entropy is not None:
        h = grad_entropy.double()
        slope, constant = scale * h, g + h * (entropy - log_sum)
    return Slopes(maximum, slope, scale * constant, g / shard.temperature)


def write_gradient(
    out: Float[Tensor, "T v"],
    logits: Float[Tensor, "T v"],
    labels: Int[Tensor, " T"],
    slopes: Slopes,
    shard: Shard,
) -> None:
    """Write d loss / d logits into `out`, which may be `logits` itself."""
    dtype = compute_dtype(logits)
    local, owned = shard.find(labels)
    at_label = torch.where(owned, slopes.at_label, 0.0).to(dtype)[:, None]
    maximum, constant = slopes.maximum.to(dtype)[:, None], slopes.constant.to(dtype)[:, None]
    slope = None if slopes.slope is None else slopes.slope.to(dtype)[:, None]
    direct = out.dtype == dtype  # then e is computed in the gradient's memory, without a cast
    blocks = shard.blocks(len(logits), logits.device, dtype.itemsize)
    buffers = make_buffers((not direct) + (slope is not None), blocks, shard, logits, dtype)
    # padding columns are no tokens: they have no probability and no gradient
    out[:, shard.columns :] = 0.0
    for rows in blocks:
        count = rows.stop - rows.start
        values, target = logits[rows, : shard.columns], out[rows, : shard.columns]
        e = target if direct else buffers[-1][:count]
        z = e if slope is None else buffers[0][:count]
        if values.dtype == dtype:
            torch.sub(values, maximum[rows], out=z)
        else:  # subtract in float32: in bf16 the difference would be rounded
            z.copy_(values).sub_(maximum[rows])
        if shard.temperature != 1:
            z.mul_(1 / shard.temperature)
        torch.exp(z, out=e)
        e.mul_(constant[rows] if slope is None else z.mul_(slope[rows]).add_(constant[rows]))
        e.scatter_add_(1, local[rows, None], at_label[rows])
        if not direct:
            target.copy_(e)


def make_buffers(
    count: int, blocks: list[slice], shard: Shard, like: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    rows = blocks[0].stop if blocks else 0
    return [torch.empty(rows, shard.columns, dtype=dtype, device=like.device) for _ in range(count)]


def compute_dtype(logits: Tensor) -> torch.dtype:
    """Return the dtype of computations: float64 for float64 logits, else float32."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def reduce_over_tp(
    tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None
) -> None:
    if group is not None and group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)
