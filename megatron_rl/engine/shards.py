"""One rank's shard of the vocabulary: what a row's log-prob, entropy and gradient take of it, a few
rows at a time.

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
"""Size of one buffer: on a CPU a few fit in the cache, on a GPU it is large enough to keep it busy.
"""


@dataclass(frozen=True)
class Shard:
    """This rank's part of the vocabulary: `columns` real ones from `first` on, of `vocab_size` in
    all.
    """

    first: int
    columns: int
    vocab_size: int
    temperature: float
    block_rows: int | None
    group: dist.ProcessGroup | None

    def find(self, labels: Int[Tensor, " T"]) -> tuple[Int[Tensor, " T"], Tensor]:
        """(column of each label here, clamped; whether the label is here)."""
        local = labels - self.first
        owned = (local >= 0) & (local < self.columns)
        return local.clamp(0, max(self.columns - 1, 0)), owned

    def blocks(self, num_rows: int, device: torch.device, itemsize: int) -> list[slice]:
        """Rows to take at a time; none where this rank has padding only."""
        row_bytes = itemsize * max(self.columns, 1)
        return self.split(
            num_rows, self.block_rows or max(1, BLOCK_BYTES.get(device.type, 2 << 20) // row_bytes)
        )

    def split(self, num_rows: int, size: int) -> list[slice]:
        """Blocks of `size` rows; none where this rank has padding only."""
        starts = range(0, num_rows, size) if self.columns else ()
        return [slice(start, min(start + size, num_rows)) for start in starts]


class Rows(NamedTuple):
    """Per row, over the entire vocabulary.

    saved: largest logit m, log sum e, entropy, float64 [T] each.
    """

    logprobs: Tensor
    entropy: Tensor
    saved: tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Slopes:
    """d loss / d logit = e * (slope * z + constant), plus `at_label` in the label's column; [T]
    each.
    """

    maximum: Tensor
    slope: Tensor | None
    constant: Tensor
    at_label: Tensor

    def of(self, rows: slice) -> Slopes:
        slope = None if self.slope is None else self.slope[rows]
        return Slopes(self.maximum[rows], slope, self.constant[rows], self.at_label[rows])


def make_shard(
    width: int,
    vocab_size: int,
    temperature: float,
    block_rows: int | None,
    group: dist.ProcessGroup | None,
) -> Shard:
    """The shard of this rank of `group`, each of which holds `width` columns, padding included."""
    first = width * (group.rank() if group is not None else 0)
    return Shard(
        first, max(0, min(width, vocab_size - first)), vocab_size, temperature, block_rows, group
    )


def scan(
    logits: Float[Tensor, "T v"], labels: Int[Tensor, " T"], shard: Shard
) -> Float[Tensor, "4 T"]:
    """Of each row over this rank's columns: largest logit m, sum e, sum e * z, the logit in the
    label's (clamped) column, with z = (logit - m) / temperature and e = exp z.  float64; the logits
    are read once.
    """
    dtype = compute_dtype(logits)
    result = torch.zeros(4, len(logits), dtype=torch.float64, device=logits.device)
    result[0] = float("-inf")  # of a rank with padding columns only
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
            z.mul_(1 / shard.temperature)  # after the subtraction: exact where logit = m
        torch.exp(z, out=e)
        result[0, rows] = maximum.squeeze(1).double()
        result[1, rows] = e.sum(dim=1).double()
        result[2, rows] = e.mul_(z).sum(dim=1).double()
    return result


def reduce_rows(
    scanned: Float[Tensor, "4 T"], labels: Int[Tensor, " T"], shard: Shard, dtype: torch.dtype
) -> Rows:
    """Log-prob and entropy, in `dtype`, from every rank's scan.

    Combined in float64, so that a sum in shards is the sum.
    """
    local_maximum, sum_e, sum_ez, label_logit = scanned
    maximum = local_maximum.clone()
    reduce_over_tp(maximum, dist.ReduceOp.MAX, shard.group)
    _, owned = shard.find(labels)
    if shard.columns:
        shift = (local_maximum - maximum) / shard.temperature  # <= 0: to the common maximum
        # -inf where no id of a kept set is here: times a sum of 0 it would be NaN
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
    """From d loss / d logp = g and d loss / d H = h, with p = e / sum e:

    d loss / d z = g (onehot - p) - h p (log p + H),  log p = z - log sum e;  None where both are
    None.
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
    """d loss / d logits into `out`, which may be `logits` itself."""
    dtype = compute_dtype(logits)
    local, owned = shard.find(labels)
    at_label = torch.where(owned, slopes.at_label, 0.0).to(dtype)[:, None]
    maximum, constant = slopes.maximum.to(dtype)[:, None], slopes.constant.to(dtype)[:, None]
    slope = None if slopes.slope is None else slopes.slope.to(dtype)[:, None]
    direct = out.dtype == dtype  # no cast: e may be computed in the gradient's memory
    blocks = shard.blocks(len(logits), logits.device, dtype.itemsize)
    buffers = make_buffers((not direct) + (slope is not None), blocks, shard, logits, dtype)
    out[:, shard.columns :] = 0.0
    for rows in blocks:
        count, values, target = (
            rows.stop - rows.start,
            logits[rows, : shard.columns],
            out[rows, : shard.columns],
        )
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
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def reduce_over_tp(
    tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None
) -> None:
    if group is not None and group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)
