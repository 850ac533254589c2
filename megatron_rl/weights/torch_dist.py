"""The model part of a megatron-core checkpoint (torch_dist) as files: written and read parameter by
parameter.

core itself saves a model that is in memory; here one parameter at a time is in memory, and the
result loads into every layout. The keys and offsets of a parameter come from core itself: from a
model on torch's meta device in the layout of one rank (Slots).  The format defines `.metadata` as a
pickle: only the classes that the format needs are admitted.

Shapes: a stored tensor has the parameter's shape after `axes` leading ones (expert, in uniform
models also layer), and is cut into chunks; the two halves of a gated MLP are separate chunks.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import IO, NamedTuple, cast

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from megatron.core.models.gpt import GPTModel
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view

from megatron_rl.weights.hf.files import CheckpointError, read_into, refusal, tensor_bytes
from megatron_rl.weights.hf.mapping import canonical_name
from megatron_rl.weights.names import canonical

CONFIG = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
OPTIMIZER = "optimizer."
"""Prefix of the optimizer's tensors in the checkpoint of a run."""
MAX_SHOWN = 4


class Chunk(NamedTuple):
    """One stored chunk: its place in the tensor `key`, whose complete shape is `whole`."""

    key: str
    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Slots:
    """Canonical parameter name -> core's ShardedTensor (or factory of some) for it; and the keys of
    its empty extra states.
    """

    def __init__(self, meta_chunk: GPTModel) -> None:
        self.parameters: dict[str, ShardedTensor | ShardedTensorFactory] = {}
        self.extra_states: list[str] = []
        for name, value in meta_chunk.sharded_state_dict().items():
            if isinstance(value, ShardedObject):
                self.extra_states.append(value.unique_key)
            elif isinstance(value, ShardedTensor | ShardedTensorFactory):
                self.parameters[canonical_name(name, meta_chunk.decoder.layers, 0)] = value

    def keys(self) -> set[str]:
        """Canonical keys of all parameters."""
        chunks = (
            part
            for name, slot in self.parameters.items()
            for part, _ in self.cut(name, tuple(slot.data.shape))
        )
        return {canonical(chunk.key) for chunk in chunks}

    def cut(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[Chunk, int]]:
        """The stored chunks of this parameter of this shape, each with its first row in the
        parameter.
        """
        slot = self.parameters[name]
        parameter = torch.empty(shape, device="meta")
        columns = parameter[0].numel()
        # a factory stores a parameter in parts, which are views of it: their offset in its storage
        # gives their first row
        is_factory = isinstance(slot, ShardedTensorFactory)
        built = (
            slot.build_fn(slot.key, parameter, slot.replica_id, slot.flattened_range)
            if is_factory
            else slot
        )
        for part in nested_values([built]):
            values = part.data if is_factory else parameter
            sizes = (1,) * part.prepend_axis_num + tuple(values.shape)
            chunk = Chunk(part.key, tuple(part.global_shape), tuple(part.global_offset), sizes)
            yield chunk, values.storage_offset() // columns


@dataclass(frozen=True)
class Stored:
    """Where a chunk was written, in plain values: the journal of a conversion keeps it as JSON."""

    chunk: Chunk
    dtype: str
    file: str
    start: int
    length: int


class ChunkWriter:
    """Writes chunks into one .distcp file, each as torch.save would, but in blocks of rows."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.stream = file.open("wb")
        self.stored: list[Stored] = []

    def write(self, chunk: Chunk, dtype: torch.dtype, blocks: Iterable[torch.Tensor]) -> None:
        start = self.stream.tell()
        head, tail = frame(chunk.sizes, dtype)
        self.stream.write(head)
        left = torch.Size(chunk.sizes).numel() * dtype.itemsize
        for block in blocks:
            assert block.dtype == dtype, f"{chunk.key}: {block.dtype}, expected {dtype}"
            left -= self.stream.write(tensor_bytes(block.contiguous()))
        assert not left, f"{chunk.key}: {left} bytes are missing"
        self.stream.write(tail)
        name = str(dtype).removeprefix("torch.")
        self.stored.append(Stored(chunk, name, self.file.name, start, self.stream.tell() - start))

    def close(self) -> None:
        """Flush the file to the disk."""
        self.stream.flush()
        os.fsync(self.stream.fileno())
        self.stream.close()


@lru_cache(maxsize=1024)
def frame(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[bytes, bytes]:
    """The bytes that torch.save writes before and after the values of a contiguous tensor.

    The archive's checksum of the values stays 0: torch.load does not check it.
    """
    recorder = _Recorder()
    with torch.serialization.skip_data():
        # pages of an empty tensor that is never touched take no memory
        torch.save(torch.empty(shape, dtype=dtype), recorder)  # type: ignore[arg-type]
    return b"".join(recorder.parts[0]), b"".join(recorder.parts[1])


class _Recorder:
    """A stream that records what is written before and after the one place that is skipped."""

    def __init__(self) -> None:
        self.parts: list[list[bytes]] = [[]]

    def write(self, data: bytes) -> int:
        self.parts[-1].append(bytes(data))
        return len(data)

    def seek(self, offset: int, whence: int) -> None:
        assert whence == os.SEEK_CUR
        self.parts.append([])

    def flush(self) -> None:
        pass


def write_metadata(folder: Path, stored: Iterable[Stored], extra_states: Iterable[str]) -> None:
    """Finish a checkpoint whose chunks are in `folder`: common state, empty extra states, metadata."""
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for item in stored:
        chunk, dtype = item.chunk, getattr(torch, item.dtype)
        new = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(chunk.whole), [])
        found = tensors.setdefault(chunk.key, new)  # one entry for all chunks of a tensor
        if found.properties.dtype != dtype:
            raise CheckpointError(
                f"{chunk.key}: parts of it are {found.properties.dtype} and {dtype}; set --dtype"
            )
        found.chunks.append(
            ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
        )
        index = MetadataIndex(chunk.key, chunk.offsets, len(found.chunks) - 1)
        places[index] = _StorageInfo(item.file, item.start, item.length)
    empty = io.BytesIO()
    torch.save([None], empty)
    (folder / "__extra_0.distcp").write_bytes(empty.getvalue())
    content: dict[str, TensorStorageMetadata | BytesStorageMetadata] = dict(tensors)
    for key in extra_states:  # all are empty, so every key may refer to the same bytes
        content[key] = BytesStorageMetadata()
        places[MetadataIndex(key)] = _StorageInfo("__extra_0.distcp", 0, len(empty.getvalue()))
    torch.save({}, folder / "common.pt")  # core's load requires the file
    (folder / "metadata.json").write_text(json.dumps(CONFIG))
    with (folder / ".metadata").open("wb") as stream:
        pickle.dump(Metadata(content, storage_data=places), stream)


class TorchDist:
    """Reads parameters from a torch_dist checkpoint, from this module or from a run, saved in any
    layout.

    A key may have the spelling of any layers (weights/names.py), whichever the checkpoint has.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.metadata = read_metadata(self.path)
        self.stored_keys = {canonical(key): key for key in self.metadata.state_dict_metadata}
        self._by_axis: dict[tuple[str, int], dict[tuple[int, ...], list[ChunkStorageMetadata]]] = {}

    def tensors(self) -> set[str]:
        """Canonical keys of the tensors."""
        content = self.metadata.state_dict_metadata
        return {
            name
            for name, key in self.stored_keys.items()
            if isinstance(content[key], TensorStorageMetadata)
        }

    def dtype(self, key: str) -> torch.dtype:
        found: torch.dtype = self._tensor(key).properties.dtype
        return found

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._tensor(key).size)

    def read_object(self, key: str) -> object:
        """A stored object.

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
        """Rows [start, stop) of the parameter of this shape that is stored in `chunks` (Slots.cut).

        Missing rows are an error; rows beyond `shape` (a padded vocabulary) are not read.
        """
        rows = torch.empty((stop - start, *shape[1:]), dtype=self.dtype(chunks[0][0].key))
        for chunk, first in chunks:
            axes = len(chunk.whole) - len(shape)
            low, high = max(start, first), min(stop, first + chunk.sizes[axes])
            if low >= high:
                continue
            offsets, sizes = list(chunk.offsets), list(chunk.sizes)
            offsets[axes], sizes[axes] = offsets[axes] + low - first, high - low
            part = Chunk(chunk.key, chunk.whole, tuple(offsets), tuple(sizes))
            self.fill(part, axes, rows[low - start : high - start].reshape(sizes))
        return rows

    def fill(
        self, chunk: Chunk, axes: int, values: torch.Tensor, *, allow_missing: bool = False
    ) -> None:
        """Copy into `values`, of the chunk's sizes, the stored chunks that overlap with it; `axes`
        leading ones come before rows.

        Raises CheckpointError where stored chunks do not cover it, unless allow_missing.
        """
        covered = 0
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
                f" {covered} of the {values.numel()} values at {list(chunk.offsets)}; is"
                " config.json of this checkpoint?"
            )

    def _load(
        self, key: str, stored: ChunkStorageMetadata, axes: int, where: list[slice]
    ) -> torch.Tensor:
        """This part of a stored chunk.

        Where the file has it as a plain tensor, only the rows in question are read.
        """
        place = self._place(MetadataIndex(key, stored.offsets))
        sizes, dtype = tuple(stored.sizes), self.dtype(key)
        # if the chunk starts with it, it is a plain tensor: values follow, uncompressed
        head, _ = frame(sizes, dtype)
        try:
            with (self.path / place.relative_path).open("rb") as stream:
                stream.seek(place.offset)
                if (
                    axes < len(sizes)
                    and torch.Size(sizes[:axes]).numel() == 1
                    and stream.read(len(head)) == head
                ):
                    rows = where[axes]
                    tensor = torch.empty(
                        (*sizes[:axes], rows.stop - rows.start, *sizes[axes + 1 :]), dtype=dtype
                    )
                    row_bytes = tensor.nbytes // (rows.stop - rows.start)
                    if not read_into(
                        tensor, stream, place.offset + len(head) + rows.start * row_bytes
                    ):
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
        """Where a chunk or object is stored.

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
        """Stored chunks that may overlap: those with the same leading offsets (expert, layer), of
        perhaps thousands.
        """
        stored = self._tensor(chunk.key)
        axes = max(len(chunk.whole) - 2, 0)  # all but rows and columns
        if any(size != 1 for size in chunk.sizes[:axes]):
            return stored.chunks
        places = self._by_axis.get((chunk.key, axes))
        if places is None:
            places = self._by_axis[chunk.key, axes] = {}
            for each in stored.chunks:
                places.setdefault(tuple(each.offsets[:axes]), []).append(each)
        return places.get(chunk.offsets[:axes], []) or stored.chunks

    def _tensor(self, key: str) -> TensorStorageMetadata:
        found = self.metadata.state_dict_metadata.get(self.stored_keys.get(canonical(key), key))
        if not isinstance(found, TensorStorageMetadata):
            raise CheckpointError(
                f"{self.path}: has no tensor {key}; is config.json of this checkpoint?"
            )
        return found


def check_keys(
    where: str, wanted: Iterable[str], stored: Iterable[str], *, other_core: bool = False
) -> None:
    """Raise CheckpointError, with the names that differ, unless the same tensors are wanted and
    stored, by canonical keys.

    Where no tensor of the optimizer is wanted, those that are stored do not count.  where: the
    checkpoint, and what saved it.
    other_core: another version of megatron-core saved it.
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
    """Names without layer numbers, each once, and how many more."""
    each = sorted({re.sub(r"\.layers\.\d+\.", ".layers.N.", name) for name in names})
    more = f" and {len(each) - MAX_SHOWN} more" if len(each) > MAX_SHOWN else ""
    return ", ".join(each[:MAX_SHOWN]) + more if each else "none"


def read_metadata(path: Path) -> Metadata:
    """`.metadata` of a torch_dist checkpoint.

    Raises CheckpointError where it is missing, or pickles anything but metadata.
    """
    file = Path(path) / ".metadata"
    try:
        with file.open("rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: not a torch_dist checkpoint (no .metadata)") from error
    except (pickle.UnpicklingError, EOFError, AttributeError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{file}: holds no checkpoint metadata")
    return metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Admits, by exact name, the records that torch and megatron-core put into metadata and the
    plain classes in them.
    """

    def find_class(self, module: str, name: str) -> object:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in ADMITTED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which checkpoint metadata does not need"
        )


ADMITTED = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.planner": {
        "SavePlan",
        "WriteItem",
        "WriteItemType",
        "TensorWriteData",
    },
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
}
