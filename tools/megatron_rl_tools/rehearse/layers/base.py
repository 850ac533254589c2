"""What linear layers have in common: module/base.py, TransformerEngineBaseModule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_rl_tools.rehearse.layers.costs import (
    group_size,
    need_cuda,
    product,
    recorder,
    refuse,
)

WITHOUT_EFFECT = (
    "get_rng_state_tracker", "init_method", "rng_tracker_name", "save_original_input", "ub_name",
)  # fmt: skip
"""Arguments of the layers' constructors that change neither sizes nor kernels without FP8."""
_dummies: dict[tuple[Any, ...], Tensor] = {}


def weight_gradient(
    name: str, grad: Tensor, x: Tensor, weight: Tensor, num_rows: int, layer: nn.Module
) -> Tensor | None:
    """Record the product; return what autograd gets.

    With fuse_wgrad_accumulation the product adds to weight.main_grad, and autograd gets a tensor of
    the right shape without meaning: module/base.py, get_dummy_wgrad.
    """
    main_grad = weight.main_grad if layer.fuse_wgrad_accumulation else None  # type: ignore[attr-defined]
    outputs, inputs = weight.shape
    dw = product(name, grad, x, outputs, inputs, num_rows, main_grad)
    return accumulated(weight, dw, is_fused=main_grad is not None)


def accumulated(weight: Tensor, dw: Tensor, *, is_fused: bool) -> Tensor | None:
    if not is_fused:
        return dw
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return get_dummy_wgrad(dw.shape, weight.dtype)


def add_weight_gradient(x: Tensor, grad: Tensor, main_grad: Tensor) -> None:
    """apex: add grad^T x to main_grad."""
    outputs, inputs = main_grad.shape
    product("apex wgrad", grad, x, outputs, inputs, grad.numel() // outputs, main_grad)


def get_dummy_wgrad(shape: Sequence[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    """One tensor for each shape and dtype of the process."""
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
        self.save_original_input = False  # core sets it: bfloat16 inputs are saved in any case
        self.fp8 = self.fp8_calibration = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False}

    def _check_arguments(self, arguments: Mapping[str, Any]) -> None:
        for name, value in arguments.items():
            if value and name not in WITHOUT_EFFECT:
                refuse(f"{name} of {type(self).__name__}", "leave it out")

    @property
    def gathers_input(self) -> bool:
        return self.parallel_mode == "column" and self.sequence_parallel

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        self.tp_group = tp_group

    def get_extra_state(self) -> Tensor:
        """Return the state of FP8 for a checkpoint: nothing."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None: ...

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
