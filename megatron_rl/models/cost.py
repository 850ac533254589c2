"""The cost of a token, from the model's sizes."""

from __future__ import annotations

from megatron_rl.models.spec import ModelSpec


def active_parameters(spec: ModelSpec) -> int:
    """Matrix weights that one token is multiplied with in a forward pass: attention, its experts or
    MLP, the LM head.
    """
    sparse, plain = (sum(layer_weights(spec, is_moe=is_moe)) for is_moe in (True, False))
    num_moe = len(spec.moe_layers)
    return (
        num_moe * sparse + (spec.num_layers - num_moe) * plain + spec.hidden_size * spec.vocab_size
    )


def layer_weights(spec: ModelSpec, *, is_moe: bool) -> tuple[int, int]:
    """Weights of one layer that a token is multiplied with: (attention, router, MLP or shared
    experts; its top-k experts).
    """
    h, dense = spec.hidden_size, attention_parameters(spec)
    if not is_moe:
        return dense + 3 * h * spec.ffn_size, 0
    dense += 3 * h * spec.shared_ffn_size + h * (spec.num_experts + spec.shared_gate)
    return dense, 3 * h * spec.expert_ffn_size * spec.top_k


def attention_parameters(spec: ModelSpec) -> int:
    """Weights of one layer's projections."""
    h = spec.hidden_size
    if not spec.is_mla:
        return 2 * h * spec.head_dim * (spec.num_heads + spec.num_kv_heads)
    queries = spec.num_heads * (spec.qk_nope_dim + spec.qk_rope_dim)
    q = spec.q_lora_rank * (h + queries) if spec.q_lora_rank else h * queries
    kv = h * (spec.kv_lora_rank + spec.qk_rope_dim) + spec.kv_lora_rank * spec.num_heads * (
        spec.qk_nope_dim + spec.v_head_dim
    )
    return q + kv + spec.num_heads * spec.v_head_dim * h


def attention_width(spec: ModelSpec) -> int:
    """Sum over heads of the sizes of a key and a value: a query takes 2 FLOPs each per token that
    it attends to.
    """
    score, value = (
        (spec.qk_nope_dim + spec.qk_rope_dim, spec.v_head_dim)
        if spec.is_mla
        else (spec.head_dim, spec.head_dim)
    )
    return spec.num_heads * (score + value)


def cache_numbers(spec: ModelSpec) -> int:
    """Numbers in a server's KV cache per token, over all layers: keys and values, or MLA's latent
    and rotated key.
    """
    each = (
        spec.kv_lora_rank + spec.qk_rope_dim
        if spec.is_mla
        else 2 * spec.num_kv_heads * spec.head_dim
    )
    return spec.num_layers * each


def balance_length(spec: ModelSpec) -> int:
    """Length S of a sequence at which causal attention costs as much as everything else.

    A token takes 2 FLOPs per weight, 2 P S in total; each of the S^2 / 2 pairs takes 2 FLOPs per
    number of a head, once for the score and once for the value: 2 L W S^2 with W the mean of the
    two widths.  Both are equal at S = P / (L W): 15,470 for Qwen3-30B-A3B.
    """
    return 2 * active_parameters(spec) // (spec.num_layers * attention_width(spec))
