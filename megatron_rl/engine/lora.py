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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from megatron_rl.config import ConfigError
from megatron_rl.config.sections import LoraConfig
from megatron_rl.distributed import Parallel
from megatron_rl.models.spec import ModelSpec
from megatron_rl.weights.adapters import PREFIX, Adapter, is_adapter
from megatron_rl.weights.hf.mapping import Entry, canonical_name, entries, find_entry

GROUPS = {
    "attention": ".self_attention.linear_",
    "mlp": ".mlp.linear_fc",
    "experts": ".mlp.experts.linear_fc",
    "shared_experts": ".mlp.shared_experts.linear_fc",
}


class Place(NamedTuple):
    """A weight of a module that can have an adapter."""

    module: nn.Module
    attribute: str
    """weight, or weight0, weight1, ... of grouped experts."""
    entry: Entry


def add_adapters(
    chunks: Sequence[GPTModel], spec: ModelSpec, parallel: Parallel, config: LoraConfig, seed: int
) -> list[Adapter]:
    """Freeze the chunks and give every target an adapter; return those of this rank.

    Call it after the weights are loaded, before DDP.  A is uniform in +-1/sqrt(in), as Kaiming's
    initialisation with slope sqrt(5) makes it, from a generator seeded by `seed` and the weight's
    name: it is the same in every layout.  B is 0, so that W' = W.
    Raises ConfigError for a target that matches no weight of the model, and a rank that is larger
    than a weight.
    """
    check_targets(config.targets, spec)
    for chunk in chunks:
        chunk.requires_grad_(False)
    adapters = []
    for chunk in chunks:
        by_module: dict[nn.Module, dict[str, Adapter]] = {}
        for place in list(places(chunk, spec, parallel)):
            if any(matches(target, place.entry.name) for target in config.targets):
                adapter = make_adapter(place, parallel, config, seed)
                by_module.setdefault(place.module, {})[place.attribute] = adapter
        for module, found in by_module.items():
            use_merged_weights(module, found)
            save_adapters(module, found, parallel, spec)
            adapters += found.values()
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
            if is_target(name, parameter.shape):
                yield Place(module, attribute, find_entry(name, spec).held_by([chunk]))


def is_target(name: str, shape: Sequence[int]) -> bool:
    """Return True for the matrices of layers, without routers."""
    return len(shape) == 2 and any(part in name for part in GROUPS.values())


def matches(target: str, name: str) -> bool:
    """Return True if a target of the configuration means the weight with this canonical name."""
    part = GROUPS.get(target)
    return target == "all" or (part in name if part else f".{target}." in name)


def check_targets(targets: Sequence[str], spec: ModelSpec) -> None:
    """Raise ConfigError for a target that no weight of the whole model has."""
    names = [entry.name for entry in entries(spec) if is_target(entry.name, entry.hf[0][1])]
    for target in targets:
        if not any(matches(target, name) for name in names):
            modules = sorted({name.split(".weight")[0].rpartition(".")[2] for name in names})
            groups = [group for group in GROUPS if any(matches(group, name) for name in names)]
            raise ConfigError(
                f"lora.targets = {target!r}: no weight of {spec.architecture} matches; it has"
                f" {', '.join((*groups, *modules))}"
            )


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
    factors = []
    for factor, values, sharded_dim in (
        ("a", a, 1 if kind == "row" else None),
        ("b", torch.zeros(rows, config.rank), None if kind in ("row", "replicated") else 0),
    ):
        parameter = nn.Parameter(values.to(weight.device, weight.dtype).contiguous())
        mark(parameter, weight, sharded_dim, group)
        place.module.register_parameter(f"{PREFIX}{factor}{number}", parameter)
        factors.append(parameter)
    several = group if group.size() > 1 else None
    adapter = Adapter(
        entry.name, weight, *factors, config.scale,
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
        parameter.shared = group.rank() > 0


# Forward ------------------------------------------------------------------------------------------


def use_merged_weights(module: nn.Module, adapters: Mapping[str, Adapter]) -> None:
    """Let module.forward find W' under the names of its weights."""
    forward = module.forward

    def with_adapters(*inputs: Any, **kwargs: Any) -> Any:
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


def save_adapters(
    module: nn.Module, adapters: Mapping[str, Adapter], parallel: Parallel, spec: ModelSpec
) -> None:
    """Let module.sharded_state_dict describe its adapters as it does its weights.

    core would take every parameter but `weight` for a copy that all tensor ranks have.
    """
    describe_module = module.sharded_state_dict

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

    module.sharded_state_dict = sharded_state_dict


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
