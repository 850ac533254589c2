"""The Qwen3-MoE weight table: names, layouts of every kind, both directions."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.weights.hf.entries import entries, find_entry, shard_shape
from megatron_rl.weights.hf.mapping import canonical_name, to_hf, to_mcore


@dataclass(frozen=True)
class Spec:
    architecture: str = "Qwen3MoeForCausalLM"
    num_layers: int = 3
    moe_layers: tuple[int, ...] = (0, 2)
    num_experts: int = 4
    hidden_size: int = 6
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 2
    ffn_size: int = 8
    expert_ffn_size: int = 12
    vocab_size: int = 11
    tie_embeddings: bool = False
    qkv_bias: bool = False
    mtp_layers: int = 0
    shared_ffn_size: int = 0
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_dim: int = 0
    qk_rope_dim: int = 0
    v_head_dim: int = 0


SPEC = Spec()


def test_names_are_those_transformers_writes(tmp_path) -> None:
    from safetensors import safe_open

    from tests.tiny import random_checkpoint

    random_checkpoint(
        tmp_path, num_hidden_layers=3, mlp_only_layers=[1], num_experts=4, hidden_size=6,
        num_attention_heads=8,
        num_key_value_heads=4, head_dim=2, intermediate_size=8, moe_intermediate_size=12,
        vocab_size=11,
    )  # fmt: skip
    with safe_open(tmp_path / "model.safetensors", framework="pt") as reader:
        shapes = {name: tuple(reader.get_slice(name).get_shape()) for name in reader.keys()}  # noqa: SIM118
    assert dict(item for entry in entries(SPEC) for item in entry.hf) == shapes


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_parameter_returns_bit_exact(size: int) -> None:
    torch.manual_seed(0)
    seen = set()
    for entry in entries(SPEC):
        tensors = [torch.randn(shape) for _, shape in entry.hf]
        shards = [to_mcore(entry, tensors, SPEC, rank, size) for rank in range(size)]
        assert all(shard.shape == shard_shape(entry, size) for shard in shards), entry.name
        back = to_hf(entry, shards, SPEC)
        assert [name for name, _ in back] == list(find_entry(entry.name, SPEC).hf_names)
        assert all(
            found.equal(expected) and found.is_contiguous()
            for (_, found), expected in zip(back, tensors, strict=True)
        )
        seen.add(entry.rule.kind)
    assert seen == {"replicated", "vocab", "row", "qkv", "glu"}


def test_qkv_shards_hold_whole_groups() -> None:
    """Row by row: rank r holds, for each of its key heads, that group's two query heads, its key,
    its value.
    """
    entry = find_entry("decoder.layers.0.self_attention.linear_qkv.weight", SPEC)

    def rows(first: int, heads: int) -> torch.Tensor:  # row value = first + head number
        return (
            (first + torch.arange(heads).repeat_interleave(2))
            .float()[:, None]
            .expand(-1, 6)
            .clone()
        )

    shard = to_mcore(entry, [rows(0, 8), rows(100, 4), rows(200, 4)], SPEC, rank=1, size=2)
    heads = shard[::2, 0].int().tolist()
    assert heads == [4, 5, 102, 202, 6, 7, 103, 203]


def test_glu_shards_pair_gate_and_up() -> None:
    entry = find_entry("decoder.layers.2.mlp.experts.linear_fc1.weight3", SPEC)
    assert entry.hf_names[0] == "model.layers.2.mlp.experts.3.gate_proj.weight"
    gate = torch.arange(12.0)[:, None].expand(-1, 6)
    shard = to_mcore(entry, [gate, gate + 100], SPEC, rank=1, size=3)
    assert shard[:, 0].tolist() == [4, 5, 6, 7, 104, 105, 106, 107]


def test_vocabulary_is_padded_with_zero_rows_and_cut_again() -> None:
    entry = find_entry("output_layer.weight", SPEC)
    weight = torch.randn(11, 6)
    shards = [to_mcore(entry, [weight], SPEC, rank, 4) for rank in range(4)]
    assert [len(shard) for shard in shards] == [3, 3, 3, 3]
    assert shards[3][2].eq(0).all()
    assert to_hf(entry, shards, SPEC)[0][1].equal(weight)


def test_tied_output_layer_is_the_embedding() -> None:
    tied = Spec(tie_embeddings=True)
    assert find_entry("output_layer.weight", tied).hf_names == ("model.embed_tokens.weight",)
    assert "lm_head.weight" not in {name for entry in entries(tied) for name in entry.hf_names}


@pytest.mark.parametrize(
    ("local", "canonical"),
    [
        ("embedding.word_embeddings.weight", "embedding.word_embeddings.weight"),
        (
            "decoder.layers.1.input_layernorm.weight",
            "decoder.layers.5.self_attention.linear_qkv.layer_norm_weight",
        ),
        (
            "decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight",
            "decoder.layers.5.mlp.experts.linear_fc1.weight10",
        ),
        (
            "decoder.layers.0.mlp.experts.linear_fc2.weight0",
            "decoder.layers.4.mlp.experts.linear_fc2.weight8",
        ),
        (
            "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
            "decoder.layers.4.pre_mlp_layernorm.weight",
        ),
        ("decoder.layers.0.pre_mlp_layernorm.weight", "decoder.layers.4.pre_mlp_layernorm.weight"),
        (
            "decoder.layers.0.self_attention.linear_kv_up_proj.layer_norm_weight",
            "decoder.layers.4.self_attention.kv_layernorm.weight",
        ),
        (
            "decoder.layers.1.self_attention.linear_q_up_proj.layer_norm_weight",
            "decoder.layers.5.self_attention.q_layernorm.weight",
        ),
        ("decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.4.mlp.linear_fc1.weight"),
    ],
)
def test_local_and_te_names_become_canonical(local: str, canonical: str) -> None:
    """A chunk with global layers 4 and 5 on the expert rank that holds experts 8 and up."""
    layers = [SimpleNamespace(layer_number=5), SimpleNamespace(layer_number=6)]
    assert canonical_name(local, layers, experts_before=8) == canonical


def test_unknown_parameter_and_architecture_are_named() -> None:
    with pytest.raises(KeyError, match=r"mlp\.router\.expert_bias"):
        find_entry("decoder.layers.0.mlp.router.expert_bias", SPEC)
    with pytest.raises(ValueError, match="LlamaForCausalLM: no weight table; known: .*Qwen3Moe"):
        list(entries(Spec(architecture="LlamaForCausalLM")))
