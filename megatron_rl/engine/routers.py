"""Checks of a model's routers: replay must control every module that sends tokens to experts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router import Router, TopKRouter

from megatron_rl.config import LossConfig
from megatron_rl.engine.model import moe_routers
from megatron_rl.models.spec import ModelSpec
from megatron_rl.replay.compatibility import ReplayIncompatible


def check_routers(chunks: Sequence[GPTModel], moe_layers: Collection[int]) -> None:
    """Raise ReplayIncompatible, with their names, for routers that would route live under replay.

    moe_layers: 0-based MoE layers of the whole model; those in these chunks must have a router with
    the replay hook.
    """
    problems = list(problems_of(chunks, moe_layers))
    if problems:
        raise ReplayIncompatible("; ".join(problems))


def check_router_shift(loss: LossConfig, spec: ModelSpec) -> None:
    """Raise ValueError where loss.router_shift has no router probabilities to compare."""
    if not loss.switches.router_shift:
        return
    if not spec.moe_layers:
        raise ValueError(
            "loss.router_shift = true: the model has no MoE layer; set loss.router_shift = false,"
            " or loss.name = gmpo"
        )
    if spec.router.score_function != "softmax":
        raise ValueError(
            f"loss.router_shift = true with a {spec.router.score_function} router: RSPO compares"
            " the probabilities of a softmax, and its source does not say what they would be here;"
            " set loss.router_shift = false, or loss.name = gmpo"
        )


def problems_of(chunks: Sequence[GPTModel], moe_layers: Collection[int]) -> Iterator[str]:
    """Yield a message for every router that replay does not control; see check_routers."""
    routers = moe_routers(list(chunks))
    controlled = {id(router) for _, router in routers}
    for chunk in chunks:
        if count := getattr(chunk.config, "moe_n_hash_layers", 0):
            yield (
                f"moe_n_hash_layers = {count}: hash layers choose experts by the token, without a"
                " top-k that could be replayed; this model is not supported"
            )
        for name, module in chunk.named_modules():
            if not is_router(name, module):
                continue
            kind = type(module).__name__
            if not isinstance(module, TopKRouter):
                yield (
                    f"{name} is a {kind}: only megatron-core's TopKRouter has the replay hook; this"
                    " model is not supported"
                )
            elif (
                type(module).routing is not TopKRouter.routing
                or type(module).forward is not TopKRouter.forward
            ):
                yield (
                    f"{name} is a {kind}, which replaces TopKRouter's routing and with it the"
                    " replay hook; not supported"
                )
            elif id(module) not in controlled:
                yield (
                    f"{name} is a router outside the decoder's layers, as those of multi-token"
                    " prediction, which rollouts have no routes for; this model is not supported"
                )
    here = {layer.layer_number - 1 for chunk in chunks for layer in chunk.decoder.layers}
    for layer in sorted(here.intersection(moe_layers) - {layer for layer, _ in routers}):
        yield (
            f"layer {layer} has experts, but no TopKRouter as its mlp.router that could replay; not"
            " supported"
        )


def is_router(name: str, module: torch.nn.Module) -> bool:
    """Return True for a module of core's base class, or with a router's name.

    Gates of shared experts are no modules in core, so that they do not count.
    """
    return (
        isinstance(module, Router)
        or name.endswith(".router")
        or type(module).__name__.endswith("Router")
    )
