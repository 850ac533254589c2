"""Groups in a checkpoint: complete responses, and beginnings of responses that a later request
continues.

Each replica writes one safetensors file, with tensors "PLACE/INDEX:KIND" of the kinds of
batch/codec.to_arrays ("PLACE/INDEX/N:KIND" of the earlier sequences of an episode), and metadata
with the prompt that each group answers.  Prompts are identified by numbers that the caller chooses,
the same in every run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from megatron_rl.batch.codec import (
    arrays_in_file,
    check_origin,
    file_arrays,
    from_arrays,
    header_of,
    joined,
)
from megatron_rl.records import Prompt
from megatron_rl.rollout.group import Group

PATTERN = "rollouts_*.safetensors"
HEADER_KEYS_0_1 = ("index", "id", "prompt_length", "finish_reason", "versions")
"""Keys of a response's header, which version 0.1 wrote as a list of these values."""


class GroupHeader(TypedDict):
    """One group in the metadata."""

    prompt: int
    """Number of the prompt."""
    size: int
    responses: list[dict[str, Any] | list[Any]]
    """header_of() each response, with its index in the group and the headers of the episode's
    earlier sequences."""


Waiting = dict[int, list[tuple[Path, int, GroupHeader]]]
"""Number of a prompt -> file, place in it and header of each group that answers it."""


def file_name(dp_rank: int) -> str:
    """Return the name of a replica's file."""
    return f"rollouts_{dp_rank:05d}.safetensors"


def copied(groups: Sequence[Group]) -> list[Group]:
    """Return one copy of every group: sampling may still put responses into the originals."""
    unique = {id(group): group for group in groups}.values()  # a group may be both started and left
    return [
        replace(group, rollouts=dict(group.rollouts), prefixes=dict(group.prefixes))
        for group in unique
    ]


def write_groups(path: Path, groups: Sequence[Group], numbers: Sequence[int]) -> None:
    """Write the groups to one file; `numbers` are those of their prompts."""
    tensors: dict[str, np.ndarray] = {}
    headers = []
    for place, (group, number) in enumerate(zip(groups, numbers, strict=True)):
        # disjoint: put() removes a prefix when its response is complete
        parts = sorted({**group.prefixes, **group.rollouts}.items())
        for index, rollout in parts:
            tensors |= file_arrays(f"{place}/{index}", rollout)
        responses = [
            {
                "index": index,
                **header_of(rollout),
                "earlier": [header_of(sequence) for sequence in rollout.episode.earlier],
            }
            for index, rollout in parts
        ]
        headers.append({"prompt": number, "size": group.size, "responses": responses})
    save_file(tensors, path, metadata={"groups": json.dumps(headers)})


def find_groups(folder: Path) -> Waiting:
    """Return the groups in the files of `folder`, which any number of replicas wrote; read no
    tensor.

    Raises ValueError for a file that is not of this format.
    """
    waiting: Waiting = {}
    for path in sorted(folder.glob(PATTERN)):
        try:
            with safe_open(path, framework="numpy") as file:
                groups = json.loads(file.metadata()["groups"])
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: not a file of rollouts in flight: {error}") from error
        for place, header in enumerate(groups):
            waiting.setdefault(header["prompt"], []).append((path, place, header))
    return waiting


def read_groups(
    waiting: Waiting, prompts: Sequence[Prompt], order: Sequence[int], part: slice
) -> list[Group]:
    """Return the groups of one replica, which gets the prompts order[part] of those that are taken
    next.

    order: numbers of prompts.  A prompt that comes twice has two groups.  Raises ValueError for
    routes of other tokens.
    """
    queues = {number: list(places) for number, places in waiting.items()}
    positions_here = set(range(len(order))[part])
    groups = []
    for position, number in enumerate(order):
        if queue := queues.get(number):
            # removed for other replicas too: a prompt's second group answers its second place
            place = queue.pop(0)
            if position in positions_here:
                groups.append(read_group(*place, prompts[number]))
    return groups


def read_group(path: Path, place: int, header: GroupHeader, prompt: Prompt) -> Group:
    group = Group(prompt, header["size"])
    with safe_open(path, framework="numpy") as file:
        names = set(file.keys())
        for entry in header["responses"]:
            response = (
                entry
                if isinstance(entry, Mapping)
                else dict(zip(HEADER_KEYS_0_1, entry, strict=True))
            )
            where = f"{place}/{response['index']}"
            headers = [*response.get("earlier", ()), response]
            keys = [*(f"{where}/{number}" for number in range(len(headers) - 1)), where]
            *earlier, last = (
                check_origin(from_arrays(fields, arrays_in_file(file, names, key)))
                for fields, key in zip(headers, keys, strict=True)
            )
            group.put(response["index"], joined(last, earlier))
    return group
