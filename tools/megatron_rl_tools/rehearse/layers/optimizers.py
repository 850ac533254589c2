"""Adam and the kernels on lists of tensors: optimizers/*.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rl_tools.rehearse.layers.costs import kernel, refuse


class FusedAdam(torch.optim.Optimizer):
    """fused_adam.py: one kernel a parameter group and dtype.

    A state in bfloat16 is copied to float32 for the kernel, all parameters of a group at a time,
    and back.  float16 and FP8, which have scales, are refused, as by a run.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        **kwargs: Any,
    ) -> None:
        changed = [key for key, value in kwargs.items() if value]
        if amsgrad or changed:
            refuse(f"FusedAdam with {changed or 'amsgrad'}", "leave it out")
        if not {exp_avg_dtype, exp_avg_sq_dtype} <= {torch.float32, torch.bfloat16}:
            refuse("FusedAdam with float16 or FP8 moments", "use float32 or bfloat16")
        if master_weight_dtype is not torch.float32:
            refuse(f"FusedAdam with weights in {master_weight_dtype}", "use float32")
        defaults = dict(
            lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, bias_correction=bias_correction
        )
        super().__init__(params, defaults)
        self.adam_w_mode, self.master_weights = int(adam_w_mode), master_weights
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = store_param_remainders and master_weights
        self.dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        self._scales: list[Tensor] = []
        self._dummy_overflow_buf = torch.zeros(1, dtype=torch.int, device="cuda")

    def initialize_state(self, param: Tensor, store_param_remainders: bool) -> None:
        state = self.state[param]
        for name, dtype in self.dtypes.items():
            state[name] = torch.zeros_like(param, dtype=dtype)
            if dtype is not torch.float32:  # made for every other dtype, also where none is used
                self._scales.append(torch.ones(1, device=param.device))
        if self.master_weights and store_param_remainders:
            state["master_param"] = torch.zeros_like(param, dtype=torch.int16)
        elif self.master_weights:
            state["master_param"] = torch.empty_like(param, dtype=torch.float32)
            state["master_param"].copy_(param.detach().clone().float())

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        if not self.use_decoupled_grad:
            super().zero_grad(set_to_none is None or set_to_none)
            return
        for param in (param for group in self.param_groups for param in group["params"]):
            if set_to_none or set_to_none is None:
                param.decoupled_grad = None
            else:
                param.decoupled_grad.zero_()

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, grad_scaler: object = None
    ) -> float | None:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
                self._update(group["params"])
        return loss

    def _update(self, params: Iterable[Tensor]) -> None:
        lists: dict[torch.dtype, list[Tensor]] = {}
        copies: list[tuple[Tensor, Tensor]] = []  # they live until the whole group is updated
        for param in params:
            state = self.state[param]
            if not state:
                is_short = self.store_param_remainders and param.dtype is torch.bfloat16
                self.initialize_state(param, is_short)
            name = "decoupled_grad" if self.use_decoupled_grad else "grad"
            if (grad := getattr(param, name, None)) is None:
                continue
            written = [param.data]
            for value in state.values():
                used = value.float() if value.dtype is torch.bfloat16 else value
                if used is not value:
                    copies.append((value, used))
                written.append(used)
            # it reads the gradient and reads and writes the others
            lists.setdefault(param.dtype, []).extend((*written, *written, grad))
        for tensors in lists.values():
            kernel("adam", *tensors)
        for value, used in copies:
            value.copy_(used.bfloat16())


class FusedSGD(torch.optim.SGD):
    """fused_sgd.py is not modelled; core imports the name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse("FusedSGD", "use Adam")


def multi_tensor_applier(
    op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: Sequence[Any], *args: Any
) -> Any:
    return op(2048 * 32, noop_flag_buffer, tensor_lists, *args)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, lists: Sequence[Sequence[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """Return (the norm of all, the norms of each or nothing), float32."""
    tensors = lists[0]
    norm = tensors[0].new_empty(1, dtype=torch.float32)
    norms = norm.new_empty(len(tensors) if per_tensor else 0)
    kernel("l2norm", *tensors)
    return norm, norms


def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, lists: Sequence[Sequence[Tensor]], scale: float
) -> None:
    kernel("scale", *lists[0], *lists[1])


def multi_tensor_scale_tensor(
    chunk_size: int, is_infinite: Tensor, lists: Sequence[Sequence[Tensor]], scale: Tensor
) -> None:
    kernel("scale", *lists[0], *lists[1])
