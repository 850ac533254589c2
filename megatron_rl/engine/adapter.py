"""The low-rank adapter of one weight (config [lora])."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

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

    entry: Entry
    """Entry of the weight; of a pair that experts share, without their number."""
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

    def product(self) -> Tensor:
        """Return B A [o, i] in at least float32, differentiable in A and B."""
        a, b = wide(self.a), wide(self.b)
        if self.summed_a is not None:
            a = copy_to_tensor_model_parallel_region(a, self.summed_a)
        if self.summed_b is not None:
            b = copy_to_tensor_model_parallel_region(b, self.summed_b)
        return b @ a

    def merged(self, product: Tensor | None = None) -> Tensor:
        """Return W' [o, i], computed in at least float32 and rounded once to W's dtype.

        product: B A, where another adapter has made it.
        """
        product = self.product() if product is None else product
        merged = torch.add(wide(self.weight.detach()), product, alpha=self.scale)
        return merged.to(self.weight.dtype)


def wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


@dataclass
class Adapters:
    """The adapters of this rank's model."""

    by_module: dict[nn.Module, dict[str, Adapter]] = field(default_factory=dict)
    """Module -> attribute (weight, or weight0, weight1, ... of grouped experts) -> adapter."""
    enabled: bool = True

    @property
    def all(self) -> list[Adapter]:
        return [adapter for some in self.by_module.values() for adapter in some.values()]

    @contextmanager
    def in_use(self, module: nn.Module) -> Iterator[None]:
        """Let the module have W' under the names of its weights inside the context."""
        if self.enabled and module in self.by_module:
            with merged_weights(module, self.by_module[module]):
                yield
        else:
            yield

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Let the model compute as its base inside the context: the reference policy."""
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = True


@contextmanager
def merged_weights(module: nn.Module, adapters: Mapping[str, Adapter]) -> Iterator[None]:
    """Replace weights by W' inside the context.  What autograd saves of W' is made again when
    backward asks for it.
    """
    merged = merge(adapters)
    # not data_ptr, which is 0 for every tensor of a rehearsal
    sources = {
        tensor.untyped_storage()._cdata: adapters[attribute] for attribute, tensor in merged.items()
    }

    def pack(tensor: Tensor) -> Any:
        adapter = sources.get(tensor.untyped_storage()._cdata)
        if adapter is None:
            return tensor
        return adapter, tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        adapter, *view = packed
        with torch.no_grad():
            return adapter.merged().as_strided(*view)

    # an attribute of the instance hides the registered parameter
    module.__dict__.update(merged)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        for attribute in merged:
            del module.__dict__[attribute]


def merge(adapters: Mapping[str, Adapter]) -> dict[str, Tensor]:
    """Return W' of each attribute.  Grouped experts that share a pair share the product B A, so
    that their gradients are summed in its dtype.
    """
    merged: dict[str, Tensor] = {}
    product: Tensor | None = None
    factor: nn.Parameter | None = None
    for attribute, adapter in adapters.items():
        if adapter.b is not factor:
            product = None  # free one before the next is made
            product, factor = adapter.product(), adapter.b
        merged[attribute] = adapter.merged(product)
    return merged


def group_of(entry: Entry, parallel: Parallel) -> dist.ProcessGroup:
    """Return the ranks among which a weight, or a pair that experts share, is sharded."""
    return parallel.etp_group if entry.rule.is_expert else parallel.tp_group
