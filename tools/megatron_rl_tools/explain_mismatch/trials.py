"""The trials: each changes one thing in the trainer, and the distance to the server is measured
again.

A trial is data: its rung of the ladder, the values to try, and how to apply a value to an engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from megatron_rl.engine.engine import Engine
from megatron_rl.engine.model import moe_routers
from megatron_rl.models.spec import ModelSpec
from megatron_rl.replay.router import LiveTopK
from megatron_rl_tools.explain_mismatch.trainer_side import Edit

GATES, MODEL, SAMPLING = "same gate weights", "same model settings", "same sampling"


@dataclass(frozen=True)
class Trial:
    """One thing that is changed in the trainer."""

    name: str
    rung: str
    values: Callable[[ModelSpec], Sequence[float]]
    """The values to try for a model; () if the trial does not apply to it."""
    edit: Callable[[float], Edit]
    is_smooth: bool = False
    """A search between these values for the best one makes sense."""


# Gate weights


def rounded_routers(_: float) -> Edit:
    """Round router weights to bfloat16."""

    @contextmanager
    def edit(engine: Engine) -> Iterator[None]:
        weights = [router.weight for _, router in moe_routers(engine.chunks)]
        before = [weight.data.clone() for weight in weights]
        for weight in weights:
            weight.data.copy_(weight.data.bfloat16())
        try:
            yield
        finally:
            for weight, values in zip(weights, before, strict=True):
                weight.data.copy_(values)

    return edit


def without_bias(_: float) -> Edit:
    """Select experts without the expert bias."""

    @contextmanager
    def edit(engine: Engine) -> Iterator[None]:
        biases = [router.expert_bias for _, router in moe_routers(engine.chunks)]
        before = [bias.clone() for bias in biases]
        for bias in biases:
            bias.zero_()
        try:
            yield
        finally:
            for bias, values in zip(biases, before, strict=True):
                bias.copy_(values)

    return edit


def router_setting(name: str, convert: Callable[[float], object]) -> Callable[[float], Edit]:
    """Change a field of core's configuration that routers read in every forward."""

    def make(value: float) -> Edit:
        @contextmanager
        def edit(engine: Engine) -> Iterator[None]:
            configs = {
                id(router.config): router.config for _, router in moe_routers(engine.chunks)
            }.values()
            before = [getattr(config, name) for config in configs]
            for config in configs:
                setattr(config, name, convert(value))
            try:
                yield
            finally:
                for config, old in zip(configs, before, strict=True):
                    setattr(config, name, old)

        return edit

    return make


# Routes


def live_from(layer: int) -> Edit:
    """Replay the server's routes only in the MoE layers below `layer`."""

    @contextmanager
    def edit(engine: Engine) -> Iterator[None]:
        overrides: list[Any] = [router.router_replay for _, router in moe_routers(engine.chunks)]
        before = [override.decide for override in overrides]

        def decide(
            at: int, scores: torch.Tensor, live_topk: LiveTopK
        ) -> tuple[torch.Tensor, torch.Tensor]:
            # asked for in every layer: the manager counts that every route is consumed
            used = engine.manager.decide(at, scores, live_topk)
            return used if at < layer else live_topk(None)

        for override in overrides:
            override.decide = decide
        try:
            yield
        finally:
            for override, old in zip(overrides, before, strict=True):
                override.decide = old

    return edit


# The model's settings


def rope_theta(value: float) -> Edit:
    """Use another theta in the frequencies theta^(-i / d) of plain RoPE."""

    @contextmanager
    def edit(engine: Engine) -> Iterator[None]:
        ropes = rotary_embeddings(engine)
        before = [rope.inv_freq for rope in ropes]
        for rope, frequencies in zip(ropes, before, strict=True):
            rope.inv_freq = frequencies ** (math.log(value) / math.log(engine.spec.rope_theta))
            forget(rope)
        try:
            yield
        finally:
            for rope, frequencies in zip(ropes, before, strict=True):
                rope.inv_freq = frequencies
                forget(rope)

    return edit


def rotary_embeddings(engine: Engine) -> list[Any]:
    """Return the rotary embeddings of all chunks; latent attention has one in every layer."""
    modules = (module for chunk in engine.chunks for module in chunk.modules())
    return [
        module for module in modules if isinstance(getattr(module, "inv_freq", None), torch.Tensor)
    ]


def forget(rope: Any) -> None:
    """Clear core's caches of values that it computed from the frequencies."""
    for name in ("forward", "get_cos_sin", "get_emb"):
        if (clear := getattr(getattr(rope, name, None), "cache_clear", None)) is not None:
            clear()


def norm_eps(value: float) -> Edit:
    @contextmanager
    def edit(engine: Engine) -> Iterator[None]:
        norms = [
            module
            for chunk in engine.chunks
            for module in chunk.modules()
            if "Norm" in type(module).__name__ and isinstance(getattr(module, "eps", None), float)
        ]
        before = [norm.eps for norm in norms]
        for norm in norms:
            norm.eps = value
        try:
            yield
        finally:
            for norm, old in zip(norms, before, strict=True):
                norm.eps = old

    return edit


# Sampling


def temperature(value: float) -> Edit:
    """Compute log-probs of logits / value."""

    @contextmanager
    def edit(engine: Engine) -> Iterator[None]:
        before = engine.cfg
        engine.cfg = before.model_copy(
            update={"rollout": before.rollout.model_copy(update={"temperature": value})}
        )
        try:
            yield
        finally:
            engine.cfg = before

    return edit


def has_softmax_gates(spec: ModelSpec) -> bool:
    return bool(spec.moe_layers) and spec.router.score_function == "softmax"


def has_gate_factor(spec: ModelSpec) -> bool:
    return bool(spec.router.scaling_factor) or spec.router.score_function == "sigmoid"


def has_plain_rope(spec: ModelSpec) -> bool:
    return spec.yarn is None and spec.rope_theta > 1


TRIALS: tuple[Trial, ...] = (
    Trial("rounded_router", GATES, lambda spec: (1.0,) if spec.moe_layers else (), rounded_routers),
    Trial("no_bias", GATES, lambda spec: (1.0,) if spec.router.expert_bias else (), without_bias),
    Trial(
        "gate_normalisation",
        GATES,
        lambda spec: (1.0 - spec.router.pre_softmax,) if has_softmax_gates(spec) else (),
        router_setting("moe_router_pre_softmax", bool),
    ),
    Trial(
        "gate_factor",
        GATES,
        lambda spec: (0.4, 0.7, 1.0, 1.5, 2.0, 2.5, 4.0) if has_gate_factor(spec) else (),
        router_setting("moe_router_topk_scaling_factor", float),
        is_smooth=True,
    ),
    Trial(
        "rope_theta",
        MODEL,
        lambda spec: (1e4, 1e5, 5e5, 1e6, 5e6, 1e7, 1e8) if has_plain_rope(spec) else (),
        rope_theta,
    ),
    Trial("norm_eps", MODEL, lambda spec: (1e-6, 1e-5, 1e-8, 1e-12), norm_eps),
    Trial(
        "temperature",
        SAMPLING,
        lambda spec: (0.3, 0.5, 0.7, 0.9, 1.0, 1.2, 1.5),
        temperature,
        is_smooth=True,
    ),
)
