"""config.json -> ModelSpec: old and new key names, and what is refused; parallel sizes that do not
fit.
"""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.moe import moe_utils
from packaging.version import Version

from megatron_rl.config import ModelConfig, ParallelConfig
from megatron_rl.engine.model import make_transformer_config, uses_transformer_engine
from megatron_rl.models import fit
from megatron_rl.models.families import make_spec
from megatron_rl.models.fit import check_sizes
from megatron_rl.models.spec import ModelError, load_hf_config, padded_vocab_size
from tests.tiny import random_checkpoint


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> dict:
    path = random_checkpoint(
        tmp_path_factory.mktemp("tiny"), rope_theta=12345.0, mlp_only_layers=[1], vocab_size=63
    )
    return load_hf_config(path)


def test_old_and_new_keys_mean_the_same(hf: dict) -> None:
    """transformers 4 wrote num_experts and rope_theta, transformers 5 num_local_experts and
    rope_parameters.
    """
    names = ("num_experts", "num_local_experts", "rope_theta", "rope_parameters")
    rest = {key: value for key, value in hf.items() if key not in names}
    old = make_spec({**rest, "num_experts": 8, "rope_theta": 12345.0})
    new = make_spec(
        {
            **rest,
            "num_local_experts": 8,
            "rope_parameters": {"rope_theta": 12345.0, "rope_type": "default"},
        }
    )
    assert old == new == make_spec(hf)
    assert (new.num_experts, new.rope_theta, new.moe_layers) == (8, 12345.0, (0, 2, 3))


def test_sparse_step(hf: dict) -> None:
    assert make_spec({**hf, "decoder_sparse_step": 2, "mlp_only_layers": []}).moe_layers == (1, 3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"architectures": ["LlamaForCausalLM"]},
            "LlamaForCausalLM.*supported: Qwen3MoeForCausalLM",
        ),
        ({"architectures": None}, "not supported"),
        ({"rms_norm_eps": None}, "key rms_norm_eps is missing"),
        (
            {"num_experts": None, "num_local_experts": None},
            "num_experts or num_local_experts is missing",
        ),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_scaling.*yarn"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"mlp_only_layers": [0, 1, 2, 3]}, "no layer has experts"),
        ({"vocab_size": "96"}, "vocab_size = '96': must be a whole number of at least 1"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0: must be a whole number"),
        ({"num_hidden_layers": 4.5}, "num_hidden_layers = 4.5: must be a whole number"),
        ({"hidden_size": True}, "hidden_size = True: must be a whole number"),
        ({"num_experts_per_tok": -1}, "num_experts_per_tok = -1: must be"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step = 0: must be"),
        ({"rope_scaling": "none"}, "rope_scaling = 'none': must be an object"),
        ({"layer_types": 5}, "layer_types = 5: must be a list"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps = 'small': must be a number"),
        ({"rope_parameters": {"rope_theta": [1]}}, r"rope_theta = \[1\]: must be a number"),
        ({"architectures": 5}, "architectures = 5: not supported"),
    ],
)
def test_what_cannot_be_trained_is_named(hf: dict, change: dict, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        make_spec({**hf, **change})


def test_unreadable_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        load_hf_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ModelError, match="one JSON object"):
        load_hf_config(tmp_path)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"tp": 4}, r"parallel\.tp = 4 must divide the model's num_key_value_heads, 2"),
        ({"ep": 3}, r"parallel\.ep = 3 must divide the model's number of experts, 8"),
        ({"pp": 2, "vp": 3}, r"pp x vp = 6 must divide the model's num_hidden_layers .*, 4"),
        ({"etp": 3}, r"parallel\.etp = 3 must divide the model's moe_intermediate_size, 32"),
        (
            {"pp": 3},
            r"pp x vp = 3 must divide the model's num_hidden_layers \(or set layers_per_stage\), 4",
        ),
        (
            {"pp": 3, "layers_per_stage": (1, 1, 3)},
            r"\[1, 1, 3\] adds up to 5, the model's num_hidden_layers is 4",
        ),
    ],
)
def test_sizes_that_do_not_divide_the_model(hf: dict, layout: dict, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        make_transformer_config(
            make_spec(hf), ModelConfig(path="x"), ParallelConfig(**layout), torch.device("cpu")
        )


def test_settings_that_cannot_work(hf: dict) -> None:
    spec, cpu = make_spec(hf), torch.device("cpu")
    with pytest.raises(ModelError, match="token_dispatcher = allgather"):
        make_transformer_config(
            spec, ModelConfig(path="x", token_dispatcher="allgather"), ParallelConfig(pp=2), cpu
        )
    with pytest.raises(ModelError, match="layer_spec = transformer_engine"):
        make_transformer_config(
            spec, ModelConfig(path="x", layer_spec="transformer_engine"), ParallelConfig(), cpu
        )


@pytest.fixture
def te_installed(monkeypatch) -> None:
    """As with TransformerEngine: it is found, and core imports its kernels for the rotation and the
    permutation of experts.
    """
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(loader=name))
    for kernel in (
        "fused_permute", "fused_permute_with_probs", "fused_sort_chunks_by_index",
        "fused_sort_chunks_by_index_with_probs",
        "fused_unpermute",
    ):  # fmt: skip
        monkeypatch.setattr(moe_utils, kernel, lambda: None, raising=False)
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", lambda: None)


def test_experts_are_permuted_by_transformer_engine_where_it_is_used(
    hf: dict, te_installed
) -> None:
    """core's own combination adds up bfloat16 in the order of CUDA's atomics."""
    spec = make_spec(hf)
    for device, settings, fused in [
        ("cuda", {}, True),
        ("cuda", {"layer_spec": "transformer_engine"}, True),
        ("cuda", {"layer_spec": "local"}, False),
        ("cuda", {"dtype": "float32"}, False),
        ("cpu", {}, False),
    ]:
        config = make_transformer_config(
            spec, ModelConfig(path="x", **settings), ParallelConfig(), torch.device(device)
        )
        assert config.moe_permute_fusion is config.moe_grouped_gemm is fused, (device, settings)


def test_float32_on_a_gpu_is_not_computed_by_transformer_engine(te_installed) -> None:
    gpu = torch.device("cuda")
    assert uses_transformer_engine(ModelConfig(path="x"), gpu)
    assert not uses_transformer_engine(ModelConfig(path="x", dtype="float32"), gpu)
    with pytest.raises(
        ValueError, match=r"layer_spec = transformer_engine with dtype = float32: .* TF32"
    ):
        ModelConfig(path="x", dtype="float32", layer_spec="transformer_engine")


@pytest.mark.parametrize(
    ("parallel", "stages"),
    [
        ({"pp": 3, "layers_per_stage": (1, 2, 1)}, [[[0]], [[1, 2]], [[3]]]),
        ({"pp": 2, "vp": 2, "layers_per_stage": (1, 1, 1, 1)}, [[[0], [2]], [[1], [3]]]),
        ({"pp": 2, "layers_per_stage": (1, 3)}, [[[0]], [[1, 2, 3]]]),
    ],
)
def test_stages_of_unequal_size(hf: dict, monkeypatch, parallel: dict, stages: list) -> None:
    """core's own list of a stage's layers: stages are dealt over pipeline ranks, then over their
    chunks.
    """
    from megatron.core import parallel_state

    monkeypatch.setattr(
        parallel_state, "get_virtual_pipeline_model_parallel_world_size", lambda: parallel.get("vp")
    )
    cfg = ParallelConfig(**parallel)
    layout = make_transformer_config(
        make_spec(hf), ModelConfig(path="x"), cfg, torch.device("cpu")
    ).pipeline_model_parallel_layout
    held = [
        [layout.get_layer_id_list(vp_stage=chunk, pp_rank=rank) for chunk in range(cfg.vp)]
        for rank in range(cfg.pp)
    ]
    assert held == stages


def test_interleaved_stages_never_batch_their_messages(hf: dict) -> None:
    """core silently crosses them over; without interleaving they are batched on a GPU only."""
    spec, model = make_spec(hf), ModelConfig(path="x")
    for device, batched in (("cpu", False), ("cuda", True)):
        target = torch.device(device)
        plain = make_transformer_config(spec, model, ParallelConfig(pp=2), target)
        interleaved = make_transformer_config(spec, model, ParallelConfig(pp=2, vp=2), target)
        assert (plain.batch_p2p_comm, plain.overlap_p2p_comm) == (batched, False)
        assert (interleaved.batch_p2p_comm, interleaved.overlap_p2p_comm) == (False, True)


def test_recompute(hf: dict) -> None:
    def config(**model):
        return make_transformer_config(
            make_spec(hf), ModelConfig(path="x", **model), ParallelConfig(), torch.device("cpu")
        )

    block = config(recompute="block", recompute_layers=2)
    assert (block.recompute_granularity, block.recompute_method, block.recompute_num_layers) == (
        "full",
        "block",
        2,
    )
    full = config(recompute="full")
    assert (full.recompute_granularity, full.recompute_method, full.recompute_num_layers) == (
        "full",
        "uniform",
        1,
    )
    assert config(recompute="none").recompute_granularity is None
    with pytest.raises(
        ModelError,
        match=r"recompute_layers = 3 must divide the layers of every pipeline stage, \[4\]",
    ):
        config(recompute="full", recompute_layers=3)


def test_transformer_config(hf: dict) -> None:
    model = ModelConfig(path="x", recompute="selective", router_dtype="model")
    config = make_transformer_config(
        make_spec(hf), model, ParallelConfig(tp=2, pp=2), torch.device("cpu")
    )
    assert (
        config.sequence_parallel and config.variable_seq_lengths and config.calculate_per_token_loss
    )
    assert not config.batch_p2p_comm and not config.moe_enable_routing_replay
    assert config.moe_router_dtype is None and config.recompute_modules == ["moe"]
    assert config.layernorm_epsilon == 1e-6 and config.moe_layer_freq == [1, 0, 1, 1]
    assert [padded_vocab_size(make_spec(hf), tp) for tp in (1, 2, 4)] == [63, 64, 64]


@pytest.mark.parametrize(
    ("layout", "world_size", "said"),
    [
        ({"tp": 2, "pp": 2}, 6, "2 x 2 x 1 = 4 must divide the number of ranks, 6"),
        (
            {"tp": 2, "ep": 2},
            2,
            r"2 x 2 x 1 = 4 must divide .* 2 \(the default is tp; set parallel.etp = 1",
        ),
    ],
)
def test_sizes_that_do_not_tile_the_ranks(layout: dict, world_size: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_sizes(ParallelConfig(**layout), world_size)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"tp": 2, "etp": 1}, r"parallel\.tp = 2 with ep = 1 and etp = 1: .*unreduced"),
        ({"cp": 2, "etp": 2}, r"parallel\.tp = 1 with ep = 1 and etp = 2: .*wrong ranks"),
    ],
)
def test_sizes_that_old_core_computes_wrongly(monkeypatch, layout: dict, said: str) -> None:
    monkeypatch.setattr(fit, "core_version", lambda: Version("0.16.1"))
    with pytest.raises(ValueError, match=said):
        check_sizes(ParallelConfig(**layout), 2)
    monkeypatch.setattr(fit, "core_version", lambda: Version("0.19.2"))
    check_sizes(ParallelConfig(**layout), 2)


def test_sizes_that_tile() -> None:
    check_sizes(ParallelConfig(tp=2, pp=2, ep=2, etp=1), 4)
    check_sizes(ParallelConfig(ep=4), 8)
