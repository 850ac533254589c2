"""Which weights have a low-rank adapter (config [lora]), and what a layer multiplies by then.

The adapters themselves are in engine/lora.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

PREFIX = "lora_"
"""Begins the names of an adapter's parameters in a module."""
GROUPS = {
    "attention": ".self_attention.linear_",
    "mlp": ".mlp.linear_fc",
    "experts": ".mlp.experts.linear_fc",
    "shared_experts": ".mlp.shared_experts.linear_fc",
}
"""Group of lora.targets -> part of the canonical names of its weights (weights/hf/mapping.py)."""
OUTSIDE = {"embedding": "embedding.word_embeddings.weight", "lm_head": "output_layer.weight"}
"""Target outside of layers -> canonical name of its weight, whose rows are the vocabulary."""


def is_adapter(name: str) -> bool:
    """Return True for the name of an adapter's parameter, as named_parameters() gives it."""
    return name.rpartition(".")[2].startswith(PREFIX)


def can_have_adapter(name: str, shape: Sequence[int]) -> bool:
    """Return True for the matrices of layers, without routers, and those of OUTSIDE, by their
    canonical names.
    """
    return len(shape) == 2 and (is_target(name, ["all"]) or name in OUTSIDE.values())


def is_target(name: str, targets: Iterable[str]) -> bool:
    """Return True if lora.targets mean the weight with this canonical name, which can have an
    adapter.
    """
    meanings = GROUPS | OUTSIDE
    parts = [
        part
        for target in targets
        for part in (GROUPS.values() if target == "all" else (meanings.get(target, f".{target}."),))
    ]
    return any(part in f".{name}" for part in parts)


def unmatched_targets(targets: Iterable[str], names: Sequence[str]) -> str | None:
    """Return what is wrong where a target means none of the model's weights, whose canonical names
    these are.
    """
    for target in targets:
        if not any(is_target(name, [target]) for name in names):
            modules = sorted({name.split(".weight")[0].rpartition(".")[2] for name in names})
            groups = [
                group
                for group in (*GROUPS, *OUTSIDE)
                if any(is_target(name, [group]) for name in names)
            ]
            return (
                f"lora.targets = {target!r}: no weight of the model matches; it has"
                f" {', '.join(('all', *groups, *modules))}"
            )
    return None
