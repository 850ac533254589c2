"""Sizes of low-rank adapters on one rank (config [lora])."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from megatron_rl.config import Config
from megatron_rl.config.sections import LoraConfig
from megatron_rl.models.spec import ModelSpec
from megatron_rl.weights.hf.entries import Entry, shard_shape
from megatron_rl.weights.hf.targets import adapted


class AdaptedWeight(NamedTuple):
    """One rank's shard of a weight that has an adapter; the experts of a layer are one entry."""

    is_expert: bool
    """A and B belong to an expert; False also for a pair that experts share."""
    rows: int
    columns: int
    num_weights: int
    """Number of weights of this shape: the rank's experts that have an adapter, else 1."""
    num_pairs: int
    """Number of pairs A, B of these weights."""


def adapted_weights(
    spec: ModelSpec, cfg: Config, places: Sequence[int | str], *, te: bool
) -> list[AdaptedWeight]:
    """Return those of one rank with these layers, and these names of weights outside of layers."""
    if not cfg.lora.rank:
        return []
    parallel = cfg.parallel
    targets = targets_by_place(spec, cfg.lora.targets)
    weights: list[AdaptedWeight] = []
    for entry, experts in (target for place in places for target in targets.get(place, ())):
        rule = entry.rule
        if te and rule.te_kind is not None:
            rule = replace(rule, kind=rule.te_kind)
        size = parallel.expert_tp if rule.is_expert else parallel.tp
        rows, columns = shard_shape(replace(entry, rule=rule), size)
        count = bisect_left(experts, spec.num_experts // parallel.ep) if rule.is_expert else 1
        is_shared = rule.is_expert and cfg.lora.shared_pairs
        pairs = min(count, 1) if is_shared else count
        has_own = rule.is_expert and not is_shared
        weights.append(AdaptedWeight(has_own, rows, columns, count, pairs))
    return weights


@lru_cache(maxsize=8)  # a planner asks for hundreds of layouts of one model
def targets_by_place(
    spec: ModelSpec, targets: tuple[str, ...]
) -> dict[int | str, list[tuple[Entry, list[int]]]]:
    """Return place (layer, or name outside of layers) -> its weights that have an adapter: (the
    entry, or that of the first such expert, all such experts in order).
    """
    by_rule: dict[tuple[int | str, str], tuple[Entry, list[int]]] = {}
    for entry in adapted(spec, targets):
        _, experts = by_rule.setdefault((entry.place, entry.rule.mcore), (entry, []))
        if entry.expert is not None:
            experts.append(entry.expert)
    by_place: dict[int | str, list[tuple[Entry, list[int]]]] = {}
    for (place, _), target in by_rule.items():
        by_place.setdefault(place, []).append(target)
    return by_place


def adapter_parameters(weights: Sequence[AdaptedWeight], rank: int) -> tuple[int, int]:
    """Return the numbers of adapter parameters on a rank: (of dense weights, of experts)."""
    sums = [0, 0]
    for weight in weights:
        sums[weight.is_expert] += rank * weight.num_pairs * (weight.rows + weight.columns)
    return sums[0], sums[1]


def sent_parameters(spec: ModelSpec, lora: LoraConfig) -> int:
    """Return the number of values that rollout.weight_sync = adapter sends: A and B of each HF
    tensor, so that q, k and v have a copy of one A each.
    """
    shapes = (shape for entry in adapted(spec, lora.targets) for _, shape in entry.hf)
    return sum(lora.rank * sum(shape) for shape in shapes)


def merged_bytes(weights: Sequence[AdaptedWeight], size: int, *, te: bool) -> int:
    """Return the most bytes of weights with their adapters that exist at a time (engine/lora.py):
    those of one module, and two float32 terms of one weight's sum.

    size: of an element.  te: a module has all local experts of a layer.
    """
    some = [weight for weight in weights if weight.num_weights]
    largest = max((weight.rows * weight.columns for weight in some), default=0)
    modules = (w.rows * w.columns * size * (w.num_weights if te else 1) for w in some)
    return max(modules, default=0) + 2 * 4 * largest
