"""Copies of small tensors to the device of a rank."""

from __future__ import annotations

import torch
from torch import Tensor


def on_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return the tensor on `device`, on a CPU itself; a copy to a GPU is not waited for.

    The GPU's current stream runs the copy.  torch keeps the page-locked memory that it reads until
    it ends.
    """
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
