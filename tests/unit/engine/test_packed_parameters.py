"""Where attention finds the bounds of packed sequences: on the device for TransformerEngine, else
on the host.
"""

from types import SimpleNamespace

import pytest
import torch

from megatron_rl.config import ModelConfig, ParallelConfig
from megatron_rl.engine import model
from megatron_rl.engine.forward import packed_parameters
from megatron_rl.models.families import make_spec
from megatron_rl.models.spec import load_hf_config
from tests.families import family_checkpoint

DEVICE = torch.device("meta")  # any but the host


@pytest.mark.parametrize(
    ("family", "te"), [("deepseek_v3", True), ("deepseek_v3", False), ("qwen3_moe", False)]
)
def test_bounds_are_where_attention_reads_them(tmp_path, monkeypatch, family, te):
    """Latent attention has no fused RoPE: without permute fusion its configuration can be made
    without TransformerEngine.
    """
    monkeypatch.setattr(model, "uses_transformer_engine", lambda *_: te)
    spec = make_spec(load_hf_config(family_checkpoint(tmp_path, family)))
    settings, fields = ModelConfig(path=tmp_path), {"moe_permute_fusion": False}
    core = model.make_transformer_config(
        spec, settings, ParallelConfig(), torch.device("cpu"), fields
    )
    batch = SimpleNamespace(
        cu_seqlens=torch.tensor([0, 3, 7], dtype=torch.int32), tokens=torch.empty(7, device=DEVICE)
    )
    packed = packed_parameters(batch, core)
    for bounds in (packed.cu_seqlens_q, packed.cu_seqlens_kv):
        assert bounds.device.type == ("meta" if te else "cpu")
    assert packed.max_seqlen_q == packed.max_seqlen_kv == 4
