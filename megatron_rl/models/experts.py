"""megatron-core's settings for experts, from a model's sizes and the configuration: plain values, no torch."""

from __future__ import annotations

from typing import Any

from megatron_rl.config import ModelConfig
from megatron_rl.models.spec import ModelSpec


def expert_settings(spec: ModelSpec, model: ModelConfig, te: bool) -> dict[str, Any]:
    """core's settings for experts; of a dense model the dispatcher alone: core judges it together with pipelines all the same."""
    dispatcher = {"moe_token_dispatcher_type": model.token_dispatcher}
    if not spec.moe_layers:
        return dispatcher
    sparse = [int(layer in spec.moe_layers) for layer in range(spec.num_layers)]
    return {
        "num_moe_experts": spec.num_experts,
        "moe_layer_freq": sparse if 0 in sparse else 1,
        "moe_ffn_hidden_size": spec.expert_ffn_size,
        "moe_shared_expert_intermediate_size": spec.shared_ffn_size or None,
        "moe_shared_expert_gate": spec.shared_gate,
        "moe_router_topk": spec.top_k,
        **spec.router.core_settings(spec.top_k),
        "moe_router_dtype": None if model.router_dtype == "model" else model.router_dtype,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": te,
        **dispatcher,
    }
