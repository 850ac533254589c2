"""The experts of a range of steps: load per layer, server against trainer; and where the engines
differ, by how much, and between which experts.

Read from the tensors that a run saved, which may be of a share of its rollouts.

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

from megatron_rl.config.run_paths import RunFolder
from megatron_rl_viewer.query import QueryError
from megatron_rl_viewer.run_folder import Run
from megatron_rl_viewer.tensor_files import ShardError, TensorFile, tensor_file_name

MAX_STEPS = 32
NUM_SWAPS = 50
EDGES = np.concatenate([[0.0], np.logspace(-6, 2, 41)])
"""Edges of the histogram of margins; values outside count in the first or last bin."""
EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
FLIP_RATE = "routing/flip_rate"
LAYER_SHIFT, EXPERT_SHIFT = 32, 16
"""Bits by which layer and served expert are shifted in the code of a swap."""


@dataclass(frozen=True)
class Counts:
    """Counts of the choices in one file of a step."""

    server: np.ndarray
    """Choices of each expert by the server, int64 [L, E]."""
    trainer: np.ndarray
    """Choices of each expert by the trainer, int64 [L, E]."""
    differing: np.ndarray
    """(token, layer) pairs in which the engines' experts differ, int64 [L]."""
    pairs: np.ndarray
    """(token, layer) pairs with experts of both engines, int64 [L]."""
    margins: np.ndarray
    """Histograms of the margins of pairs that agree and of pairs that differ, int64 [2, bins]."""
    swaps: np.ndarray
    """Code of (layer, from, to), and its count, int64 [2, m]."""
    missing: tuple[str, ...] = ()
    """Messages about files that cannot be read."""


def loads_of_steps(run: Run, wanted: str) -> dict[str, object]:
    """Return the answer to /experts; wanted: "", "STEP" or "FIRST:LAST"."""
    shards = saved_steps(run)
    steps = chosen_steps(sorted(shards), wanted)
    num_experts = experts_of_model(run)
    counts = [count(run, step, stem, num_experts) for step in steps for stem in shards[step]]
    missing = [text for part in counts for text in part.missing]
    notes = [text for text in (run.indexing(),) if text]
    if not steps and not notes:
        why = "rollout.save_tensors = true or a share saves them"
        notes.append(f"no tensors of rollouts in these steps: {why}")
    layers = max((len(part.server) for part in counts), default=0)
    same = [part for part in counts if layers and len(part.server) == layers]
    over_steps = flips_over_steps(run)
    if not same:
        return NOTHING | {
            "steps": steps,
            "flips_by_layer_over_steps": over_steps,
            "missing": missing,
            "notes": notes,
        }
    server, trainer, differing, pairs, margins = (
        total_counts([getattr(part, name) for part in same]) for name in COUNTED
    )
    histogram = {"edges": EDGES, "kept": margins[0], "flipped": margins[1]}
    return {
        "steps": steps,
        "layers": layers,
        "experts": server.shape[1],
        "server_load": shares_of(server),
        "trainer_load": shares_of(trainer) if trainer.any() else None,
        "flips_by_layer": differing / np.maximum(pairs, 1) if pairs.any() else None,
        "flips_by_layer_over_steps": over_steps,
        "margin_histogram": histogram if margins.any() else None,
        "swaps": largest_swaps(np.concatenate([part.swaps for part in same], axis=1)),
        "missing": missing,
        "notes": notes,
    }


def over_steps(run: Run, layer: int, expert: int) -> dict[str, object]:
    """Return the answer to /expert: one expert's share of its layer's choices by step, for at most
    MAX_STEPS evenly spread steps.
    """
    shards, num_experts = saved_steps(run), experts_of_model(run)
    steps = chosen_steps(sorted(shards), ":")
    shares: dict[str, list[float | None]] = {"server": [], "trainer": []}
    for step in steps:
        counts = [count(run, step, stem, num_experts) for stem in shards[step]]
        for name, values in shares.items():
            values.append(share_of([getattr(part, name) for part in counts], layer, expert))
    return {"layer": layer, "expert": expert, "steps": steps, **shares}


def share_of(parts: Sequence[np.ndarray], layer: int, expert: int) -> float | None:
    """Return the expert's share of its layer's choices; None if there are none, or no such layer or
    expert.

    parts: choices [L, E] of the files of a step.
    """
    rows = [part[layer] for part in parts if layer < len(part) and expert < part.shape[1]]
    chosen = sum(int(row.sum()) for row in rows)
    return sum(int(row[expert]) for row in rows) / chosen if chosen else None


NOTHING = {
    "layers": 0,
    "experts": 0,
    "server_load": [],
    "trainer_load": None,
    "flips_by_layer": None,
    "margin_histogram": None,
    "swaps": [],
}
"""The answer to /experts without data."""


def saved_steps(run: Run) -> dict[int, list[str]]:
    """Return step -> stems of the rollout files that have tensors of it."""
    stems: dict[int, list[str]] = {}
    with closing(run.index.connect()) as connection:
        names = "SELECT name FROM shards WHERE name LIKE 'rollouts%' ORDER BY name"
        files = [RunFolder(run.folder).file_named(row["name"]) for row in connection.execute(names)]
    for file in sorted(file for file in files if file):
        stems.setdefault(file.step, []).append(file.writer)
    return stems


def chosen_steps(steps: Sequence[int], wanted: str) -> list[int]:
    """Return the steps in the range, at most MAX_STEPS evenly spread ones; for "" the last step."""
    match = re.fullmatch(r"(\d{0,9})(:?)(\d{0,9})", wanted, re.ASCII)
    if match is None:
        raise QueryError(f"step = {wanted}: must be STEP or FIRST:LAST")
    if not wanted:
        return list(steps[-1:])
    first = int(match[1] or 0)
    last = int(match[3]) if match[3] else (first if not match[2] else 10**9)
    inside = [step for step in steps if first <= step <= last]
    places = np.linspace(0, len(inside) - 1, min(MAX_STEPS, len(inside))).round().astype(int)
    return [inside[place] for place in np.unique(places)]


def count(run: Run, step: int, stem: str, num_experts: int) -> Counts:
    """Count one file; the result is cached until it or the trainer's files change."""
    server = tensor_file_name(run.folder, stem, step)
    trained = trained_places(run, step, stem)
    paths = [run.folder / name for name in (server, *sorted({name for _, name, _ in trained}))]
    stamps = tuple(
        (path.stat().st_mtime_ns, path.stat().st_size) if path.is_file() else (0, 0)
        for path in paths
    )
    return counted_experts(run.folder, server, trained, stamps, num_experts)


Places = tuple[tuple[str, str, str], ...]
"""(id of a rollout, file of its trainer's half, key of its tensors there).  The file may be another
replica's: that of the one which trained on it."""


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
    """Count all rollouts of the file `server`; `stamps` are part of the cache's key only."""
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
            part = count_rollout(shards[server], name, places.get(name), num_experts)
        except ShardError as error:
            missing.append(str(error))
            continue
        counts += [part] if part is not None else []
    layers = max((len(total.server) for total in counts), default=0)
    same = [total for total in counts if len(total.server) == layers]
    if not same:
        none, bins = np.zeros((0, 0), np.int64), np.zeros((2, len(EDGES) - 1), np.int64)
        return Counts(none, none, none, none, bins, none, tuple(missing))
    sums = {name: total_counts([getattr(total, name) for total in same]) for name in COUNTED}
    swaps = np.concatenate([total.swaps for total in same], axis=1)
    return Counts(**sums, swaps=swaps, missing=tuple(missing))


COUNTED = ("server", "trainer", "differing", "pairs", "margins")
"""Fields of Counts that are added up."""


def count_rollout(
    half: TensorFile, name: str, trained: tuple[TensorFile, str] | None, num_experts: int
) -> Counts | None:
    """Count one rollout; None if it has no routes."""
    server = half.get(name, "routed_experts")
    if server is None or server.ndim != 3:
        return None
    gaps = half.get(name, "missing_routes")
    trainer = trained[0].get(trained[1], "own_experts") if trained else None
    margin = trained[0].get(trained[1], "margin") if trained else None
    if trainer is not None and trainer.shape != server.shape:
        trainer = None
    has_route = np.ones(len(server), bool)
    if gaps is not None and gaps.shape == (len(server),):
        has_route = ~gaps
    server = server[has_route].astype(np.int64)
    layers = server.shape[1]
    bins = np.zeros((2, len(EDGES) - 1), np.int64)
    if trainer is None:
        none = np.zeros(layers, np.int64)
        load = loads(server, num_experts)
        return Counts(load, np.zeros_like(load), none, none, bins, np.zeros((2, 0), np.int64))
    trainer = trainer[has_route].astype(np.int64)
    # [n, L, K]: the server's experts that the trainer does not use, and the reverse
    lost = ~(server[..., :, None] == trainer[..., None, :]).any(-1)
    won = ~(trainer[..., :, None] == server[..., None, :]).any(-1)
    differs = lost.any(-1)
    if margin is not None and margin.shape == (*has_route.shape, layers):
        margins = np.clip(margin[has_route].astype(np.float64), EDGES[0], EDGES[-1])
        bins = np.stack([np.histogram(margins[rows], EDGES)[0] for rows in (~differs, differs)])
    return Counts(
        loads(server, num_experts),
        loads(trainer, num_experts),
        differs.sum(0),
        np.full(layers, len(server)),
        bins,
        swaps_of(server, trainer, lost, won),
    )


def loads(experts: np.ndarray, num_experts: int) -> np.ndarray:
    """Return how often each expert was chosen, int64 [L, E]; experts: int64 [n, L, K]."""
    layers = experts.shape[1]
    size = max(num_experts, int(experts.max(initial=-1)) + 1)
    # one bincount for all layers: the codes of different layers do not overlap
    codes = np.arange(layers)[None, :, None] * size + experts
    return np.bincount(codes[experts >= 0], minlength=layers * size).reshape(layers, size)


def swaps_of(
    server: np.ndarray, trainer: np.ndarray, lost: np.ndarray, won: np.ndarray
) -> np.ndarray:
    """Return the swaps as in Counts, int64 [2, m].

    If several experts of a (token, layer) differ, they are paired in their stored order.
    """
    layers = np.broadcast_to(np.arange(server.shape[1])[None, :, None], server.shape)
    if lost.sum() != won.sum():  # ids that occur twice in a row have no pairs
        return np.zeros((2, 0), np.int64)
    codes = (layers[lost] << LAYER_SHIFT) | (server[lost] << EXPERT_SHIFT) | trainer[won]
    return np.stack(np.unique(codes, return_counts=True))


def largest_swaps(swaps: np.ndarray) -> list[dict[str, int]]:
    codes, places = np.unique(swaps[0], return_inverse=True)
    counts = np.bincount(places, weights=swaps[1], minlength=len(codes)).astype(np.int64)
    first = np.argsort(-counts, kind="stable")[:NUM_SWAPS]
    mask = (1 << EXPERT_SHIFT) - 1
    columns = {
        "layer": codes[first] >> LAYER_SHIFT,
        "from": codes[first] >> EXPERT_SHIFT & mask,
        "to": codes[first] & mask,
        "count": counts[first],
    }
    rows = zip(*columns.values(), strict=True)
    return [dict(zip(columns, map(int, row), strict=True)) for row in rows]


def total_counts(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the sum; the last axis of smaller parts is padded with 0, because the number of
    experts is not always known.
    """
    width = max(part.shape[-1] for part in parts)
    padded = [
        np.pad(part, [(0, 0)] * (part.ndim - 1) + [(0, width - part.shape[-1])]) for part in parts
    ]
    return np.sum(padded, axis=0)


def shares_of(load: np.ndarray) -> np.ndarray:
    """Return the shares of each layer's choices, [L, E]."""
    return load / np.maximum(load.sum(1, keepdims=True), 1)


def flips_over_steps(run: Run) -> dict[str, object]:
    """Return the flip rates by layer of every step, from the run's metrics."""
    table = run.metrics.table(names=[FLIP_RATE])
    values = table["per_layer"].get(FLIP_RATE, [])
    kept = [(step, row) for step, row in zip(table["steps"], values, strict=False) if row]
    return {"steps": [step for step, _ in kept], "values": [row for _, row in kept]}


def experts_of_model(run: Run) -> int:
    """Return E according to the model's config.json, or 0 if that is not found.

    With it, an expert that no token chose is shown too.
    """
    for folder in run.model_folders():
        try:
            config = json.loads((folder / "config.json").read_text())
        except (OSError, ValueError):
            continue
        sizes = [value for key in EXPERT_KEYS if isinstance(value := config.get(key), int)]
        if sizes:
            return sizes[0]
    return 0
