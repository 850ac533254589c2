"""A layer with an adapter multiplies by W + s B A, and keeps no copy of it for backward."""

import gc
import weakref

import pytest
import torch
from torch import nn

from megatron_rl.config.sections import LoraConfig
from megatron_rl.engine.lora import Adapter, Adapters, initial_a, use_merged_weights
from megatron_rl.weights.adapters import is_target, unmatched_targets
from megatron_rl.weights.hf.export import weight_values

NAMES = (
    "decoder.layers.0.self_attention.linear_qkv.weight",
    "decoder.layers.0.mlp.linear_fc1.weight",
    "decoder.layers.1.mlp.experts.linear_fc1.weight12",
    "decoder.layers.1.mlp.shared_experts.linear_fc2.weight",
)


@pytest.fixture
def layer():
    torch.manual_seed(0)
    module = nn.Linear(8, 6, bias=False).requires_grad_(False)
    a, b = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.randn(6, 2))
    adapter = Adapter("w", module.weight, a, b, 0.5, None, None)
    module.weight.adapter = adapter
    switch = Adapters({module: {"weight": adapter}})
    use_merged_weights(module, switch)
    return module, adapter, switch


def test_output_and_gradients_are_those_of_the_merged_weight(layer):
    module, adapter, switch = layer
    x = torch.randn(5, 8, requires_grad=True)
    module(x).square().sum().backward()
    a, b = (p.detach().clone().requires_grad_() for p in (adapter.a, adapter.b))
    other = x.detach().clone().requires_grad_()
    (other @ (module.weight + 0.5 * b @ a).T).square().sum().backward()
    for ours, theirs in ((adapter.a, a), (adapter.b, b), (x, other)):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-6)
    assert module.weight.grad is None and "weight" not in module.__dict__
    with switch.disabled():
        assert module(x).equal(x @ module.weight.T)
    assert weight_values(module.weight).equal(adapter.merged())
    assert weight_values(adapter.a).equal(adapter.a)


def test_nothing_keeps_the_merged_weight_until_backward(layer, monkeypatch):
    module, _, _ = layer
    made, real = [], Adapter.merged

    def merged(self, product=None):
        result = real(self, product)
        made.append(weakref.ref(result.untyped_storage()))
        return result

    monkeypatch.setattr(Adapter, "merged", merged)
    x = torch.randn(5, 8, requires_grad=True)  # its gradient needs the weight
    output = module(x)
    gc.collect()
    assert len(made) == 1 and made[0]() is None
    output.sum().backward()
    assert len(made) == 2, "backward makes it again"


def test_an_error_in_the_layer_leaves_its_weight(layer):
    module, _, _ = layer
    with pytest.raises(RuntimeError):
        module(torch.randn(5, 7))
    assert isinstance(module.weight, nn.Parameter)


def test_a_bfloat16_sum_is_rounded_once():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(64, 32, dtype=torch.bfloat16))
    a, b = (nn.Parameter(torch.randn(size, dtype=torch.bfloat16)) for size in ((4, 32), (64, 4)))
    merged = Adapter("w", weight, a, b, 0.3, None, None).merged()
    exact = weight.double() + 0.3 * (b.double() @ a.double())
    # half a unit in the last of 8 bits; a product rounded before the sum adds as much again
    assert ((merged.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()
    twice = weight + (0.3 * (b @ a))
    assert ((twice.double() - exact).abs() > exact.abs() * 2**-8 + 1e-6).any()


def test_first_values_depend_on_name_and_seed_alone():
    a = initial_a(NAMES[0], 4, 100, seed=3)
    assert a.equal(initial_a(NAMES[0], 4, 100, seed=3)) and a.abs().max() <= 0.1
    assert not a.equal(initial_a(NAMES[1], 4, 100, seed=3))
    assert not a.equal(initial_a(NAMES[0], 4, 100, seed=4))
    assert abs(float(a.std()) - 0.1 / 3**0.5) < 0.005


@pytest.mark.parametrize(
    ("target", "matching"),
    [
        ("all", (0, 1, 2, 3)),
        ("attention", (0,)),
        ("mlp", (1,)),
        ("experts", (2,)),
        ("shared_experts", (3,)),
        ("linear_fc1", (1, 2)),
    ],
)
def test_targets(target, matching):
    assert [is_target(name, [target]) for name in NAMES] == [i in matching for i in range(4)]


def test_a_target_that_matches_nothing_is_named_with_those_that_do():
    assert unmatched_targets(["all", "linear_qkv"], NAMES) is None
    problem = unmatched_targets(["attention", "q_proj"], NAMES)
    assert "lora.targets = 'q_proj'" in problem and "linear_qkv" in problem


def test_scale():
    assert LoraConfig(rank=8, alpha=16).scale == 2
    assert LoraConfig(rank=16, alpha=16, rslora=True).scale == 4
