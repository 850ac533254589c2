"""Replacements in torch and megatron-core that let core run without CUDA (CPU tensors, gloo).

`install_cpu()` is called once, by `megatron_rl.distributed`'s __init__; with a GPU it does nothing.
Each row of `PATCHES` names one symbol, its replacement and why megatron-core uses it on a CPU.  A
test runs training steps and fails for a row that megatron-core no longer uses.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.utils import _device

if TYPE_CHECKING:  # core is imported after the patches of torch
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

CPU = torch.device("cpu")
FUSED = ("transformer_engine.pytorch.optimizers", "apex", "amp_C")
"""Modules from which core's optimizers take kernels for a GPU."""
_TENSOR_TYPE = torch.Tensor.type


class Stream:
    """A stream that is always done: CPU work is synchronous."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def record_event(self, event: object = None) -> Event:
        return Event()


class Event:
    """An event that has always happened."""

    def synchronize(self) -> None: ...

    def wait(self, stream: object = None) -> None: ...


def on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return `make`, one of torch's factories, with the CPU where the caller names a GPU, and with
    plain memory where pinned memory is asked for, which only a GPU has a use for.

    A TorchFunctionMode would do the same for all functions, and cost every operation 2 us: 18 % of
    a step of a tiny model.
    """

    @functools.wraps(make)
    def call(*args: object, **kwargs: object) -> torch.Tensor:
        if kwargs.get("device") is not None and str(kwargs["device"]).startswith("cuda"):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return make(*args, **kwargs)

    return call


def tensor_type(
    self: torch.Tensor, dtype: torch.dtype | str | None = None, *args: object, **kwargs: object
) -> object:
    """Answer Tensor.type() with 'torch.cuda.FloatTensor' for a CPU tensor.

    The optimizer compares these strings.
    """
    if dtype is not None:  # a conversion, which torch does itself
        return _TENSOR_TYPE(self, dtype, *args, **kwargs)  # type: ignore[call-overload]
    # under a TorchFunctionMode this comes back through here, already renamed
    name = _TENSOR_TYPE(self)
    return name if name.startswith("torch.cuda.") else name.replace("torch.", "torch.cuda.", 1)


def move_to_host(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
    """Return the tensor, which is on the host, as numpy where that is asked for.

    Collectives need split sizes as numbers, and core converts CUDA tensors only.
    """
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def gather_unequal_rows(
    rows: torch.Tensor,
    group: dist.ProcessGroup,
    output_split_sizes: list[int] | None = None,
    use_global_buffer: bool = False,
) -> torch.Tensor:
    """Return the rows of all ranks, end to end.

    gloo gathers equal sizes only, so unequal ones are padded.
    """
    if group.size() == 1:
        return rows
    sizes = list(output_split_sizes or [len(rows)] * group.size())
    padded = rows.new_zeros(max(sizes), *rows.shape[1:])
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def reduce_scatter_rows(
    rows: torch.Tensor,
    group: dist.ProcessGroup,
    input_split_sizes: list[int] | None = None,
    use_global_buffer: bool = False,
) -> torch.Tensor:
    """Return this rank's part of the sum over ranks.

    gloo scatters equal sizes only, so unequal ones are all-reduced, then cut.
    """
    if group.size() == 1:
        return rows
    if input_split_sizes is None:
        output = rows.new_empty(len(rows) // group.size(), *rows.shape[1:])
        dist.reduce_scatter_tensor(output, rows.contiguous(), group=group)
        return output
    # all_reduce works in place, and the input must stay as it is
    total = rows.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    # a copy: a view would keep the rows of all ranks in memory
    return total.split(list(input_split_sizes))[group.rank()].clone()


def zigzag_positions(
    embedding: torch.Tensor, seq_dim: int, cp_group: dist.ProcessGroup
) -> torch.Tensor:
    """Return position embeddings of this context-parallel rank's two chunks of a sequence."""
    rank, size = cp_group.rank(), cp_group.size()
    chunks = embedding.unflatten(seq_dim, (2 * size, -1))
    # the zigzag of megatron-core: chunk r from the front and chunk r from the back
    numbers = torch.tensor([rank, 2 * size - 1 - rank])
    return chunks.index_select(seq_dim, numbers).flatten(seq_dim, seq_dim + 1)


def divide_parameters(optimizer: HybridDeviceOptimizer, fraction: float) -> tuple[object, ...]:
    """Divide an optimizer's parameters between host and device, as core does, but with all of them
    on the device, though it is a CPU.

    Returns the groups of the host and of the device, {parameter: copy on the host}, its inverse,
    and {parameter: float32 copy}.
    """
    host_groups, device_groups = [], []
    copies: dict[torch.Tensor, torch.Tensor] = {}
    exact: dict[torch.Tensor, torch.Tensor] = {}
    left = fraction * sum(
        item.numel() for group in optimizer.param_groups for item in group["params"]
    )
    for group in optimizer.param_groups:
        host: list[torch.Tensor] = []
        device: list[torch.Tensor] = []
        for parameter in group["params"]:
            offloaded = left > 0
            updated = parameter.detach().clone() if offloaded else parameter
            if optimizer.param_update_in_fp32 and parameter.dtype is not torch.float32:
                updated = exact[parameter] = parameter.detach().float()
            if offloaded:
                left -= parameter.numel()
                copies[parameter] = updated
            (host if offloaded else device).append(updated)
        host_groups += [group | {"params": host}] if host else []
        device_groups += [group | {"params": device}] if device else []
    inverse = {copy: parameter for parameter, copy in copies.items()}
    return host_groups, device_groups, copies, inverse, exact


def get_rng_state(*_: object, **__: object) -> torch.Tensor:
    return torch.default_generator.get_state()


def set_cuda_rng_state(state: torch.Tensor, *_: object, **__: object) -> None:
    torch.default_generator.set_state(state)


def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


@dataclass(frozen=True)
class Patch:
    """One symbol that is replaced."""

    module: str
    """Module, or module and class, that has the symbol."""
    name: str
    replacement: object
    why: str
    """Use of the symbol by megatron-core on a CPU."""


def patches(module: str, *rows: tuple[str, object, str]) -> tuple[Patch, ...]:
    """Return the patches of (name, replacement, why) in one module."""
    return tuple(Patch(module, *row) for row in rows)


CORE = "megatron.core"
PATCHES = (
    *patches(
        "torch.cuda",
        ("current_device", lambda: CPU, "the device of nearly every buffer core allocates"),
        ("Stream", Stream, "side streams of the token dispatcher and of gradient reduction"),
        ("current_stream", lambda *_: Stream(), "the token dispatcher orders its copies"),
        ("stream", lambda _: contextlib.nullcontext(), "the token dispatcher's side stream"),
        ("synchronize", lambda *_: None, "point-to-point pipeline communication"),
        ("manual_seed", manual_seed, "model_parallel_cuda_manual_seed"),
        ("get_rng_state", get_rng_state, "the RNG tracker records the state of each seed"),
    ),
    *patches(
        "torch.Tensor",
        ("type", tensor_type, "optimizers and clip_grads compare 'torch.cuda.FloatTensor'"),
        ("cuda", lambda self, *_, **__: self, "tied embeddings and optimizer state"),
    ),
    *patches(
        f"{CORE}.tensor_parallel.random",
        ("_get_cuda_rng_state", get_rng_state, "saved by fork and recompute"),
        ("_set_cuda_rng_state", set_cuda_rng_state, "restored by them"),
    ),
    *patches(
        f"{CORE}.tensor_parallel.mappings",
        (
            "_gather_along_first_dim",
            gather_unequal_rows,
            "expert tensor ranks hold unequal numbers of tokens, which gloo's all_gather refuses",
        ),
        ("_reduce_scatter_along_first_dim", reduce_scatter_rows, "the same in backward"),
    ),
    *patches(
        f"{CORE}.models.common.embeddings.rotary_pos_embedding",
        (
            "get_pos_emb_on_this_cp_rank",
            zigzag_positions,
            "RoPE of padded sequences under context parallelism; core's goes through pinned memory,"
            " which needs CUDA",
        ),
    ),
    *patches(
        f"{CORE}.optimizer.cpu_offloading.hybrid_optimizer.HybridDeviceOptimizer",
        (
            "_get_sub_optimizer_param_groups",
            divide_parameters,
            "optimizer_cpu_offload; core's goes by is_cuda, and through pinned memory",
        ),
    ),
    *patches(
        f"{CORE}.transformer.moe.token_dispatcher",
        (
            "maybe_move_tensor_to_cpu",
            move_to_host,
            "all-to-all split sizes stay tensors, which gloo refuses",
        ),
    ),
)

FACTORIES = ("tensor", "zeros", "ones", "full", "empty", "empty_like", "arange")
"""torch's functions that core calls with device="cuda", literally or by a variable.

Other functions fail: torch has no CUDA here.
"""


def install_cpu() -> None:
    """Apply every patch, once per process; no effect where CUDA is available."""
    # the patches would replace what works
    if torch.cuda.is_available() or _is_installed():
        return
    # `with torch.device(...)` knows factories by identity.  This call caches torch's own ones
    _device._device_constructors()
    # before the patches: core's modules, imported there, may keep one as a default argument
    for name in FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))
    import_core_optimizers()
    for patch in PATCHES:
        setattr(_owner(patch.module), patch.name, patch.replacement)


def import_core_optimizers() -> None:
    """Import core's optimizers while the fused kernels of other packages cannot be imported.

    Core then takes torch's Adam and its own norm of gradients.  It prefers fused ones where they
    are installed, which is in every container, and these fail on a CPU.
    """
    with contextlib.suppress(ImportError):  # it imports its optimizers itself
        importlib.import_module("transformer_engine.pytorch")
    installed = {name: sys.modules[name] for name in FUSED if name in sys.modules}
    sys.modules.update(dict.fromkeys(FUSED))  # type: ignore[arg-type]  # None hides a module
    try:
        importlib.import_module(f"{CORE}.optimizer")
    finally:
        for name in FUSED:
            del sys.modules[name]
        sys.modules.update(installed)


def check_no_gpu() -> None:
    """Raise ValueError where a model on the CPU would be mixed with core's buffers on a GPU."""
    if torch.cuda.is_available():
        raise ValueError(
            "a model on the CPU (run.device = cpu): torch sees a GPU, and megatron-core would put"
            ' its buffers on it; hide it with CUDA_VISIBLE_DEVICES="", or set run.device = cuda'
        )


def _is_installed() -> bool:
    return torch.Tensor.type is tensor_type


def _owner(path: str) -> object:
    """Return the module at `path`, or the class where the last part is one."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)
