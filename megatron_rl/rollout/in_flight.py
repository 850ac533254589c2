"""Groups that were sampled and not trained on yet, whole or cut short, in a file of a checkpoint; back as the same records.

One safetensors file per replica, "PLACE/INDEX:KIND" with the kinds of batch/codec.to_arrays; its metadata says which
prompt each group answers.  Ids of prompts are
numbers that the caller chooses, the same in every run.  Shapes: S tokens, R response, L MoE layers, K top-k.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from megatron_rl.batch.codec import check_routes_digest, from_arrays, header_of, to_arrays
from megatron_rl.records import Prompt, Rollout
from megatron_rl.rollout.partial import PartialGroup

PATTERN = "rollouts_*.safetensors"
FORMER_KINDS = {"routed_experts": "routes", "routes_digest": "digest", "missing_routes": "gaps"}
"""Names that version 0.1 gave to arrays; its routes are [L, S - 1, K]."""

Waiting = dict[int, list[tuple[Path, int, dict[str, Any]]]]
"""Number of a prompt -> file, place in it and description of each group that answers it."""


def file_name(dp_rank: int) -> str:
    return f"rollouts_{dp_rank:05d}.safetensors"


def copied(groups: Sequence[PartialGroup]) -> list[PartialGroup]:
    """As they are now, each once: sampling may still put responses into the originals."""
    unique = {id(group): group for group in groups}.values()
    return [replace(group, rollouts=dict(group.rollouts), prefixes=dict(group.prefixes)) for group in unique]


def write_groups(path: Path, groups: Sequence[PartialGroup], numbers: Sequence[int]) -> None:
    """numbers: of the groups' prompts."""
    tensors: dict[str, np.ndarray] = {}
    about = []
    for place, (group, number) in enumerate(zip(groups, numbers, strict=True)):
        parts = []
        for index, rollout in sorted({**group.prefixes, **group.rollouts}.items()):
            # safetensors writes the memory of a view, not its elements
            arrays = {kind: np.ascontiguousarray(array) for kind, array in to_arrays(rollout).items()}
            tensors |= {f"{place}/{index}:{kind}": array for kind, array in arrays.items()}
            parts.append({"index": index, **header_of(rollout)})
        about.append({"prompt": number, "size": group.size, "must": group.must, "responses": parts})
    save_file(tensors, path, metadata={"groups": json.dumps(about)})


def find_groups(folder: Path) -> Waiting:
    """What the replicas that wrote `folder`, as many as there were, left in it; no tensor is read.

    Raises ValueError for a file that is not theirs.
    """
    waiting: Waiting = {}
    for path in sorted(folder.glob(PATTERN)):
        try:
            with safe_open(path, framework="numpy") as file:
                groups = json.loads(file.metadata()["groups"])
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: not a file of rollouts in flight: {error}") from error
        for place, about in enumerate(groups):
            waiting.setdefault(about["prompt"], []).append((path, place, about))
    return waiting


def read_groups(waiting: Waiting, prompts: Sequence[Prompt], order: Sequence[int], part: slice) -> list[PartialGroup]:
    """Those whose prompts will be dealt to one replica: it gets order[part] of the prompts that will be drawn next.

    order: their numbers.  A prompt that comes twice has two groups.  Raises ValueError for routes that are not their tokens'.
    """
    queues, mine, groups = {number: list(found) for number, found in waiting.items()}, set(range(len(order))[part]), []
    for position, number in enumerate(order):
        if queue := queues.get(number):
            path, place, about = queue.pop(0)
            if position in mine:
                groups.append(read_group(path, place, about, prompts[number]))
    return groups


def read_group(path: Path, place: int, about: Mapping[str, Any], prompt: Prompt) -> PartialGroup:
    group = PartialGroup(prompt, about["size"], must=about["must"])
    with safe_open(path, framework="numpy") as file:
        for index, rollout in responses(file, place, about["responses"]):
            group.put(index, rollout)
    return group


def responses(file: Any, place: int, about: Sequence[Any]) -> Iterator[tuple[int, Rollout]]:
    """(index in the group, response), with routes that are those of its tokens."""
    names = set(file.keys())
    for header in map(upgraded, about):
        name = f"{place}/{header['index']}"

        def array(kind: str, name: str = name) -> np.ndarray | None:
            if f"{name}:{kind}" in names:
                return file.get_tensor(f"{name}:{kind}")
            former = f"{name}:{FORMER_KINDS.get(kind, kind)}"
            if former not in names:
                return None
            return file.get_tensor(former).transpose(1, 0, 2) if kind == "routed_experts" else file.get_tensor(former)

        yield header["index"], check_routes_digest(from_arrays(header, array))


def upgraded(header: Any) -> Mapping[str, Any]:
    """A header as it is written today; version 0.1 wrote a list."""
    if isinstance(header, Mapping):
        return header
    return dict(zip(("index", "id", "prompt_length", "finish_reason", "versions"), header, strict=True))
