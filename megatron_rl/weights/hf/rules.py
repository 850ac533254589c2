"""The weight tables: which HF tensors are behind each megatron-core parameter, one table per model family, as data.

A table is put together from the parts below.  Everything that moves weights reads it: loading, export, push, conversion.
What a family computes is in models/families.py.

Sizes in the tables (weights.mapping.sizes has their values): V vocabulary, H hidden, Q query heads x head_dim, K key heads x
head_dim, D head_dim, F dense MLP, I expert MLP, S shared experts' MLP, E experts; of latent attention: QL and KL the ranks,
KR = KL + rotary head, QM query heads x head, KVM heads x (key without position + value), OM heads x value head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["replicated", "vocab", "column", "row", "qkv", "glu"]
"""How tensor-parallel ranks split the megatron tensor.

replicated  every rank holds all of it
vocab       rows, after zero rows make their number a multiple of the ranks
column      rows (megatron's column-parallel layers: output features)
row         input columns (megatron's row-parallel layers)
qkv         rows, ordered key-head group by group: its query heads, its key, its value
glu         rows of gate and of up, split apart: rank r holds [gate_r; up_r]
"""


@dataclass(frozen=True)
class Rule:
    mcore: str
    hf: tuple[tuple[str, str], ...]
    """(HF name, shape in the sizes above) of the one to three HF tensors behind this parameter."""
    kind: Kind = "replicated"
    when: str = ""
    """Only in models whose spec has this field, or "not FIELD"; "": always."""
    float32: bool = False
    """Held in float32 whatever the model's dtype."""

    @property
    def is_expert(self) -> bool:
        return "{expert}" in self.mcore


_M, _H = "decoder.layers.{layer}.", "model.layers.{layer}."
_ATTENTION, _MLP = _H + "self_attn.", _H + "mlp."

EMBEDDING = (Rule("embedding.word_embeddings.weight", (("model.embed_tokens.weight", "V H"),), "vocab"),)
HEAD = (
    Rule("decoder.final_layernorm.weight", (("model.norm.weight", "H"),)),
    Rule("output_layer.weight", (("lm_head.weight", "V H"),), "vocab"),
)
INPUT_NORM = (Rule(_M + "self_attention.linear_qkv.layer_norm_weight", ((_H + "input_layernorm.weight", "H"),)),)
MLP_NORM = (Rule(_M + "pre_mlp_layernorm.weight", ((_H + "post_attention_layernorm.weight", "H"),)),)
QKV = (
    Rule(
        _M + "self_attention.linear_qkv.weight",
        tuple((f"{_ATTENTION}{part}_proj.weight", shape) for part, shape in (("q", "Q H"), ("k", "K H"), ("v", "K H"))),
        "qkv",
    ),
    Rule(
        _M + "self_attention.linear_qkv.bias",
        tuple((f"{_ATTENTION}{part}_proj.bias", shape) for part, shape in (("q", "Q"), ("k", "K"), ("v", "K"))),
        "qkv",
        when="qkv_bias",
    ),
)
PROJECTION = (Rule(_M + "self_attention.linear_proj.weight", ((_ATTENTION + "o_proj.weight", "H Q"),), "row"),)
HEAD_NORMS = (
    Rule(_M + "self_attention.q_layernorm.weight", ((_ATTENTION + "q_norm.weight", "D"),)),
    Rule(_M + "self_attention.k_layernorm.weight", ((_ATTENTION + "k_norm.weight", "D"),)),
)
OPTIONAL_HEAD_NORMS = tuple(replace(rule, when="has_head_norms") for rule in HEAD_NORMS)
VECTOR_NORMS = (
    Rule(_M + "self_attention.q_layernorm.weight", ((_ATTENTION + "q_norm.weight", "Q"),)),
    Rule(_M + "self_attention.k_layernorm.weight", ((_ATTENTION + "k_norm.weight", "K"),)),
)
LATENT_ATTENTION = (  # both down-projections side by side: servers want them in one call (weights/sync/push.py)
    Rule(
        _M + "self_attention.linear_q_proj.weight",
        ((_ATTENTION + "q_proj.weight", "QM H"),),
        "column",
        "not q_lora_rank",
    ),
    Rule(
        _M + "self_attention.linear_q_down_proj.weight",
        ((_ATTENTION + "q_a_proj.weight", "QL H"),),
        "column",
        "q_lora_rank",
    ),
    Rule(
        _M + "self_attention.linear_kv_down_proj.weight",
        ((_ATTENTION + "kv_a_proj_with_mqa.weight", "KR H"),),
        "column",
    ),
    Rule(_M + "self_attention.q_layernorm.weight", ((_ATTENTION + "q_a_layernorm.weight", "QL"),), when="q_lora_rank"),
    Rule(
        _M + "self_attention.linear_q_up_proj.weight",
        ((_ATTENTION + "q_b_proj.weight", "QM QL"),),
        "column",
        "q_lora_rank",
    ),
    Rule(_M + "self_attention.kv_layernorm.weight", ((_ATTENTION + "kv_a_layernorm.weight", "KL"),)),
    Rule(_M + "self_attention.linear_kv_up_proj.weight", ((_ATTENTION + "kv_b_proj.weight", "KVM KL"),), "column"),
    Rule(_M + "self_attention.linear_proj.weight", ((_ATTENTION + "o_proj.weight", "H OM"),), "row"),
)
DENSE_MLP = (
    Rule(_M + "mlp.linear_fc1.weight", ((_MLP + "gate_proj.weight", "F H"), (_MLP + "up_proj.weight", "F H")), "glu"),
    Rule(_M + "mlp.linear_fc2.weight", ((_MLP + "down_proj.weight", "H F"),), "row"),
)


def experts(
    router: str = "mlp.gate",
    prefix: str = "mlp.experts",
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> tuple[Rule, ...]:
    """Router and experts, under these HF names."""
    gate, up, down = parts
    expert = f"{_H}{prefix}.{{expert}}."
    return (
        Rule(_M + "mlp.router.weight", ((f"{_H}{router}.weight", "E H"),)),
        Rule(
            _M + "mlp.experts.linear_fc1.weight{expert}",
            ((f"{expert}{gate}.weight", "I H"), (f"{expert}{up}.weight", "I H")),
            "glu",
        ),
        Rule(_M + "mlp.experts.linear_fc2.weight{expert}", ((f"{expert}{down}.weight", "H I"),), "row"),
    )


def shared_experts(name: str) -> tuple[Rule, ...]:
    """Shared experts, under this HF name."""
    gate, up, down = (f"{_MLP}{name}.{part}_proj.weight" for part in ("gate", "up", "down"))
    return (
        Rule(_M + "mlp.shared_experts.linear_fc1.weight", ((gate, "S H"), (up, "S H")), "glu"),
        Rule(_M + "mlp.shared_experts.linear_fc2.weight", ((down, "H S"),), "row"),
    )


EXPERT_BIAS = (Rule(_M + "mlp.router.expert_bias", ((_MLP + "gate.e_score_correction_bias", "E"),), float32=True),)
GROUPED_ATTENTION = (*INPUT_NORM, *QKV, *PROJECTION)
SHARED_GATE = (Rule(_M + "mlp.shared_experts.gate_weight", ((_MLP + "shared_expert_gate.weight", "1 H"),)),)

FAMILIES: dict[str, tuple[Rule, ...]] = {
    "Qwen3MoeForCausalLM": (
        *(*EMBEDDING, *GROUPED_ATTENTION, *HEAD_NORMS, *MLP_NORM, *DENSE_MLP),
        *(*experts(), *HEAD),
    ),
    "Qwen3ForCausalLM": (*EMBEDDING, *GROUPED_ATTENTION, *HEAD_NORMS, *MLP_NORM, *DENSE_MLP, *HEAD),
    "OlmoeForCausalLM": (*EMBEDDING, *GROUPED_ATTENTION, *VECTOR_NORMS, *MLP_NORM, *experts(), *HEAD),
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
"""One entry per HF architecture, in checkpoint order: what comes before the layers, in each layer, behind them."""
