"""Low-rank adapters in a megatron-core model (config [lora]).

A layer multiplies by W + scale B A, rounded once to the model's dtype: the weight that servers get,
so that adapters add nothing to the training-inference discrepancy.  The sum is made before each use
and freed after it, so it takes the memory of one layer; backward makes it again.  The price: the
gradient of the full weight is computed, and multiplied with A and B, as in full training.

Gradients need no rule of their own in a layout.  A factor that tensor ranks hold in common passes
through core's copy_to_tensor_model_parallel_region, whose backward sums it over these ranks; the
attributes of W tell core's DDP over which replicas to reduce the rest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from megatron_rl.config import ConfigError
from megatron_rl.config.sections import LoraConfig
from megatron_rl.distributed import Parallel
from megatron_rl.models.spec import ModelSpec
from megatron_rl.weights.adapters import (
    PREFIX,
    can_have_adapter,
    is_adapter,
    is_target,
    unmatched_targets,
)
from megatron_rl.weights.hf.entries import Entry, entries, find_entry
from megatron_rl.weights.hf.mapping import canonical_name, local_parameters


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


class Place(NamedTuple):
    """A weight of a module that can have an adapter."""

    module: nn.Module
    attribute: str
    """weight, or weight0, weight1, ... of grouped experts."""
    entry: Entry


def add_adapters(
    chunks: Sequence[GPTModel], spec: ModelSpec, parallel: Parallel, config: LoraConfig, seed: int
) -> Adapters | None:
    """Freeze the chunks and give every target an adapter; return those of this rank.  None for
    rank 0: all weights are trained.

    Call it after the weights are loaded, before DDP.  A is uniform in +-1/sqrt(in), as Kaiming's
    initialisation with slope sqrt(5) makes it, from a generator seeded by `seed` and the weight's
    name: it is the same in every layout.  B is 0, so that W' = W.
    Raises ConfigError for a target that matches no weight of the model, and a rank that is larger
    than a weight.
    """
    if not config.rank:
        return None
    names = [e.name for e in entries(spec) if can_have_adapter(e.name, e.hf[0][1])]
    if problem := unmatched_targets(config.targets, names):
        raise ConfigError(problem)
    for chunk in chunks:
        chunk.requires_grad_(False)
    adapters = Adapters()
    for chunk in chunks:
        by_module: dict[nn.Module, dict[str, Adapter]] = {}
        for place in list(places(chunk, spec, parallel)):
            if is_target(place.entry.name, config.targets):
                adapter = make_adapter(place, parallel, config, seed)
                by_module.setdefault(place.module, {})[place.attribute] = adapter
        for module, found in by_module.items():
            use_merged_weights(module, found, adapters)
            save_adapters(module, found, parallel, spec)
            adapters.all += found.values()
        embedding = getattr(chunk, "embedding", None)
        if embedding is not None:
            embedding.register_forward_hook(require_gradient)
    return adapters


def places(chunk: GPTModel, spec: ModelSpec, parallel: Parallel) -> Iterator[Place]:
    """Yield what can have an adapter, with its entry of the family's table."""
    experts_before = spec.num_experts // parallel.ep_size * parallel.ep_rank
    for path, module in chunk.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            name = canonical_name(f"{path}.{attribute}", chunk.decoder.layers, experts_before)
            if can_have_adapter(name, parameter.shape):
                yield Place(module, attribute, find_entry(name, spec).held_by([chunk]))


def make_adapter(place: Place, parallel: Parallel, config: LoraConfig, seed: int) -> Adapter:
    """Register A and B in the module; W refers to its adapter in `adapter`."""
    entry, weight = place.entry, getattr(place.module, place.attribute)
    group = parallel.etp_group if entry.rule.is_expert else parallel.tp_group
    kind, (rows, columns) = entry.rule.kind, weight.shape
    width = columns * (group.size() if kind == "row" else 1)
    if config.rank > min(rows * (1 if kind in ("row", "replicated") else group.size()), width):
        raise ConfigError(
            f"lora.rank = {config.rank}: {entry.name} has shape {rows} x {columns} on a rank;"
            " an adapter's rank must not exceed a dimension of its weight"
        )
    a = initial_a(entry.name, config.rank, width, seed)
    if kind == "row":
        a = a.chunk(group.size(), dim=1)[group.rank()]
    number = place.attribute.removeprefix("weight")
    factors: dict[str, nn.Parameter] = {}
    for factor, values, sharded_dim in (
        ("a", a, 1 if kind == "row" else None),
        ("b", torch.zeros(rows, config.rank), None if kind in ("row", "replicated") else 0),
    ):
        parameter = nn.Parameter(values.to(weight.device, weight.dtype).contiguous())
        mark(parameter, weight, sharded_dim, group)
        place.module.register_parameter(f"{PREFIX}{factor}{number}", parameter)
        factors[factor] = parameter
    several = group if group.size() > 1 else None
    adapter = Adapter(
        entry.name, weight, **factors, scale=config.scale,
        summed_a=several if kind not in ("row", "replicated") else None,
        summed_b=several if kind == "row" else None,
    )  # fmt: skip
    weight.adapter = adapter
    return adapter


def initial_a(name: str, rank: int, width: int, seed: int) -> Tensor:
    """float32 [rank, width], the same for a name whatever the layout."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return (torch.rand(rank, width, generator=generator) * 2 - 1) / width**0.5


def mark(parameter: Tensor, weight: Tensor, sharded_dim: int | None, group: Any) -> None:
    """Set the attributes that core's gradient reduction and gradient norm read."""
    # replicas of an expert, and tensor ranks with other rows of a replicated weight
    for name in ("allreduce", "sequence_parallel"):
        if hasattr(weight, name):
            setattr(parameter, name, getattr(weight, name))
    # core's norm counts what is not sharded on tensor rank 0 only, also for experts, whose tensor
    # ranks are others: count it on the first rank of its own group instead
    set_tensor_model_parallel_attributes(parameter, True, sharded_dim or 0, 1)
    if sharded_dim is None:
        parameter.shared = group.rank() > 0  # type: ignore[attr-defined]  # core reads it


# Forward ------------------------------------------------------------------------------------------


def use_merged_weights(
    module: nn.Module, adapters: Mapping[str, Adapter], of_model: Adapters
) -> None:
    """Let module.forward find W' under the names of its weights."""
    forward = module.forward

    def with_adapters(*inputs: Any, **kwargs: Any) -> Any:
        if not of_model.enabled:
            return forward(*inputs, **kwargs)
        with merged_weights(module, adapters):
            return forward(*inputs, **kwargs)

    module.forward = with_adapters


@contextmanager
def merged_weights(module: nn.Module, adapters: Mapping[str, Adapter]) -> Iterator[None]:
    """Replace weights by W' inside the context.  What autograd saves of W' is made again when
    backward asks for it.
    """
    merged = {attribute: adapter.merged() for attribute, adapter in adapters.items()}
    sources = {
        tensor.untyped_storage().data_ptr(): adapters[attribute]
        for attribute, tensor in merged.items()
    }

    def pack(tensor: Tensor) -> Any:
        adapter = sources.get(tensor.untyped_storage().data_ptr())
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


def require_gradient(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """A forward hook: hidden states need a gradient, though nothing before them does.

    Activation recompute makes no graph of a layer whose input needs none, and the adapters in it
    would never learn.
    """
    return output.requires_grad_() if torch.is_grad_enabled() else output


# Checkpoints --------------------------------------------------------------------------------------


def base_digest(chunks: Sequence[GPTModel], spec: ModelSpec, parallel: Parallel) -> str:
    """Return 16 hex digits of the frozen weights, the same in every layout.  Collective.

    They are the sum of all weights' bits as integers, modulo 2^64: it knows other weights, not the
    same ones in another order.
    """
    total = torch.zeros(1, dtype=torch.int64, device=parallel.device)
    parameters = local_parameters(chunks, spec, parallel.ep_rank, parallel.ep_size)
    for name, parameter in parameters.items():
        entry = find_entry(name, spec).held_by(chunks)
        is_expert = entry.rule.is_expert
        group = parallel.etp_group if is_expert else parallel.tp_group
        replicas = parallel.expert_dp_group if is_expert else parallel.dp_cp_group
        is_copy = name == "output_layer.weight" and spec.tie_embeddings
        is_copy |= entry.rule.kind == "replicated" and group.rank() > 0
        if replicas.rank() == 0 and not is_copy:
            size = parameter.element_size()
            bits = parameter.detach().view({2: torch.int16, 4: torch.int32}[size])
            total += bits.sum(dtype=torch.int64)
    dist.all_reduce(total)
    return f"{int(total) % 2**64:016x}"


def save_adapters(
    module: nn.Module, adapters: Mapping[str, Adapter], parallel: Parallel, spec: ModelSpec
) -> None:
    """Let module.sharded_state_dict describe its adapters as it does its weights.

    core would take every parameter but `weight` for a copy that all tensor ranks have.
    """
    describe_module: Callable[..., dict[str, Any]] = module.sharded_state_dict  # type: ignore[assignment]

    def sharded_state_dict(
        prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        tensors = describe_module(prefix, sharded_offsets, metadata)
        tensors = {name: tensor for name, tensor in tensors.items() if not is_adapter(name)}
        for attribute, adapter in adapters.items():
            number = attribute.removeprefix("weight")
            described = describe(
                adapter, number, parallel, spec, prefix, sharded_offsets, metadata["dp_cp_group"]
            )
            tensors |= described
        return tensors

    module.sharded_state_dict = sharded_state_dict  # type: ignore[assignment]


def describe(
    adapter: Adapter,
    number: str,
    parallel: Parallel,
    spec: ModelSpec,
    prefix: str,
    offsets: tuple[Any, ...],
    dp_cp_group: Any,
) -> dict[str, Any]:
    """Return core's sharded tensors of A and B.

    number: of a local expert whose weights are grouped in one module; "" otherwise.
    """
    entry = find_entry(adapter.name, spec)
    group = parallel.etp_group if entry.rule.is_expert else parallel.tp_group
    if number:
        offsets = (*offsets, (len(offsets), entry.expert, spec.num_experts))
    axes = {}
    if adapter.summed_a is not None:
        axes = {f"{PREFIX}b": 0}
    elif adapter.summed_b is not None:
        axes = {f"{PREFIX}a": 1}
    factors = {f"{PREFIX}a": adapter.a, f"{PREFIX}b": adapter.b}
    tensors = make_sharded_tensors_for_checkpoint(
        factors, prefix, axes, offsets, tp_group=group, dp_cp_group=dp_cp_group
    )
    if number:
        for tensor in tensors.values():
            # core numbered replicas over all data ranks, but those of an expert are fewer
            tensor.replica_id = (*tensor.replica_id[:2], parallel.expert_dp_group.rank())
    if entry.rule.kind == "glu":
        # a rank's rows are its part of gate, then its part of up
        name = f"{prefix}{PREFIX}b"
        tensors[name] = apply_swiglu_sharded_factory(tensors[name], offsets)
    return {f"{name}{number}": tensor for name, tensor in tensors.items()}
