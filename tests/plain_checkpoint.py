"""Checkpoint directories of a few bytes: config.json, a tokenizer's settings, one tensor.

Enough for a plan, without torch.
"""

import json
from pathlib import Path

MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 64,
    "hidden_size": 64, "head_dim": 16,
    "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 4, "rope_theta": 1e6,
    "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [], "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}  # fmt: skip
OF_EXPERTS = {
    "moe_intermediate_size", "num_experts", "num_experts_per_tok", "norm_topk_prob",
    "decoder_sparse_step", "mlp_only_layers",
}  # fmt: skip
DENSE = {key: value for key, value in MOE.items() if key not in OF_EXPERTS}
DENSE |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "</s>",
    "chat_template": "{{ messages }}",
}


def checkpoint(
    path: Path, config: dict | None, tokenizer: dict | None = TOKENIZER, weights: bytes | None = b""
) -> Path:
    """Write a checkpoint directory; None leaves a part out, weights are the bytes of its one file
    (b"": a whole one).
    """
    path.mkdir()
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    if tokenizer is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    if weights is not None:
        header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
        (path / "model.safetensors").write_bytes(
            weights or len(header).to_bytes(8, "little") + header + bytes(8)
        )
    return path
