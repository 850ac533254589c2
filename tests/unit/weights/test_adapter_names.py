"""lora.targets select weights by their canonical names."""

from dataclasses import replace

import pytest

from megatron_rl.config import ConfigError
from megatron_rl.config.sections import LoraConfig
from megatron_rl.weights.adapters import (
    OUTSIDE,
    can_have_adapter,
    is_adapter,
    is_target,
    unmatched_targets,
)
from megatron_rl.weights.hf.targets import check_targets
from tests.unit.weights.test_mapping import SPEC

LAYER = "decoder.layers.0."
WEIGHTS = {
    "attention": LAYER + "self_attention.linear_qkv.weight",
    "mlp": LAYER + "mlp.linear_fc1.weight",
    "experts": LAYER + "mlp.experts.linear_fc2.weight12",
    "shared_experts": LAYER + "mlp.shared_experts.linear_fc1.weight",
}


@pytest.mark.parametrize("target", WEIGHTS)
def test_a_group_means_its_own_weights(target):
    for group, name in WEIGHTS.items():
        assert is_target(name, [target]) == (group == target)
        assert is_target(name, ["linear_proj", group]) and is_target(name, ["all"])


@pytest.mark.parametrize("target", OUTSIDE)
def test_embedding_and_lm_head_are_meant_by_name_alone(target):
    name = OUTSIDE[target]
    module = name.removesuffix(".weight").rpartition(".")[2]
    assert can_have_adapter(name, (5, 3)) and not is_target(name, ["all", *WEIGHTS])
    for other in OUTSIDE:
        assert is_target(name, ["all", other]) == (other == target)
    assert is_target(name, [module]) and not is_target(WEIGHTS["mlp"], [target, module])


def test_adapters_of_a_tied_pair_are_refused():
    tied, parted = (replace(SPEC, tie_embeddings=tied) for tied in (True, False))
    for target in (*OUTSIDE, "word_embeddings", "output_layer"):
        lora = LoraConfig(rank=2, targets=("all", target))
        with pytest.raises(ConfigError, match=f"targets = '{target}': adapters on a tied pair"):
            check_targets(lora, tied)
        check_targets(lora, parted)
        check_targets(LoraConfig(rank=0, targets=("all", target)), tied)
    for spec, names in ((tied, "linear_qkv$"), (parted, "output_layer, word_embeddings$")):
        with pytest.raises(ConfigError, match=f"no weight of the model matches; .*{names}"):
            check_targets(LoraConfig(rank=2, targets=("lm_head_",)), spec)


def test_shared_pairs_without_experts_are_refused():
    for targets in (("attention",), ("linear_qkv", "lm_head")):
        lora = LoraConfig(rank=2, targets=targets, shared_pairs=True)
        with pytest.raises(ConfigError, match="no routed expert of the model has an adapter"):
            check_targets(lora, SPEC)
    for targets in (("experts",), ("all",), ("attention", "linear_fc2")):
        check_targets(LoraConfig(rank=2, targets=targets, shared_pairs=True), SPEC)


@pytest.mark.parametrize("name", WEIGHTS.values())
def test_matrices_of_layers_can_have_an_adapter(name):
    assert can_have_adapter(name, (4, 3))
    assert not can_have_adapter(name, (4,)) and not can_have_adapter(name, (2, 4, 3))
    assert not can_have_adapter(LAYER + "mlp.router.weight", (4, 3))


def test_an_adapters_parameter_is_known_by_the_end_of_its_name():
    assert is_adapter(LAYER + "mlp.linear_fc1.lora_a")
    assert not is_adapter("lora_model." + LAYER + "mlp.lora_fc.weight")


def test_a_target_without_a_weight_is_refused_with_what_there_is():
    names = [WEIGHTS["attention"], WEIGHTS["experts"]]
    assert unmatched_targets(["all", "experts", "linear_qkv"], names) is None
    assert unmatched_targets(["attention", "mlp"], names) == (
        "lora.targets = 'mlp': no weight of the model matches; it has all, attention, experts,"
        " linear_fc2, linear_qkv"
    )
    assert "has all, attention, mlp, experts, shared_experts, linear_fc1" in (
        unmatched_targets(["q"], [*WEIGHTS.values()])
    )
