"""HF tensor names and layouts <-> megatron-core parameters, by the tables of weights/hf/rules.py.

A megatron parameter has a canonical name, with GLOBAL layer and expert numbers; names of
TransformerEngine's and of local layers are translated to it (weights/names.py).  Everything here is
pure: tensors in, tensors out, no collectives.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from megatron_rl.models.spec import ModelSpec
from megatron_rl.weights.adapters import is_adapter
from megatron_rl.weights.hf.entries import Entry, bare, rules_of
from megatron_rl.weights.names import canonical

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_layer import TransformerLayer


_LOCAL_EXPERT = re.compile(r"\.mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight$")


def to_mcore(
    entry: Entry, tensors: Sequence[torch.Tensor], spec: ModelSpec, rank: int, size: int
) -> torch.Tensor:
    """Return this tensor-parallel rank's shard of the megatron parameter.

    `tensors` are the HF tensors of `entry`, in their order.
    """
    kind = entry.rule.kind
    if kind == "qkv":  # core orders by key head, so that a shard has all heads of its groups
        by_head = [tensor.unflatten(0, (spec.num_kv_heads, -1)) for tensor in tensors]
        return torch.cat(by_head, dim=1).flatten(0, 1).chunk(size)[rank]
    # each rank has its part of gate, then its part of up
    if kind == "glu":
        return torch.cat([x.chunk(size)[rank] for x in tensors])
    full = _joined(tensors, 0)
    if kind == "replicated":
        return full
    # core pads the vocabulary to a multiple of the ranks
    if kind == "vocab" and (pad := -full.shape[0] % size):
        full = torch.cat([full, full.new_zeros(pad, full.shape[1])])
    return full.chunk(size, dim=1 if kind == "row" else 0)[rank]


def to_hf(
    entry: Entry, shards: Sequence[torch.Tensor], spec: ModelSpec
) -> list[tuple[str, torch.Tensor]]:
    """Return (HF name, contiguous HF tensor) pairs, from all tensor-parallel shards in rank order.

    It is the inverse of `to_mcore`.
    """
    kind = entry.rule.kind
    parts: Sequence[torch.Tensor]
    if kind == "qkv":
        grouped = _joined(shards, 0).unflatten(0, (spec.num_kv_heads, -1))
        heads = [grouped.shape[1] - 2 * spec.head_dim, spec.head_dim, spec.head_dim]
        parts = [x.flatten(0, 1) for x in grouped.split(heads, dim=1)]
    elif kind == "glu":
        halves = [shard.chunk(2) for shard in shards]
        parts = [_joined([half[i] for half in halves], 0) for i in (0, 1)]
    elif kind == "replicated":
        parts = shards[:1]
    else:
        full = _joined(shards, 1 if kind == "row" else 0)
        parts = [full[: spec.vocab_size] if kind == "vocab" else full]
    return [(name, part.contiguous()) for name, part in zip(entry.hf_names, parts, strict=True)]


def local_parameters(
    chunks: Iterable[GPTModel], spec: ModelSpec, ep_rank: int, ep_size: int
) -> dict[str, torch.Tensor]:
    """Return canonical name -> parameter of this rank's model chunks.

    The chunks are bare, or wrapped in DDP / Float16Module.  The buffers that the family's table
    names are included: in core, biases that select experts are not parameters.  Adapters are not.
    """
    parameters: dict[str, torch.Tensor] = {}
    # names of such buffers
    ends = tuple(rule.mcore.rpartition(".")[2] for rule in rules_of(spec) if rule.float32)
    experts_before = spec.num_experts // ep_size * ep_rank
    for chunk in map(bare, chunks):
        buffers = (item for item in chunk.named_buffers() if ends and item[0].endswith(ends))
        for name, parameter in (*chunk.named_parameters(), *buffers):
            if not is_adapter(name):
                parameters[canonical_name(name, chunk.decoder.layers, experts_before)] = parameter
    return parameters


def canonical_name(name: str, layers: Sequence[TransformerLayer], experts_before: int) -> str:
    """Return the canonical name of a parameter that named_parameters() of a chunk calls `name`.

    It has the global layer (from layer_number) and the global expert.
    """
    match = re.match(r"decoder\.layers\.(\d+)(\..*)", name)
    if not match:
        return name
    suffix = canonical(_LOCAL_EXPERT.sub(r".mlp.experts.\2.weight\1", match[2]))
    # names of experts end in their local number
    suffix = re.sub(
        r"(?<=\.weight)\d+$", lambda expert: str(int(expert[0]) + experts_before), suffix
    )
    # layer_number counts from 1, over all pipeline stages
    return f"decoder.layers.{layers[int(match[1])].layer_number - 1}{suffix}"


def _joined(shards: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Concatenate the shards; a single one is not copied."""
    return shards[0] if len(shards) == 1 else torch.cat(list(shards), dim=dim)
