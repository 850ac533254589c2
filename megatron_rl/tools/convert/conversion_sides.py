"""The two kinds of checkpoint as a conversion reads them: HF tensors or megatron parameters, in blocks of a few megabytes.

A block is [rows, columns] (or [rows]) of one HF tensor, as stored.  Which rows of a parameter it is, is asked of the mapping.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import reduce
from typing import Protocol

import torch

from megatron_rl.models.spec import ModelSpec
from megatron_rl.weights.hf.files import DTYPES, HFFiles, is_finite, row_blocks
from megatron_rl.weights.hf.mapping import Entry, RowRun, row_runs, shard_shape
from megatron_rl.weights.torch_dist import Slots, TorchDist

Named = tuple[str, torch.Tensor]
"""An HF name and a block of that tensor."""


class Side(Protocol):
    def dtype(self, entry: Entry) -> torch.dtype: ...

    def tensor(self, entry: Entry, index: int) -> Iterator[Named]:
        """The blocks of an HF tensor, by its place in entry.hf, in order; the same blocks on every side."""


class HFSide:
    def __init__(self, files: HFFiles, spec: ModelSpec) -> None:
        self.files, self.spec = files, spec

    def dtype(self, entry: Entry) -> torch.dtype:
        """That of the parameter: tensors of several types become the one that holds all."""
        return reduce(torch.promote_types, (DTYPES[self.files.headers[name].dtype] for name in entry.hf_names))

    def tensor(self, entry: Entry, index: int) -> Iterator[Named]:
        for first, stop, _ in blocks(entry, [run for run in row_runs(entry, self.spec) if run.tensor == index]):
            yield entry.hf_names[index], self.files.read_rows(entry.hf_names[index], first, stop)

    def parameter(self, entry: Entry, start: int, stop: int) -> Iterator[Named]:
        """Rows [start, stop) of the megatron parameter, in order."""
        for run in row_runs(entry, self.spec):
            low, high = max(start, run.row), min(stop, run.row + run.size)
            part = RowRun(run.tensor, run.hf_row + low - run.row, low, high - low)
            name = entry.hf_names[run.tensor]
            for first, last, _ in blocks(entry, [part]):
                yield name, self.files.read_rows(name, first, last)


class MegatronSide:
    def __init__(self, source: TorchDist, slots: Slots, spec: ModelSpec) -> None:
        self.source, self.slots, self.spec = source, slots, spec

    def dtype(self, entry: Entry) -> torch.dtype:
        return self.source.dtype(next(self.slots.cut(entry.name, shard_shape(entry, 1)))[0].key)

    def tensor(self, entry: Entry, index: int) -> Iterator[Named]:
        shape = shard_shape(entry, 1)
        chunks = list(self.slots.cut(entry.name, shape))
        for first, stop, row in blocks(entry, [run for run in row_runs(entry, self.spec) if run.tensor == index]):
            yield entry.hf_names[index], self.source.read_rows(chunks, shape, row, row + stop - first)


def blocks(entry: Entry, runs: Iterable[RowRun]) -> Iterator[tuple[int, int, int]]:
    """(first row, stop) in the HF tensor and the parameter's row, of every block of these runs in order of the HF rows."""
    for run in sorted(runs, key=lambda run: run.hf_row):
        for first, stop in row_blocks(run.hf_row, run.size, columns(entry) * torch.float32.itemsize):
            yield first, stop, run.row + first - run.hf_row


def columns(entry: Entry) -> int:
    """Values per row, the same in a parameter as in the HF tensors behind it."""
    return torch.Size(entry.hf[0][1][1:]).numel()


def checked(named: Iterable[Named], dtype: torch.dtype, bad: set[str]) -> Iterator[torch.Tensor]:
    """The blocks in this dtype; names of tensors with a value that is not finite go to `bad`."""
    for name, block in named:
        if not is_finite(block):
            bad.add(name)
        yield block.to(dtype)
