"""Groups in a checkpoint that were sampled and not trained on yet, complete or cut short.

One safetensors file per replica: tensors "PLACE/INDEX:KIND" with the kinds of batch/codec.to_arrays ("PLACE/INDEX/N:KIND" of
the earlier sequences of an episode), and metadata with the prompt that each group answers.  Prompts are identified by numbers
that the caller chooses, the same in every run.
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

from megatron_rl.batch.codec import arrays_in_file, check_origin, file_arrays, from_arrays, header_of, joined
from megatron_rl.records import Prompt
from megatron_rl.rollout.partial import PartialGroup

PATTERN = "rollouts_*.safetensors"
HEADER_KEYS_0_1 = ("index", "id", "prompt_length", "finish_reason", "versions")
"""Version 0.1 wrote the header of a response as a list of these."""


class GroupHeader(TypedDict):
    """One group in the metadata.  responses: header_of() each, with its index in the group and those of earlier sequences."""

    prompt: int
    size: int
    must: bool
    responses: list[dict[str, Any] | list[Any]]


Waiting = dict[int, list[tuple[Path, int, GroupHeader]]]
"""Number of a prompt -> file, place in it and header of each group that answers it."""


def file_name(dp_rank: int) -> str:
    return f"rollouts_{dp_rank:05d}.safetensors"


def copied(groups: Sequence[PartialGroup]) -> list[PartialGroup]:
    """As they are now, each once: sampling may still put responses into the originals."""
    unique = {id(group): group for group in groups}.values()  # a group may be both started and left
    return [replace(group, rollouts=dict(group.rollouts), prefixes=dict(group.prefixes)) for group in unique]


def write_groups(path: Path, groups: Sequence[PartialGroup], numbers: Sequence[int]) -> None:
    """numbers: of the groups' prompts."""
    tensors: dict[str, np.ndarray] = {}
    headers = []
    for place, (group, number) in enumerate(zip(groups, numbers, strict=True)):
        # disjoint: put() removes a prefix when its response is complete
        parts = sorted({**group.prefixes, **group.rollouts}.items())
        for index, rollout in parts:
            tensors |= file_arrays(f"{place}/{index}", rollout)
        responses = [
            {"index": index, **header_of(rollout), "earlier": [header_of(each) for each in rollout.earlier]}
            for index, rollout in parts
        ]
        headers.append({"prompt": number, "size": group.size, "must": group.must, "responses": responses})
    save_file(tensors, path, metadata={"groups": json.dumps(headers)})


def find_groups(folder: Path) -> Waiting:
    """The groups in the files of `folder`, which any number of replicas wrote; reads no tensor.

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


def read_groups(waiting: Waiting, prompts: Sequence[Prompt], order: Sequence[int], part: slice) -> list[PartialGroup]:
    """The groups of one replica, which gets the prompts order[part] of those that are taken next.

    order: numbers of prompts.  A prompt that comes twice has two groups.  Raises ValueError for routes of other tokens.
    """
    queues, mine = {number: list(found) for number, found in waiting.items()}, set(range(len(order))[part])
    groups = []
    for position, number in enumerate(order):
        if queue := queues.get(number):
            found = queue.pop(0)  # also those of other replicas: a prompt's second group answers its second place
            if position in mine:
                groups.append(read_group(*found, prompts[number]))
    return groups


def read_group(path: Path, place: int, header: GroupHeader, prompt: Prompt) -> PartialGroup:
    group = PartialGroup(prompt, header["size"], must=header["must"])
    with safe_open(path, framework="numpy") as file:
        names = set(file.keys())
        for found in header["responses"]:
            response = found if isinstance(found, Mapping) else dict(zip(HEADER_KEYS_0_1, found, strict=True))
            where, headers = f"{place}/{response['index']}", [*response.get("earlier", ()), response]
            places = [*(f"{where}/{number}" for number in range(len(headers) - 1)), where]
            *earlier, last = (
                check_origin(from_arrays(each, arrays_in_file(file, names, own)))
                for each, own in zip(headers, places, strict=True)
            )
            group.put(response["index"], joined(last, earlier))
    return group
