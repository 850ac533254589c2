"""Norms: ops/basic/{rmsnorm,layer_norm}.py, on which module/{rmsnorm,layernorm}.py stand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from megatron_rl_tools.rehearse.layers.costs import kernel, need_cuda


class NormFunction(Function):
    """ops/basic/rmsnorm.py, op_forward and op_backward; layer_norm.py saves the means too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.contiguous()  # a copy that is saved, for the strided views of queries and keys
        out, statistics = normalise(rows, weight, bias)
        ctx.save_for_backward(rows, weight, bias, *statistics)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        rows, weight, bias, *statistics = ctx.saved_tensors
        return normalise_backward(grad.contiguous(), rows, weight, bias, statistics)


def normalise(rows: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    """Return (output, float32 statistics of every row): the deviation, and a LayerNorm's mean."""
    out, num_rows = torch.empty_like(rows), rows.numel() // rows.shape[-1]
    count = 1 if bias is None else 2
    statistics = [rows.new_empty(num_rows, dtype=torch.float32) for _ in range(count)]
    kernel("norm", rows, weight, bias, out, *statistics)
    return out, statistics


def normalise_backward(
    grad: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None, statistics: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor | None]:
    dx, dweight = torch.empty_like(rows), torch.empty_like(weight)
    dbias = None if bias is None else torch.empty_like(bias)
    kernel("norm backward", grad, rows, weight, dx, dweight, dbias, *statistics)
    return dx, dweight, dbias


class RMSNorm(nn.Module):
    """module/rmsnorm.py."""

    has_bias = False

    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        device: Any = "cuda",
    ) -> None:
        super().__init__()
        size = hidden_size if normalized_shape is None else normalized_shape
        assert size is not None
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        for name in ("weight", "bias") if self.has_bias else ("weight",):
            made = nn.Parameter(torch.empty(size, dtype=params_dtype, device=device))
            if sequence_parallel is not None:
                made.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
            self.register_parameter(name, made)

    def forward(self, input: Tensor) -> Tensor:
        need_cuda("norm input", input)
        out: Tensor = NormFunction.apply(input, self.weight, getattr(self, "bias", None))
        return out


class LayerNorm(RMSNorm):
    """module/layernorm.py."""

    has_bias = True
