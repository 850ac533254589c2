"""The pretended GPU: torch.cuda without a driver, and CUDA tensors without values.

PretendedGpu sends an operation to torch's FakeTensorMode where an argument or the wanted device is
CUDA; CPU operations run as they are.  It records what the operation means for a GPU.  Autograd runs
CUDA nodes in a thread of its own, to which torch carries the mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from megatron_rl_tools.rehearse import torch_cuda
from megatron_rl_tools.rehearse.recorder import Recorder, place
from megatron_rl_tools.rehearse.values import Values, leaves

SizeRule = Callable[[str, Sequence[Any]], int | None]
"""(operation, arguments) -> number of results of an operation whose size depends on values."""
MAY_MIX = ("index", "set_", "index_put_", "_index_put_impl_", "lift_fresh")
"""Operations that take a CPU tensor beside CUDA tensors, or are judged elsewhere."""
GEMMS = ("mm", "bmm", "addmm", "baddbmm", "_grouped_mm")
PICK = ("gather", "index", "index_select", "embedding", "take")
PUT = ("scatter_", "scatter_add_", "index_put_", "_index_put_impl_", "index_add_", "scatter")
OVERWRITE = ("copy", "zero", "fill")
"""In place they only write their first argument."""
NO_KERNEL = ("empty", "new_empty", "detach", "prim::", "_unsafe_view", "lift_fresh", "set_")
NEW_SIZE = ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive")


class PretendedGpu(TorchDispatchMode):
    """One GPU of one virtual rank.  Enter it once, before tensors are made."""

    def __init__(self, recorder: Recorder, total_bytes: int) -> None:
        super().__init__()
        self.recorder = recorder
        self.values = Values(recorder)
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.size_rules: list[SizeRule] = []
        self.column_counts: torch.Tensor | None = None
        """int64 [E]: the sums over the next mask [rows, E] that is summed (core_hooks.py)."""
        torch_cuda.install(recorder, total_bytes)
        install_fake_devices(recorder)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        arguments = leaves((args, kwargs))
        is_fake = any(isinstance(leaf, FakeTensor) for leaf in arguments)
        if not is_fake and not any(is_cuda(leaf) for leaf in arguments):
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if name == "_local_scalar_dense":
            return self._scalar(args[0])
        if name in ("_to_copy", "copy_"):
            moved = self._copy(name, args, kwargs)
            if moved is not None:
                return moved
        elif name not in MAY_MIX and is_fake:
            self._check_devices(name, arguments)
        out = self._sized(name, args, kwargs)
        if out is None:
            with self.fake:
                out = func(*args, **kwargs)
            self.values.follow(func, args, kwargs, out)
            if name == "sum" and self.column_counts is not None and args[0].dtype is torch.bool:
                self.values.set(out, self.column_counts.to(out.dtype))
                self.column_counts = None
        self._record(func, name, args, kwargs, arguments, out)
        return out

    def _record(
        self,
        func: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        arguments: Sequence[Any],
        out: Any,
    ) -> None:
        outputs = [leaf for leaf in leaves(out) if isinstance(leaf, FakeTensor)]
        for tensor in outputs:
            if tensor.is_cuda:
                self.recorder.allocate(tensor)
        returns = func._schema.returns
        is_view = bool(returns) and all(
            value.alias_info is not None and not value.alias_info.is_write for value in returns
        )
        if is_view or name.startswith(NO_KERNEL):
            return
        inputs = [leaf for leaf in arguments if isinstance(leaf, FakeTensor)]
        flops = 0
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            flops = int(count(*args, **kwargs, out_val=out))
        kind = "gemm" if name in GEMMS else "attention" if "attention" in name else "memory"
        num_bytes = moved_bytes(name, inputs, outputs, kwargs.get("out"))
        dtype = outputs[0].dtype if outputs else inputs[0].dtype if inputs else None
        self.recorder.operation(name, kind, flops=flops, num_bytes=num_bytes, dtype=dtype)

    def _scalar(self, tensor: torch.Tensor) -> bool | int | float:
        """Answer tensor.item(): the value, or an invented one, which is noted."""
        self.recorder.sync("item()")
        value = self.values.of(tensor)
        if value is not None:
            return value.item()
        self.recorder.invented[self.recorder.phase, "item()", place()] += 1
        if tensor.dtype is torch.bool:
            return False
        return 1.0 if tensor.dtype.is_floating_point else 1

    def _copy(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a copy between host and device; answer one to the host, and None otherwise."""
        target: torch.Tensor | None = None
        if name == "copy_":
            target, source, *flags = args
            to, non_blocking = target.device.type, bool(flags and flags[0])
        else:
            source = args[0]
            device = kwargs.get("device")
            to = source.device.type if device is None else torch.device(device).type
            non_blocking = bool(kwargs.get("non_blocking"))
        if source.device.type == "cpu" and to == "cuda":
            is_pinned = getattr(source, "is_pretended_pinned", False)
            kind = f"{'pinned' if is_pinned else 'pageable'}, " + (
                "asynchronous" if non_blocking and is_pinned else "blocking"
            )
            self.recorder.copy(kind, source.numel() * source.element_size())
        if not (isinstance(source, FakeTensor) and to == "cpu"):
            return None
        self.recorder.sync("copy to the host" + (", not waited for" if non_blocking else ""))
        value = self.values.of(source)
        dtype = kwargs.get("dtype") or source.dtype
        if value is None:
            if source.numel() <= 64 and not source.dtype.is_floating_point:
                self.recorder.invented[self.recorder.phase, "copy to the host", place()] += 1
            value = torch.zeros(source.shape, dtype=source.dtype)
        if target is None:
            return value.to(dtype, copy=True)
        return target.copy_(value)

    def _check_devices(self, name: str, arguments: Sequence[Any]) -> None:
        for leaf in arguments:
            if isinstance(leaf, torch.Tensor) and leaf.dim() and not isinstance(leaf, FakeTensor):
                self.recorder.problem(f"{name} mixes a CPU tensor {tuple(leaf.shape)} with CUDA")

    def _sized(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer an operation whose size depends on values; None for all others."""
        if name in ("index", "index_put_", "_index_put_impl_"):
            masks = self._check_indices(name, args)
            if name != "index" or not masks:
                return None
            mask = masks[0]
            count = self._count(name, args, mask)
            shape = (count, *args[0].shape[mask.dim() :])
            return self._new(shape, args[0].dtype)
        if name in NEW_SIZE:
            self.recorder.sync(name)
            known = self.values.of(args[0])
            if name.startswith("unique") or name == "_unique2":
                count = args[0].numel() if known is None else int(known.unique().numel())
                self._note_guess(name, known)
                return self._new((count,), args[0].dtype), self._new((0,)), self._new((0,))
            mask = args[1] if name == "masked_select" else args[0]
            count = self._count(name, args, mask)
            if name == "masked_select":
                return self._new((count,), args[0].dtype)
            return self._new((count, args[0].dim()))
        if name == "bincount":
            self.recorder.sync(name)
            least = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
            known = self.values.of(args[0])
            if known is None and not least:
                self._note_guess(name, known)
            return self._new((max(least, 1 if known is None else int(known.max()) + 1),))
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            self.recorder.sync(name)
            known = self.values.of(args[0])
            self._note_guess(name, known)
            return self._new((args[0].numel() if known is None else int(known.sum()),))
        return None

    def _check_indices(self, name: str, args: tuple[Any, ...]) -> list[torch.Tensor]:
        """Record what the indices mean for a GPU; return those that are masks."""
        masks = []
        for index in args[1]:
            if index is None:
                continue
            if not isinstance(index, FakeTensor):
                self.recorder.problem(f"{name} by a CPU index: a copy for which the host waits")
            if index.dtype in (torch.bool, torch.uint8):
                self.recorder.sync(f"{name} by a mask")
                masks.append(index)
        return masks

    def _count(self, name: str, args: tuple[Any, ...], mask: torch.Tensor) -> int:
        """Return the number of true elements of a mask."""
        value = self.values.of(mask) if isinstance(mask, FakeTensor) else mask
        if value is not None:
            return int(value.count_nonzero())
        for rule in self.size_rules:
            if (count := rule(name, args)) is not None:
                return count
        self._note_guess(name, None)
        return mask.numel()

    def _note_guess(self, name: str, known: object) -> None:
        if known is None:
            self.recorder.not_known[name, place()] += 1

    def _new(self, shape: Sequence[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        with self.fake:
            return torch.empty(tuple(shape), dtype=dtype, device="cuda")


def moved_bytes(
    name: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], out: Any
) -> int:
    """Return the bytes that an operation reads and writes in the GPU's memory."""
    if name in PICK:  # it reads what it gives
        return 2 * sum(map(size_of, outputs))
    if name in PUT:  # its source, and the places that it changes twice
        return 3 * sum(map(size_of, inputs[1:]))
    if name.rstrip("_") in OVERWRITE:
        inputs = inputs[1:]
    read = sum(size_of(tensor) for tensor in inputs if tensor is not out)
    return read + sum(map(size_of, outputs))


def size_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def is_cuda(leaf: Any) -> bool:
    """Return whether an argument asks for the GPU."""
    return isinstance(leaf, torch.device) and leaf.type == "cuda"


def install_fake_devices(recorder: Recorder) -> None:
    """Let FakeTensors be on a CUDA device without a driver, and parameters become them."""
    fake_tensor.init_gpu_context = lambda device: None  # type: ignore[assignment]
    FakeTensorMode.avoid_device_init = property(lambda self: True)  # type: ignore[method-assign,assignment]
    torch._C._set_only_lift_cpu_tensors(True)
    resize = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        recorder.resize(self, size)
        return resize(self, size)

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
    nn.Module._apply = apply_to_module  # type: ignore[method-assign]


def apply_to_module(
    self: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    """Replace Module._apply, which cannot change a CPU parameter into a FakeTensor in place:
    a new parameter takes over the attributes of the old one.
    """
    for child in self.children() if recurse else ():
        child._apply(function)
    for name, parameter in self._parameters.items():
        if parameter is None:
            continue
        with torch.no_grad():
            moved = function(parameter)
        if moved is not parameter:
            made = nn.Parameter(moved, parameter.requires_grad)
            made.__dict__.update(parameter.__dict__)
            self._parameters[name] = made
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = function(buffer)
    return self
