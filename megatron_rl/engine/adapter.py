"""The low-rank adapter of one weight (config [lora])."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from torch import Tensor, nn

from megatron_rl.distributed import Parallel
from megatron_rl.weights.hf.entries import Entry


@dataclass(frozen=True)
class Adapter:
    """The adapter of one weight, this tensor rank's shard of it: W' = W + s B A
    (arXiv 2106.09685, Eq. 3).
    """

    name: str
    """Canonical name of the weight (weights/hf/mapping.py)."""
    weight: nn.Parameter
    """W [o, i]; frozen."""
    a: nn.Parameter
    """A [r, i]."""
    b: nn.Parameter
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
        a, b = wide(self.a), wide(self.b)
        if self.summed_a is not None:
            a = copy_to_tensor_model_parallel_region(a, self.summed_a)
        if self.summed_b is not None:
            b = copy_to_tensor_model_parallel_region(b, self.summed_b)
        return torch.add(wide(self.weight.detach()), b @ a, alpha=self.scale).to(self.weight.dtype)


def wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


@dataclass
class Adapters:
    """The adapters of this rank's model."""

    all: list[Adapter] = field(default_factory=list)
    enabled: bool = True

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Let the model compute as its base inside the context: the reference policy."""
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = True


def group_of(entry: Entry, parallel: Parallel) -> dist.ProcessGroup:
    """Return the ranks among which a weight is sharded."""
    return parallel.etp_group if entry.rule.is_expert else parallel.tp_group
