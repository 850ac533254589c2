"""Every module that sends tokens to experts must be one that replay controls: the others are
refused by name.
"""

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
    """Raise ReplayIncompatible, naming each, for routers of these chunks that would route live
    whatever is replayed.

    moe_layers: 0-based, of the whole model; each that is here must have a router with the replay
    hook.
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
    found = moe_routers(list(chunks))
    controlled = {id(router) for _, router in found}
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
    for layer in sorted(here.intersection(moe_layers) - {layer for layer, _ in found}):
        yield (
            f"layer {layer} has experts, but no TopKRouter as its mlp.router that could replay; not"
            " supported"
        )


def is_router(name: str, module: torch.nn.Module) -> bool:
    """core's base class, or what is called a router.

    Gates of shared experts are no modules in core.
    """
    return (
        isinstance(module, Router)
        or name.endswith(".router")
        or type(module).__name__.endswith("Router")
    )
