"""Functions that torch.compile makes one kernel of, as megatron-core's fused activations.

A pretended GPU runs them operation by operation.  The kernel reads its arguments and writes its
results; what is between them stays in registers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_rl_tools.rehearse.device import PretendedGpu, size_of
from megatron_rl_tools.rehearse.values import leaves


def install(gpu: PretendedGpu) -> None:
    """Replace torch.compile; call it before megatron-core is imported, which decorates with it."""

    def compile_(function: Callable[..., Any] | None = None, **options: object) -> Any:
        return as_kernel(gpu, function) if function else functools.partial(as_kernel, gpu)

    torch.compile = compile_  # type: ignore[assignment]


def as_kernel(gpu: PretendedGpu, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, recorded as one kernel where it computes on the pretended GPU."""

    @functools.wraps(function)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        inputs = tensors_of((args, kwargs))
        if gpu.recorder.is_merging or not inputs:  # a part of another kernel, or of the host's work
            return function(*args, **kwargs)
        with gpu.recorder.merged():
            out = function(*args, **kwargs)
        outputs = tensors_of(out)
        gpu.recorder.operation(
            f"compiled {function.__name__}", "memory", flops=0,
            num_bytes=sum(map(size_of, [*inputs, *outputs])),
            dtype=outputs[0].dtype if outputs else inputs[0].dtype,
        )  # fmt: skip
        return out

    return compiled


def tensors_of(values: Any) -> list[torch.Tensor]:
    """Return the CUDA tensors among arguments or results."""
    found = leaves(values)
    return [leaf for leaf in found if isinstance(leaf, torch.Tensor) and leaf.is_cuda]
