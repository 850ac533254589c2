"""Experts of a range of steps: load per layer, server against trainer; where the engines differ, by
how much, and between which experts.  From the tensors of the rollouts that a run saved, which may
be a share of them.

Shapes: n tokens of a step's saved rollouts, L MoE layers, K top-k, E experts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from megatron_rl_viewer.query import QueryError
from megatron_rl_viewer.run_folder import Run
from megatron_rl_viewer.tensor_files import ShardError, TensorFile, tensor_file_name

MAX_STEPS = 32
NUM_SWAPS = 50
# of margins; what is outside counts in the first or last bin
EDGES = np.concatenate([[0.0], np.logspace(-6, 2, 41)])
EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
FLIP_RATE = "routing/flip_rate"
LAYER_SHIFT, EXPERT_SHIFT = 32, 16  # bits of the code of a swap


@dataclass(frozen=True)
class Counts:
    """Of one file of a step.

    server, trainer  int64 [L, E], choices of each expert
    differing, pairs int64 [L], (token, layer) pairs in which the engines' experts differ, and all
    that have both
    margins          int64 [2, bins], of pairs that agree and that differ
    swaps            int64 [2, m]: code of (layer, from, to), and how often
    """

    server: np.ndarray
    trainer: np.ndarray
    differing: np.ndarray
    pairs: np.ndarray
    margins: np.ndarray
    swaps: np.ndarray
    missing: tuple[str, ...] = ()


def loads_of_steps(run: Run, wanted: str) -> dict[str, object]:
    """The answer to /experts; wanted: "", "STEP" or "FIRST:LAST"."""
    shards = saved_steps(run)
    steps = chosen_steps(sorted(shards), wanted)
    num_experts = experts_of_model(run)
    counts = [count(run, step, stem, num_experts) for step in steps for stem in shards[step]]
    missing = [text for each in counts for text in each.missing]
    notes = [text for text in (run.indexing(),) if text]
    if not steps and not notes:
        notes.append(
            "no tensors of rollouts in these steps: rollout.save_tensors = true or a share saves"
            " them"
        )
    layers = max((len(each.server) for each in counts), default=0)
    same = [each for each in counts if layers and len(each.server) == layers]
    over_steps = flips_over_steps(run)
    if not same:
        return NOTHING | {
            "steps": steps, "flips_by_layer_over_steps": over_steps, "missing": missing,
            "notes": notes,
        }  # fmt: skip
    server, trainer = (
        total_counts([each.server for each in same]),
        total_counts([each.trainer for each in same]),
    )
    differing, pairs = (
        total_counts([each.differing for each in same]),
        total_counts([each.pairs for each in same]),
    )
    margins = total_counts([each.margins for each in same])
    return {
        "steps": steps,
        "layers": layers,
        "experts": server.shape[1],
        "server_load": shares_of(server),
        "trainer_load": shares_of(trainer) if trainer.any() else None,
        "flips_by_layer": differing / np.maximum(pairs, 1) if pairs.any() else None,
        "flips_by_layer_over_steps": over_steps,
        "margin_histogram": {"edges": EDGES, "kept": margins[0], "flipped": margins[1]}
        if margins.any()
        else None,
        "swaps": largest_swaps(np.concatenate([each.swaps for each in same], axis=1)),
        "missing": missing,
        "notes": notes,
    }


def over_steps(run: Run, layer: int, expert: int) -> dict[str, object]:
    """The answer to /expert: one expert's share of its layer's choices by step, of at most
    MAX_STEPS steps, evenly spread.
    """
    shards, num_experts = saved_steps(run), experts_of_model(run)
    steps = chosen_steps(sorted(shards), ":")
    found: dict[str, list[float | None]] = {"server": [], "trainer": []}
    for step in steps:
        counts = [count(run, step, stem, num_experts) for stem in shards[step]]
        for name, values in found.items():
            values.append(share_of([getattr(each, name) for each in counts], layer, expert))
    return {"layer": layer, "expert": expert, "steps": steps, **found}


def share_of(parts: Sequence[np.ndarray], layer: int, expert: int) -> float | None:
    """Of all choices [L, E] of a step; None where the layer has none, or there is no such layer or
    expert.
    """
    rows = [part[layer] for part in parts if layer < len(part) and expert < part.shape[1]]
    chosen = sum(int(row.sum()) for row in rows)
    return sum(int(row[expert]) for row in rows) / chosen if chosen else None


NOTHING = {
    "layers": 0, "experts": 0, "server_load": [], "trainer_load": None, "flips_by_layer": None,
    "margin_histogram": None,
    "swaps": [],
}  # fmt: skip


def saved_steps(run: Run) -> dict[int, list[str]]:
    """Step -> stems of the rollout files that have tensors of it."""
    found: dict[int, list[str]] = {}
    with closing(run.index.connect()) as connection:
        for row in connection.execute(
            "SELECT name FROM shards WHERE name LIKE 'rollouts%' ORDER BY name"
        ):
            stem, _, step = row["name"].removesuffix(".safetensors").rpartition("_")
            found.setdefault(int(step), []).append(stem)
    return found


def chosen_steps(steps: Sequence[int], wanted: str) -> list[int]:
    """Of these steps those in the range, at most MAX_STEPS of them, evenly spread; the last step
    where none is named.
    """
    match = re.fullmatch(r"(\d*)(:?)(\d*)", wanted, re.ASCII)
    if match is None:
        raise QueryError(f"step = {wanted}: must be STEP or FIRST:LAST")
    if not wanted:
        return list(steps[-1:])
    first = int(match[1] or 0)
    last = int(match[3]) if match[3] else (first if not match[2] else 10**9)
    inside = [step for step in steps if first <= step <= last]
    places = np.unique(
        np.linspace(0, len(inside) - 1, min(MAX_STEPS, len(inside))).round().astype(int)
    )
    return [inside[place] for place in places]


def count(run: Run, step: int, stem: str, num_experts: int) -> Counts:
    """Of one file; remembered as long as neither it nor the trainer's files change."""
    server = tensor_file_name(stem, step)
    trained = trained_places(run, step, stem)
    paths = [run.folder / name for name in (server, *sorted({name for _, name, _ in trained}))]
    stamps = tuple(
        (path.stat().st_mtime_ns, path.stat().st_size) if path.is_file() else (0, 0)
        for path in paths
    )
    return counted_experts(run.folder, server, trained, stamps, num_experts)


Places = tuple[tuple[str, str, str], ...]
"""(id of a rollout, file of its trainer's half, key of its tensors there): another replica may have
trained on it.
"""


def trained_places(run: Run, step: int, stem: str) -> Places:
    with closing(run.index.connect()) as connection:
        rows = connection.execute(
            "SELECT id, json_extract(line, '$.tensors') AS name, json_extract(line, '$.key') AS key"
            " FROM trained WHERE step = ? AND file IN (?, '')",
            (step, stem),
        )
        return tuple(
            (row["id"], str(row["name"]), str(row["key"] or row["id"]))
            for row in rows
            if row["name"]
        )


@lru_cache(maxsize=256)
def counted_experts(
    folder: Path, server: str, trained: Places, stamps: tuple, num_experts: int
) -> Counts:
    """Counts of all rollouts of the file `server`.  `stamps` tell changed files apart."""
    missing: list[str] = []
    shards: dict[str, TensorFile] = {}
    for name in dict.fromkeys([server, *(name for _, name, _ in trained)]):
        try:
            shards[name] = TensorFile(folder, name)
        except ShardError as error:
            missing.append(str(error))
    places = {rollout: (shards[name], key) for rollout, name, key in trained if name in shards}
    counts = []
    for name in shards[server].ids if server in shards else []:
        try:
            found = count_rollout(shards[server], name, places.get(name), num_experts)
        except ShardError as error:
            missing.append(str(error))
            continue
        counts += [found] if found is not None else []
    layers = max((len(each.server) for each in counts), default=0)
    same = [each for each in counts if len(each.server) == layers]
    if not same:
        none = np.zeros((0, 0), np.int64)
        return Counts(
            none,
            none,
            none[:, :0],
            none[:, :0],
            np.zeros((2, len(EDGES) - 1), np.int64),
            none,
            tuple(missing),
        )
    sums = {name: total_counts([getattr(each, name) for each in same]) for name in COUNTED}
    return Counts(
        **sums, swaps=np.concatenate([each.swaps for each in same], axis=1), missing=tuple(missing)
    )


COUNTED = ("server", "trainer", "differing", "pairs", "margins")


def count_rollout(
    half: TensorFile, name: str, trained: tuple[TensorFile, str] | None, num_experts: int
) -> Counts | None:
    """Counts of one rollout; None where it has no routes."""
    server = half.get(name, "routed_experts")
    if server is None or server.ndim != 3:
        return None
    gaps = half.get(name, "missing_routes")
    trainer = trained[0].get(trained[1], "own_experts") if trained else None
    margin = trained[0].get(trained[1], "margin") if trained else None
    if trainer is not None and trainer.shape != server.shape:
        trainer = None
    has_route = (
        np.ones(len(server), bool) if gaps is None or gaps.shape != (len(server),) else ~gaps
    )
    server = server[has_route].astype(np.int64)
    layers = server.shape[1]
    bins = np.zeros((2, len(EDGES) - 1), np.int64)
    if trainer is None:
        none = np.zeros(layers, np.int64)
        load = loads(server, num_experts)
        return Counts(load, np.zeros_like(load), none, none, bins, np.zeros((2, 0), np.int64))
    trainer = trainer[has_route].astype(np.int64)
    # [n, L, K]: the server's that the trainer has not
    lost = ~(server[..., :, None] == trainer[..., None, :]).any(-1)
    won = ~(trainer[..., :, None] == server[..., None, :]).any(-1)
    differs = lost.any(-1)
    if margin is not None and margin.shape == (*has_route.shape, layers):
        margins = np.clip(margin[has_route].astype(np.float64), EDGES[0], EDGES[-1])
        bins = np.stack(
            [np.histogram(margins[~differs], EDGES)[0], np.histogram(margins[differs], EDGES)[0]]
        )
    return Counts(
        loads(server, num_experts),
        loads(trainer, num_experts),
        differs.sum(0),
        np.full(layers, len(server)),
        bins,
        swaps_of(server, trainer, lost, won),
    )


def loads(experts: np.ndarray, num_experts: int) -> np.ndarray:
    """int64 [L, E]: how often each expert was chosen; experts int64 [n, L, K]."""
    layers = experts.shape[1]
    size = max(num_experts, int(experts.max(initial=-1)) + 1)
    codes = np.arange(layers)[None, :, None] * size + experts
    return np.bincount(codes[experts >= 0], minlength=layers * size).reshape(layers, size)


def swaps_of(
    server: np.ndarray, trainer: np.ndarray, lost: np.ndarray, won: np.ndarray
) -> np.ndarray:
    """int64 [2, m].

    Where several experts of a (token, layer) differ, they are paired in the order in which they are
    stored.
    """
    layers = np.broadcast_to(np.arange(server.shape[1])[None, :, None], server.shape)
    if lost.sum() != won.sum():  # duplicated ids have no pairs
        return np.zeros((2, 0), np.int64)
    codes = (layers[lost] << LAYER_SHIFT) | (server[lost] << EXPERT_SHIFT) | trainer[won]
    return np.stack(np.unique(codes, return_counts=True))


def largest_swaps(swaps: np.ndarray) -> list[dict[str, int]]:
    codes, places = np.unique(swaps[0], return_inverse=True)
    counts = np.bincount(places, weights=swaps[1], minlength=len(codes)).astype(np.int64)
    first = np.argsort(-counts, kind="stable")[:NUM_SWAPS]
    mask = (1 << EXPERT_SHIFT) - 1
    layers, before, after = (
        codes[first] >> LAYER_SHIFT,
        codes[first] >> EXPERT_SHIFT & mask,
        codes[first] & mask,
    )
    columns = {"layer": layers, "from": before, "to": after, "count": counts[first]}
    return [
        dict(zip(columns, map(int, row), strict=True))
        for row in zip(*columns.values(), strict=True)
    ]


def total_counts(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The sum; loads of a smaller number of experts (that number is not always known) are filled up
    with 0.
    """
    width = max(part.shape[-1] for part in parts)
    padded = [
        np.pad(part, [(0, 0)] * (part.ndim - 1) + [(0, width - part.shape[-1])]) for part in parts
    ]
    return np.sum(padded, axis=0)


def shares_of(load: np.ndarray) -> np.ndarray:
    """Share of the choices of each layer, [L, E]."""
    return load / np.maximum(load.sum(1, keepdims=True), 1)


def flips_over_steps(run: Run) -> dict[str, object]:
    """Of every step, from the run's metrics."""
    table = run.metrics.table(names=[FLIP_RATE])
    values = table["per_layer"].get(FLIP_RATE, [])
    kept = [(step, row) for step, row in zip(table["steps"], values, strict=False) if row]
    return {"steps": [step for step, _ in kept], "values": [row for _, row in kept]}


def experts_of_model(run: Run) -> int:
    """E by the model's config.json, so that an expert that nothing chose is shown; 0 where that is
    not found.
    """
    for folder in run.model_folders():
        try:
            config = json.loads((folder / "config.json").read_text())
        except (OSError, ValueError):
            continue  # not known: as many as were chosen
        found = [value for key in EXPERT_KEYS if isinstance(value := config.get(key), int)]
        if found:
            return found[0]
    return 0
