"""Modules that route tokens and that replay does not control are refused by name; routers that it
controls are not.
"""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.moe.router import Router, TopKRouter

from megatron_rl.config import LossConfig
from megatron_rl.engine.routers import check_router_shift, check_routers
from megatron_rl.replay.compatibility import ReplayIncompatible


class ExpertChoiceRouter(torch.nn.Module):
    """Experts choose tokens."""


class HashRouter(Router):
    """Experts by the token's id; core's base class."""

    def routing(self, logits):
        raise NotImplementedError

    def forward(self, input):
        raise NotImplementedError


class OwnRouting(TopKRouter):
    """A router that overrides what calls the replay hook."""

    def routing(self, logits, padding_mask=None):
        raise NotImplementedError


class OwnProjection(TopKRouter):
    """Another projection before the same routing: replay controls it."""

    def gating(self, input):
        raise NotImplementedError


def bare(kind):
    """A router without parameters: real ones need process groups."""
    router = kind.__new__(kind)
    torch.nn.Module.__init__(router)
    return router


class Mlp(torch.nn.Module):
    def __init__(self, router=None, **modules):
        super().__init__()
        for name, module in (
            modules.items() if router is None else {"router": router, **modules}.items()
        ):
            self.add_module(name, module)


def chunk_of(*mlps, first=1, config=None, **modules):
    """What the check reads of a GPTModel: decoder layers with these MLPs."""
    chunk = torch.nn.Module()
    chunk.config = config or SimpleNamespace()
    chunk.decoder = torch.nn.Module()
    chunk.decoder.layers = torch.nn.ModuleList()
    for number, mlp in enumerate(mlps, first):
        layer = torch.nn.Module()
        layer.layer_number, layer.mlp = number, mlp
        chunk.decoder.layers.append(layer)
    for name, module in modules.items():
        chunk.add_module(name, module)
    return chunk


def test_top_k_routers_and_dense_layers_pass():
    check_routers([chunk_of(Mlp(bare(TopKRouter)), Mlp())], {0})
    check_routers([chunk_of(Mlp(bare(OwnProjection)))], {0, 1})  # layer 1 is on another stage
    check_routers([chunk_of(Mlp(), Mlp())], ())


@pytest.mark.parametrize(
    ("router", "said"),
    [
        (
            ExpertChoiceRouter(),
            r"decoder\.layers\.0\.mlp\.router is a ExpertChoiceRouter: only .* TopKRouter",
        ),
        (bare(HashRouter), r"decoder\.layers\.0\.mlp\.router is a HashRouter: only .* TopKRouter"),
        (
            bare(OwnRouting),
            r"decoder\.layers\.0\.mlp\.router is a OwnRouting, which replaces TopKRouter's routing",
        ),
        (torch.nn.Linear(2, 2), r"decoder\.layers\.0\.mlp\.router is a Linear: only .* TopKRouter"),
    ],
)
def test_another_kind_of_router_is_named(router, said):
    with pytest.raises(ReplayIncompatible, match=said):
        check_routers([chunk_of(Mlp(router))], {0})


def test_a_router_under_another_name_is_found():
    with pytest.raises(
        ReplayIncompatible,
        match=r"decoder\.layers\.0\.mlp\.choice is a ExpertChoiceRouter.*layer 0 has",
    ):
        check_routers([chunk_of(Mlp(choice=ExpertChoiceRouter()))], {0})


def test_routers_of_multi_token_prediction_are_named():
    chunk = chunk_of(Mlp(bare(TopKRouter)), mtp=Mlp(bare(TopKRouter)))
    with pytest.raises(
        ReplayIncompatible,
        match=r"^mtp\.router is a router outside the decoder.*this model is not supported",
    ):
        check_routers([chunk], {0})


def test_hash_layers_are_named():
    chunk = chunk_of(Mlp(bare(TopKRouter)), config=SimpleNamespace(moe_n_hash_layers=3))
    with pytest.raises(ReplayIncompatible, match="moe_n_hash_layers = 3: hash layers"):
        check_routers([chunk], {0})


def test_a_layer_with_experts_and_no_router_is_named():
    with pytest.raises(ReplayIncompatible, match="layer 4 has experts, but no"):
        check_routers([chunk_of(Mlp(bare(TopKRouter)), Mlp(), first=4)], {3, 4})


def test_all_are_named_together():
    with pytest.raises(ReplayIncompatible, match=r"layers\.0\.mlp\.router.*layers\.1\.mlp\.router"):
        check_routers([chunk_of(Mlp(bare(OwnRouting)), Mlp(bare(HashRouter)))], {0, 1})


@pytest.mark.parametrize(
    ("moe_layers", "score_function", "message"),
    [
        ((), "softmax", "no MoE layer"),
        ((0, 1), "sigmoid", "sigmoid router.*softmax"),
        ((0, 1), "softmax", None),
    ],
)
def test_the_router_shift_needs_probabilities_of_a_softmax(moe_layers, score_function, message):
    spec = SimpleNamespace(
        moe_layers=moe_layers, router=SimpleNamespace(score_function=score_function)
    )
    check_router_shift(LossConfig(name="gmpo"), spec)
    if message is None:
        check_router_shift(LossConfig(name="rspo"), spec)
        return
    with pytest.raises(ValueError, match=f"loss.router_shift = true.*{message}.*loss.name = gmpo"):
        check_router_shift(LossConfig(name="rspo"), spec)
