"""Safetensors files that are written block by block, so that no tensor is in memory as a whole."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from megatron_rl.weights.hf.files import NAMES, tensor_bytes


class Piece(NamedTuple):
    """A tensor of the file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class ShardWriter:
    """Writes one file: the pieces in their order, each in one or more blocks of rows."""

    def __init__(self, file: Path, pieces: Sequence[Piece]) -> None:
        self.pieces = list(pieces)
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        start = 0
        for piece in self.pieces:
            offsets = [start, start + piece.nbytes]
            header[piece.name] = {
                "dtype": NAMES[piece.dtype],
                "shape": list(piece.shape),
                "data_offsets": offsets,
            }
            start = offsets[1]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # readers map the values, whose start must be aligned
        self.stream = file.open("wb")
        self.stream.write(len(text).to_bytes(8, "little") + text)
        self._next = 0

    def write(self, name: str, blocks: Iterable[torch.Tensor]) -> None:
        """Write all blocks of the next piece."""
        piece = self.pieces[self._next]
        left = piece.nbytes
        for block in blocks:
            assert (name, block.dtype) == (piece.name, piece.dtype), (
                f"{name} {block.dtype}, expected {piece}"
            )
            left -= self.stream.write(tensor_bytes(block.contiguous()))
        assert not left, f"{name}: {left} bytes are missing of {piece}"
        self._next += 1

    def close(self) -> None:
        """Flush the file to the disk.  Raises unless every tensor was written."""
        assert self._next == len(self.pieces), (
            f"{len(self.pieces) - self._next} tensors were not written"
        )
        self.stream.flush()
        os.fsync(self.stream.fileno())
        self.stream.close()
