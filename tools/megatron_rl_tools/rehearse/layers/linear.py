"""Norms and linear layers: module/{rmsnorm,layernorm,linear,layernorm_linear,grouped_linear}.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from megatron_rl_tools.rehearse.layers.costs import (
    free,
    gather_rows,
    group_size,
    kernel,
    need_cuda,
    product,
    recorder,
    refuse,
    scatter_rows,
    sum_ranks,
)

_dummies: dict[tuple[Any, ...], Tensor] = {}


class NormFunction(Function):
    """ops/basic/rmsnorm.py, op_forward and op_backward; layer_norm.py saves the means too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.contiguous()  # a copy that is saved, for the strided views of queries and keys
        out, statistics = normalise(rows, weight, bias)
        ctx.save_for_backward(rows, weight, bias, *statistics)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:  # type: ignore[override]
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

    bias: nn.Parameter | None = None

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        size = hidden_size if normalized_shape is None else normalized_shape
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        dtype, device = params_dtype or kwargs.get("dtype"), kwargs.get("device", "cuda")
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))  # type: ignore[arg-type]
        self.sequence_parallel = sequence_parallel
        if sequence_parallel is not None:
            self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        need_cuda("norm input", x)
        out: Tensor = NormFunction.apply(x, self.weight, self.bias)
        return out


class LayerNorm(RMSNorm):
    """module/layernorm.py."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            normalized_shape, eps, sequence_parallel, params_dtype, zero_centered_gamma,
            hidden_size, **kwargs,
        )  # fmt: skip
        self.bias = nn.Parameter(torch.empty_like(self.weight))
        if sequence_parallel is not None:
            self.bias.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]


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
        rows, statistics = x, []
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
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
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


def weight_gradient(
    name: str, grad: Tensor, x: Tensor, weight: Tensor, num_rows: int, layer: nn.Module
) -> Tensor | None:
    """Record the product; return what autograd gets.

    With fuse_wgrad_accumulation the product adds to weight.main_grad, and autograd gets a tensor of
    the right shape without meaning: module/base.py, get_dummy_wgrad.
    """
    main_grad = weight.main_grad if layer.fuse_wgrad_accumulation else None  # type: ignore[attr-defined]
    dw = product(name, grad, x, *weight.shape, num_rows, out=main_grad)
    return accumulated(weight, dw, is_fused=main_grad is not None)


def accumulated(weight: Tensor, dw: Tensor, *, is_fused: bool) -> Tensor | None:
    if not is_fused:
        return dw
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return dummy_gradient(dw.shape, weight.dtype)


def add_weight_gradient(x: Tensor, grad: Tensor, main_grad: Tensor) -> None:
    """apex: add grad^T x to main_grad."""
    product("apex wgrad", grad, x, *main_grad.shape, grad.numel() // grad.shape[-1], out=main_grad)


def dummy_gradient(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """module/base.py, get_dummy_wgrad: one tensor for each shape and dtype of the process."""
    key = (tuple(shape), dtype)
    if key not in _dummies:
        _dummies[key] = torch.empty(key[0], dtype=dtype, device="cuda")
    return _dummies[key].detach()


class LinearBase(nn.Module):
    """What core reads of module/base.py, TransformerEngineBaseModule, and of the layers."""

    def _set_up(
        self, tp_group: Any, tp_size: int, parallel_mode: str | None, sequence_parallel: bool,
        in_features: int, out_features: int,
    ) -> None:  # fmt: skip
        self.tp_group = tp_group
        self.tp_size = tp_size if tp_group is None else group_size(tp_group)
        self.parallel_mode = parallel_mode
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        if parallel_mode == "column":
            out_features //= self.tp_size
        elif parallel_mode == "row":
            in_features //= self.tp_size
        self.in_features, self.out_features = in_features, out_features
        self.fp8_meta: dict[str, Any] = {}

    @property
    def gathers_input(self) -> bool:
        return self.parallel_mode == "column" and self.sequence_parallel

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        self.tp_group = tp_group

    def init_fp8_metadata(self, num_gemms: int = 1) -> None: ...

    def _add(
        self, name: str, shape: Sequence[int], dtype: torch.dtype | None, device: Any, dim: int
    ) -> None:
        """Register a parameter.  Its values are of no use, so that `init_method` is not called."""
        parameter = nn.Parameter(torch.empty(tuple(shape), dtype=dtype, device=device))
        for key, value in (("tensor_model_parallel", True), ("partition_dim", dim),
                           ("partition_stride", 1)):  # fmt: skip
            setattr(parameter, key, value)
        self.register_parameter(name, parameter)

    def _add_bias(self, name: str, dtype: torch.dtype | None, device: Any, use_bias: bool) -> None:
        if not use_bias:
            setattr(self, name, torch.empty(0, dtype=dtype, device=device))
            return
        self._add(name, (self.out_features,), dtype, device, 0)
        if self.parallel_mode == "row":
            bias = getattr(self, name)
            del bias.tensor_model_parallel, bias.partition_dim, bias.partition_stride
            bias.sequence_parallel = self.sequence_parallel

    def _check(self, x: Tensor) -> None:
        need_cuda("input of a linear layer", x)
        dtypes = {parameter.dtype for parameter in self.parameters()}
        if dtypes != {x.dtype} and not torch.is_autocast_enabled("cuda"):
            recorder().problem(
                f"TransformerEngine refuses an input in {x.dtype} for parameters in"
                f" {', '.join(map(str, dtypes))}"
            )


class Linear(LinearBase):
    """module/linear.py."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if delay_wgrad_compute or any(kwargs.values()):
            refuse(f"delay_wgrad_compute or {sorted(kwargs)} of Linear", "leave it out")
        self._set_up(tp_group, tp_size, parallel_mode, sequence_parallel, in_features, out_features)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias = bias, return_bias
        self.save_original_input = save_original_input
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

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        device: Any = "cuda",
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            in_features, out_features, sequence_parallel, fuse_wgrad_accumulation, tp_group,
            tp_size, bias=bias, return_bias=return_bias, params_dtype=params_dtype,
            parallel_mode=parallel_mode, device=device, delay_wgrad_compute=delay_wgrad_compute,
            return_layernorm_output=return_layernorm_output, **kwargs,
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


class GroupedFunction(Function):
    """module/grouped_linear.py, _GroupedLinear: rows of several experts, one weight for each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: GroupedLinear, *parameters: Tensor) -> Tensor:
        weights = parameters[: layer.num_gemms]
        rows = x.reshape(-1, layer.in_features)
        out = x.new_empty(len(rows), layer.out_features)
        flops = 2 * len(rows) * layer.in_features * layer.out_features
        kernel("grouped linear", rows, *parameters, out, kind="gemm", flops=flops)
        saved = rows if weights[0].requires_grad else None
        ctx.layer, ctx.shape = layer, x.shape
        ctx.save_for_backward(saved, *parameters)
        return out.view(*x.shape[:-1], layer.out_features)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
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
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if delay_wgrad_compute or any(kwargs.values()):
            refuse(f"delay_wgrad_compute or {sorted(kwargs)} of GroupedLinear", "leave it out")
        self._set_up(tp_group, tp_size, parallel_mode, sequence_parallel, in_features, out_features)
        self.num_gemms, self.fuse_wgrad_accumulation = num_gemms, fuse_wgrad_accumulation
        self.use_bias, self.return_bias = bias, return_bias
        self.save_original_input = save_original_input
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
