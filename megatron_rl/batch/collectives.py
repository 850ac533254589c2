"""Small sums and maxima over the ranks of a group, on the device that the group's backend needs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist


def device_of_group(group: dist.ProcessGroup) -> torch.device:
    """Return the device on which the tensors of this group's collectives must be."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def all_reduce(
    values: Sequence[float] | np.ndarray,
    op: dist.ReduceOp.RedOpType,
    group: dist.ProcessGroup | None,
) -> np.ndarray:
    """Reduce n values over `group` (None: a single replica), and return them on every rank: int64
    [n] for integers, float64 [n] for floats.
    """
    array = np.array(values)
    if group is None or group.size() == 1:
        return array
    tensor = torch.as_tensor(array, device=device_of_group(group))
    dist.all_reduce(tensor, op=op, group=group)
    return tensor.cpu().numpy()


def all_reduce_ints(
    values: Sequence[int], op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None
) -> list[int]:
    """Reduce a few integers over `group` (None: a single replica)."""
    return all_reduce(values, op, group).tolist()
