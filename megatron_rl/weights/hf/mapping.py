"""HF tensor names and layouts <-> megatron-core parameters, both directions, by the tables of weights/hf/rules.py.

A megatron parameter is known by its canonical name: TransformerEngine's spelling, with GLOBAL layer and expert numbers;
the local layer spec's spelling is translated to it.  Everything here is pure: tensors in, tensors out, no collectives.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch

from megatron_rl.weights.hf.rules import FAMILIES, Rule


class Geometry(Protocol):
    """What the mapping must know of a model; engine.model.ModelSpec has it."""

    @property
    def architecture(self) -> str: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def moe_layers(self) -> tuple[int, ...]: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def ffn_size(self) -> int: ...
    @property
    def expert_ffn_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def tie_embeddings(self) -> bool: ...
    @property
    def mtp_layers(self) -> int: ...
    @property
    def shared_ffn_size(self) -> int: ...
    @property
    def q_lora_rank(self) -> int: ...
    @property
    def kv_lora_rank(self) -> int: ...
    @property
    def qk_nope_dim(self) -> int: ...
    @property
    def qk_rope_dim(self) -> int: ...
    @property
    def v_head_dim(self) -> int: ...


_LOCAL_TO_CANONICAL = (
    (re.compile(r"\.mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight$"), r".mlp.experts.\2.weight\1"),
    (re.compile(r"\.input_layernorm\.weight$"), ".self_attention.linear_qkv.layer_norm_weight"),
    (re.compile(r"\.mlp\.linear_fc1\.layer_norm_weight$"), ".pre_mlp_layernorm.weight"),  # TE fuses it in dense layers
    (re.compile(r"\.linear_q_up_proj\.layer_norm_weight$"), ".q_layernorm.weight"),  # and these in latent attention
    (re.compile(r"\.linear_kv_up_proj\.layer_norm_weight$"), ".kv_layernorm.weight"),
)


@dataclass(frozen=True)
class Entry:
    """One parameter of one concrete model: a rule with its layer and expert filled in."""

    rule: Rule
    name: str
    layer: int | None
    expert: int | None
    hf: tuple[tuple[str, tuple[int, ...]], ...]
    """(HF name, HF shape)."""

    @property
    def hf_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.hf)


def entries(spec: Geometry) -> Iterator[Entry]:
    """Every parameter of the whole model, in checkpoint order.  A tied output layer is the embedding: left out."""
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


def sizes(spec: Geometry) -> dict[str, int]:
    """What the sizes in the tables of weights/hf/rules.py are for this model."""
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


def hf_names(name: str, spec: Geometry) -> tuple[str, ...]:
    """The HF tensors behind the parameter with this canonical name (KeyError for an unknown one)."""
    return find_entry(name, spec).hf_names


def find_entry(name: str, spec: Geometry) -> Entry:
    """The entry of a canonical name; the tied output layer of a last pipeline stage reads the embedding's tensor."""
    for rule in _rules(spec):
        match = re.fullmatch(_pattern(rule.mcore), name)
        if match:
            found = {key: int(value) for key, value in match.groupdict().items()}
            entry = _entry(rule, spec, found.get("layer"), found.get("expert"))
            if spec.tie_embeddings and name == "output_layer.weight":
                return Entry(rule, name, None, None, _entry(_rules(spec)[0], spec).hf)
            return entry
    raise KeyError(f"megatron parameter {name}: no rule for it in the table of {spec.architecture}")


def to_mcore(entry: Entry, tensors: Sequence[torch.Tensor], spec: Geometry, rank: int, size: int) -> torch.Tensor:
    """This tensor-parallel rank's shard of the megatron parameter, from the HF tensors of `entry` in their order."""
    kind = entry.rule.kind
    if kind == "qkv":
        full = torch.cat([x.unflatten(0, (spec.num_kv_heads, -1)) for x in tensors], dim=1).flatten(0, 1)
        return full.chunk(size)[rank]
    if kind == "glu":
        return torch.cat([x.chunk(size)[rank] for x in tensors])
    (full,) = tensors
    if kind == "vocab":
        pad = -full.shape[0] % size
        return (
            torch.cat([full, full.new_zeros(pad, full.shape[1])]).chunk(size)[rank] if pad else full.chunk(size)[rank]
        )
    if kind == "replicated":
        return full
    return full.chunk(size, dim=1 if kind == "row" else 0)[rank]


def to_hf(entry: Entry, shards: Sequence[torch.Tensor], spec: Geometry) -> list[tuple[str, torch.Tensor]]:
    """(HF name, contiguous HF tensor) pairs, from all tensor-parallel shards in rank order.  Inverse of to_mcore."""
    kind = entry.rule.kind
    if kind == "qkv":
        full = _joined(shards, 0)
        grouped = full.unflatten(0, (spec.num_kv_heads, -1))
        heads = [grouped.shape[1] - 2 * spec.head_dim, spec.head_dim, spec.head_dim]
        parts = [x.flatten(0, 1) for x in grouped.split(heads, dim=1)]
    elif kind == "glu":
        halves = [shard.chunk(2) for shard in shards]
        parts = [torch.cat([half[i] for half in halves]) for i in (0, 1)]
    elif kind == "vocab":
        parts = [_joined(shards, 0)[: spec.vocab_size]]
    elif kind in ("row", "column"):
        parts = [_joined(shards, 1 if kind == "row" else 0)]
    else:
        parts = [shards[0]]
    return [(name, part.contiguous()) for name, part in zip(entry.hf_names, parts, strict=True)]


class RowRun(NamedTuple):
    """`size` rows of an HF tensor (by its place in entry.hf), from `hf_row`, that are as many of a parameter, from `row`."""

    tensor: int
    hf_row: int
    row: int
    size: int


def row_runs(entry: Entry, spec: Geometry) -> list[RowRun]:
    """Which HF rows the rows of the whole parameter are, in the parameter's order: to_mcore, asked with numbered rows."""
    rows = [shape[0] for _, shape in entry.hf]
    starts = [
        sum(rows[:i]) + i for i in range(len(rows))
    ]  # a number is left out between two tensors: no run crosses over
    numbered = [torch.arange(start, start + n)[:, None] for start, n in zip(starts, rows, strict=True)]
    order = to_mcore(entry, numbered, spec, 0, 1).flatten()
    cuts = [0, *(torch.nonzero(order.diff() != 1).flatten() + 1).tolist(), len(order)]
    runs = []
    for first, stop in pairwise(cuts):
        number = int(order[first])
        tensor = bisect_right(starts, number) - 1
        runs.append(RowRun(tensor, number - starts[tensor], first, stop - first))
    return runs


def shard_shape(entry: Entry, size: int) -> tuple[int, ...]:
    """Shape of one of `size` tensor-parallel shards of the megatron parameter."""
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


def local_parameters(chunks: Iterable[Any], spec: Geometry, ep_rank: int, ep_size: int) -> dict[str, torch.Tensor]:
    """Canonical name -> parameter of this rank's model chunks (bare, or wrapped in DDP / Float16Module).

    Buffers that the family's table names are among them: biases that select experts are no parameters in core.
    """
    found: dict[str, torch.Tensor] = {}
    kept = tuple(rule.mcore.rpartition(".")[2] for rule in _rules(spec) if rule.float32)
    experts_before = spec.num_experts // ep_size * ep_rank
    for chunk in chunks:
        while hasattr(chunk, "module"):
            chunk = chunk.module
        buffers = (item for item in chunk.named_buffers() if kept and item[0].endswith(kept))
        for name, parameter in (*chunk.named_parameters(), *buffers):
            found[canonical_name(name, chunk.decoder.layers, experts_before)] = parameter
    return found


def canonical_name(name: str, layers: Sequence[Any], experts_before: int) -> str:
    """`name` as in named_parameters() of a chunk -> canonical: global layer (from layer_number), global expert."""
    match = re.match(r"decoder\.layers\.(\d+)(\..*)", name)
    if not match:
        return name
    rest = match[2]
    for pattern, replacement in _LOCAL_TO_CANONICAL:
        rest = pattern.sub(replacement, rest)
    rest = re.sub(
        r"(?<=\.weight)\d+$", lambda expert: str(int(expert[0]) + experts_before), rest
    )  # experts end in a number
    return f"decoder.layers.{layers[int(match[1])].layer_number - 1}{rest}"


def _joined(shards: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Of one shard no copy is made."""
    return shards[0] if len(shards) == 1 else torch.cat(list(shards), dim=dim)


def _rules(spec: Geometry) -> tuple[Rule, ...]:
    try:
        table = FAMILIES[spec.architecture]
    except KeyError:
        raise ValueError(f"architecture {spec.architecture}: no weight table; known: {', '.join(FAMILIES)}") from None
    return tuple(rule for rule in table if _applies(rule.when, spec))


def _applies(when: str, spec: Geometry) -> bool:
    return not when or bool(getattr(spec, when.removeprefix("not "))) != when.startswith("not ")


def _is_in_layer(rule: Rule, is_moe: bool) -> bool:
    """Dense layers have mlp.linear_fc*, MoE layers have a router and experts; the rest is in both."""
    if ".mlp.linear_fc" in rule.mcore:
        return not is_moe
    return is_moe or ".mlp." not in rule.mcore


def _entry(rule: Rule, spec: Geometry, layer: int | None = None, expert: int | None = None) -> Entry:
    lengths = sizes(spec)
    hf = tuple(
        (name.format(layer=layer, expert=expert), tuple(lengths[size] for size in shape.split()))
        for name, shape in rule.hf
    )
    return Entry(rule, rule.mcore.format(layer=layer, expert=expert), layer, expert, hf)


def _pattern(mcore: str) -> str:
    return re.escape(mcore).replace(r"\{layer\}", r"(?P<layer>\d+)").replace(r"\{expert\}", r"(?P<expert>\d+)")
