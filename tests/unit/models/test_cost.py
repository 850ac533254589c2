import json

import pytest
from safetensors.torch import load_file

from megatron_rl.models.cost import active_parameters, balance_length
from megatron_rl.models.families import make_spec
from tests.families import FAMILIES, family_checkpoint

QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 48, "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "vocab_size": 151_936, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40_960, "tie_word_embeddings": False, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip


def test_the_papers_model_against_known_numbers():
    spec = make_spec(QWEN3_30B)
    attention = 2048 * 32 * 128 + 2 * 2048 * 4 * 128 + 32 * 128 * 2048
    experts = 8 * 3 * 2048 * 768 + 2048 * 128
    assert active_parameters(spec) == 48 * (attention + experts) + 2048 * 151_936
    assert balance_length(spec) == active_parameters(spec) // (48 * 32 * 128) == 15_470


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_counts_the_weights_of_its_checkpoint(name, tmp_path):
    """Matrices of the checkpoint, top-k of the experts; an embedding is a look-up, not a
    product.
    """
    path = family_checkpoint(tmp_path, name)
    spec = make_spec(json.loads((path / "config.json").read_text()))
    found = 0.0
    for key, value in load_file(path / "model.safetensors").items():
        if value.dim() == 2 and ("embed_tokens" not in key or spec.tie_embeddings):
            found += value.numel() * (spec.top_k / spec.num_experts if ".experts." in key else 1)
    assert active_parameters(spec) == pytest.approx(found)
    assert balance_length(spec) > 0
