"""Random HF checkpoints for the proof: a small Qwen3-MoE, or a reduced copy of a model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_rl.models.families import make_spec
from megatron_rl.models.spec import ModelSpec
from megatron_rl.weights.hf.entries import entries


def small_config(
    *, num_layers: int, num_experts: int, top_k: int, first_k_dense: int, tp: int, etp: int
) -> dict[str, Any]:
    """Return the config.json of a small Qwen3-MoE that every layout of these sizes divides."""
    kv_heads = math.lcm(2, tp)
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": num_layers,
        "mlp_only_layers": list(range(first_k_dense)),
        "decoder_sparse_step": 1,
        "num_experts": num_experts,
        "num_experts_per_tok": top_k,
        "norm_topk_prob": True,
        "hidden_size": 64,
        "num_attention_heads": 2 * kv_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 16,
        "intermediate_size": 32 * tp,
        "moe_intermediate_size": 16 * etp,
        "vocab_size": 96,
        "max_position_embeddings": 4096,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


def shrunk_config(
    hf: dict[str, Any], *, tp: int, etp: int, stages: int, num_layers: int | None = None
) -> dict[str, Any]:
    """Return `hf` with narrow matrices, a small vocabulary, and `num_layers` layers.

    The default number of layers is the smallest that keeps the dense ones and divides by `stages`.
    Everything that a layout depends on stays: heads, experts, top-k, gate normalisation, tied
    embeddings, first dense layers.
    """
    spec = make_spec(hf)
    needed = max(4, spec.moe_layers[0] + 2, stages)
    num_layers = num_layers or min(spec.num_layers, -(-needed // stages) * stages)
    dense = sorted(set(range(num_layers)) - set(spec.moe_layers))
    return {
        **small_config(
            num_layers=num_layers,
            num_experts=spec.num_experts,
            top_k=spec.top_k,
            first_k_dense=0,
            tp=tp,
            etp=etp,
        ),
        "architectures": [spec.architecture],
        "mlp_only_layers": dense,
        "norm_topk_prob": not spec.router.pre_softmax,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "tie_word_embeddings": spec.tie_embeddings,
    }


def write_random_checkpoint(
    config: dict[str, Any], path: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> ModelSpec:
    """Write an HF checkpoint with this config.json and random weights, which are large enough for
    distinct routes and logits.
    """
    spec = make_spec(config)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for entry in entries(spec):
        for name, shape in entry.hf:
            if "norm" in name:
                tensor = 1 + 0.1 * torch.randn(shape, generator=generator)
            else:
                # wider scores of routers, for distinct routes
                scale = 0.5 if name.endswith("mlp.gate.weight") else 0.1
                tensor = scale * torch.randn(shape, generator=generator)
            tensors[name] = tensor.to(dtype)
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return spec
