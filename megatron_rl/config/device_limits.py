"""Time limits whose default, "auto", depends on the device.

The limits of GPUs are estimates: nothing here was run on a GPU.
"""

from __future__ import annotations

from typing import Literal

from megatron_rl.config.base import AboveZero

Device = Literal["cpu", "cuda"]
AutoSeconds = AboveZero | Literal["auto"]
PerDevice = dict[Device, float]

# a GPU rank may have 45 GiB of weights and optimizer state to gather and write, after its stage
GRACE_SECONDS: PerDevice = {"cpu": 25.0, "cuda": 600.0}
# a busy CPU is slow to import; a GPU server reads 100 GiB, compiles kernels, captures CUDA graphs
START_SECONDS: PerDevice = {"cpu": 900.0, "cuda": 1200.0}
# servers start without a warm-up, so the first requests compile kernels
PROBE_SECONDS: PerDevice = {"cpu": 60.0, "cuda": 600.0}


def seconds(setting: float | Literal["auto"], defaults: PerDevice, device: Device) -> float:
    """Return `setting`, or for "auto" the device's default."""
    return defaults[device] if isinstance(setting, str) else setting
