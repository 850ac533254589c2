"""Gated delta nets (linear attention of Qwen3-Next and Qwen3.5) on torch, for machines without a
GPU.

core computes them with kernels of flash-linear-attention, which need a GPU.  These functions
replace the kernels, with the same arguments and results, also for packed sequences.  core's own
torch version, that of its deterministic mode, cannot pack.

Shapes: B batch, S rows (with packed sequences all of their rows, and B = 1), A heads, D head size,
C channels, W width of the filter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


def install_linear_attention() -> None:
    """Replace flash-linear-attention's functions in core, also where that package is installed."""
    from megatron.core.ssm.gated_delta_net import common, gdn

    rule = per_sequence(common.torch_chunk_gated_delta_rule)
    for module in (common, gdn):
        module.causal_conv1d = causal_conv1d
        module.chunk_gated_delta_rule = rule
    common.l2norm = l2norm
    common.HAVE_FLA = True


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Compute x / sqrt(sum x^2 + eps) over the last axis, in float32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str,
    cu_seqlens: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Compute silu of a causal convolution of every channel of x [B, S, C] with weight [C, W].

    Packed sequences are convolved separately.
    """
    assert activation in ("silu", "swish")
    channels, width = weight.shape
    parts = []
    for rows in sequences(x, cu_seqlens):
        # zeros before the first row, so that no row sees a later one
        padded = F.pad(x[:, rows].transpose(1, 2), (width - 1, 0))
        parts.append(F.conv1d(padded, weight[:, None], bias, groups=channels).transpose(1, 2))
    return F.silu(torch.cat(parts, dim=1)), None


def per_sequence(rule: Callable[..., tuple[Tensor, None]]) -> Callable[..., tuple[Tensor, None]]:
    """Return core's `rule` for q, k, v [B, S, A, D] and g, beta [B, S, A], applied to every packed
    sequence separately.
    """

    def apply(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        g: Tensor,
        beta: Tensor,
        cu_seqlens: Tensor | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, None]:
        parts = [
            rule(q[:, rows], k[:, rows], v[:, rows], g=g[:, rows], beta=beta[:, rows], **kwargs)[0]
            for rows in sequences(q, cu_seqlens)
        ]
        return torch.cat(parts, dim=1), None

    return apply


def sequences(x: Tensor, cu_seqlens: Tensor | None) -> Iterator[slice]:
    """Return the rows of every sequence of x [B, S, ...]."""
    bounds = [0, x.size(1)] if cu_seqlens is None else cu_seqlens.tolist()
    return (slice(*pair) for pair in pairwise(bounds) if pair[0] < pair[1])
