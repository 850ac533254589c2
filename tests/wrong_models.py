"""Trainers that do not hold the model that was served: what the start-up comparison must tell from
rounding.

Each is made from an engine that does, compared with rollouts of the served model, and undone.
Import on a rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from megatron_rl.config import Config
from megatron_rl.engine.engine import Engine
from megatron_rl.engine.parity import ParityReport, compare
from megatron_rl.records import RolloutGroup


def wrong_models(
    engine: Engine, groups: list[RolloutGroup], cfg: Config
) -> Iterator[tuple[str, ParityReport]]:
    """(what is wrong, the comparison) one at a time; the engine is as before afterwards."""
    middle = engine.spec.num_layers // 2
    edits: dict[str, Callable[[], Any]] = {
        f"layer {middle} of another seed": lambda: changed(engine, f"layers.{middle}.", redraw),
        "all layers of another seed": lambda: changed(engine, "layers.", redraw),
        "rope theta 100 times smaller": lambda: other_rope(engine),
    }
    if engine.spec.moe_layers:
        experts = f"layers.{middle}.mlp.experts."
        edits[f"experts of layer {middle} permuted"] = lambda: changed(engine, experts, next_expert)
        edits["experts of all layers permuted"] = lambda: changed(
            engine, ".mlp.experts.", next_expert
        )
    for wrong, edit in edits.items():
        with edit():
            yield wrong, compare(engine, groups, cfg)
    for temperature in (0.7, 0.9):
        engine.cfg = cfg.model_copy(
            update={"rollout": cfg.rollout.model_copy(update={"temperature": temperature})}
        )
        yield f"temperature {temperature} instead of 1", compare(engine, groups, cfg)
    engine.cfg = cfg
    yield "answers shifted by one token", compare(engine, [shifted(group) for group in groups], cfg)


@contextmanager
def changed(
    engine: Engine, part: str, edit: Callable[[dict[str, torch.Tensor]], None]
) -> Iterator[None]:
    """`edit` applied to the matrices whose names hold `part`."""
    names = {
        name: p.data
        for chunk in engine.chunks
        for name, p in chunk.named_parameters()
        if part in name and p.dim() > 1
    }
    assert names, part
    before = {name: tensor.clone() for name, tensor in names.items()}
    edit(names)
    try:
        yield
    finally:
        for name, tensor in names.items():
            tensor.copy_(before[name])


def redraw(tensors: dict[str, torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(1234)
    for tensor in tensors.values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * tensor.float().std())


def next_expert(tensors: dict[str, torch.Tensor]) -> None:
    """Expert e's weights become those of expert e + 1."""
    values = {name: tensor.clone() for name, tensor in tensors.items()}
    layers: dict[str, list[str]] = {}
    for name in tensors:
        head, _, tail = name.partition(".local_experts.")
        layers.setdefault(head + tail.partition(".")[2], []).append(name)
    for names in layers.values():
        for name, source in zip(names, names[1:] + names[:1], strict=True):
            tensors[name].copy_(values[source])


@contextmanager
def other_rope(engine: Engine) -> Iterator[None]:
    """theta^(-i/d) with a theta 100 times smaller."""
    rope = engine.chunks[0].rotary_pos_emb
    before = rope.inv_freq
    rope.inv_freq = before ** (1 - math.log(100) / math.log(engine.spec.rope_theta))
    rope.forward.cache_clear()
    try:
        yield
    finally:
        rope.inv_freq = before
        rope.forward.cache_clear()


def shifted(group: RolloutGroup) -> RolloutGroup:
    rollouts = tuple(
        replace(
            rollout,
            rollout_logprobs=np.roll(rollout.rollout_logprobs, 1),
            routed_experts=None
            if rollout.routed_experts is None
            else np.roll(rollout.routed_experts, 1, axis=0),
            routes_digest=None,
        )
        for rollout in group.rollouts
    )
    return replace(group, rollouts=rollouts)
