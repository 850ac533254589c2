"""The cost of a token, from the model's sizes."""

from __future__ import annotations

from megatron_rl.models.spec import ModelSpec


def active_parameters(spec: ModelSpec) -> int:
    """Return the matrix weights that one token is multiplied with in a forward pass: attention, its
    experts or MLP, and the LM head.
    """
    sparse, plain = (sum(layer_weights(spec, is_moe=is_moe)) for is_moe in (True, False))
    num_moe = len(spec.moe_layers)
    layers = num_moe * sparse + (spec.num_layers - num_moe) * plain
    return layers + spec.hidden_size * spec.vocab_size


def layer_weights(spec: ModelSpec, *, is_moe: bool) -> tuple[int, int]:
    """Return the weights of one layer that a token is multiplied with, in two parts.

    The first part is attention, router, and MLP or shared experts; the second its top-k experts.
    """
    h, dense = spec.hidden_size, attention_parameters(spec)
    if not is_moe:
        # 3: gate, up and down projection
        return dense + 3 * h * spec.ffn_size, 0
    # with the router, and the gate of shared experts
    dense += 3 * h * spec.shared_ffn_size + h * (spec.num_experts + spec.shared_gate)
    return dense, 3 * h * spec.expert_ffn_size * spec.top_k


def attention_parameters(spec: ModelSpec) -> int:
    """Return the weights of one layer's attention projections."""
    h = spec.hidden_size
    if not spec.is_mla:
        return 2 * h * spec.head_dim * (spec.num_heads + spec.num_kv_heads)
    queries = spec.num_heads * (spec.qk_nope_dim + spec.qk_rope_dim)
    q = spec.q_lora_rank * (h + queries) if spec.q_lora_rank else h * queries
    down = h * (spec.kv_lora_rank + spec.qk_rope_dim)
    up = spec.kv_lora_rank * spec.num_heads * (spec.qk_nope_dim + spec.v_head_dim)
    return q + down + up + spec.num_heads * spec.v_head_dim * h


def attention_width(spec: ModelSpec) -> int:
    """Return the sum over heads of the sizes of a key and a value.

    For every token that a query attends to, it takes 2 FLOPs for each of these numbers.
    """
    key, value = spec.head_dim, spec.head_dim
    if spec.is_mla:
        key, value = spec.qk_nope_dim + spec.qk_rope_dim, spec.v_head_dim
    return spec.num_heads * (key + value)


def cache_numbers(spec: ModelSpec) -> int:
    """Return how many numbers a server's KV cache holds per token, over all layers.

    They are keys and values, or MLA's latent and rotated key.
    """
    if spec.is_mla:
        return spec.num_layers * (spec.kv_lora_rank + spec.qk_rope_dim)
    return spec.num_layers * 2 * spec.num_kv_heads * spec.head_dim


def balance_length(spec: ModelSpec) -> int:
    """Return the length S of a sequence at which causal attention costs as much as all the rest.

    The P matrix weights take 2 P S FLOPs.  Each of the S^2 / 2 pairs of tokens takes 2 FLOPs per
    number of a head in each of the L layers, once for the score and once for the value:
    2 L W S^2 with W the mean of the two widths.  Both are equal at S = P / (L W), which is 15,470
    for Qwen3-30B-A3B.
    """
    # attention_width is 2 W
    return 2 * active_parameters(spec) // (spec.num_layers * attention_width(spec))
