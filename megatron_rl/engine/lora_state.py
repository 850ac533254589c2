"""Low-rank adapters in checkpoints: the digest of their base, and core's description of A and B."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import nn

from megatron_rl.distributed import Parallel
from megatron_rl.engine.adapter import Adapter, group_of
from megatron_rl.models.spec import ModelSpec
from megatron_rl.weights.adapters import PREFIX, is_adapter
from megatron_rl.weights.hf.entries import find_entry
from megatron_rl.weights.hf.mapping import local_parameters


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
        group = group_of(entry, parallel)
        replicas = parallel.expert_dp_group if is_expert else parallel.dp_cp_group
        is_copy = name == "output_layer.weight" and spec.tie_embeddings
        is_copy |= entry.rule.kind == "replicated" and group.rank() > 0
        if replicas.rank() == 0 and not is_copy:
            size = parameter.element_size()
            bits = parameter.detach().view({2: torch.int16, 4: torch.int32}[size])
            total += bits.sum(dtype=torch.int64)
    dist.all_reduce(total)
    return f"{int(total) % 2**64:016x}"


class CoreModule(Protocol):
    """What core's modules have and nn.Module has not."""

    sharded_state_dict: Callable[..., dict[str, Any]]


def save_adapters(
    module: nn.Module, adapters: Mapping[str, Adapter], parallel: Parallel, spec: ModelSpec
) -> None:
    """Let module.sharded_state_dict describe its adapters, by the ends of the names of A and B, as
    it does its weights.

    core would take every parameter but `weight` for a copy that all tensor ranks have.
    """
    core_module = cast(CoreModule, module)
    describe_module = core_module.sharded_state_dict

    def sharded_state_dict(
        prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        tensors = describe_module(prefix, sharded_offsets, metadata)
        tensors = {name: tensor for name, tensor in tensors.items() if not is_adapter(name)}
        for suffix, adapter in adapters.items():
            tensors |= describe(
                adapter, suffix, parallel, spec, prefix, sharded_offsets, metadata["dp_cp_group"]
            )
        return tensors

    core_module.sharded_state_dict = sharded_state_dict


def describe(
    adapter: Adapter,
    suffix: str,
    parallel: Parallel,
    spec: ModelSpec,
    prefix: str,
    offsets: tuple[Any, ...],
    dp_cp_group: Any,
) -> dict[str, Any]:
    """Return core's sharded tensors of A and B.

    suffix: the number of a local expert whose weights are grouped in one module, the projection of
    a pair that experts share; "" otherwise.
    """
    entry = adapter.entry
    group = group_of(entry, parallel)
    number, end = (suffix, "") if entry.rule.is_expert else ("", suffix)
    if number:
        offsets = (*offsets, (len(offsets), entry.expert, spec.num_experts))
    name_a, name_b = (f"{PREFIX}{factor}{end}" for factor in "ab")
    axes = {}
    if adapter.summed_a is not None:
        axes = {name_b: 0}
    elif adapter.summed_b is not None:
        axes = {name_a: 1}
    factors = {name_a: adapter.a, name_b: adapter.b}
    tensors = make_sharded_tensors_for_checkpoint(
        factors, prefix, axes, offsets, tp_group=group, dp_cp_group=dp_cp_group
    )
    if entry.rule.kind == "vocab":
        # another number of tensor ranks pads the vocabulary otherwise
        tensors[f"{prefix}{name_b}"].allow_shape_mismatch = True
    if number:
        for tensor in tensors.values():
            # core numbered replicas over all data ranks, but those of an expert are fewer
            tensor.replica_id = (*tensor.replica_id[:2], parallel.expert_dp_group.rank())
    if entry.rule.kind == "glu":
        # a rank's rows are its part of gate, then its part of up
        name = f"{prefix}{name_b}"
        tensors[name] = apply_swiglu_sharded_factory(tensors[name], offsets)
    return {f"{name}{number}": tensor for name, tensor in tensors.items()}
