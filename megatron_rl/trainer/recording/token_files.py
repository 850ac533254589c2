"""The files in trained/: the trainer's half of what a run writes about every token.

docs/reference/token_data.md has the schema, and how to read it.  The leader of a data-parallel
replica writes about the sequences that its replica trained, which another one may have sampled.
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

from megatron_rl.config.run_paths import RunFolder, writer_name
from megatron_rl.metrics.file_writer import FileWriter
from megatron_rl.metrics.lines import replace_text
from megatron_rl.records.packed import Sample
from megatron_rl.rollout.saved.rollout_tensors import SCHEMA, write_tensors


class Flag(enum.IntFlag):
    """Reasons why a token did not, or not fully, contribute to the update."""

    CLIPPED_HIGH = 1
    CLIPPED_LOW = 2
    BOUNDED = 4
    """The bounds of W_t changed its weight."""
    WEIGHT_MASKED = 8
    """loss.weight_mode = mask removed it."""
    REJECTED = 16
    """Its response was rejected."""
    NOT_FINITE = 32
    """One of its log-probs is not finite."""
    MISSING_ROUTE = 64
    """It has no route, and replay.on_missing_route = mask_token."""
    LEFT_OUT = 128
    """Its response is not in the loss: batch.filter_truncated, or no reward."""


@dataclass(frozen=True)
class Table:
    """The chosen sequences of one micro-batch, end to end."""

    VALUES: ClassVar = ("old_logprobs", "logprobs", "weight", "ratio", "entropy", "loss", "flags")

    memory: np.ndarray
    """uint8, of which all other arrays are views: one reduction gathers them."""
    values: np.ndarray
    """float32 [VALUES, n]."""
    own_experts: np.ndarray
    """uint8 | int16 [L, m, K], the router's own choices; L is 0 where routes were not compared."""
    margins: np.ndarray
    """float16 [L, m], between the scores of the last chosen expert and the next one."""
    flipped: np.ndarray
    """uint8 [L, m], 1 where the router's own choice differs from the rollout's route."""

    @classmethod
    def zeros(
        cls, layers: int, num_rows: int, top_k: int, num_sampled: int, ids: np.dtype
    ) -> Table:
        """Return a table of zeros."""
        # the widest elements come first, so that all are aligned
        shapes: list[tuple[tuple[int, ...], np.dtype]] = [
            ((len(cls.VALUES), num_sampled), np.dtype(np.float32)),
            ((layers, num_rows), np.dtype(np.float16)),
            ((layers, num_rows, top_k), ids),
            ((layers, num_rows), np.dtype(np.uint8)),
        ]
        sizes = [int(np.prod(shape)) * kind.itemsize for shape, kind in shapes]
        memory = np.zeros(sum(sizes), np.uint8)
        parts = np.split(memory, np.cumsum(sizes)[:-1])
        values, margins, own_experts, flipped = (
            part.view(kind).reshape(shape)
            for part, (shape, kind) in zip(parts, shapes, strict=True)
        )
        return cls(memory, values, own_experts, margins, flipped)


@dataclass(frozen=True)
class SequenceTokens:
    """A trained sequence."""

    mini_batch: int
    """Index of its mini-batch."""
    sample: Sample
    summary: Sequence[float]
    """Sums and maxima over its tokens, in the order that `line_of` reads."""
    table: Table | None
    """The table of its micro-batch; None where no sequence of it is chosen."""


class TokenFiles:
    """The files of one data-parallel replica in a run's folder."""

    def __init__(
        self, folder: Path, files: FileWriter, *, dp_rank: int, mask_missing_routes: bool
    ) -> None:
        self.folder, self.files = RunFolder(folder), files
        self.dp_rank, self.mask_missing_routes = dp_rank, mask_missing_routes

    def write(self, step: int, sequences: Sequence[SequenceTokens]) -> None:
        """Write `step`, counted from 1, in the thread of `files`.

        The tensors come first: a line names a complete file.
        """
        path = self.folder.lines_path("trained", step, self.dp_rank)
        tensors_file = self.folder.tensors_path("trained", step, self.dp_rank)
        name = self.folder.name_of(tensors_file)
        sequences = [sequence for sequence in sequences if not sequence.sample.is_copy]
        keys = tensor_keys(sequences)
        self.files.later(
            tensors_file, lambda: write_tensors(tensors_file, dict(self._tensors(sequences, keys)))
        )
        self.files.later(path, lambda: replace_text(path, lines_of(sequences, keys, step, name)))

    def _tensors(
        self, sequences: Sequence[SequenceTokens], keys: Sequence[str]
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Yield ("KEY:KIND", array) of the chosen sequences."""
        row = sampled = 0
        table: Table | None = None
        for sequence, key in zip(sequences, keys, strict=True):
            # the sequences of a micro-batch follow each other, in the order of its table's rows
            if sequence.table is not table:
                table, row, sampled = sequence.table, 0, 0
            if table is None or not sequence.sample.save_tokens:
                continue
            rollout = sequence.sample.rollout
            rows = slice(row, row := row + len(rollout.tokens) - 1)
            tokens = slice(sampled, sampled := sampled + rollout.response_length)
            for kind, array in self._arrays(sequence.sample, table, rows, tokens).items():
                yield f"{key}:{kind}", np.ascontiguousarray(array)

    def _arrays(
        self, sample: Sample, table: Table, rows: slice, tokens: slice
    ) -> dict[str, np.ndarray]:
        """Return kind -> array of one sequence, from these rows and sampled tokens of the table."""
        arrays = dict(zip(table.VALUES, table.values[:, tokens], strict=True))
        # [N, R], as of N updates that use the sequence; N is 1 (docs/reference/token_data.md)
        arrays["logprobs"] = arrays["logprobs"][None]
        # the table has flags as float32, beside the other columns: 255 is exact there
        arrays["flags"] = arrays["flags"].astype(np.uint8) | self._known_flags(sample)
        arrays["advantage"] = np.array([sample.advantage], np.float32)
        if len(table.own_experts):
            arrays["own_experts"] = table.own_experts[:, rows].transpose(1, 0, 2)
            arrays["margin"] = table.margins[:, rows].T
            arrays["flips"] = np.packbits(table.flipped[:, rows].T, axis=1, bitorder="little")
        return arrays

    def _known_flags(self, sample: Sample) -> np.ndarray:
        """Return uint8 [R], the flags that the loss does not know."""
        rollout = sample.rollout
        known = np.zeros(rollout.response_length, np.uint8)
        if self.mask_missing_routes and rollout.missing_routes is not None:
            known[rollout.missing_routes[rollout.sampled - 1]] = Flag.MISSING_ROUTE
        if not sample.in_loss:
            known |= np.uint8(Flag.LEFT_OUT)
        return known


def tensor_keys(sequences: Sequence[SequenceTokens]) -> list[str]:
    """Return the key of each sequence's tensors: its id, or ID@FILE for the second of equal ids.

    Two replicas that drew the same prompt sample rollouts of equal ids.
    """
    keys: dict[str, None] = {}
    for sequence in sequences:
        sample = sequence.sample
        name = sample.rollout.id
        if name in keys:
            name = f"{name}@{writer_name('rollouts', sample.sampled_by)}"
        keys[name] = None
    return list(keys)


def lines_of(
    sequences: Sequence[SequenceTokens], keys: Sequence[str], step: int, tensors: str
) -> bytes:
    """Return the step's lines.

    tensors: the path of the file with its tensors, from the run's folder.

    orjson is fast, and writes numbers that are not finite as null.
    """
    lines = [
        line_of(sequence, step, tensors, key) for sequence, key in zip(sequences, keys, strict=True)
    ]
    return b"".join(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE) for line in lines)


def line_of(sequence: SequenceTokens, step: int, tensors: str, key: str) -> dict[str, object]:
    """Return the line of a sequence.

    Means are over the tokens in the loss, null where there are none; flip_frac is the share of all
    (token, layer) pairs with a route.
    """
    count, kl, k3, clipped, weight, entropy, loss, flips, pairs, gap, stale = sequence.summary
    means = {
        "kl": kl,
        "kl_k3": k3,
        "clipped_frac": clipped,
        "weight_mean": weight,
        "entropy_mean": entropy,
    }
    sample = sequence.sample
    return {
        "schema": int(SCHEMA),
        "step": step,
        "id": sample.rollout.id,
        "sampled_by": writer_name("rollouts", sample.sampled_by),
        "tensors": tensors if sample.save_tokens else None,
        "key": key,
        "mini_batch": sequence.mini_batch,
        **{name: total / count if count else None for name, total in means.items()},
        "max_log_ratio": gap if count else None,
        "max_staleness": stale if count else None,
        "flip_frac": flips / pairs if pairs else None,
        "loss": loss,
    }
