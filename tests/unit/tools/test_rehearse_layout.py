"""Which model and which ranks a rehearsal takes."""

import json

import pytest

from megatron_rl.config import ParallelConfig
from megatron_rl.plan.grid import place
from megatron_rl_tools.rehearse.layout import check_provider, rank_roles, write_model


@pytest.mark.parametrize(
    ("sizes", "world_size", "ranks"),
    [
        (dict(), 1, [0]),
        (dict(tp=2, cp=4, ep=8, etp=1), 8, [0, 7]),
        # a second replica: its ranks export nothing, the last experts' exporter is rank 7
        (dict(tp=2, cp=4, ep=8, etp=1), 32, [0, 7, 31]),
        # both ends of an odd ring send first, the middle receives first
        (dict(cp=3), 3, [0, 1, 2]),
        (dict(pp=2, vp=2, ep=2), 4, [0, 1, 2, 3]),
    ],
)
def test_roles(sizes, world_size, ranks):
    assert rank_roles(ParallelConfig(**sizes), world_size) == ranks


def test_roles_have_every_stage_and_both_ends_of_every_axis():
    parallel = ParallelConfig(tp=2, cp=2, pp=4, ep=4, etp=1)
    places = [place(rank, parallel, 64) for rank in rank_roles(parallel, 64)]
    sizes = {"tp": 2, "cp": 2, "pp": 4, "replica": 4, "ep": 4, "etp": 1, "expert_replica": 4}
    for axis, size in sizes.items():
        shown = {getattr(item, axis) for item in places}
        assert {0, size - 1} <= shown, axis
    assert {item.pp for item in places} == {0, 1, 2, 3}


def test_models_of_megatron_bridge_are_refused():
    qwen, mamba = {"architectures": ["Qwen3MoeForCausalLM"]}, {"architectures": ["Zamba2"]}
    for provider, hf in (("native", mamba), ("auto", qwen)):
        check_provider(provider, hf)
    for provider, hf in (("bridge", qwen), ("auto", mamba)):
        with pytest.raises(ValueError, match=f"model.provider = {provider}: .*gpu-check"):
            check_provider(provider, hf)


def test_fewer_layers_keep_one_dense_layer(tmp_path):
    whole = {
        "num_hidden_layers": 6, "first_k_dense_replace": 3, "mlp_only_layers": [0, 5],
        "layer_types": ["a", "b"] * 3,
    }  # fmt: skip
    write_model(whole, tmp_path, 2)
    expected = {
        "num_hidden_layers": 2, "first_k_dense_replace": 1, "mlp_only_layers": [0],
        "layer_types": ["a", "b"],
    }  # fmt: skip
    assert json.loads((tmp_path / "config.json").read_text()) == expected
    write_model(whole, tmp_path, 9)
    assert json.loads((tmp_path / "config.json").read_text()) == whole
