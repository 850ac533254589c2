"""Linear layers: module/{linear,layernorm_linear}.py and cpp_extensions/gemm.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from megatron_rl_tools.rehearse.layers.base import LinearBase, weight_gradient
from megatron_rl_tools.rehearse.layers.costs import (
    free,
    gather_rows,
    need_cuda,
    product,
    scatter_rows,
    sum_ranks,
)
from megatron_rl_tools.rehearse.layers.norms import normalise, normalise_backward


class LinearFunction(Function):
    """module/linear.py, _Linear, and layernorm_linear.py, _LayerNormLinear, where `norm_weight` is
    passed: that one saves its input and the norm's output.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        layer: Linear,
    ) -> Tensor:
        rows = x
        statistics: list[Tensor] = []
        if norm_weight is not None:
            rows, statistics = normalise(x, norm_weight, norm_bias)
        total = rows
        if layer.gathers_input:
            total, _ = gather_rows(rows, layer.tp_group)
        out = product(
            "linear", total.flatten(0, -2), weight, total.numel() // total.shape[-1], *weight.shape
        ).view(*total.shape[:-1], len(weight))
        del total
        if layer.parallel_mode == "row":
            change = scatter_rows if layer.sequence_parallel else sum_ranks
            out, _ = change(out, layer.tp_group)
        ctx.layer = layer
        saved = rows if weight.requires_grad else None
        has_norm = norm_weight is not None
        ctx.save_for_backward(
            saved, weight, bias, x if has_norm else None, norm_weight, norm_bias, *statistics
        )
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, bias, x, norm_weight, norm_bias, *statistics = ctx.saved_tensors
        layer, needs_dx, needs_dw = ctx.layer, ctx.needs_input_grad[0], weight.requires_grad
        grad = grad.contiguous()
        if layer.parallel_mode == "row" and layer.sequence_parallel:
            grad, _ = gather_rows(grad, layer.tp_group)
        total, gathering = rows, None
        if needs_dw and layer.gathers_input:  # while the input's gradient is computed
            total, gathering = gather_rows(rows, layer.tp_group, async_op=True)
        num_rows, (outputs, inputs) = grad.numel() // grad.shape[-1], weight.shape
        dx, reducing = None, None
        if needs_dx or norm_weight is not None:
            dx = product("linear dgrad", grad, weight, num_rows, inputs, outputs)
            dx = dx.view(*grad.shape[:-1], inputs)
            if layer.parallel_mode == "column":
                change = scatter_rows if layer.sequence_parallel else sum_ranks
                dx, reducing = change(dx, layer.tp_group, async_op=True)
        dw = db = None
        if needs_dw:
            if gathering is not None:
                gathering.wait()
            dw = weight_gradient("linear wgrad", grad, total, weight, num_rows, layer)
            # the product's epilogue sums the bias
            db = None if bias is None else torch.empty_like(bias)
            del total
            if norm_weight is not None:
                free(rows)
        if reducing is not None:
            reducing.wait()
        if norm_weight is None:
            return dx, None, None, dw, db, None
        assert dx is not None
        dx, dgamma, dbeta = normalise_backward(dx, x, norm_weight, norm_bias, statistics)
        return dx, dgamma, dbeta, dw, db, None


class Linear(LinearBase):
    """module/linear.py."""

    bias: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self._check_arguments(kwargs)
        self._set_up(tp_group, tp_size, parallel_mode, sequence_parallel, in_features, out_features)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias = bias, return_bias
        dim = 1 if parallel_mode == "row" else 0
        self._add("weight", (self.out_features, self.in_features), params_dtype, device, dim)
        self._add_bias("bias", params_dtype, device, bias)

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        self._check(inp)
        return self._apply_linear(inp, None, None)

    def _apply_linear(
        self, inp: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        adds_bias = self.use_bias and not self.return_bias
        is_fused = adds_bias and self.parallel_mode != "row"  # else it comes after the reduction
        bias = self.bias if is_fused else None
        out: Tensor = LinearFunction.apply(inp, norm_weight, norm_bias, self.weight, bias, self)
        if adds_bias and not is_fused:
            out = out + self.bias
        return (out, self.bias) if self.return_bias else out


class LayerNormLinear(Linear):
    """module/layernorm_linear.py."""

    layer_norm_weight: nn.Parameter

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        zero_centered_gamma: bool = False,
        device: Any = "cuda",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            in_features, out_features, sequence_parallel, fuse_wgrad_accumulation, tp_group,
            tp_size, bias=bias, return_bias=return_bias, params_dtype=params_dtype,
            parallel_mode=parallel_mode, device=device, **kwargs,
        )  # fmt: skip
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        names = ["layer_norm_weight"] + ["layer_norm_bias"] * (normalization == "LayerNorm")
        for name in names:
            made = nn.Parameter(torch.empty(in_features, dtype=params_dtype, device=device))
            made.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
            self.register_parameter(name, made)

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        self._check(inp)
        norm_bias = getattr(self, "layer_norm_bias", None)
        return self._apply_linear(inp, self.layer_norm_weight, norm_bias)


def general_gemm(
    A: Tensor,
    B: Tensor,
    out_dtype: torch.dtype | None = None,
    quantization_params: Any = None,
    gelu: bool = False,
    gelu_in: Tensor | None = None,
    alpha: float = 1.0,
    beta: float | None = None,
    accumulate: bool = False,
    layout: str = "TN",
    out: Tensor | None = None,
    bias: Tensor | None = None,
    use_split_accumulator: bool = False,
    grad: bool = False,
    ub: Any = None,
    ub_type: Any = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
) -> tuple[Tensor | None, ...]:
    """cpp_extensions/gemm.py: B x A of column-major matrices; T transposes."""
    need_cuda("general_gemm", A)
    inner, columns = A.shape[::-1] if layout[0] == "T" else (A.numel() // A.shape[-1], A.shape[-1])
    rows = B.shape[-1] if layout[1] == "T" else B.numel() // B.shape[-1]
    out = product("general_gemm", A, B, rows, columns, inner, out, out_dtype or A.dtype)
    if layout[1] == "N":
        out = out.view(*B.shape[:-1], columns)
    return out, torch.empty_like(bias) if grad and bias is not None else None, None, None
