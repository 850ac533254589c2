"""Which model and which ranks to rehearse."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.config import ParallelConfig
from megatron_rl.models.known import KNOWN, is_known
from megatron_rl.models.spec import load_hf_config
from megatron_rl.plan.grid import RankPlace, place

PER_LAYER = ("layer_types", "mlp_only_layers")
"""Keys of config.json with an entry for each layer, or with numbers of layers."""
AXES = ("tp", "cp", "ep", "etp", "replica")


def write_model(model: str | Path, folder: Path, num_layers: int | None) -> int:
    """Write config.json of a model with so many layers (None: all) to `folder`; return their
    number.

    The first layers are the dense ones, if the model has any: of them one stays, so that two layers
    show both kinds.
    """
    hf: dict[str, Any] = dict(
        KNOWN[str(model).lower()] if is_known(model) else load_hf_config(Path(model))
    )
    whole = int(hf["num_hidden_layers"])
    number = min(num_layers or whole, whole)
    if number < whole:
        hf["num_hidden_layers"] = number
        if hf.get("first_k_dense_replace"):
            hf["first_k_dense_replace"] = 1
        if "layer_types" in hf:
            hf["layer_types"] = list(hf["layer_types"])[:number]
        if hf.get("mlp_only_layers"):
            hf["mlp_only_layers"] = [layer for layer in hf["mlp_only_layers"] if layer < number]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf))
    return number


def smallest_layers(parallel: ParallelConfig, wanted: int) -> int:
    """Return the fewest layers from `wanted` on that all pipeline stages share equally."""
    stages = parallel.pp * parallel.vp
    return -(-wanted // stages) * stages


def rank_roles(parallel: ParallelConfig, world_size: int) -> list[int]:
    """Return ranks among which are the first and last place on every axis, in every stage.

    All stages of a chosen place are taken: they send each other what they compute.
    """
    per_stage = world_size // parallel.pp
    places = [place(rank, parallel, world_size) for rank in range(per_stage)]
    chosen = columns(places)
    return [stage * per_stage + rank for stage in range(parallel.pp) for rank in chosen]


def columns(places: Sequence[RankPlace]) -> list[int]:
    """Return ranks of the first stage that have the first and last place on every axis."""
    last = {axis: max(getattr(item, axis) for item in places) for axis in AXES}
    wanted = {(axis, number) for axis in AXES for number in (0, last[axis])}
    chosen: list[int] = []
    while wanted:
        shown = {
            item.rank: {(axis, getattr(item, axis)) for axis in AXES} & wanted for item in places
        }
        best = max(shown, key=lambda rank: (len(shown[rank]), -rank))
        wanted -= shown[best]
        chosen.append(best)
    return sorted(chosen)
