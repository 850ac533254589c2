"""Fields of OptimizerConfig with which Adam keeps its state elsewhere than on the device, or in
fewer bits: which of them a run can use and resume with, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from megatron.core.optimizer import OptimizerConfig

from megatron_rl.config import ConfigError

STATE_DTYPES = ("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype")


def check_adam_fields(config: OptimizerConfig, values: Mapping[str, object]) -> None:
    """Raise ConfigError, with a line for every problem, where a run could not resume, or where core
    ignores a field.

    values: the fields of [megatron], as written.
    """
    problems = [*offload_problems(config, values), *precision_problems(config)]
    if problems:
        raise ConfigError("\n".join(problems))


def offload_problems(config: OptimizerConfig, values: Mapping[str, object]) -> Iterator[str]:
    """Yield the problems of CPU offload."""
    if not config.optimizer_cpu_offload:
        if config.optimizer_offload_fraction:
            yield (
                f"megatron.optimizer_offload_fraction = {config.optimizer_offload_fraction}: has no"
                " effect; set megatron.optimizer_cpu_offload = true, or remove it"
            )
        return
    key = "megatron.optimizer_cpu_offload = true"
    if not config.use_distributed_optimizer:
        yield f"{key}: needs optim.distributed = true, whose state checkpoints hold"
    if config.params_dtype is not torch.bfloat16:
        yield f"{key}: needs model.dtype = bfloat16; core's offload fails with float32 weights"
    if not 0 < config.optimizer_offload_fraction <= 1:
        yield (
            f"megatron.optimizer_offload_fraction = {config.optimizer_offload_fraction}: must be"
            " above 0 and at most 1, the part of Adam's state that is kept on the host; 0 is core's"
            " default, with which nothing is offloaded"
        )
    if not config.decoupled_weight_decay:
        yield f"{key}: core offloads AdamW only; remove megatron.decoupled_weight_decay = false"
    for name in STATE_DTYPES:
        if getattr(config, name) is not torch.float32:
            yield (
                f"megatron.{name} = {values[name]!r}: has no effect with optimizer_cpu_offload,"
                " whose state is float32; remove it"
            )
    if (
        config.overlap_cpu_optimizer_d2h_h2d
        and config.optimizer_offload_fraction < 1
        and config.main_grads_dtype is not torch.float32
    ):
        yield (
            "megatron.overlap_cpu_optimizer_d2h_h2d = true with main_grads_dtype ="
            f" {values['main_grads_dtype']!r}: core updates what stays on the device without"
            " waiting for its gradients in float32; set optimizer_offload_fraction = 1, or remove"
            " one of them"
        )


def precision_problems(config: OptimizerConfig) -> Iterator[str]:
    """Yield the problems of TransformerEngine's Adam with its state in fewer bits."""
    if not config.use_precision_aware_optimizer:
        return
    if config.params_dtype is not torch.bfloat16:
        yield (
            "megatron.use_precision_aware_optimizer = true: needs model.dtype = bfloat16;"
            " TransformerEngine keeps a copy of float32 weights, which it does not update"
        )
    if config.main_grads_dtype not in (torch.float32, torch.bfloat16):
        yield (
            f"megatron.main_grads_dtype = {short(config.main_grads_dtype)}: must be float32 or"
            " bfloat16, in which core sums gradients"
        )
    for name in STATE_DTYPES:
        dtype = getattr(config, name)
        allowed = [torch.float32] + [torch.bfloat16] * (name != "main_params_dtype")
        if dtype not in allowed:
            yield (
                f"megatron.{name} = {short(dtype)}: must be {' or '.join(map(short, allowed))}; a"
                " run could save, but not resume bit for bit: other dtypes have a scale for each"
                " rank's part of a parameter, which a load would compute again, rounded"
            )


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
