"""What a token costs the model, from its shape alone."""

from __future__ import annotations

from megatron_rl.engine.model import ModelSpec


def linear_parameters(spec: ModelSpec) -> int:
    """Weights of matrices that one token is multiplied with in a forward pass: attention, its experts or MLP, the LM head."""
    attention = spec.hidden_size * spec.head_dim * 2 * (spec.num_heads + spec.num_kv_heads)
    moe = 3 * spec.hidden_size * spec.expert_ffn_size * spec.top_k + spec.hidden_size * spec.num_experts
    dense = 3 * spec.hidden_size * spec.ffn_size
    num_moe = len(spec.moe_layers)
    layers = spec.num_layers * attention + num_moe * moe + (spec.num_layers - num_moe) * dense
    return layers + spec.hidden_size * spec.vocab_size


def balance_length(spec: ModelSpec) -> int:
    """Length S of a sequence at which causal attention costs as much as everything else.

    A token costs 2 FLOPs a weight, 2 P S in all; scores and their product with the values 4 FLOPs for each head's width and
    each of S^2 / 2 pairs, 2 L W S^2: equal at S = P / (L W).  15,470 for Qwen3-30B-A3B.
    """
    return linear_parameters(spec) // (spec.num_layers * spec.num_heads * spec.head_dim)
