"""The parameters of one concrete model: names and shapes of its tensors in HF files and in
megatron-core, by the tables of weights/hf/rules.py.

A megatron parameter has a canonical name, with GLOBAL layer and expert numbers.  Nothing here needs
torch: plans read it, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatron_rl.models.spec import ModelSpec
from megatron_rl.weights.hf.rules import FAMILIES, Rule

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


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

    def of_all_experts(self, *, is_split: bool) -> Entry:
        """Return the entry of what the routed experts of a layer have in common, in the dense part
        of the model: it has the shape of this expert's weight, and no number.

        is_split: split over tensor ranks as an expert is; False: every tensor rank has all of it.
        """
        mcore = self.rule.mcore.removesuffix("{expert}")
        kind = self.rule.kind if is_split else "replicated"
        rule = replace(self.rule, mcore=mcore, kind=kind)
        return replace(self, rule=rule, name=mcore.format(layer=self.layer), expert=None)

    @property
    def place(self) -> int | str:
        """The layer, or the name of a parameter outside of layers: it decides the stage."""
        return self.name if self.layer is None else self.layer

    @property
    def hf_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.hf)


def entries(spec: ModelSpec) -> Iterator[Entry]:
    """Yield every parameter of the model, in checkpoint order.

    A tied output layer is left out: it is the embedding.
    """
    moe = frozenset(spec.moe_layers)
    rules = rules_of(spec)
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
    for rule in rules_of(spec):
        # the rule's name with its numbers as groups
        pattern = re.sub(r"\\{(\w+)\\}", r"(?P<\1>\\d+)", re.escape(rule.mcore))
        if match := re.fullmatch(pattern, name):
            numbers = {key: int(number) for key, number in match.groupdict().items()}
            entry = _entry(rule, spec, **numbers)
            if spec.tie_embeddings and name == "output_layer.weight":
                # the last pipeline stage has a copy of the embedding
                return replace(entry, hf=_entry(rules_of(spec)[0], spec).hf)
            return entry
    raise KeyError(f"megatron parameter {name}: no rule for it in the table of {spec.architecture}")


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


def bare(chunk: GPTModel) -> GPTModel:
    """Return a chunk without the wrappers around it."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def is_te(chunk: GPTModel) -> bool:
    """Return True where the chunk has TransformerEngine's layers."""
    return bool(bare(chunk).config.transformer_impl == "transformer_engine")


def rules_of(spec: ModelSpec) -> tuple[Rule, ...]:
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
