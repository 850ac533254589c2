"""megatron-core's settings for experts and their router, from a model's sizes and the
configuration.

Imports no torch.
"""

from __future__ import annotations

from typing import Any

from megatron_rl.config import ModelConfig
from megatron_rl.models.spec import ModelSpec


def expert_settings(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields of core's TransformerConfig that the checkpoint defines.

    There are none for a dense model.
    """
    if not spec.moe_layers:
        return {}
    router, limits_groups = spec.router, spec.router.core_limits_groups(spec.top_k)
    sparse = [int(layer in spec.moe_layers) for layer in range(spec.num_layers)]
    return {
        "num_moe_experts": spec.num_experts,
        "moe_layer_freq": sparse if 0 in sparse else 1,  # core takes a pattern, or 1 for all layers
        "moe_ffn_hidden_size": spec.expert_ffn_size,
        "moe_shared_expert_intermediate_size": spec.shared_ffn_size or None,
        "moe_shared_expert_gate": spec.shared_gate,
        "moe_router_topk": spec.top_k,
        "moe_router_score_function": router.score_function,
        "moe_router_pre_softmax": router.pre_softmax,
        "moe_router_enable_expert_bias": router.expert_bias,
        "moe_router_num_groups": router.num_groups if limits_groups else None,
        "moe_router_group_topk": router.group_topk if limits_groups else None,
        "moe_router_topk_scaling_factor": router.scaling_factor,
    }


def routing_settings(spec: ModelSpec, model: ModelConfig, te: bool) -> dict[str, Any]:
    """Return the fields of core's TransformerConfig that this program chooses for every model with
    experts.

    A dense model gets the dispatcher alone, which core checks with pipelines even there.
    """
    dispatcher = {"moe_token_dispatcher_type": model.token_dispatcher}
    if not spec.moe_layers:
        return dispatcher
    return {
        # core would update it with the load of replayed routes, pads included
        "moe_router_bias_update_rate": 0.0,
        "moe_router_dtype": None if model.router_dtype == "model" else model.router_dtype,
        # RL uses no balancing loss: its gradient is not part of the policy's loss
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": te,  # the grouped GEMM is TransformerEngine's
        # TransformerEngine's kernel adds up a token's experts in fp32.  Core's own is a
        # scatter_add_ in the model's dtype, on CUDA in the order of its atomics: log pi_old and
        # log pi would differ at equal weights.
        "moe_permute_fusion": te,
        **dispatcher,
    }
