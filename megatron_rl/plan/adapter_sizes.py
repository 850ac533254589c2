"""Sizes of low-rank adapters on one rank (config [lora])."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron_rl.config import Config
from megatron_rl.models.spec import ModelSpec
from megatron_rl.weights.adapters import can_have_adapter, is_target
from megatron_rl.weights.hf.entries import entries, shard_shape


class AdaptedWeight(NamedTuple):
    """One rank's shard of a weight that has an adapter."""

    name: str
    """Canonical name."""
    is_expert: bool
    rows: int
    columns: int


def adapted_weights(
    spec: ModelSpec, cfg: Config, layers: Sequence[int], *, te: bool
) -> list[AdaptedWeight]:
    """Return those of one rank with these layers."""
    parallel, here = cfg.parallel, set(layers)
    weights: list[AdaptedWeight] = []
    if not cfg.lora.rank:
        return weights
    for entry in entries(spec):
        is_local = entry.expert is None or entry.expert < spec.num_experts // parallel.ep
        if entry.layer not in here or not is_local:
            continue
        if can_have_adapter(entry.name, entry.hf[0][1]) and is_target(entry.name, cfg.lora.targets):
            rule = entry.rule
            if te and rule.te_kind is not None:
                rule = replace(rule, kind=rule.te_kind)
            size = parallel.expert_tp if rule.is_expert else parallel.tp
            rows, columns = shard_shape(replace(entry, rule=rule), size)
            weights.append(AdaptedWeight(entry.name, rule.is_expert, rows, columns))
    return weights


def adapter_parameters(weights: Sequence[AdaptedWeight], rank: int) -> tuple[int, int]:
    """Return the numbers of adapter parameters on a rank: (of dense weights, of experts)."""
    sums = [0, 0]
    for weight in weights:
        sums[weight.is_expert] += rank * (weight.rows + weight.columns)
    return sums[0], sums[1]


def merged_bytes(weights: Sequence[AdaptedWeight], size: int, *, te: bool) -> int:
    """Return the most bytes of weights with their adapters that exist at a time (engine/lora.py):
    those of one module, and two float32 terms of one weight's sum.

    size: of an element.  te: a module has all local experts of a layer.
    """
    modules: dict[str, int] = {}
    for weight in weights:
        name = weight.name.rstrip("0123456789") if te else weight.name
        modules[name] = modules.get(name, 0) + weight.rows * weight.columns * size
    largest = max((weight.rows * weight.columns for weight in weights), default=0)
    return max(modules.values(), default=0) + 2 * 4 * largest
