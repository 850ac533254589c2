"""What TransformerEngine's attention gets of a packed micro-batch: every tensor on its device, in
its dtype.

The device here is torch's meta device, which holds no values: reading one, as core's unfused RoPE
does with the bounds of sequences, fails on it, and would wait for a GPU.
"""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import multi_latent_attention

from megatron_rl.config import ModelConfig, ParallelConfig
from megatron_rl.distributed import make_parallel
from megatron_rl.engine import model
from megatron_rl.engine.forward import packed_parameters
from megatron_rl.models.families import make_spec
from megatron_rl.models.spec import load_hf_config
from tests.families import family_checkpoint

DEVICE = torch.device("meta")
LENGTHS = (5, 2, 4)
OF_TE = {field.name for field in dataclasses.fields(PackedSeqParams)}
"""core passes these fields to TransformerEngine's attention."""


class Recorder(torch.nn.Module):
    """In place of TransformerEngine's attention, which on a GPU takes the address of every tensor
    that it gets.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(
        self, query, key, value, attention_mask, *, packed_seq_params, attn_mask_type=None, **others
    ):
        self.calls += 1
        assert attention_mask is None and not any(
            isinstance(value, torch.Tensor) for value in others.values()
        )
        for name, tensor in {"query": query, "key": key, "value": value}.items():
            assert (tensor.device, tensor.dtype) == (DEVICE, torch.bfloat16), name
            assert (
                tensor.dim() == 3 and tensor.size(0) == sum(LENGTHS) and tensor.stride(-1) == 1
            ), name
        for name in OF_TE:
            found = getattr(packed_seq_params, name)
            if isinstance(found, torch.Tensor):
                assert (found.device, found.dtype) == (DEVICE, torch.int32), name
                assert found.shape == (len(LENGTHS) + 1,), name
        assert (
            packed_seq_params.cu_seqlens_q is not None
            and packed_seq_params.cu_seqlens_kv is not None
        )
        assert packed_seq_params.max_seqlen_q == packed_seq_params.max_seqlen_kv == max(LENGTHS)
        assert packed_seq_params.qkv_format == "thd"
        return query.new_empty(query.size(0), query.size(1) * value.size(2))


class OnDevice(torch.nn.Module):
    """The angles of core's rotary embedding, which it computes where CUDA would be, moved to the
    device.
    """

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def get_rotary_seq_len(self, *arguments):
        return self.inner.get_rotary_seq_len(*arguments)

    def forward(self, *arguments, **options):
        found = self.inner(*arguments, **options)
        return (found[0].to(DEVICE), found[1]) if isinstance(found, tuple) else found.to(DEVICE)

    def get_cached_cos_sin(self, *arguments, **options):
        return tuple(
            found.to(DEVICE) for found in self.inner.get_cached_cos_sin(*arguments, **options)
        )


class FusedRope:
    """In place of core's kernels for the fused RoPE of latent attention, which read the bounds of
    sequences on a GPU.
    """

    def __init__(self) -> None:
        self.calls = 0

    def of_queries(self, query, cos, sin, plain, rotary, bounds, cp_rank, cp_size):
        self.check(bounds)
        return query

    def of_keys(
        self, key_value, rotary_key, cos, sin, rotary, plain, value, bounds, cp_rank, cp_size
    ):
        self.check(bounds)
        rows = key_value.shape[:-1]
        return key_value.new_empty(*rows, plain + rotary), key_value.new_empty(*rows, value)

    def check(self, bounds):
        self.calls += 1
        assert (bounds.device, bounds.dtype, bounds.shape) == (
            DEVICE,
            torch.int32,
            (len(LENGTHS) + 1,),
        )


@pytest.fixture
def parallel():
    groups = make_parallel(ParallelConfig(), device="cpu", timeout_minutes=2)
    yield dataclasses.replace(groups, device=DEVICE)
    groups.destroy()


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v2", "moonlight", "qwen3_moe"])
def test_attention_of_transformer_engine_gets_tensors_of_its_device(tmp_path, parallel, family):
    """Local layers, in the configuration for TransformerEngine's, with the bounds that the engine
    then makes.

    qwen3_moe: its RoPE runs before, as one fused kernel that reads the bounds on the device; it is
    left out here.
    """
    run_attention(tmp_path, parallel, family)


def test_fused_rope_of_latent_attention_gets_bounds_on_the_device(tmp_path, parallel, monkeypatch):
    fused = FusedRope()
    monkeypatch.setattr(multi_latent_attention, "fused_apply_mla_rope_for_q", fused.of_queries)
    monkeypatch.setattr(multi_latent_attention, "fused_apply_mla_rope_for_kv", fused.of_keys)
    spec = run_attention(tmp_path, parallel, "deepseek_v2_yarn", apply_rope_fusion=True)
    assert fused.calls == 2 * spec.num_layers


def run_attention(tmp_path, parallel, family, **fields):
    """The model's spec, after every layer's attention; fields: of core's configuration, once the
    model is made.
    """
    spec = make_spec(load_hf_config(family_checkpoint(tmp_path, family)))
    settings = ModelConfig(path=tmp_path, dtype="bfloat16")
    config = model.make_transformer_config(spec, settings, ParallelConfig(), torch.device("cpu"))
    config.perform_initialization = False
    with DEVICE:
        (chunk,) = model.make_model(spec, settings, config, parallel)
    for name, value in {"transformer_impl": "transformer_engine", **fields}.items():
        setattr(config, name, value)
    bounds = torch.tensor([0, 5, 7, 11], dtype=torch.int32)
    packed = packed_parameters(
        SimpleNamespace(cu_seqlens=bounds, tokens=torch.empty(11, device=DEVICE)), config
    )
    recorder = Recorder()
    for layer in chunk.decoder.layers:
        attention = layer.self_attention
        attention.core_attention = recorder
        if spec.is_mla:
            attention.rotary_pos_emb = OnDevice(attention.rotary_pos_emb)
        hidden = torch.empty(sum(LENGTHS), 1, spec.hidden_size, dtype=torch.bfloat16, device=DEVICE)
        output, _ = attention(hidden, None, packed_seq_params=packed)
        assert output.shape == hidden.shape
    assert recorder.calls == spec.num_layers
    return spec
