"""Groups that were sampled and not trained on yet, whole or cut short, in a file of a checkpoint; back as the same records.

One safetensors file per replica, layout in `to_tensors`; its metadata says which prompt each group answers.  Ids of prompts are
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

from megatron_rl.records import Prompt, Rollout, check_digest, spanned_versions, version_spans
from megatron_rl.rollout.partial import PartialGroup

PATTERN = "rollouts_*.safetensors"

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
            tensors |= to_tensors(f"{place}/{index}", rollout)
            spans = version_spans(rollout.policy_versions)
            parts.append([index, rollout.id, rollout.prompt_length, rollout.finish_reason, spans])
        about.append({"prompt": number, "size": group.size, "must": group.must, "responses": parts})
    save_file(tensors, path, metadata={"groups": json.dumps(about)})


def to_tensors(name: str, rollout: Rollout) -> dict[str, np.ndarray]:
    """tokens int64 [S], logprobs float32 [R]; with routes: routes uint8 | int16 [L, S - 1, K], digest uint8 [16]; with gaps in
    them: gaps bool [S - 1]."""
    tensors = {"tokens": rollout.tokens, "logprobs": rollout.rollout_logprobs}
    if rollout.routed_experts is not None:
        tensors["routes"] = rollout.routed_experts.transpose(1, 0, 2)
        tensors["digest"] = np.frombuffer(rollout.routes_digest or b"", np.uint8)
    if rollout.missing_routes is not None:
        tensors["gaps"] = rollout.missing_routes
    # a no-op where routes are layer-major, as the client leaves them; safetensors writes a view's memory, not its elements
    return {f"{name}:{kind}": np.ascontiguousarray(value) for kind, value in tensors.items()}


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


def responses(file: Any, place: int, about: Sequence[Sequence[Any]]) -> Iterator[tuple[int, Rollout]]:
    names = set(file.keys())
    for index, id_, prompt_length, finish_reason, spans in about:

        def tensor(kind: str, name: str = f"{place}/{index}") -> np.ndarray | None:
            return file.get_tensor(f"{name}:{kind}") if f"{name}:{kind}" in names else None

        tokens, logprobs, routes, digest = tensor("tokens"), tensor("logprobs"), tensor("routes"), tensor("digest")
        assert tokens is not None and logprobs is not None
        if routes is not None:
            routes = routes.transpose(1, 0, 2)
            check_digest(id_, tokens, routes, None if digest is None else digest.tobytes())
        yield (
            index,
            Rollout(
                id=id_,
                tokens=tokens,
                prompt_length=prompt_length,
                rollout_logprobs=logprobs,
                routed_experts=routes,
                finish_reason=finish_reason,
                policy_versions=spanned_versions(spans),
                missing_routes=tensor("gaps"),
                routes_digest=None if digest is None else digest.tobytes(),
            ),
        )
