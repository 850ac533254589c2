"""Bytes that Adam takes for a parameter, on the device, on the host and in a checkpoint.

Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_rl.config import Config


@dataclass(frozen=True)
class AdamBytes:
    """Bytes of one parameter; all but `gradient` of one that the rank updates."""

    gradient: int
    """Its gradient's sum, on every rank that has the parameter."""
    device: float
    """Its state on the device: moments, and a float32 copy of 16-bit weights."""
    host: float
    """Its state and its gradient on the host.  torch rounds pinned tensors, which are half of it,
    up to powers of two.
    """
    update: float
    """Float32 copies on the device during an update."""
    saved: int
    """Its state in a checkpoint."""


def adam_bytes(cfg: Config) -> AdamBytes:
    """Return the bytes of one parameter under [optim] and the fields of [megatron]."""
    state = bytes_of_state(cfg)
    # the gradient of the update before
    return replace(state, device=state.device + 4 * cfg.optim.measure_cosine)


def bytes_of_state(cfg: Config) -> AdamBytes:
    """Return `adam_bytes` without the copy of optim.measure_cosine."""
    size = 2 if cfg.model.dtype == "bfloat16" else 4
    in_float32 = dtype_bytes(cfg, "main_grads_dtype") == 4
    gradient = 4 if cfg.megatron.is_on("grad_reduce_in_fp32", default=in_float32) else size
    precise = cfg.megatron.is_on("use_precision_aware_optimizer")
    if cfg.megatron.is_on("optimizer_cpu_offload"):
        fraction = float(str(cfg.megatron.fields.get("optimizer_offload_fraction", 0)))
        stays = 1 - fraction
        # without it core keeps a float32 copy of all weights on the device, beside the host's
        weights = 4 * stays if precise else 4.0
        copies = 0.0 if gradient == 4 else 4 * stays if precise else 4.0
        return AdamBytes(gradient, weights + 8 * stays, 16 * fraction, copies, saved=12)
    if precise:
        moments = [dtype_bytes(cfg, name) for name in ("exp_avg_dtype", "exp_avg_sq_dtype")]
        # the high 16 bits of a float32 weight are the bfloat16 weight
        weights = 2 if cfg.megatron.is_on("store_param_remainders", default=True) else 4
        state = weights + sum(moments)
        # TransformerEngine's kernel takes float32: those of a group of parameters at a time
        return AdamBytes(gradient, state, 0, 4 * moments.count(2), saved=state)
    state = 12 if size == 2 else 8
    copy = 4 * (cfg.optim.distributed or size == 2)  # float32 weights are saved once more
    return AdamBytes(gradient, state, 0, 4 * (gradient == 2), saved=8 + copy)


def dtype_bytes(cfg: Config, name: str) -> int:
    """Return the size of a dtype of [megatron] that Adam can have."""
    return 2 if cfg.megatron.fields.get(name) == "bfloat16" else 4
