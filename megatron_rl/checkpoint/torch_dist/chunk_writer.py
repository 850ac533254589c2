"""Writes the model part of a torch_dist checkpoint, one parameter at a time.

core itself saves a model that is in memory.  Here one parameter at a time is in memory, and the
result loads into every layout.  The keys and offsets of a parameter come from core itself: from a
model on torch's meta device in the layout of one rank (`Slots`).
"""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_rl.checkpoint.torch_dist.chunks import Chunk, Stored, frame
from megatron_rl.weights.hf.files import CheckpointError, tensor_bytes

CONFIG = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


class ChunkWriter:
    """Writes chunks into one .distcp file, each as torch.save would, but in blocks of rows."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.stream = file.open("wb")
        self.stored: list[Stored] = []

    def write(self, chunk: Chunk, dtype: torch.dtype, blocks: Iterable[torch.Tensor]) -> None:
        start = self.stream.tell()
        # the values stream between the two, so the chunk is never complete in memory
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
        """Flush the file to the disk and close it."""
        self.stream.flush()
        os.fsync(self.stream.fileno())
        self.stream.close()


def write_metadata(folder: Path, stored: Iterable[Stored], extra_states: Iterable[str]) -> None:
    """Finish a checkpoint whose chunks are in `folder`.

    Common state, empty extra states and `.metadata` are written.  Raises CheckpointError where
    parts of a tensor have different dtypes.
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for item in stored:
        chunk, dtype = item.chunk, getattr(torch, item.dtype)
        new = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(chunk.whole), [])
        entry = tensors.setdefault(chunk.key, new)  # one entry for all chunks of a tensor
        if entry.properties.dtype != dtype:
            raise CheckpointError(
                f"{chunk.key}: parts of it are {entry.properties.dtype} and {dtype}; set --dtype"
            )
        entry.chunks.append(
            ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
        )
        index = MetadataIndex(chunk.key, chunk.offsets, len(entry.chunks) - 1)
        places[index] = _StorageInfo(item.file, item.start, item.length)
    empty = io.BytesIO()
    # core stores the extra state of a layer as a list of one
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
