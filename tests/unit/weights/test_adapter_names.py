"""lora.targets select weights by their canonical names."""

import pytest

from megatron_rl.weights.adapters import (
    can_have_adapter,
    is_adapter,
    is_target,
    unmatched_targets,
)

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
