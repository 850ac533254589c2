"""Low-rank adapters in a megatron-core model (config [lora]).

A layer multiplies by W + scale B A, rounded once to the model's dtype: the weight that servers get,
so that adapters add nothing to the training-inference discrepancy.  The sum is made before each use
and freed after it, so it takes the memory of one layer; backward makes it again.  The price: the
gradient of the full weight is computed, and multiplied with A and B, as in full training.  The
embedding and the LM head are weights as any other, also where the fused LM head reads the weight
(engine/output_logprobs.py).

Gradients need no rule of their own in a layout.  A factor that tensor ranks hold in common passes
through core's copy_to_tensor_model_parallel_region, whose backward sums it over these ranks; the
attributes of W tell core's DDP over which replicas to reduce the rest.  A pair that the experts of
a layer share (lora.shared_pairs) is no expert: it is reduced over all data ranks, as dense weights
are, and among these are the ranks with the other experts.  Where an expert is on one tensor rank
(etp = 1), tensor ranks have other experts, too: core sums the gradient over them, as that of a norm
under sequence parallelism.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
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
    name: str
    """Canonical name of the weight."""
    entry: Entry
    """Entry of the weight; of a pair that experts share, without their number."""
    owner: nn.Module
    """Module that has A and B as parameters; of a shared pair, the experts of the layer."""
    suffix: str
    """Ends the names of A and B in `owner`."""

    @property
    def has_factors(self) -> bool:
        return hasattr(self.owner, f"{PREFIX}a{self.suffix}")

    def factor(self, name: str) -> nn.Parameter:
        """Return A or B, by "a" or "b"."""
        parameter: nn.Parameter = getattr(self.owner, f"{PREFIX}{name}{self.suffix}")
        return parameter


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
    config, adapters, owned = cfg.lora, Adapters(), dict[nn.Module, dict[str, Adapter]]()
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
        for place in places(chunk, spec, parallel, config):
            if not place.has_factors:
                values = initial_values(place, parallel, spec, cfg, start)
                make_factors(place, parallel, values)
            adapter = make_adapter(place, parallel, config)
            adapters.by_module.setdefault(place.module, {})[place.attribute] = adapter
            owned.setdefault(place.owner, {})[place.suffix] = adapter
        embedding = getattr(chunk, "embedding", None)
        if embedding is not None:
            embedding.register_forward_hook(require_gradient)
        head = getattr(chunk, "output_layer", None)
        if head is not None:
            head.register_forward_hook(fold_gradient)
    for module in adapters.by_module:
        use_merged_weights(module, adapters)
    for module, some in owned.items():
        save_adapters(module, some, parallel, spec)
    return adapters


def places(chunk: GPTModel, spec: ModelSpec, parallel: Parallel, config: LoraConfig) -> list[Place]:
    """Return the weights of lora.targets, with their entries of the family's table."""
    experts_before = spec.num_experts // parallel.ep_size * parallel.ep_rank
    found = []
    for path, module in chunk.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            name = canonical_name(f"{path}.{attribute}", chunk.decoder.layers, experts_before)
            if not can_have_adapter(name, parameter.shape) or not is_target(name, config.targets):
                continue
            entry = find_entry(name, spec).held_by([chunk])
            owner, suffix = module, attribute.removeprefix("weight")
            if entry.rule.is_expert and config.shared_pairs:
                before, experts, _ = path.partition(".mlp.experts")
                owner, suffix = chunk.get_submodule(before + experts), f"_{path.rpartition('.')[2]}"
                is_split = parallel.etp_group.size() == parallel.tp_size
                entry = entry.of_all_experts(is_split=is_split)
            found.append(Place(module, attribute, name, entry, owner, suffix))
    return found


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


def make_factors(place: Place, parallel: Parallel, values: tuple[Tensor, Tensor]) -> None:
    """Register A and B in their module."""
    kind, weight = place.entry.rule.kind, getattr(place.module, place.attribute)
    for factor, first, sharded_dim in (
        ("a", values[0], 1 if kind == "row" else None),
        ("b", values[1], None if kind in ("row", "replicated") else 0),
    ):
        parameter = nn.Parameter(first.to(weight.device, weight.dtype).contiguous())
        mark(parameter, place, sharded_dim, group_of(place.entry, parallel))
        place.owner.register_parameter(f"{PREFIX}{factor}{place.suffix}", parameter)


def make_adapter(place: Place, parallel: Parallel, config: LoraConfig) -> Adapter:
    """Return the adapter of a weight whose A and B were made; W refers to it in `adapter`."""
    kind, group = place.entry.rule.kind, group_of(place.entry, parallel)
    weight = getattr(place.module, place.attribute)
    several = group if group.size() > 1 else None
    adapter = Adapter(
        place.entry, weight, place.factor("a"), place.factor("b"), config.scale,
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


def mark(parameter: Any, place: Place, sharded_dim: int | None, group: Any) -> None:
    """Set the attributes that core's gradient reduction and gradient norm read."""
    if place.owner is place.module:
        weight = getattr(place.module, place.attribute)
        # replicas of an expert, and tensor ranks with other rows of a replicated weight
        for name in ("allreduce", "sequence_parallel"):
            if hasattr(weight, name):
                setattr(parameter, name, getattr(weight, name))
    else:
        # tensor ranks with other experts
        parameter.sequence_parallel = place.entry.rule.kind == "replicated"
    # core's norm counts what is not sharded on tensor rank 0 only, also for experts, whose tensor
    # ranks are others: count it on the first rank of its own group instead
    set_tensor_model_parallel_attributes(parameter, True, sharded_dim or 0, 1)
    if sharded_dim is None:
        parameter.shared = group.rank() > 0


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


def fold_gradient(module: nn.Module, inputs: Any, output: tuple[Tensor, Any]) -> None:
    """A forward hook of the LM head: give the gradient of its logits [T, 1, V] the strides of a
    matrix [T, V].

    GPTModel transposes logits, which leaves their gradient another stride in the dimension of size
    1.  For a frozen weight torch.matmul would then multiply row by row (bmm), and read the weight T
    times.
    """
    logits = output[0]
    if logits.requires_grad and logits.shape[1] == 1:
        logits.register_hook(lambda gradient: gradient.squeeze(1).unsqueeze(1))
