"""The two kinds of checkpoints as a conversion reads them: HF tensors or megatron parameters, in
blocks of a few megabytes.

A block is [rows, columns] (or [rows]) of one HF tensor, as stored.  The mapping says which rows of
the parameter these are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import reduce
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch

from megatron_rl.checkpoint.torch_dist.chunk_reader import TorchDist, check_keys
from megatron_rl.checkpoint.torch_dist.chunks import Chunk, Slots
from megatron_rl.models.spec import ModelSpec
from megatron_rl.weights.hf.entries import Entry, shard_shape
from megatron_rl.weights.hf.files import DTYPES, CheckpointError, HFFiles, is_finite
from megatron_rl.weights.hf.mapping import to_mcore

BLOCK_BYTES = 4 * 2**20
"""Bytes of a tensor that are in memory at a time; they also fit into a processor's cache."""
Named = tuple[str, torch.Tensor]
"""An HF name and a block of that tensor."""


class Side(Protocol):
    """A checkpoint that a conversion reads."""

    def dtype(self, entry: Entry) -> torch.dtype: ...

    def tensor(self, entry: Entry, index: int) -> Iterator[Named]:
        """Yield the blocks of the HF tensor entry.hf[index] in order, the same ones on every
        side.
        """


class HFSide:
    def __init__(self, files: HFFiles, spec: ModelSpec) -> None:
        self.files, self.spec = files, spec

    def dtype(self, entry: Entry) -> torch.dtype:
        """Return the parameter's dtype: if its tensors have different ones, that which represents
        all their values.
        """
        dtypes = [DTYPES[self.files.headers[name].dtype] for name in entry.hf_names]
        return reduce(torch.promote_types, dtypes)

    def tensor(self, entry: Entry, index: int) -> Iterator[Named]:
        runs = [run for run in row_runs(entry, self.spec) if run.tensor == index]
        for first, stop, _ in blocks(entry, runs):
            yield entry.hf_names[index], self.files.read_rows(entry.hf_names[index], first, stop)

    def parameter(self, entry: Entry, start: int, stop: int) -> Iterator[Named]:
        """Yield rows [start, stop) of the megatron parameter, in order."""
        for run in row_runs(entry, self.spec):
            low, high = max(start, run.row), min(stop, run.row + run.size)
            part = RowRun(run.tensor, run.hf_row + low - run.row, low, high - low)
            name = entry.hf_names[run.tensor]
            for first, last, _ in blocks(entry, [part]):
                yield name, self.files.read_rows(name, first, last)


class MegatronSide:
    """A torch_dist checkpoint.

    Raises CheckpointError, with the names that differ, if it has another model or other layers.
    """

    def __init__(self, source: TorchDist, slots: Slots, spec: ModelSpec) -> None:
        check_keys(str(source.path), slots.keys(), source.tensors())
        self.source, self.slots, self.spec = source, slots, spec

    def dtype(self, entry: Entry) -> torch.dtype:
        return self.source.dtype(self._chunks(entry)[0][0].key)

    def _chunks(self, entry: Entry) -> list[tuple[Chunk, int]]:
        """Return the stored chunks of a parameter, see Slots.cut.

        Raises CheckpointError if the tensor is larger than config.json says: a part of it would be
        read as the whole.  Only a vocabulary may have more rows, as padding.
        """
        chunks = list(self.slots.cut(entry.name, shard_shape(entry, 1)))
        first = 1 if entry.rule.kind == "vocab" else 0
        for chunk, _ in chunks:
            stored = self.source.shape(chunk.key)
            if stored[first:] != chunk.whole[first:]:
                raise CheckpointError(
                    f"{self.source.path}: {chunk.key} has shape {list(stored)}, config.json means"
                    f" {list(chunk.whole)}; is config.json of this checkpoint?"
                )
        return chunks

    def tensor(self, entry: Entry, index: int) -> Iterator[Named]:
        shape, chunks = shard_shape(entry, 1), self._chunks(entry)
        runs = [run for run in row_runs(entry, self.spec) if run.tensor == index]
        for first, stop, row in blocks(entry, runs):
            values = self.source.read_rows(chunks, shape, row, row + stop - first)
            yield entry.hf_names[index], values


class RowRun(NamedTuple):
    """A block of rows: [hf_row, hf_row + size) of the HF tensor entry.hf[tensor] are rows
    [row, row + size) of the parameter.
    """

    tensor: int
    hf_row: int
    row: int
    size: int


def row_runs(entry: Entry, spec: ModelSpec) -> list[RowRun]:
    """Return the origin of the complete parameter's rows, in its order: to_mcore applied to row
    numbers.
    """
    rows = [shape[0] for _, shape in entry.hf]
    # a number is skipped between tensors, so that no run spans two of them
    starts = [sum(rows[:i]) + i for i in range(len(rows))]
    numbered = [
        torch.arange(start, start + n)[:, None] for start, n in zip(starts, rows, strict=True)
    ]
    order = to_mcore(entry, numbered, spec, 0, 1).flatten()
    cuts = [0, *(torch.nonzero(order.diff() != 1).flatten() + 1).tolist(), len(order)]
    runs = []
    for first, stop in pairwise(cuts):
        number = int(order[first])
        tensor = bisect_right(starts, number) - 1
        runs.append(RowRun(tensor, number - starts[tensor], first, stop - first))
    return runs


def blocks(entry: Entry, runs: Iterable[RowRun]) -> Iterator[tuple[int, int, int]]:
    """Yield (first row, stop, the parameter's first row) of every block of these runs, in the order
    of the HF tensor's rows, which the first two count.

    A block has at most BLOCK_BYTES, or one row.
    """
    step = max(BLOCK_BYTES // max(columns(entry) * torch.float32.itemsize, 1), 1)
    for run in sorted(runs, key=lambda run: run.hf_row):
        stop = run.hf_row + run.size
        for first in range(run.hf_row, stop, step):
            yield first, min(first + step, stop), run.row + first - run.hf_row


def columns(entry: Entry) -> int:
    """Return the number of values per row, the same in a parameter and in its HF tensors."""
    return torch.Size(entry.hf[0][1][1:]).numel()


def checked_shape(
    named: Iterable[Named], dtype: torch.dtype, bad: set[str]
) -> Iterator[torch.Tensor]:
    """Yield the blocks in this dtype, and add names of tensors with non-finite values to `bad`."""
    for name, block in named:
        if not is_finite(block):
            bad.add(name)
        yield block.to(dtype)
