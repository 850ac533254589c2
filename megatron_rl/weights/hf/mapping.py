"""HF tensor names and layouts <-> megatron-core parameters, by the tables of weights/hf/rules.py.

A megatron parameter has a canonical name, with GLOBAL layer and expert numbers; names of
TransformerEngine's and of local layers are translated to it (weights/names.py).  Everything here is
pure: tensors in, tensors out, no collectives.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from megatron_rl.models.spec import ModelSpec
from megatron_rl.weights.adapters import is_adapter
from megatron_rl.weights.hf.rules import FAMILIES, Rule
from megatron_rl.weights.names import canonical

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_layer import TransformerLayer


_LOCAL_EXPERT = re.compile(r"\.mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight$")


@dataclass(frozen=True)
class Entry:
    """One parameter of one concrete model: a rule with its layer and expert filled in."""

    rule: Rule
    name: str
    layer: int | None
    expert: int | None
    hf: tuple[tuple[str, tuple[int, ...]], ...]
    """(HF name, HF shape) of each HF tensor that makes up the parameter."""

    def held_by(self, chunks: Iterable[GPTModel]) -> Entry:
        """Return this entry as the layers of these chunks have it.

        Some tensors are sharded in local layers only.
        """
        if self.rule.te_kind is None or not any(is_te(chunk) for chunk in chunks):
            return self
        return replace(self, rule=replace(self.rule, kind=self.rule.te_kind))

    @property
    def hf_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.hf)


def entries(spec: ModelSpec) -> Iterator[Entry]:
    """Yield every parameter of the model, in checkpoint order.

    A tied output layer is left out: it is the embedding.
    """
    moe = frozenset(spec.moe_layers)
    rules = _rules(spec)
    per_layer = [rule for rule in rules if "{layer}" in rule.mcore]
    first = rules.index(per_layer[0])
    for rule in rules[:first]:
        yield _entry(rule, spec)
    for layer in range(spec.num_layers):
        for rule in per_layer:
            if _is_in_layer(rule, layer in moe):
                for expert in range(spec.num_experts) if rule.is_expert else (None,):
                    yield _entry(rule, spec, layer, expert)
    for rule in rules[first + len(per_layer) :]:
        if not (spec.tie_embeddings and rule.mcore == "output_layer.weight"):
            yield _entry(rule, spec)


def size_values(spec: ModelSpec) -> dict[str, int]:
    """Return the values of the sizes in the tables of weights/hf/rules.py for this model."""
    heads = spec.num_heads
    return {
        "1": 1,
        "V": spec.vocab_size,
        "H": spec.hidden_size,
        "Q": heads * spec.head_dim,
        "K": spec.num_kv_heads * spec.head_dim,
        "D": spec.head_dim,
        "F": spec.ffn_size,
        "I": spec.expert_ffn_size,
        "S": spec.shared_ffn_size,
        "E": spec.num_experts,
        "QL": spec.q_lora_rank,
        "KL": spec.kv_lora_rank,
        "KR": spec.kv_lora_rank + spec.qk_rope_dim,
        "QM": heads * (spec.qk_nope_dim + spec.qk_rope_dim),
        "KVM": heads * (spec.qk_nope_dim + spec.v_head_dim),
        "OM": heads * spec.v_head_dim,
    }


def find_entry(name: str, spec: ModelSpec) -> Entry:
    """Return the entry with this canonical name.

    Raises KeyError where the family's table has no rule for it.
    """
    for rule in _rules(spec):
        # the rule's name with its numbers as groups
        pattern = re.sub(r"\\{(\w+)\\}", r"(?P<\1>\\d+)", re.escape(rule.mcore))
        if match := re.fullmatch(pattern, name):
            numbers = {key: int(number) for key, number in match.groupdict().items()}
            entry = _entry(rule, spec, **numbers)
            if spec.tie_embeddings and name == "output_layer.weight":
                # the last pipeline stage has a copy of the embedding
                return replace(entry, hf=_entry(_rules(spec)[0], spec).hf)
            return entry
    raise KeyError(f"megatron parameter {name}: no rule for it in the table of {spec.architecture}")


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
    (full,) = tensors
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


def shard_shape(entry: Entry, size: int) -> tuple[int, ...]:
    """Return the shape of one of `size` tensor-parallel shards of the megatron parameter."""
    columns = entry.hf[0][1][1:]
    rows = sum(shape[0] for _, shape in entry.hf)
    match entry.rule.kind:
        case "replicated":
            return (rows, *columns)
        case "row":
            return (rows, columns[0] // size)
        case "vocab":
            return (-(-rows // size), *columns)
        case _:
            return (rows // size, *columns)


def local_parameters(
    chunks: Iterable[GPTModel], spec: ModelSpec, ep_rank: int, ep_size: int
) -> dict[str, torch.Tensor]:
    """Return canonical name -> parameter of this rank's model chunks.

    The chunks are bare, or wrapped in DDP / Float16Module.  The buffers that the family's table
    names are included: in core, biases that select experts are not parameters.  Adapters are not.
    """
    parameters: dict[str, torch.Tensor] = {}
    # names of such buffers
    ends = tuple(rule.mcore.rpartition(".")[2] for rule in _rules(spec) if rule.float32)
    experts_before = spec.num_experts // ep_size * ep_rank
    for chunk in map(bare, chunks):
        buffers = (item for item in chunk.named_buffers() if ends and item[0].endswith(ends))
        for name, parameter in (*chunk.named_parameters(), *buffers):
            if not is_adapter(name):
                parameters[canonical_name(name, chunk.decoder.layers, experts_before)] = parameter
    return parameters


def bare(chunk: GPTModel) -> GPTModel:
    """Return a chunk without the wrappers around it."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def is_te(chunk: GPTModel) -> bool:
    """Return True where the chunk has TransformerEngine's layers."""
    return bool(bare(chunk).config.transformer_impl == "transformer_engine")


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


def _rules(spec: ModelSpec) -> tuple[Rule, ...]:
    try:
        table = FAMILIES[spec.architecture]
    except KeyError:
        raise ValueError(
            f"architecture {spec.architecture}: no weight table; known: {', '.join(FAMILIES)}"
        ) from None
    return tuple(rule for rule in table if _applies(rule.when, spec))


def _applies(when: str, spec: ModelSpec) -> bool:
    return not when or bool(getattr(spec, when.removeprefix("not "))) != when.startswith("not ")


def _is_in_layer(rule: Rule, is_moe: bool) -> bool:
    """Return True where a layer of this kind has the rule's parameter.

    Dense layers have mlp.linear_fc*, MoE layers a router and experts; both have everything else.
    """
    if ".mlp.linear_fc" in rule.mcore:
        return not is_moe
    return is_moe or ".mlp." not in rule.mcore


def _entry(
    rule: Rule, spec: ModelSpec, layer: int | None = None, expert: int | None = None
) -> Entry:
    lengths = size_values(spec)
    hf = tuple(
        (name.format(layer=layer, expert=expert), tuple(lengths[size] for size in shape.split()))
        for name, shape in rule.hf
    )
    return Entry(rule, rule.mcore.format(layer=layer, expert=expert), layer, expert, hf)
