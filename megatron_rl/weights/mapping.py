"""HF tensor names and layouts <-> megatron-core parameters, as one table per model family, both directions.

A megatron parameter is known by its canonical name: TransformerEngine's spelling, with GLOBAL layer and expert numbers;
the local layer spec's spelling is translated to it.  Everything here is pure: tensors in, tensors out, no collectives.

Sizes in the table: V vocabulary, H hidden, Q query heads x head_dim, K key heads x head_dim, D head_dim, F dense MLP,
I expert MLP, E experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

Kind = Literal["replicated", "vocab", "row", "qkv", "glu"]
"""How tensor-parallel ranks split the megatron tensor.

replicated  every rank holds all of it
vocab       rows, after zero rows make their number a multiple of the ranks
row         input columns (megatron's row-parallel layers)
qkv         rows, ordered key-head group by group: its query heads, its key, its value
glu         rows of gate and of up, split apart: rank r holds [gate_r; up_r]
"""


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


@dataclass(frozen=True)
class Rule:
    mcore: str
    hf: tuple[tuple[str, str], ...]
    """(HF name, shape in the letters above) of the one to three HF tensors behind this parameter."""
    kind: Kind = "replicated"

    @property
    def is_expert(self) -> bool:
        return "{expert}" in self.mcore


_M, _H = "decoder.layers.{layer}.", "model.layers.{layer}."
QWEN3_MOE = (
    Rule("embedding.word_embeddings.weight", (("model.embed_tokens.weight", "V H"),), "vocab"),
    Rule(_M + "self_attention.linear_qkv.layer_norm_weight", ((_H + "input_layernorm.weight", "H"),)),
    Rule(
        _M + "self_attention.linear_qkv.weight",
        (
            (_H + "self_attn.q_proj.weight", "Q H"),
            (_H + "self_attn.k_proj.weight", "K H"),
            (_H + "self_attn.v_proj.weight", "K H"),
        ),
        "qkv",
    ),
    Rule(_M + "self_attention.q_layernorm.weight", ((_H + "self_attn.q_norm.weight", "D"),)),
    Rule(_M + "self_attention.k_layernorm.weight", ((_H + "self_attn.k_norm.weight", "D"),)),
    Rule(_M + "self_attention.linear_proj.weight", ((_H + "self_attn.o_proj.weight", "H Q"),), "row"),
    Rule(_M + "pre_mlp_layernorm.weight", ((_H + "post_attention_layernorm.weight", "H"),)),
    Rule(
        _M + "mlp.linear_fc1.weight",
        ((_H + "mlp.gate_proj.weight", "F H"), (_H + "mlp.up_proj.weight", "F H")),
        "glu",
    ),
    Rule(_M + "mlp.linear_fc2.weight", ((_H + "mlp.down_proj.weight", "H F"),), "row"),
    Rule(_M + "mlp.router.weight", ((_H + "mlp.gate.weight", "E H"),)),
    Rule(
        _M + "mlp.experts.linear_fc1.weight{expert}",
        ((_H + "mlp.experts.{expert}.gate_proj.weight", "I H"), (_H + "mlp.experts.{expert}.up_proj.weight", "I H")),
        "glu",
    ),
    Rule(_M + "mlp.experts.linear_fc2.weight{expert}", ((_H + "mlp.experts.{expert}.down_proj.weight", "H I"),), "row"),
    Rule("decoder.final_layernorm.weight", (("model.norm.weight", "H"),)),
    Rule("output_layer.weight", (("lm_head.weight", "V H"),), "vocab"),
)
FAMILIES: dict[str, tuple[Rule, ...]] = {"Qwen3MoeForCausalLM": QWEN3_MOE}

_LOCAL_TO_CANONICAL = (
    (re.compile(r"\.mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight$"), r".mlp.experts.\2.weight\1"),
    (re.compile(r"\.input_layernorm\.weight$"), ".self_attention.linear_qkv.layer_norm_weight"),
    (re.compile(r"\.mlp\.linear_fc1\.layer_norm_weight$"), ".pre_mlp_layernorm.weight"),  # TE fuses it in dense layers
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
        width = tensors[0].shape[-1]
        full = torch.cat([x.reshape(spec.num_kv_heads, -1, width) for x in tensors], dim=1).reshape(-1, width)
        return full.chunk(size)[rank]
    if kind == "glu":
        return torch.cat([x.chunk(size)[rank] for x in tensors])
    (full,) = tensors
    if kind == "vocab":
        pad = -full.shape[0] % size
        return (
            torch.cat([full, full.new_zeros(pad, full.shape[1])]).chunk(size)[rank] if pad else full.chunk(size)[rank]
        )
    return full.chunk(size, dim=1)[rank] if kind == "row" else full


def to_hf(entry: Entry, shards: Sequence[torch.Tensor], spec: Geometry) -> list[tuple[str, torch.Tensor]]:
    """(HF name, contiguous HF tensor) pairs, from all tensor-parallel shards in rank order.  Inverse of to_mcore."""
    kind = entry.rule.kind
    if kind == "qkv":
        full = torch.cat(list(shards))
        grouped = full.view(spec.num_kv_heads, -1, full.shape[-1])
        sizes = [grouped.shape[1] - 2 * spec.head_dim, spec.head_dim, spec.head_dim]
        parts = [x.reshape(-1, full.shape[-1]) for x in grouped.split(sizes, dim=1)]
    elif kind == "glu":
        halves = [shard.chunk(2) for shard in shards]
        parts = [torch.cat([half[i] for half in halves]) for i in (0, 1)]
    elif kind == "vocab":
        parts = [torch.cat(list(shards))[: spec.vocab_size]]
    elif kind == "row":
        parts = [torch.cat(list(shards), dim=1)]
    else:
        parts = [shards[0]]
    return [(name, part.contiguous()) for name, part in zip(entry.hf_names, parts, strict=True)]


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


def local_parameters(
    chunks: Iterable[Any], spec: Geometry, ep_rank: int, ep_size: int
) -> dict[str, torch.nn.Parameter]:
    """Canonical name -> parameter of this rank's model chunks (bare, or wrapped in DDP / Float16Module)."""
    found: dict[str, torch.nn.Parameter] = {}
    experts_before = spec.num_experts // ep_size * ep_rank
    for chunk in chunks:
        while hasattr(chunk, "module"):
            chunk = chunk.module
        for name, parameter in chunk.named_parameters():
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


def _rules(spec: Geometry) -> tuple[Rule, ...]:
    try:
        return FAMILIES[spec.architecture]
    except KeyError:
        raise ValueError(f"architecture {spec.architecture}: no weight table; known: {', '.join(FAMILIES)}") from None


def _is_in_layer(rule: Rule, is_moe: bool) -> bool:
    """Dense layers have mlp.linear_fc*, MoE layers have a router and experts; the rest is in both."""
    if ".mlp.linear_fc" in rule.mcore:
        return not is_moe
    return is_moe or ".mlp." not in rule.mcore


def _entry(rule: Rule, spec: Geometry, layer: int | None = None, expert: int | None = None) -> Entry:
    sizes = {
        "V": spec.vocab_size,
        "H": spec.hidden_size,
        "Q": spec.num_heads * spec.head_dim,
        "K": spec.num_kv_heads * spec.head_dim,
        "D": spec.head_dim,
        "F": spec.ffn_size,
        "I": spec.expert_ffn_size,
        "E": spec.num_experts,
    }
    hf = tuple(
        (name.format(layer=layer, expert=expert), tuple(sizes[letter] for letter in shape.split()))
        for name, shape in rule.hf
    )
    return Entry(rule, rule.mcore.format(layer=layer, expert=expert), layer, expert, hf)


def _pattern(mcore: str) -> str:
    return re.escape(mcore).replace(r"\{layer\}", r"(?P<layer>\d+)").replace(r"\{expert\}", r"(?P<expert>\d+)")
