"""A pair that experts share, with experts grouped in one module, as TransformerEngine has them, and
with a module each: the same parameters and checkpoint keys, gradients summed over the experts.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron_rl.config.sections import LoraConfig
from megatron_rl.engine.adapter import Adapters, merge
from megatron_rl.engine.lora import make_adapter, make_factors, places, use_merged_weights
from megatron_rl.engine.lora_state import save_adapters
from megatron_rl.models.known import find_spec

EXPERTS, RANK, ROWS, COLUMNS = 4, 2, 6, 5
SPEC = replace(find_spec("qwen3-30b-a3b"), num_experts=EXPERTS)
ONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
PARALLEL = SimpleNamespace(
    ep_size=1, ep_rank=0, tp_size=1, tp_group=ONE, etp_group=ONE, expert_dp_group=ONE
)
LORA = LoraConfig(rank=RANK, targets=("experts",), shared_pairs=True)
NAME = "decoder.layers.3.mlp.experts.linear_fc2.weight"


class Grouped(nn.Module):
    def __init__(self, weights: list[torch.Tensor]) -> None:
        super().__init__()
        for number, weight in enumerate(weights):
            self.register_parameter(f"weight{number}", nn.Parameter(weight, requires_grad=False))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        weights = [getattr(self, f"weight{number}") for number in range(EXPERTS)]
        return torch.stack([weight @ row for weight, row in zip(weights, rows, strict=True)])


def tree(**modules: nn.Module) -> nn.Module:
    parent = nn.Module()
    for name, module in modules.items():
        parent.add_module(name, module)
    return parent


def make_chunk(weights: list[torch.Tensor], *, grouped: bool) -> nn.Module:
    """The fourth layer of a model, with the second projection of its experts alone."""
    if grouped:
        experts = tree(linear_fc2=Grouped(weights))
    else:
        linears = [nn.Linear(COLUMNS, ROWS, bias=False) for _ in weights]
        for linear, weight in zip(linears, weights, strict=True):
            linear.weight = nn.Parameter(weight, requires_grad=False)
        experts = tree(local_experts=nn.ModuleList(tree(linear_fc2=one) for one in linears))
    experts.sharded_state_dict = lambda *_: {}
    layer = tree(mlp=tree(experts=experts))
    layer.layer_number = 4
    return tree(decoder=tree(layers=nn.ModuleList([layer])))


def with_pair(chunk: nn.Module, a: torch.Tensor, b: torch.Tensor) -> Adapters:
    adapters = Adapters()
    for place in places(chunk, SPEC, PARALLEL, LORA):
        if not place.has_factors:
            make_factors(place, PARALLEL, (a, b))
        adapter = make_adapter(place, PARALLEL, LORA)
        adapters.by_module.setdefault(place.module, {})[place.attribute] = adapter
    return adapters


@pytest.fixture
def values():
    torch.manual_seed(0)
    weights = [torch.randn(ROWS, COLUMNS) for _ in range(EXPERTS)]
    return weights, torch.randn(RANK, COLUMNS), torch.randn(ROWS, RANK)


@pytest.mark.parametrize("grouped", [True, False])
def test_experts_share_parameters_and_their_key(values, grouped):
    weights, a, b = values
    chunk = make_chunk(weights, grouped=grouped)
    adapters = with_pair(chunk, a, b)
    trained = {name for name, p in chunk.named_parameters() if p.requires_grad}
    path = "decoder.layers.0.mlp.experts."
    assert trained == {f"{path}lora_{factor}_linear_fc2" for factor in "ab"}
    assert len(adapters.all) == EXPERTS
    assert {adapter.entry.name for adapter in adapters.all} == {NAME}
    experts = chunk.get_submodule(path[:-1])
    save_adapters(experts, {"_linear_fc2": adapters.all[0]}, PARALLEL, SPEC)
    tensors = experts.sharded_state_dict("mlp.experts.", (), {"dp_cp_group": ONE})
    keys = [f"mlp.experts.lora_{factor}_linear_fc2" for factor in "ab"]
    assert [tensor.key for tensor in tensors.values()] == list(tensors) == keys
    assert [tensor.global_shape for tensor in tensors.values()] == [a.shape, b.shape]


def test_grouped_experts_multiply_by_their_sums_with_one_product(values):
    weights, a, b = values
    chunk = make_chunk(weights, grouped=True)
    adapters = with_pair(chunk, a, b)
    (module, some), *_ = adapters.by_module.items()
    expected = [adapter.merged() for adapter in some.values()]
    merged = merge(some).values()
    assert all(ours.equal(theirs) for ours, theirs in zip(merged, expected, strict=True))
    use_merged_weights(module, adapters)
    rows = torch.randn(EXPERTS, COLUMNS)
    module(rows).square().sum().backward()
    first, second = (values.clone().requires_grad_() for values in (a, b))
    sums = [weight + LORA.scale * second @ first for weight in weights]
    torch.stack([w @ x for w, x in zip(sums, rows, strict=True)]).square().sum().backward()
    trained = next(iter(some.values()))
    assert torch.allclose(trained.a.grad, first.grad, rtol=1e-5)
    assert torch.allclose(trained.b.grad, second.grad, rtol=1e-5)


def test_gradients_of_a_pair_are_summed_before_they_are_rounded(values):
    """In bfloat16, a sum over experts that is rounded for each of them would be off."""
    torch.manual_seed(1)
    weights, a, b = ([w.bfloat16() for w in values[0]], *(v.bfloat16() for v in values[1:]))
    gradients = [torch.randn(ROWS, COLUMNS).bfloat16() for _ in weights]
    adapters = with_pair(make_chunk(weights, grouped=True), a, b)
    (some,) = adapters.by_module.values()
    torch.autograd.backward(list(merge(some).values()), gradients)
    whole = LORA.scale * sum(gradient.float() for gradient in gradients)
    trained = next(iter(some.values()))
    assert trained.b.grad.equal((whole @ a.float().T).bfloat16())
    assert trained.a.grad.equal((b.float().T @ whole).bfloat16())
