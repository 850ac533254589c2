"""Vocab-parallel token log-prob and full-vocabulary entropy, chunked over tokens.

Shapes: T packed tokens, v this rank's vocabulary columns (V / tp).  Two all-reduces per call, whatever T is.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor


def token_logprobs(
    logits: Float[Tensor, "T v"],
    labels: Int[Tensor, " T"],
    *,
    vocab_size: int,
    temperature: float = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    chunk: int = 1024,
) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    """(log pi(labels), entropy), float32, both differentiable with respect to `logits`, of softmax(logits / temperature).

    logp_t = z_y - lse(z),  H_t = lse(z) - sum_v p_v z_v  with z = logits_t / temperature over the true `vocab_size`
    columns; padding columns beyond it get no probability and no gradient.  The logits are not modified.
    """
    return _TokenLogprobs.apply(logits, labels, vocab_size, temperature, tp_group, chunk)  # type: ignore[no-any-return]


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, vocab_size: int, temperature: float, group: Any, chunk: int
    ) -> tuple[Tensor, Tensor]:
        first = logits.shape[1] * (group.rank() if group is not None else 0)
        columns = max(0, min(logits.shape[1], vocab_size - first))
        local = labels - first
        owned = (local >= 0) & (local < columns)
        local = local.clamp(0, max(columns - 1, 0))
        maximum = torch.full((len(logits),), float("-inf"), device=logits.device)
        if columns:
            maximum = logits[:, :columns].amax(dim=1).float() / temperature
        all_reduce(maximum, dist.ReduceOp.MAX, group)
        sums = torch.zeros(3, len(logits), device=logits.device)  # sum e, sum e * z, z_y; all relative to the maximum
        for a in range(0, len(logits) if columns else 0, chunk):
            rows = slice(a, a + chunk)
            z = logits[rows, :columns].float() / temperature - maximum[rows, None]
            e = z.exp()
            sums[0, rows] = e.sum(dim=1)
            sums[1, rows] = (e * z).sum(dim=1)
            sums[2, rows] = torch.where(owned[rows], z.gather(1, local[rows, None]).squeeze(1), 0.0)
        all_reduce(sums, dist.ReduceOp.SUM, group)
        log_sum = sums[0].log()
        logprobs = sums[2] - log_sum
        entropy = log_sum - sums[1] / sums[0]
        ctx.save_for_backward(logits, maximum + log_sum, entropy, local, owned)
        ctx.settings = (columns, temperature, chunk)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        """d logp / d z = onehot - p;  d H / d z = -p (log p + H)."""
        grad_logprobs, grad_entropy = grads
        logits, lse, entropy, local, owned = ctx.saved_tensors
        columns, temperature, chunk = ctx.settings
        grad = torch.zeros_like(logits)
        for a in range(0, len(logits) if columns else 0, chunk):
            rows = slice(a, a + chunk)
            logp = logits[rows, :columns].float() / temperature - lse[rows, None]
            p = logp.exp()
            part = -p * (grad_logprobs[rows, None] + grad_entropy[rows, None] * (logp + entropy[rows, None]))
            part.scatter_add_(
                1, local[rows, None], torch.where(owned[rows], grad_logprobs[rows], 0.0)[:, None].to(part.dtype)
            )
            grad[rows, :columns] = (part / temperature).to(grad.dtype)
        return grad, None, None, None, None, None


def all_reduce(tensor: Tensor, op: Any, group: dist.ProcessGroup | None) -> None:
    if group is not None and group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)
