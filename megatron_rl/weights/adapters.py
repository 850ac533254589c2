"""The weight that a low-rank adapter makes: what layers multiply by, and what is exported.

arXiv 2106.09685, Eq. 3: W' = W + s B A, with frozen W [out, in], B [out, r] and A [r, in].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from torch import Tensor
from torch.nn import Parameter

PREFIX = "lora_"


@dataclass(frozen=True)
class Adapter:
    """The adapter of one weight, this tensor rank's shard of it."""

    name: str
    """Canonical name of the weight (weights/hf/mapping.py)."""
    weight: Parameter
    """W [o, i]; frozen."""
    a: Parameter
    """A [r, i]."""
    b: Parameter
    """B [o, r]."""
    scale: float
    summed_a: dist.ProcessGroup | None
    """The ranks whose shards have the same A and other rows of W: their gradients of A are summed;
    None where A is sharded, or the only copy."""
    summed_b: dist.ProcessGroup | None
    """The same for B, where W is sharded by columns."""

    def merged(self) -> Tensor:
        """Return W' [o, i], computed in at least float32 and rounded once to W's dtype.

        Differentiable in A and B.
        """
        a, b = (_wide(factor) for factor in (self.a, self.b))
        if self.summed_a is not None:
            a = copy_to_tensor_model_parallel_region(a, self.summed_a)
        if self.summed_b is not None:
            b = copy_to_tensor_model_parallel_region(b, self.summed_b)
        wide = torch.add(_wide(self.weight.detach()), b @ a, alpha=self.scale)
        return wide.to(self.weight.dtype)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def is_adapter(name: str) -> bool:
    """Return True for the name of an adapter's parameter, as named_parameters() gives it."""
    return name.rpartition(".")[2].startswith(PREFIX)


@torch.no_grad()
def weight_values(parameter: Tensor) -> Tensor:
    """Return what a layer multiplies by: the parameter, or, where it has an adapter, W'."""
    adapter: Adapter | None = getattr(parameter, "adapter", None)
    return parameter.detach() if adapter is None else adapter.merged()
