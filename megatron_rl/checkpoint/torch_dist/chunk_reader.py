"""Reads parameters of a torch_dist checkpoint, row by row where the file allows it."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, cast

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view

from megatron_rl.checkpoint.torch_dist.chunks import Chunk, frame
from megatron_rl.checkpoint.torch_dist.metadata import read_metadata
from megatron_rl.weights.hf.files import CheckpointError, read_into, refusal
from megatron_rl.weights.names import canonical

OPTIMIZER = "optimizer."
"""Prefix of the optimizer's tensors in the checkpoint of a run."""
MAX_SHOWN = 4


class TorchDist:
    """Reads parameters from a torch_dist checkpoint of any layout, converted or saved by a run.

    A key may have the spelling of any layers (weights/names.py), whichever the checkpoint has.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.metadata = read_metadata(self.path)
        self.stored_keys = {canonical(key): key for key in self.metadata.state_dict_metadata}
        self._by_axis: dict[tuple[str, int], dict[tuple[int, ...], list[ChunkStorageMetadata]]] = {}
        """Key and number of leading axes -> leading offsets -> chunks with these offsets."""

    def tensors(self) -> set[str]:
        """Return the canonical keys of the tensors."""
        content = self.metadata.state_dict_metadata
        return {
            name
            for name, key in self.stored_keys.items()
            if isinstance(content[key], TensorStorageMetadata)
        }

    def dtype(self, key: str) -> torch.dtype:
        dtype: torch.dtype = self._tensor(key).properties.dtype
        return dtype

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._tensor(key).size)

    def read_object(self, key: str) -> object:
        """Return a stored object.

        Raises CheckpointError for one that is more than tensors and plain values.
        """
        place = self._place(MetadataIndex(key))
        file = self.path / place.relative_path
        try:
            with file.open("rb") as stream:
                stream.seek(place.offset)
                data = io.BytesIO(stream.read(place.length))
            return torch.load(data, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
            raise CheckpointError(
                f"{file}: object {key} has more than tensors and plain values: {refusal(error)}"
            ) from error

    def read_rows(
        self, chunks: Sequence[tuple[Chunk, int]], shape: tuple[int, ...], start: int, stop: int
    ) -> torch.Tensor:
        """Return rows [start, stop) of the parameter of this shape.

        `chunks` are those that it is stored in (Slots.cut).  Missing rows are an error; rows beyond
        `shape` (a padded vocabulary) are not read.
        """
        rows = torch.empty((stop - start, *shape[1:]), dtype=self.dtype(chunks[0][0].key))
        for chunk, first in chunks:
            axes = len(chunk.whole) - len(shape)
            low, high = max(start, first), min(stop, first + chunk.sizes[axes])
            if low >= high:
                continue
            offsets, sizes = list(chunk.offsets), list(chunk.sizes)
            # only the rows of this block, in the coordinates of the stored tensor
            offsets[axes], sizes[axes] = offsets[axes] + low - first, high - low
            part = Chunk(chunk.key, chunk.whole, tuple(offsets), tuple(sizes))
            self.fill(part, axes, rows[low - start : high - start].reshape(sizes))
        return rows

    def fill(
        self, chunk: Chunk, axes: int, values: torch.Tensor, *, allow_missing: bool = False
    ) -> None:
        """Fill `values`, of the chunk's sizes, from the stored chunks that overlap with `chunk`.

        `axes` leading axes come before that of the rows.  Raises CheckpointError where stored
        chunks do not cover the chunk, unless allow_missing.
        """
        covered = 0
        # chunks of one tensor do not overlap, so counting their values shows whether all are there
        for stored in self._near(chunk):
            spans = zip(chunk.offsets, chunk.sizes, stored.offsets, stored.sizes, strict=True)
            overlap = [range(max(a, b), min(a + n, b + m)) for a, n, b, m in spans]
            if not all(overlap):
                continue
            there = [
                slice(o.start - b, o.stop - b) for o, b in zip(overlap, stored.offsets, strict=True)
            ]
            here = tuple(
                slice(o.start - a, o.stop - a) for o, a in zip(overlap, chunk.offsets, strict=True)
            )
            values[here].copy_(self._load(chunk.key, stored, axes, there))
            covered += values[here].numel()
        if covered != values.numel() and not allow_missing:
            raise CheckpointError(
                f"{self.path}: {chunk.key} of shape {list(self._tensor(chunk.key).size)} holds"
                f" {covered} of the {values.numel()} values at {list(chunk.offsets)};"
                " does config.json belong to this checkpoint?"
            )

    def _load(
        self, key: str, stored: ChunkStorageMetadata, axes: int, where: list[slice]
    ) -> torch.Tensor:
        """Return this part of a stored chunk.

        Where the file has it as a plain tensor, only the rows in question are read.
        """
        place = self._place(MetadataIndex(key, stored.offsets))
        sizes, dtype = tuple(stored.sizes), self.dtype(key)
        # if the chunk starts with it, it is a plain tensor: values follow, uncompressed
        head, _ = frame(sizes, dtype)
        has_rows = axes < len(sizes) and torch.Size(sizes[:axes]).numel() == 1
        try:
            with (self.path / place.relative_path).open("rb") as stream:
                stream.seek(place.offset)
                if has_rows and stream.read(len(head)) == head:
                    rows = where[axes]
                    count = rows.stop - rows.start
                    tensor = torch.empty((*sizes[:axes], count, *sizes[axes + 1 :]), dtype=dtype)
                    start = place.offset + len(head) + rows.start * (tensor.nbytes // count)
                    if not read_into(tensor, stream, start):
                        raise EOFError("the file ends before its values do")
                    return tensor[(*where[:axes], slice(None), *where[axes + 1 :])]
                view = _create_file_view(stream, place.offset, place.length)
                complete: torch.Tensor = torch.load(
                    cast(IO[bytes], view), map_location="cpu", weights_only=True
                )
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
            raise CheckpointError(
                f"{self.path / place.relative_path}: {key} cannot be read: {refusal(error)}"
            ) from error
        return complete[tuple(where)]

    def _place(self, index: MetadataIndex) -> _StorageInfo:
        """Return the place of a chunk or object.

        Raises CheckpointError for a file outside this checkpoint's folder.
        """
        index = replace(index, fqn=self.stored_keys.get(canonical(index.fqn), index.fqn))
        place = (self.metadata.storage_data or {}).get(index)
        name = getattr(place, "relative_path", None)
        if (
            not isinstance(place, _StorageInfo)
            or not isinstance(name, str)
            or Path(name).name != name
        ):
            raise CheckpointError(
                f"{self.path}/.metadata: {index.fqn} is stored in {name!r}, must be a file of this"
                " folder"
            )
        if getattr(place, "transform_descriptors", None):
            raise CheckpointError(
                f"{self.path}: {index.fqn} is stored transformed ({place.transform_descriptors});"
                " not supported"
            )
        return place

    def _near(self, chunk: Chunk) -> list[ChunkStorageMetadata]:
        """Return the stored chunks that may overlap, of perhaps thousands.

        They are those with the same leading offsets (expert, layer).
        """
        stored = self._tensor(chunk.key)
        axes = max(len(chunk.whole) - 2, 0)  # all but rows and columns
        if any(size != 1 for size in chunk.sizes[:axes]):
            return stored.chunks
        places = self._by_axis.get((chunk.key, axes))
        if places is None:
            places = self._by_axis[chunk.key, axes] = {}
            for other in stored.chunks:
                places.setdefault(tuple(other.offsets[:axes]), []).append(other)
        # none begins there where chunks span several experts or layers: look at all
        return places.get(chunk.offsets[:axes], []) or stored.chunks

    def _tensor(self, key: str) -> TensorStorageMetadata:
        entry = self.metadata.state_dict_metadata.get(self.stored_keys.get(canonical(key), key))
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(
                f"{self.path}: has no tensor {key}; does config.json belong to this checkpoint?"
            )
        return entry


def check_keys(
    where: str, wanted: Iterable[str], stored: Iterable[str], *, other_core: bool = False
) -> None:
    """Raise CheckpointError unless the same tensors are wanted and stored, by canonical keys.

    The error has the names that differ.  Where no tensor of the optimizer is wanted, those that are
    stored do not count.  `where` names the checkpoint, and what saved it; `other_core` means that
    another version of megatron-core saved it.
    """
    wanted, stored = set(wanted), set(stored)
    if not any(key.startswith(OPTIMIZER) for key in wanted):
        stored = {key for key in stored if not key.startswith(OPTIMIZER)}
    if wanted == stored:
        return
    fix = "model.path (config.json) must be that of the checkpoint"
    if all(key.startswith(OPTIMIZER) for key in wanted ^ stored):
        fix = (
            "optim.distributed or model.dtype differs from that of the run that saved it; set both"
            " as there"
        )
    if other_core:
        fix += (
            "; else the other version of megatron-core is the cause: with that one run megatron-rl"
            " convert megatron-to-hf"
        )
    raise CheckpointError(
        f"{where}: has other tensors than this model; only in the model: "
        f"{shown_parameters(wanted - stored)}; only in the checkpoint: "
        f"{shown_parameters(stored - wanted)}; {fix}"
    )


def shown_parameters(names: Iterable[str]) -> str:
    """List names without layer numbers, each once, and how many more there are."""
    unique = sorted({re.sub(r"\.layers\.\d+\.", ".layers.N.", name) for name in names})
    more = f" and {len(unique) - MAX_SHOWN} more" if len(unique) > MAX_SHOWN else ""
    return ", ".join(unique[:MAX_SHOWN]) + more if unique else "none"
