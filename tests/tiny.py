"""A small random Qwen3-MoE HF checkpoint for tests: config.json and safetensors, no tokenizer,
written in milliseconds.
"""

from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM


def random_checkpoint(
    path: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides
) -> Path:
    """Write a random checkpoint to `path` and return it; `overrides` go to Qwen3MoeConfig."""
    settings = dict(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=4096,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**settings, **overrides}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:  # larger than the default init: distinct logits, clear routing
                parameter.normal_(0.0, 0.5 if "gate.weight" in name else 0.1)
    model.to(dtype).save_pretrained(path)
    return Path(path)


def changed_checkpoint(path: Path, before: Path, change: float, *, seed: int = 1) -> Path:
    """Write to `path` the weights of `before`, each tensor plus noise of `change` times its
    norm.
    """
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM.from_pretrained(before, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.add_(noise * (change * parameter.norm() / noise.norm()))
    model.save_pretrained(path)
    return Path(path)
