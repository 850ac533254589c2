"""What a kernel leaves in the record, and the collectives around it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_tools.rehearse.native import RehearsalError
from megatron_rl_tools.rehearse.recorder import Recorder

_recorders: list[Recorder] = []
"""The recorder of this process, once the stand-in is installed: layers are made by core, which
cannot pass one."""
_workspaces: dict[int, list[Tensor]] = {}


def use(recorder: Recorder) -> None:
    _recorders[:] = [recorder]


def recorder() -> Recorder:
    return _recorders[0]


def kernel(name: str, *tensors: Tensor | None, kind: str = "memory", flops: int = 0) -> None:
    """Record one kernel that reads or writes these tensors once; its dtype is the first one's."""
    used = [tensor for tensor in tensors if tensor is not None]
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in used)
    recorder().operation(f"te.{name}", kind, flops=flops, num_bytes=num_bytes, dtype=used[0].dtype)


def need_workspaces(count: int) -> None:
    """cpp_extensions/gemm.py, get_cublas_workspace: made at the first product, and kept.

    count: 1 for a product, 4 streams for those of several experts.  They are larger on Hopper and
    later, the GPUs that are pretended.
    """
    if count not in _workspaces:
        size = (32 << 20) + 1024
        made = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(count)]
        _workspaces[count] = made


def product(
    name: str, left: Tensor, right: Tensor, rows: int, columns: int, inner: int,
    out: Tensor | None = None, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Record a matrix product and return its result [rows, columns], `out` if it is passed."""
    need_workspaces(1)
    if out is None:
        out = left.new_empty((rows, columns), dtype=dtype)
    kernel(name, left, right, out, kind="gemm", flops=2 * rows * columns * inner)
    return out


def need_cuda(name: str, tensor: Tensor | None) -> None:
    """TransformerEngine asserts it: its kernels would read a wrong address."""
    if tensor is not None and not tensor.is_cuda:
        recorder().problem(f"TransformerEngine's {name} is on {tensor.device}: it must be on CUDA")


def refuse(feature: str, fix: str) -> None:
    raise RehearsalError(f"rehearse: {feature} has no stand-in; {fix}")


def free(tensor: Tensor) -> None:
    """Free the storage, as TransformerEngine's clear_tensor_data does for what only it has seen."""
    tensor.untyped_storage().resize_(0)


def group_size(group: Any) -> int:
    return 1 if group is None else int(group.size())


def gather_rows(tensor: Tensor, group: Any, *, async_op: bool = False) -> tuple[Tensor, Any]:
    """distributed.py, gather_along_first_dim: return (rows of all ranks, the work)."""
    if group_size(group) == 1:
        return tensor, None
    total = tensor.new_empty((len(tensor) * group.size(), *tensor.shape[1:]))
    work = dist.all_gather_into_tensor(total, tensor.contiguous(), group=group, async_op=async_op)
    return total, work


def scatter_rows(tensor: Tensor, group: Any, *, async_op: bool = False) -> tuple[Tensor, Any]:
    """distributed.py, reduce_scatter_along_first_dim: return (this rank's rows, the work)."""
    if group_size(group) == 1:
        return tensor, None
    part = tensor.new_empty((len(tensor) // group.size(), *tensor.shape[1:]))
    work = dist.reduce_scatter_tensor(part, tensor.contiguous(), group=group, async_op=async_op)
    return part, work


def sum_ranks(tensor: Tensor, group: Any, *, async_op: bool = False) -> tuple[Tensor, Any]:
    """distributed.py, allreduce: return (the tensor, the work)."""
    if group_size(group) == 1:
        return tensor, None
    return tensor, dist.all_reduce(tensor, group=group, async_op=async_op)
