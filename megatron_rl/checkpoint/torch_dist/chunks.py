"""The chunks of which a torch_dist checkpoint consists, and their bytes in a file.

A stored tensor has the parameter's shape after `axes` leading axes (expert; in uniform models also
layer), and is cut into chunks.  The two halves of a gated MLP are separate chunks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from megatron.core.models.gpt import GPTModel

from megatron_rl.weights.hf.mapping import canonical_name
from megatron_rl.weights.names import canonical


class Chunk(NamedTuple):
    """A stored chunk: its place in the tensor `key`, whose complete shape is `whole`."""

    key: str
    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Slots:
    """core's ShardedTensors of a model, as a table of where each parameter is stored."""

    def __init__(self, meta_chunk: GPTModel) -> None:
        self.parameters: dict[str, ShardedTensor | ShardedTensorFactory] = {}
        """Canonical name of a parameter -> core's tensor for it, or a factory of some."""
        self.extra_states: list[str] = []
        """Keys of the extra states of layers, which are empty."""
        for name, value in meta_chunk.sharded_state_dict().items():
            if isinstance(value, ShardedObject):
                self.extra_states.append(value.unique_key)
            elif isinstance(value, ShardedTensor | ShardedTensorFactory):
                self.parameters[canonical_name(name, meta_chunk.decoder.layers, 0)] = value

    def keys(self) -> set[str]:
        """Return the canonical keys of all parameters."""
        chunks = (
            part
            for name, slot in self.parameters.items()
            for part, _ in self.cut(name, tuple(slot.data.shape))
        )
        return {canonical(chunk.key) for chunk in chunks}

    def cut(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[Chunk, int]]:
        """Yield the stored chunks of a parameter of this shape.

        Each comes with its first row in the parameter.
        """
        slot = self.parameters[name]
        parameter = torch.empty(shape, device="meta")
        columns = parameter[0].numel()
        is_factory = isinstance(slot, ShardedTensorFactory)
        built = slot
        if is_factory:
            built = slot.build_fn(slot.key, parameter, slot.replica_id, slot.flattened_range)
        for part in nested_values([built]):
            # a factory's parts are views of the parameter: their offset in its storage gives their
            # first row
            values = part.data if is_factory else parameter
            sizes = (1,) * part.prepend_axis_num + tuple(values.shape)
            chunk = Chunk(part.key, tuple(part.global_shape), tuple(part.global_offset), sizes)
            yield chunk, values.storage_offset() // columns


@dataclass(frozen=True)
class Stored:
    """A written chunk and its place.

    All values are plain: the journal of a conversion keeps them as JSON.
    """

    chunk: Chunk
    dtype: str
    file: str
    """Name of the file."""
    start: int
    """Offset of the chunk's first byte in the file."""
    length: int
    """Bytes."""


@lru_cache(maxsize=1024)
def frame(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[bytes, bytes]:
    """Return the bytes that torch.save writes before and after the values of a contiguous tensor.

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
