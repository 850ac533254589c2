"""A group while it is sampled, and as a checkpoint holds it: complete responses, and beginnings of
responses that a later request continues.

In a checkpoint: one safetensors file per replica, with tensors "PLACE/INDEX:KIND" of the kinds of
batch/codec.to_arrays ("PLACE/INDEX/N:KIND" of the earlier sequences of an episode), and metadata
with the prompt that each group answers.  Prompts are identified by numbers that the caller chooses,
the same in every run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from megatron_rl.records import Prompt, Rollout, RolloutGroup

PATTERN = "rollouts_*.safetensors"
HEADER_KEYS_0_1 = ("index", "id", "prompt_length", "finish_reason", "versions")
"""Version 0.1 wrote the header of a response as a list of these."""


@dataclass(eq=False)  # compared by identity: a prompt may be drawn twice
class PartialGroup:
    """One prompt's group while it is sampled, perhaps over several steps.

    rollouts: complete responses by index; prefixes: those cut short (finish_reason abort).  is_due:
    a token would be too old for the next step, so that this step waits for the group and takes it.
    sent_to: version of the weights that a server had when it got the group's request, until its
    answer is in the group.
    troubles: (URL of a server, what failed there) of the call that fills the group now.
    max_tokens: of a response; None: as many as the call allows.  stop_token_ids: at which it ends,
    beside the call's.
    server: URL of the one that was asked last.
    scored: the complete group with its rewards, where it was scored while others were sampled.
    known: the sequence that the prompt begins with, up to its last turn: routes that need not be
    sent again.
    """

    prompt: Prompt
    size: int
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    prefixes: dict[int, Rollout] = field(default_factory=dict)
    is_due: bool = False
    sent_to: int | None = None
    troubles: list[tuple[str, str]] = field(default_factory=list)
    max_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    server: str = ""
    known: Rollout | None = None
    scored: RolloutGroup | None = None

    @property
    def missing(self) -> list[int]:
        return [index for index in range(self.size) if index not in self.rollouts]

    @property
    def is_complete(self) -> bool:
        return len(self.rollouts) == self.size

    def prefix_tokens(self, index: int) -> list[int]:
        """The response tokens that exist of an unfinished response."""
        prefix = self.prefixes.get(index)
        return [] if prefix is None else prefix.tokens[prefix.prompt_length :].tolist()

    def known_of(self, index: int) -> Rollout | None:
        """What was sampled of the input of the next request for response `index`."""
        return self.prefixes.get(index, self.known)

    @property
    def first_row(self) -> int:
        """From which row on the next request needs routes, the same for all its samples.

        Before it are tokens whose rows are known; the last of a sampled sequence was never an
        input, and has none.
        """
        known = [self.known_of(index) for index in self.missing]
        return min(
            (0 if k is None or not k.has_routes else len(k.tokens) - 1 for k in known), default=0
        )

    def put(self, index: int, rollout: Rollout) -> None:
        """Set response `index`: complete, or a longer prefix than before."""
        if rollout.finish_reason == "abort":
            self.prefixes[index] = rollout
        else:
            self.rollouts[index] = rollout
            self.prefixes.pop(index, None)

    def begins_at(self, version: int) -> bool:
        """Whether the oldest weights of a response are `version`, or may be in the answer of a
        request.
        """
        # in this order: while it is sampled, a response goes from the request to the prefixes to
        # the complete ones
        sent_to, responses = self.sent_to, (*self.prefixes.values(), *self.rollouts.values())
        return sent_to == version or any(rollout.oldest_version == version for rollout in responses)

    def drop_older(self, version: int, *, is_asked: bool) -> list[Rollout]:
        """Remove and return the responses with a token of weights older than `version`: they start
        again.

        is_asked: not the prefixes, which a request may be continuing.
        """
        old = []
        for found in (self.rollouts,) if is_asked else (self.rollouts, self.prefixes):
            for index in [
                index for index, rollout in found.items() if rollout.oldest_version < version
            ]:
                old.append(found.pop(index))
        if old:
            self.scored = None
        return old

    def closed(self) -> RolloutGroup:
        """The complete group, with its rewards if it was scored."""
        return self.scored or RolloutGroup(
            self.prompt, tuple(self.rollouts[index] for index in range(self.size))
        )


class GroupHeader(TypedDict):
    """One group in the metadata.

    responses: header_of() each, with its index in the group and those of earlier sequences.
    """

    prompt: int
    size: int
    responses: list[dict[str, Any] | list[Any]]


Waiting = dict[int, list[tuple[Path, int, GroupHeader]]]
"""Number of a prompt -> file, place in it and header of each group that answers it."""


def file_name(dp_rank: int) -> str:
    return f"rollouts_{dp_rank:05d}.safetensors"


def copied(groups: Sequence[PartialGroup]) -> list[PartialGroup]:
    """As they are now, each once: sampling may still put responses into the originals."""
    unique = {id(group): group for group in groups}.values()  # a group may be both started and left
    return [
        replace(group, rollouts=dict(group.rollouts), prefixes=dict(group.prefixes))
        for group in unique
    ]


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
            {
                "index": index,
                **header_of(rollout),
                "earlier": [header_of(each) for each in rollout.episode.earlier],
            }
            for index, rollout in parts
        ]
        headers.append({"prompt": number, "size": group.size, "responses": responses})
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


def read_groups(
    waiting: Waiting, prompts: Sequence[Prompt], order: Sequence[int], part: slice
) -> list[PartialGroup]:
    """The groups of one replica, which gets the prompts order[part] of those that are taken next.

    order: numbers of prompts.  A prompt that comes twice has two groups.  Raises ValueError for
    routes of other tokens.
    """
    queues, mine = (
        {number: list(found) for number, found in waiting.items()},
        set(range(len(order))[part]),
    )
    groups = []
    for position, number in enumerate(order):
        if queue := queues.get(number):
            # also those of other replicas: a prompt's second group answers its second place
            found = queue.pop(0)
            if position in mine:
                groups.append(read_group(*found, prompts[number]))
    return groups


def read_group(path: Path, place: int, header: GroupHeader, prompt: Prompt) -> PartialGroup:
    group = PartialGroup(prompt, header["size"])
    with safe_open(path, framework="numpy") as file:
        names = set(file.keys())
        for found in header["responses"]:
            response = (
                found
                if isinstance(found, Mapping)
                else dict(zip(HEADER_KEYS_0_1, found, strict=True))
            )
            where, headers = (
                f"{place}/{response['index']}",
                [*response.get("earlier", ()), response],
            )
            places = [*(f"{where}/{number}" for number in range(len(headers) - 1)), where]
            *earlier, last = (
                check_origin(from_arrays(each, arrays_in_file(file, names, own)))
                for each, own in zip(headers, places, strict=True)
            )
            group.put(response["index"], joined(last, earlier))
    return group
