"""trained.jsonl and trained_STEP.safetensors: the trainer's half of what a run writes about every
token.

Schema, and how to read it: docs/reference/token_data.md.  Written by the leader of a data-parallel
replica about the sequences that it trained, which another replica may have sampled.
Shapes: S tokens of a sequence, R sampled, L MoE layers, K top-k; m rows and n sampled tokens of a
micro-batch's chosen sequences.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import orjson

from megatron_rl.metrics.file_writer import FileWriter
from megatron_rl.metrics.lines import append_text
from megatron_rl.records import Sample
from megatron_rl.rollout.saved.rollout_tensors import (
    SCHEMA,
    replica_file,
    tensors_path,
    write_tensors,
)


class Flag(enum.IntFlag):
    """Why a token did not, or not fully, contribute to the update."""

    CLIPPED_HIGH = 1
    CLIPPED_LOW = 2
    BOUNDED = 4  # the bounds of W_t changed it
    WEIGHT_MASKED = 8  # removed by loss.weight_mode = mask
    REJECTED = 16  # with its response
    NOT_FINITE = 32  # a log-prob is not finite
    MISSING_ROUTE = 64  # replay.on_missing_route = mask_token
    LEFT_OUT = 128  # the response is not in the loss: batch.filter_truncated, or no reward


@dataclass(frozen=True)
class Table:
    """The chosen sequences of one micro-batch, end to end; all arrays are views of `memory`, uint8."""

    VALUES: ClassVar = ("old_logprobs", "logprobs", "weight", "ratio", "entropy", "loss", "flags")

    memory: np.ndarray
    values: np.ndarray  # float32 [VALUES, n]
    own_experts: np.ndarray  # uint8 | int16 [L, m, K]; L is 0 where routes were not compared
    margins: np.ndarray  # float16 [L, m]
    flipped: np.ndarray  # uint8 [L, m], 0 or 1

    @classmethod
    def zeros(
        cls, layers: int, num_rows: int, top_k: int, num_sampled: int, ids: np.dtype
    ) -> Table:
        """The widest elements first, so that all are aligned."""
        shapes: list[tuple[tuple[int, ...], np.dtype]] = [
            ((len(cls.VALUES), num_sampled), np.dtype(np.float32)),
            ((layers, num_rows), np.dtype(np.float16)),
            ((layers, num_rows, top_k), ids),
            ((layers, num_rows), np.dtype(np.uint8)),
        ]
        sizes = [int(np.prod(shape)) * kind.itemsize for shape, kind in shapes]
        memory = np.zeros(sum(sizes), np.uint8)
        parts = np.split(memory, np.cumsum(sizes)[:-1])
        values, margins, own, flipped = (
            part.view(kind).reshape(shape)
            for part, (shape, kind) in zip(parts, shapes, strict=True)
        )
        return cls(memory, values, own, margins, flipped)


@dataclass(frozen=True)
class SequenceTokens:
    """A trained sequence.

    summary: the columns of `line_of`; table: of its micro-batch, where one of its sequences is
    chosen.
    """

    mini_batch: int
    sample: Sample
    summary: Sequence[float]
    table: Table | None


class TokenFiles:
    """The files of one data-parallel replica in `folder`."""

    def __init__(
        self, folder: Path, files: FileWriter, *, dp_rank: int, mask_missing_routes: bool
    ) -> None:
        self.folder, self.files, self.mask_missing_routes = folder, files, mask_missing_routes
        self.name = replica_file("trained", dp_rank)

    def write(self, step: int, sequences: Sequence[SequenceTokens]) -> None:
        """Write `step`, counted from 1, in the thread of `files`.

        The tensors come first: a line names a complete file.
        """
        side, path = tensors_path(self.folder, step, self.name), self.folder / f"{self.name}.jsonl"
        sequences = [each for each in sequences if not each.sample.is_copy]
        keys = tensor_keys(sequences)
        self.files.later(side, lambda: write_tensors(side, dict(self._tensors(sequences, keys))))
        self.files.later(
            path, lambda: append_text(path, lines_of(sequences, keys, step, side.name))
        )

    def _tensors(
        self, sequences: Sequence[SequenceTokens], keys: Sequence[str]
    ) -> Iterator[tuple[str, np.ndarray]]:
        """("KEY:KIND", array) of the chosen ones."""
        row = sampled = 0
        before: Table | None = None
        for each, key in zip(sequences, keys, strict=True):
            if each.table is not before:
                before, row, sampled = each.table, 0, 0
            if before is None or not each.sample.save_tokens:
                continue
            rollout = each.sample.rollout
            rows = slice(row, row := row + len(rollout.tokens) - 1)
            tokens = slice(sampled, sampled := sampled + rollout.response_length)
            for kind, array in self._arrays(each.sample, before, rows, tokens).items():
                yield f"{key}:{kind}", np.ascontiguousarray(array)

    def _arrays(
        self, sample: Sample, table: Table, rows: slice, tokens: slice
    ) -> dict[str, np.ndarray]:
        found = dict(zip(table.VALUES, table.values[:, tokens], strict=True))
        found["logprobs"] = found["logprobs"][None]
        found["flags"] = found["flags"].astype(np.uint8) | self._known_flags(sample)
        found["advantage"] = np.array([sample.advantage], np.float32)
        if len(table.own_experts):
            found["own_experts"] = table.own_experts[:, rows].transpose(1, 0, 2)
            found["margin"] = table.margins[:, rows].T
            found["flips"] = np.packbits(table.flipped[:, rows].T, axis=1, bitorder="little")
        return found

    def _known_flags(self, sample: Sample) -> np.ndarray:
        """uint8 [R]: the flags that the loss does not know."""
        rollout = sample.rollout
        known = np.zeros(rollout.response_length, np.uint8)
        if self.mask_missing_routes and rollout.missing_routes is not None:
            known[rollout.missing_routes[rollout.sampled - 1]] = Flag.MISSING_ROUTE
        if not sample.in_loss:
            known |= np.uint8(Flag.LEFT_OUT)
        return known


def tensor_keys(sequences: Sequence[SequenceTokens]) -> list[str]:
    """The id; of two equal ones, which two replicas sampled for a prompt that both drew, the second
    is ID@FILE.
    """
    keys: dict[str, None] = {}
    for each in sequences:
        name = each.sample.rollout.id
        keys[
            f"{name}@{replica_file('rollouts', each.sample.sampled_by)}" if name in keys else name
        ] = None
    return list(keys)


def lines_of(
    sequences: Sequence[SequenceTokens], keys: Sequence[str], step: int, tensors: str
) -> bytes:
    """The step's lines of trained.jsonl; by orjson, which is fast, and writes what is not finite as
    null.
    """
    lines = [line_of(each, step, tensors, key) for each, key in zip(sequences, keys, strict=True)]
    return b"".join(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE) for line in lines)


def line_of(each: SequenceTokens, step: int, tensors: str, key: str) -> dict[str, object]:
    """Means are over the tokens in the loss, null where there are none; flip_frac over all (token,
    layer) pairs with a route.
    """
    count, kl, k3, clipped, weight, entropy, loss, flips, pairs, gap, stale = each.summary
    means = {
        "kl": kl,
        "kl_k3": k3,
        "clipped_frac": clipped,
        "weight_mean": weight,
        "entropy_mean": entropy,
    }
    sample = each.sample
    return {
        "schema": int(SCHEMA),
        "step": step,
        "id": sample.rollout.id,
        "sampled_by": replica_file("rollouts", sample.sampled_by),
        "tensors": tensors if sample.save_tokens else None,
        "key": key,
        "mini_batch": each.mini_batch,
        **{name: total / count if count else None for name, total in means.items()},
        "max_log_ratio": gap if count else None,
        "max_staleness": stale if count else None,
        "flip_frac": flips / pairs if pairs else None,
        "loss": loss,
    }
