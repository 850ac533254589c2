"""A rollout as a JSON header and named arrays, the form in which it is sent to ranks and written to
files.

The users are transfer.py (between ranks), rollout/saved (files of a run) and
rollout/group_files.py (files of a checkpoint).
Shapes: S tokens of a rollout, R of them sampled, L MoE layers, K top-k, n rollouts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from safetensors import safe_open

from megatron_rl.batch.optional_fields import teacher_of, to_mask, to_top
from megatron_rl.records import (
    EpisodeRecord,
    Rollout,
    check_digest,
    check_episode,
    spanned_versions,
    version_spans,
)
from megatron_rl.records.token_sets import check_mask

TOP_KINDS = ("teacher_top_sizes", "teacher_top_codes", "teacher_top_logprobs")
"""Kinds of the arrays of Rollout.teacher_top."""
ALIGNMENT = 16
"""Every array starts at a multiple of this number of bytes, so that views of any dtype are aligned.
"""


def header_of(rollout: Rollout) -> dict[str, Any]:
    """Return all fields of a sequence except its arrays, as JSON values.

    Its "versions" are [[version, tokens], ...] of the response, in order.
    """
    episode = rollout.episode
    optional = {
        "reward": episode.reward,
        "metrics": dict(episode.metrics),
        "reward_metrics": dict(rollout.reward_metrics),
        "turn_rewards": list(episode.turn_rewards),
        "turns": [list(turn) for turn in episode.turns],
        "turn_seconds": [list(seconds) for seconds in episode.turn_seconds],
        "messages": [dict(message) for message in episode.messages],
    }
    return {
        "id": rollout.id,
        "prompt_length": rollout.prompt_length,
        "finish_reason": rollout.finish_reason,
        "versions": version_spans(rollout.policy_versions),
    } | {name: value for name, value in optional.items() if value not in (None, {}, [])}


def to_arrays(rollout: Rollout) -> dict[str, np.ndarray]:
    """Return the arrays of one sequence by kind:

    tokens          int64 [S]
    logprobs        float32 [R]
    environment     int64 [spans, 2], where an environment wrote tokens
    routed_experts  uint8 | int16 [S - 1, L, K], with routes
    routes_digest   uint8 [16], with routes
    missing_routes  bool [S - 1], where some rows have no route
    mask_sizes      uint16 [R], with kept sets (see TokenSets)
    mask_codes      uint8 [bytes], with kept sets
    teacher_logprobs  float32 [R], where a teacher has scored the sequence
    teacher_top_sizes, _codes, _logprobs  uint16 [R], uint8 [bytes], float32 [R * K], its most
                    probable tokens (see TeacherTop), with loss.teacher_form other than token
    episode_digest  uint8 [16], where the sequence ends an episode of several
    """
    arrays = {"tokens": rollout.tokens, "logprobs": rollout.rollout_logprobs}
    if rollout.environment:
        arrays["environment"] = np.array(rollout.environment, np.int64)
    if rollout.routed_experts is not None:
        arrays["routed_experts"] = rollout.routed_experts
        arrays["routes_digest"] = np.frombuffer(rollout.routes_digest or b"", np.uint8)
    if rollout.missing_routes is not None:
        arrays["missing_routes"] = rollout.missing_routes
    if rollout.sampling_mask is not None:
        arrays |= {
            "mask_sizes": rollout.sampling_mask.sizes,
            "mask_codes": rollout.sampling_mask.codes,
        }
    if rollout.teacher_logprobs is not None:
        arrays["teacher_logprobs"] = rollout.teacher_logprobs
    if (top := rollout.teacher_top) is not None:
        parts = (top.sets.sizes, top.sets.codes, top.logprobs)
        arrays |= dict(zip(TOP_KINDS, parts, strict=True))
    if rollout.episode.digest is not None:
        arrays["episode_digest"] = np.frombuffer(rollout.episode.digest, np.uint8)
    return arrays


def from_arrays(header: Mapping[str, Any], array: Callable[[str], np.ndarray | None]) -> Rollout:
    """Return the sequence of `header`, without its text; `joined` makes an episode.

    array: kind -> the array of `to_arrays`, or None.
    Raises ValueError for arrays of other lengths than the header's, and for routes without a
    digest.  `pack` checks that the digest is that of these tokens and routes.
    """
    tokens, logprobs, versions = (
        array("tokens"),
        array("logprobs"),
        spanned_versions(header["versions"]),
    )
    if tokens is None or logprobs is None:
        raise ValueError(
            f"rollout {header['id']}: tokens or log-probs are missing; record it again"
        )
    environment = to_spans(array("environment"))
    observed = sum(end - start for start, end in environment)
    sizes = (len(tokens) - header["prompt_length"] - observed, len(logprobs), len(versions))
    if len(set(sizes)) > 1:
        others = f" and an environment of {observed}" if observed else ""
        raise ValueError(
            f"rollout {header['id']}: {len(tokens)} tokens with a prompt of"
            f" {header['prompt_length']}{others}, {sizes[1]} log-probs and {sizes[2]} weight"
            " versions must describe one response; record it again"
        )
    routes, digest = array("routed_experts"), array("routes_digest")
    if routes is not None and digest is None:
        raise ValueError(
            f"rollout {header['id']}: expert ids without their digest, both are required; record it"
            " again"
        )
    return Rollout(
        id=header["id"],
        tokens=tokens,
        prompt_length=header["prompt_length"],
        rollout_logprobs=logprobs,
        routed_experts=None if routes is None else layer_major(routes),
        finish_reason=header["finish_reason"],
        policy_versions=versions,
        missing_routes=None if routes is None else array("missing_routes"),
        routes_digest=None if routes is None or digest is None else digest.tobytes(),
        environment=environment,
        sampling_mask=to_mask(array("mask_sizes"), array("mask_codes"), header["id"]),
        teacher_logprobs=teacher_of(array("teacher_logprobs"), len(logprobs), header["id"]),
        teacher_top=to_top([array(kind) for kind in TOP_KINDS], len(logprobs), header["id"]),
        reward_metrics=header.get("reward_metrics", {}),
        episode=to_episode(header, array("episode_digest")),
    )


def to_episode(header: Mapping[str, Any], digest: np.ndarray | None) -> EpisodeRecord:
    """Return Rollout.episode from a header and the array of its digest, without other sequences."""
    return EpisodeRecord(
        reward=header.get("reward"),
        metrics=header.get("metrics", {}),
        turns=tuple((int(end), reason) for end, reason in header.get("turns", ())),
        turn_rewards=tuple(header.get("turn_rewards", ())),
        turn_seconds=tuple((env, model) for env, model in header.get("turn_seconds", ())),
        messages=tuple(header.get("messages", ())),
        digest=None if digest is None else digest.tobytes(),
    )


def joined(rollout: Rollout, earlier: Sequence[Rollout]) -> Rollout:
    """Return the episode of the sequences `earlier` and `rollout`, which ends it.

    Raises ValueError unless these are all its sequences, in their order.
    """
    if not earlier:
        return check_episode(rollout)
    if rollout.episode.digest is None:
        raise ValueError(
            f"rollout {rollout.id}: {len(earlier) + 1} sequences without the digest that binds"
            " them, which is required; record it again"
        )
    return check_episode(rollout.after(earlier))


def to_spans(environment: np.ndarray | None) -> tuple[tuple[int, int], ...]:
    """Return Rollout.environment from its array, int64 [spans, 2] or None."""
    return (
        () if environment is None else tuple((int(start), int(end)) for start, end in environment)
    )


def check_origin(rollout: Rollout) -> Rollout:
    """Return the rollout; raise ValueError where its routes or kept sets are not of its tokens."""
    if rollout.sampling_mask is not None:
        check_mask(rollout.id, rollout.sampling_mask, rollout.tokens[rollout.sampled])
    if rollout.routed_experts is not None:
        check_digest(
            rollout.id,
            rollout.tokens,
            rollout.routed_experts,
            rollout.routes_digest,
            rollout.environment,
        )
    return rollout


FORMER_KINDS = {"routed_experts": "routes", "routes_digest": "digest", "missing_routes": "gaps"}
"""Names of arrays in checkpoints of version 0.1, whose routes are [L, S - 1, K]."""


def file_arrays(name: str, rollout: Rollout) -> dict[str, np.ndarray]:
    """Return the arrays of a rollout as tensors of a safetensors file: "NAME:KIND", and
    "NAME/0:KIND", "NAME/1:KIND" ... for earlier sequences.
    """
    names = [*(f"{name}/{number}" for number in range(len(rollout.episode.earlier))), name]
    return {
        # safetensors writes the memory of a view, not its elements
        f"{key}:{kind}": np.ascontiguousarray(array)
        for key, sequence in zip(names, (*rollout.episode.earlier, rollout), strict=True)
        for kind, array in to_arrays(sequence).items()
    }


def arrays_in_file(
    file: safe_open, names: Collection[str], name: str
) -> Callable[[str], np.ndarray | None]:
    """Return a reader for `from_arrays`: kind -> tensor "NAME:KIND" of an open safetensors file,
    None where it is not one of the file's `names`.
    """

    def array(kind: str) -> np.ndarray | None:
        if f"{name}:{kind}" in names:
            return file.get_tensor(f"{name}:{kind}")
        former = f"{name}:{FORMER_KINDS.get(kind, kind)}"
        if former not in names:
            return None
        return (
            file.get_tensor(former).transpose(1, 0, 2)
            if kind == "routed_experts"
            else file.get_tensor(former)
        )

    return array


def layer_major(routes: np.ndarray) -> np.ndarray:
    """Return the same ids [S - 1, L, K] with the memory order [L, S - 1, K], because ranks copy all
    rows of some layers.
    """
    return np.ascontiguousarray(routes.transpose(1, 0, 2)).transpose(1, 0, 2)


@dataclass(frozen=True)
class Encoded:
    """Rollouts as bytes, of which any part can be copied: a step's routes take gigabytes, which are
    never copied as a whole.
    """

    blocks: Sequence[np.ndarray]
    """uint8, views of the rollouts' arrays; zeros fill the space up to the next start."""
    starts: np.ndarray
    """int64: the starts of the blocks, multiples of ALIGNMENT, and the number of all bytes."""

    def __len__(self) -> int:
        return int(self.starts[-1])

    def copy_to(self, out: np.ndarray, start: int = 0) -> None:
        """Fill `out`, uint8, with the bytes from `start` on."""
        out[:] = 0  # also the space between blocks, so that equal rollouts have equal bytes
        end = start + len(out)
        for index in range(
            int(np.searchsorted(self.starts, start, side="right")) - 1, len(self.blocks)
        ):
            at = int(self.starts[index])
            if at >= end:
                return
            part = self.blocks[index][max(start - at, 0) : end - at]
            to = max(at - start, 0)
            out[to : to + len(part)] = part


def to_bytes(rollouts: Sequence[Rollout], **columns: np.ndarray) -> np.ndarray:
    """Return the bytes of `encode` in one array, uint8 [bytes]."""
    content = encode(rollouts, None, **columns)
    data = np.empty(len(content), np.uint8)
    content.copy_to(data)
    return data


def encode(
    rollouts: Sequence[Rollout],
    routes: list[np.ndarray] | None = None,
    **columns: np.ndarray,
) -> Encoded:
    """Encode a JSON header, then every array.  columns: more arrays, such as one value per rollout.

    An episode is written sequence by sequence; the one that ends it is the last.
    routes: a list that gets the expert ids [L, S - 1, K] of the sequences, which are left out then.
    """
    headers, arrays = [], list(columns.values())
    for rollout in rollouts:
        for sequence in (*rollout.episode.earlier, rollout):
            by_kind = to_arrays(sequence)
            if "routed_experts" in by_kind:
                # layer-major, so this is contiguous
                by_kind["routed_experts"] = by_kind["routed_experts"].transpose(1, 0, 2)
            header = header_of(sequence) | {"num_earlier": len(sequence.episode.earlier)}
            if routes is not None and "routed_experts" in by_kind:
                ids = by_kind.pop("routed_experts")
                routes.append(ids)
                header["routes"] = (ids.dtype.str, ids.shape)
            headers.append(header | {"arrays": list(by_kind)})
            arrays += by_kind.values()
    contents = {
        "rollouts": headers,
        "columns": list(columns),
        "arrays": [(array.dtype.str, array.shape) for array in arrays],
    }
    text = np.frombuffer(json.dumps(contents).encode(), np.uint8)
    # the first block is the length of the header, which `from_bytes` needs first
    blocks = [np.array([len(text)], np.int64).view(np.uint8), text]
    return encoded([*blocks, *arrays])


def encoded(arrays: Sequence[np.ndarray]) -> Encoded:
    """Return the bytes of the arrays, one after the other."""
    blocks = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
    return Encoded(blocks, np.cumsum([0, *(aligned(len(block)) for block in blocks)]))


def from_bytes(
    data: np.ndarray, routes: Callable[[str, Sequence[int]], np.ndarray] | None = None
) -> tuple[list[Rollout], dict[str, np.ndarray]]:
    """Return (rollouts, columns), the inverse of `to_bytes` except for texts, which are not sent.
    Arrays are views of `data`.

    routes: (dtype, shape) -> the next array of those that `encode` left out.
    """
    # the first block is the length of the header
    at, length = ALIGNMENT, int(data[:8].view(np.int64)[0])
    header = json.loads(data[at : at + length].tobytes())
    at += aligned(length)
    arrays = []
    for dtype, shape in header["arrays"]:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        arrays.append(data[at : at + size].view(dtype).reshape(shape))
        at += aligned(size)
    remaining = iter(arrays)
    columns = {name: next(remaining) for name in header["columns"]}
    rollouts: list[Rollout] = []
    for sequence in header["rollouts"]:
        by_kind = {kind: next(remaining) for kind in sequence["arrays"]}
        if routes is not None and "routes" in sequence:
            by_kind["routed_experts"] = routes(*sequence["routes"])
        if "routed_experts" in by_kind:
            by_kind["routed_experts"] = by_kind["routed_experts"].transpose(1, 0, 2)
        first = len(rollouts) - sequence["num_earlier"]
        # the last sequence of an episode takes the place of the earlier ones
        rollouts[first:] = [joined(from_arrays(sequence, by_kind.get), rollouts[first:])]
    return rollouts, columns


def aligned(size: int) -> int:
    return size + -size % ALIGNMENT
