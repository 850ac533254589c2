"""The weight tables: which HF tensors make up each megatron-core parameter, as data.

There is one table for each model family, composed of the parts below.  Loading, export, weight sync
and conversion all read it.  models/families.py has what a family computes.

Sizes in the tables (weights.hf.mapping.size_values has their values): V vocabulary, H hidden, Q
query heads x head_dim, K key heads x head_dim, D head_dim, F dense MLP, I expert MLP, S shared
experts' MLP, E experts.  Of latent attention: QL and KL the ranks, KR = KL + rotary head, QM query
heads x head, KVM heads x (key without position + value), OM heads x value head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["replicated", "vocab", "column", "row", "qkv", "glu"]
"""Split of the megatron tensor over tensor-parallel ranks.

replicated  every rank holds all of it
vocab       rows, padded with zero rows to a multiple of the ranks
column      rows (megatron's column-parallel layers: output features)
row         input columns (megatron's row-parallel layers)
qkv         rows, ordered key-head group by group: its query heads, its key, its value
glu         rows of gate and of up, each split: rank r holds [gate_r; up_r]
"""


ONE_CALL = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")
"""SGLang fuses these two, and drops them without an error unless one call to load weights has both:
they travel together.
"""


@dataclass(frozen=True)
class Rule:
    """One megatron-core parameter, and the HF tensors that make it up."""

    mcore: str
    hf: tuple[tuple[str, str], ...]
    """(HF name, shape in the sizes above) of the one to three HF tensors that make up this
    parameter.
    """
    kind: Kind = "replicated"
    when: str = ""
    """The rule applies only to models whose spec has this field set, or to those without it for
    "not FIELD"; "": to all.
    """
    float32: bool = False
    """The parameter stays float32 whatever the dtype of the model."""
    te_kind: Kind | None = None
    """Kind in TransformerEngine's layers, where it is not `kind`."""

    @property
    def is_expert(self) -> bool:
        return "{expert}" in self.mcore


_M, _H = "decoder.layers.{layer}.", "model.layers.{layer}."
_ATTENTION, _MLP = _H + "self_attn.", _H + "mlp."


def _attention(mcore: str, hf: str, shape: str, kind: Kind = "replicated", when: str = "") -> Rule:
    """Return the rule of a weight of the attention layer that is one HF tensor."""
    return Rule(
        f"{_M}self_attention.{mcore}.weight", ((f"{_ATTENTION}{hf}.weight", shape),), kind, when
    )


def _down(mcore: str, hf: str, shape: str, when: str = "") -> Rule:
    """Return the rule of a down-projection of latent attention.

    TransformerEngine's layers have all of it on every tensor rank.
    """
    return replace(_attention(mcore, hf, shape, "column", when), te_kind="replicated")


def _qkv(suffix: str, columns: str, when: str = "") -> Rule:
    """Return the rule of queries, keys and values: three HF tensors, one parameter."""
    parts = (("q", "Q"), ("k", "K"), ("v", "K"))
    hf = tuple((f"{_ATTENTION}{part}_proj.{suffix}", rows + columns) for part, rows in parts)
    return Rule(f"{_M}self_attention.linear_qkv.{suffix}", hf, "qkv", when)


EMBEDDING = (
    Rule("embedding.word_embeddings.weight", (("model.embed_tokens.weight", "V H"),), "vocab"),
)
HEAD = (
    Rule("decoder.final_layernorm.weight", (("model.norm.weight", "H"),)),
    Rule("output_layer.weight", (("lm_head.weight", "V H"),), "vocab"),
)
INPUT_NORM = (
    Rule(
        _M + "self_attention.linear_qkv.layer_norm_weight", ((_H + "input_layernorm.weight", "H"),)
    ),
)
MLP_NORM = (
    Rule(_M + "pre_mlp_layernorm.weight", ((_H + "post_attention_layernorm.weight", "H"),)),
)
QKV = (_qkv("weight", " H"), _qkv("bias", "", when="qkv_bias"))
PROJECTION = (_attention("linear_proj", "o_proj", "H Q", "row"),)
HEAD_NORMS = (_attention("q_layernorm", "q_norm", "D"), _attention("k_layernorm", "k_norm", "D"))
OPTIONAL_HEAD_NORMS = tuple(replace(rule, when="has_head_norms") for rule in HEAD_NORMS)
VECTOR_NORMS = (_attention("q_layernorm", "q_norm", "Q"), _attention("k_layernorm", "k_norm", "K"))
LATENT_ATTENTION = (
    _attention("linear_q_proj", "q_proj", "QM H", "column", "not q_lora_rank"),
    # the two down-projections are neighbours: servers need both in one call (ONE_CALL)
    _down("linear_q_down_proj", "q_a_proj", "QL H", "q_lora_rank"),
    _down("linear_kv_down_proj", "kv_a_proj_with_mqa", "KR H"),
    _attention("q_layernorm", "q_a_layernorm", "QL", when="q_lora_rank"),
    _attention("linear_q_up_proj", "q_b_proj", "QM QL", "column", "q_lora_rank"),
    _attention("kv_layernorm", "kv_a_layernorm", "KL"),
    _attention("linear_kv_up_proj", "kv_b_proj", "KVM KL", "column"),
    _attention("linear_proj", "o_proj", "H OM", "row"),
)
DENSE_MLP = (
    Rule(
        _M + "mlp.linear_fc1.weight",
        ((_MLP + "gate_proj.weight", "F H"), (_MLP + "up_proj.weight", "F H")),
        "glu",
    ),
    Rule(_M + "mlp.linear_fc2.weight", ((_MLP + "down_proj.weight", "H F"),), "row"),
)


def experts(
    router: str = "mlp.gate",
    prefix: str = "mlp.experts",
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> tuple[Rule, ...]:
    """Return the rules of router and experts, under these HF names."""
    gate, up, down = parts
    expert = f"{_H}{prefix}.{{expert}}."
    return (
        Rule(_M + "mlp.router.weight", ((f"{_H}{router}.weight", "E H"),)),
        Rule(
            _M + "mlp.experts.linear_fc1.weight{expert}",
            ((f"{expert}{gate}.weight", "I H"), (f"{expert}{up}.weight", "I H")),
            "glu",
        ),
        Rule(
            _M + "mlp.experts.linear_fc2.weight{expert}",
            ((f"{expert}{down}.weight", "H I"),),
            "row",
        ),
    )


def shared_experts(name: str) -> tuple[Rule, ...]:
    """Return the rules of shared experts, under this HF name."""
    gate, up, down = (f"{_MLP}{name}.{part}_proj.weight" for part in ("gate", "up", "down"))
    return (
        Rule(_M + "mlp.shared_experts.linear_fc1.weight", ((gate, "S H"), (up, "S H")), "glu"),
        Rule(_M + "mlp.shared_experts.linear_fc2.weight", ((down, "H S"),), "row"),
    )


EXPERT_BIAS = (
    Rule(
        _M + "mlp.router.expert_bias", ((_MLP + "gate.e_score_correction_bias", "E"),), float32=True
    ),
)
GROUPED_ATTENTION = (*INPUT_NORM, *QKV, *PROJECTION)
SHARED_GATE = (
    Rule(_M + "mlp.shared_experts.gate_weight", ((_MLP + "shared_expert_gate.weight", "1 H"),)),
)

FAMILIES: dict[str, tuple[Rule, ...]] = {
    "Qwen3MoeForCausalLM": (
        *(*EMBEDDING, *GROUPED_ATTENTION, *HEAD_NORMS, *MLP_NORM, *DENSE_MLP),
        *(*experts(), *HEAD),
    ),
    "Qwen3ForCausalLM": (*EMBEDDING, *GROUPED_ATTENTION, *HEAD_NORMS, *MLP_NORM, *DENSE_MLP, *HEAD),
    "OlmoeForCausalLM": (
        *EMBEDDING,
        *GROUPED_ATTENTION,
        *VECTOR_NORMS,
        *MLP_NORM,
        *experts(),
        *HEAD,
    ),
    "MixtralForCausalLM": (
        *(*EMBEDDING, *GROUPED_ATTENTION, *MLP_NORM),
        *experts("block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3", "w2")),
        *HEAD,
    ),
    "Qwen2MoeForCausalLM": (
        *(*EMBEDDING, *GROUPED_ATTENTION, *MLP_NORM, *DENSE_MLP),
        *(*experts(), *shared_experts("shared_expert"), *SHARED_GATE, *HEAD),
    ),
    "Glm4MoeForCausalLM": (
        *(*EMBEDDING, *GROUPED_ATTENTION, *OPTIONAL_HEAD_NORMS, *MLP_NORM, *DENSE_MLP),
        *(*experts(), *EXPERT_BIAS, *shared_experts("shared_experts"), *HEAD),
    ),
    "DeepseekV3ForCausalLM": (
        *(*EMBEDDING, *INPUT_NORM, *LATENT_ATTENTION, *MLP_NORM, *DENSE_MLP),
        *(*experts(), *EXPERT_BIAS, *shared_experts("shared_experts"), *HEAD),
    ),
    "DeepseekV2ForCausalLM": (
        *(*EMBEDDING, *INPUT_NORM, *LATENT_ATTENTION, *MLP_NORM, *DENSE_MLP),
        *(*experts(), *shared_experts("shared_experts"), *HEAD),
    ),
}
"""One entry per HF architecture, in checkpoint order: before the layers, in each layer, after them.
"""
