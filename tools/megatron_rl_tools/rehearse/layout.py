"""Which model and which ranks to rehearse."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl.config import ParallelConfig
from megatron_rl.models.families import READERS
from megatron_rl.models.known import KNOWN, is_known
from megatron_rl.models.spec import load_hf_config
from megatron_rl.plan.grid import RankPlace, place

AXES = ("tp", "cp", "ep", "etp", "replica", "expert_replica")


def model_config(model: str | Path) -> dict[str, Any]:
    """Return config.json of a checkpoint directory, or that of a known model."""
    return dict(KNOWN[str(model).lower()] if is_known(model) else load_hf_config(Path(model)))


def check_provider(provider: str, hf: Mapping[str, Any]) -> None:
    """Raise ValueError for a model that Megatron-Bridge would build."""
    (architecture, *_) = hf.get("architectures") or ["(none)"]
    if provider == "bridge" or (provider == "auto" and architecture not in READERS):
        raise ValueError(
            f"model.provider = {provider}: Megatron-Bridge builds {architecture} from the files of"
            " its weights, and a rehearsal reads only config.json; rehearse a model of the native"
            " provider instead (results/families.md), or try this one on GPUs with megatron-rl"
            " gpu-check"
        )


def write_model(hf: dict[str, Any], folder: Path, num_layers: int | None) -> None:
    """Write config.json with so many layers (None: all) to `folder`.

    The first layers are the dense ones, if the model has any: of them one stays, so that two layers
    show both kinds.
    """
    number = int(hf["num_hidden_layers"])
    if num_layers is not None and num_layers < number:
        number = num_layers
        hf = hf | {"num_hidden_layers": number}
        if hf.get("first_k_dense_replace"):
            hf["first_k_dense_replace"] = 1
        if "layer_types" in hf:
            hf["layer_types"] = list(hf["layer_types"])[:number]
        if hf.get("mlp_only_layers"):
            hf["mlp_only_layers"] = [layer for layer in hf["mlp_only_layers"] if layer < number]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf))


def smallest_layers(parallel: ParallelConfig, wanted: int) -> int:
    """Return the fewest layers from `wanted` on that all pipeline stages share equally."""
    stages = parallel.pp * parallel.vp
    return -(-wanted // stages) * stages


def rank_roles(parallel: ParallelConfig, world_size: int) -> list[int]:
    """Return ranks that show every role, in every stage of the pipeline.

    All stages of a chosen place are taken: they send each other what they compute, and each has all
    its virtual stages.  See `roles` for what a place shows.
    """
    per_stage = world_size // parallel.pp
    places = [place(rank, parallel, world_size) for rank in range(per_stage)]
    last = {axis: max(getattr(item, axis) for item in places) for axis in AXES}
    shown = {item.rank: roles(item, last) for item in places}
    wanted, chosen = set().union(*shown.values()), []
    while wanted:
        best = max(shown, key=lambda rank: (len(shown[rank] & wanted), -rank))
        wanted -= shown[best]
        chosen.append(best)
    return [stage * per_stage + rank for stage in range(parallel.pp) for rank in sorted(chosen)]


def roles(item: RankPlace, last: Mapping[str, int]) -> set[tuple[str, int]]:
    """Return what a place shows: the first or last place on an axis, its turn in the ring of
    context ranks, where even ones send first, and the export of the first or last experts.

    Other places differ from these only in how many operations of one kind they have, between those
    of the first and the last (halves of sequences in the ring), and in where the optimizer's equal
    shares cut a parameter (test_rehearse.py compares all ranks of a layout).
    """
    shown = {(axis, getattr(item, axis)) for axis in AXES if getattr(item, axis) in (0, last[axis])}
    if last["cp"] > 1:
        shown.add(("turn", item.cp % 2))
    if item.etp == item.expert_replica == 0 and item.ep in (0, last["ep"]):
        shown.add(("exports", item.ep))
    return shown
