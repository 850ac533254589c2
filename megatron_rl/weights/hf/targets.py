"""The weights of one concrete model that lora.targets mean."""

from __future__ import annotations

from functools import lru_cache

from megatron_rl.config import ConfigError
from megatron_rl.config.sections import LoraConfig
from megatron_rl.models.spec import ModelSpec
from megatron_rl.weights.adapters import OUTSIDE, can_have_adapter, is_target, unmatched_targets
from megatron_rl.weights.hf.entries import Entry, entries


@lru_cache(maxsize=8)  # a planner asks for hundreds of layouts of one model
def adapted(spec: ModelSpec, targets: tuple[str, ...]) -> tuple[Entry, ...]:
    """Return the weights of the model that lora.targets mean, in checkpoint order."""
    return tuple(
        entry
        for entry in entries(spec)
        if can_have_adapter(entry.name, entry.hf[0][1]) and is_target(entry.name, targets)
    )


def check_targets(lora: LoraConfig, spec: ModelSpec) -> None:
    """Raise ConfigError for a target that matches no weight of the model, for one of a tied pair,
    and for shared pairs without routed experts.
    """
    if not lora.rank:
        return
    names = [entry.name for entry in adapted(spec, ("all", *OUTSIDE))]
    if spec.tie_embeddings:
        names = [name for name in names if name not in OUTSIDE.values()]
        for target in lora.targets:
            if any(is_target(name, [target]) for name in OUTSIDE.values()):
                raise ConfigError(
                    f"lora.targets = {target!r}: adapters on a tied pair: embedding and LM head of"
                    " this model are one weight (tie_word_embeddings), so an adapter of one would"
                    " change the other; remove it from lora.targets"
                )
    if problem := unmatched_targets(lora.targets, names):
        raise ConfigError(problem)
    experts = [name for name in names if is_target(name, ["experts"])]
    if lora.shared_pairs and not any(is_target(name, lora.targets) for name in experts):
        raise ConfigError(
            f"lora.shared_pairs = true with lora.targets = {list(lora.targets)}: no routed expert"
            " of the model has an adapter, so it has no effect; remove it"
        )
