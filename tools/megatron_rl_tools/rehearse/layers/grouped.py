"""Linear layers of several experts: module/grouped_linear.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatron_rl_tools.rehearse.layers.base import LinearBase, accumulated
from megatron_rl_tools.rehearse.layers.costs import kernel, need_workspaces, recorder


class GroupedFunction(Function):
    """module/grouped_linear.py, _GroupedLinear: rows of several experts, one weight for each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: GroupedLinear, *parameters: Tensor) -> Tensor:
        weights = parameters[: layer.num_gemms]
        need_workspaces(4)
        rows = x.reshape(-1, layer.in_features)
        out = x.new_empty(len(rows), layer.out_features)
        flops = 2 * len(rows) * layer.in_features * layer.out_features
        kernel("grouped linear", rows, *parameters, out, kind="gemm", flops=flops)
        saved = rows if weights[0].requires_grad else None
        ctx.layer, ctx.shape = layer, x.shape
        ctx.save_for_backward(saved, *parameters)
        return out.view(*x.shape[:-1], layer.out_features)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layer, (rows, *parameters) = ctx.layer, ctx.saved_tensors
        weights, biases = parameters[: layer.num_gemms], parameters[layer.num_gemms :]
        grad = grad.contiguous().view(-1, grad.shape[-1])
        flops = 2 * len(grad) * layer.in_features * layer.out_features
        dx = None
        if ctx.needs_input_grad[0]:
            dx = grad.new_empty(ctx.shape)
            kernel("grouped linear dgrad", grad, *weights, dx, kind="gemm", flops=flops)
        gradients: list[Tensor | None] = [None] * len(parameters)
        if rows is not None:
            is_fused = layer.fuse_wgrad_accumulation
            outs = [w.main_grad if is_fused else torch.empty_like(w) for w in weights]
            sums = [torch.empty_like(bias) for bias in biases]
            kernel("grouped linear wgrad", grad, rows, *outs, *sums, kind="gemm", flops=flops)
            pairs = zip(weights, outs, strict=True)
            gradients = [*(accumulated(*pair, is_fused=is_fused) for pair in pairs), *sums]
        return dx, None, *gradients


class GroupedLinear(LinearBase):
    """module/grouped_linear.py."""

    def __init__(
        self,
        num_gemms: int,
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
        self.num_gemms, self.fuse_wgrad_accumulation = num_gemms, fuse_wgrad_accumulation
        self.use_bias, self.return_bias = bias, return_bias
        dim = 1 if parallel_mode == "row" else 0
        for index in range(num_gemms):
            shape = (self.out_features, self.in_features)
            self._add(f"weight{index}", shape, params_dtype, device, dim)
            self._add_bias(f"bias{index}", params_dtype, device, bias)

    def forward(
        self, inp: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        self._check(inp)
        if not isinstance(m_splits, list):
            recorder().problem(f"GroupedLinear: m_splits is {type(m_splits)}: it must be a list")
        elif sum(m_splits) != inp.numel() // inp.shape[-1]:
            recorder().problem(f"GroupedLinear: {sum(m_splits)} rows in m_splits, not {len(inp)}")
        count = range(self.num_gemms)
        weights = [getattr(self, f"weight{index}") for index in count]
        biases = [getattr(self, f"bias{index}") for index in count]
        added = biases if self.use_bias and not self.return_bias else []
        out: Tensor = GroupedFunction.apply(inp, self, *weights, *added)
        return (out, biases) if self.return_bias else out
