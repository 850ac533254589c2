"""Adam and the kernels on lists of tensors: optimizers/*.py.  They need no temporary tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rl_tools.rehearse.layers.costs import kernel, refuse


class FusedAdam(torch.optim.Optimizer):
    """fused_adam.py, with float32 states: one kernel a parameter group and dtype."""

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
        **kwargs: Any,
    ) -> None:
        changed = [key for key, value in kwargs.items() if value not in (False, torch.float32)]
        if amsgrad or changed:
            refuse(f"FusedAdam with {changed or 'amsgrad'}", "use Adam with float32 states")
        defaults = dict(
            lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, bias_correction=bias_correction
        )
        super().__init__(params, defaults)
        self.adam_w_mode, self.master_weights = int(adam_w_mode), False
        self._dummy_overflow_buf = torch.zeros(1, dtype=torch.int, device="cuda")

    def initialize_state(self, param: Tensor, store_param_remainders: bool) -> None:
        for name in ("exp_avg", "exp_avg_sq"):
            self.state[param][name] = torch.zeros_like(param, dtype=torch.float32)

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, grad_scaler: object = None
    ) -> float | None:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            lists: dict[torch.dtype, list[Tensor]] = {}
            for param in group["params"]:
                if not self.state[param]:
                    self.initialize_state(param, store_param_remainders=False)
                if param.grad is None:
                    continue
                state = self.state[param]
                moments = (state["exp_avg"], state["exp_avg_sq"])
                written = (param.data, *moments)
                # it reads the gradient and reads and writes the others
                lists.setdefault(param.dtype, []).extend((*written, *written, param.grad))
            for tensors in lists.values():
                kernel("adam", *tensors)
        return loss


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
