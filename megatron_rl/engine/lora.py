"""Low-rank adapters in a megatron-core model (config [lora]).

A layer multiplies by W + scale B A, rounded once to the model's dtype: the weight that servers get,
so that adapters add nothing to the training-inference discrepancy.  The sum is made before each use
and freed after it, so it takes the memory of one layer; backward makes it again.  The price: the
gradient of the full weight is computed, and multiplied with A and B, as in full training.  The
embedding and the LM head are weights as any other, also where the fused LM head reads the weight
(engine/output_logprobs.py).

Gradients need no rule of their own in a layout.  A factor that tensor ranks hold in common passes
through core's copy_to_tensor_model_parallel_region, whose backward sums it over these ranks; the
attributes of W tell core's DDP over which replicas to reduce the rest.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from torch import Tensor, nn

from megatron_rl.config import Config, ConfigError
from megatron_rl.config.sections import LoraConfig
from megatron_rl.distributed import Parallel
from megatron_rl.engine.adapter import Adapter, Adapters, group_of
from megatron_rl.engine.lora_state import base_digest, save_adapters
from megatron_rl.models.spec import ModelSpec
from megatron_rl.weights.adapters import PREFIX, can_have_adapter, is_target
from megatron_rl.weights.hf.entries import Entry, find_entry
from megatron_rl.weights.hf.mapping import canonical_name, to_mcore
from megatron_rl.weights.hf.peft_reader import PeftFolder
from megatron_rl.weights.hf.targets import check_targets

logger = logging.getLogger(__name__)


def open_peft(config: LoraConfig, spec: ModelSpec) -> PeftFolder | None:
    """Return the adapter of lora.path, checked against the model; None without one.  Raises
    ConfigError for lora.targets that the model cannot have.
    """
    check_targets(config, spec)
    return None if config.path is None else PeftFolder(config.path, spec, config)


class Place(NamedTuple):
    """A weight of a module that can have an adapter."""

    module: nn.Module
    attribute: str
    """weight, or weight0, weight1, ... of grouped experts."""
    entry: Entry


def add_adapters(
    chunks: Sequence[GPTModel],
    spec: ModelSpec,
    parallel: Parallel,
    cfg: Config,
    start: PeftFolder | None = None,
) -> Adapters:
    """Freeze the chunks and give every target an adapter; return those of this rank.  With rank 0
    there are none: all weights are trained.  Collective with `start`, the adapter to continue from.

    Call it after the weights are loaded, before DDP.  A is uniform in +-1/sqrt(in), as Kaiming's
    initialisation with slope sqrt(5) makes it, from a generator seeded by `seed` and the weight's
    name: it is the same in every layout.  B is 0, so that W' = W.
    Raises ConfigError for a rank that is larger than a dimension of a weight.
    """
    config, adapters = cfg.lora, Adapters()
    if not config.rank:
        return adapters
    if start is not None:
        dtype = next(chunks[0].parameters()).dtype
        for note in start.check_base(base_digest(chunks, spec, parallel), dtype, cfg.model.path):
            if parallel.rank == 0:
                logger.warning(note)
    for chunk in chunks:
        chunk.requires_grad_(False)
    for chunk in chunks:
        for place in list(places(chunk, spec, parallel)):
            if is_target(place.entry.name, config.targets):
                values = initial_values(place, parallel, spec, cfg, start)
                adapter = make_adapter(place, parallel, config, values)
                adapters.by_module.setdefault(place.module, {})[place.attribute] = adapter
        embedding = getattr(chunk, "embedding", None)
        if embedding is not None:
            embedding.register_forward_hook(require_gradient)
    for module, some in adapters.by_module.items():
        use_merged_weights(module, adapters)
        save_adapters(module, some, parallel, spec)
    return adapters


def places(chunk: GPTModel, spec: ModelSpec, parallel: Parallel) -> Iterator[Place]:
    """Yield what can have an adapter, with its entry of the family's table."""
    experts_before = spec.num_experts // parallel.ep_size * parallel.ep_rank
    for path, module in chunk.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            name = canonical_name(f"{path}.{attribute}", chunk.decoder.layers, experts_before)
            if can_have_adapter(name, parameter.shape):
                yield Place(module, attribute, find_entry(name, spec).held_by([chunk]))


def initial_values(
    place: Place,
    parallel: Parallel,
    spec: ModelSpec,
    cfg: Config,
    start: PeftFolder | None,
) -> tuple[Tensor, Tensor]:
    """Return this rank's A [rank, i] and B [o, rank] before the first update, float32."""
    entry, (rows, columns) = place.entry, getattr(place.module, place.attribute).shape
    kind, group, rank = entry.rule.kind, group_of(entry, parallel), cfg.lora.rank
    width = columns * (group.size() if kind == "row" else 1)
    height = rows * (1 if kind in ("row", "replicated") else group.size())
    if rank > min(height, width):
        raise ConfigError(
            f"lora.rank = {rank}: {entry.name} has shape {height} x {width}; an adapter's"
            " rank must not exceed a dimension of its weight"
        )
    a, b = initial_a(entry.name, rank, width, cfg.run.seed), torch.zeros(rows, rank)
    if start is not None:
        a, parts = start.factors(entry, a)
        # rows of B are rows of W
        b = parts[0] if kind == "row" else to_mcore(entry, parts, spec, group.rank(), group.size())
    return (a.chunk(group.size(), dim=1)[group.rank()] if kind == "row" else a), b


def make_adapter(
    place: Place, parallel: Parallel, config: LoraConfig, values: tuple[Tensor, Tensor]
) -> Adapter:
    """Register A and B in the module; W refers to its adapter in `adapter`."""
    entry, weight = place.entry, getattr(place.module, place.attribute)
    kind, group = entry.rule.kind, group_of(entry, parallel)
    number = place.attribute.removeprefix("weight")
    factors: dict[str, nn.Parameter] = {}
    for factor, first, sharded_dim in (
        ("a", values[0], 1 if kind == "row" else None),
        ("b", values[1], None if kind in ("row", "replicated") else 0),
    ):
        parameter = nn.Parameter(first.to(weight.device, weight.dtype).contiguous())
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


def use_merged_weights(module: nn.Module, adapters: Adapters) -> None:
    """Let module.forward find W' under the names of its weights."""
    forward = module.forward

    def with_adapters(*inputs: Any, **kwargs: Any) -> Any:
        with adapters.in_use(module):
            return forward(*inputs, **kwargs)

    module.forward = with_adapters


def require_gradient(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """A forward hook: hidden states need a gradient, though nothing before them does.

    Activation recompute makes no graph of a layer whose input needs none, and the adapters in it
    would never learn.
    """
    return output.requires_grad_() if torch.is_grad_enabled() else output
