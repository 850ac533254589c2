"""Host memory in which a pass's routes are cut, and the copies from it to the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class RouteMemory:
    """Host memory that every pass uses again, one piece per micro-batch, because page faults of new
    memory cost ten times the copy.  On a CPU routes stay in it.
    """

    def __init__(self) -> None:
        self._pieces: dict[int, np.ndarray] = {}

    def take(self, index: int, size: int, dtype: np.dtype) -> np.ndarray:
        """Return memory of at least `size` elements for micro-batch `index`, the same that was
        taken for it before.
        """
        piece = self._pieces.get(index)
        if piece is None or piece.size < size or piece.dtype != dtype:
            piece = self._pieces[index] = self._new(size, dtype)
        return piece

    def send(self, index: int, ids: np.ndarray, device: torch.device) -> Tensor:
        """Return `ids`, which are in the memory of micro-batch `index`, on the device."""
        return torch.from_numpy(ids).to(device)

    def _new(self, size: int, dtype: np.dtype) -> np.ndarray:
        return np.empty(size, dtype)


class PinnedMemory(RouteMemory):
    """Page-locked memory for a GPU: two pieces, so that a micro-batch is cut while the one before
    is copied.

    Copies are asynchronous; a piece is taken again when its last copy has ended.
    """

    NUM_PIECES = 2

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[int, torch.cuda.Event] = {}

    def take(self, index: int, size: int, dtype: np.dtype) -> np.ndarray:
        """Return memory of at least `size` elements, of which the last copy has ended."""
        index %= self.NUM_PIECES
        # also where the piece is too small now: torch may hand out its memory again
        if copy := self._copies.pop(index, None):
            copy.synchronize()
        return super().take(index, size, dtype)

    def send(self, index: int, ids: np.ndarray, device: torch.device) -> Tensor:
        """Copy `ids` to the device on its current stream; return without waiting."""
        sent = torch.from_numpy(ids).to(device, non_blocking=True)
        copy = self._copies[index % self.NUM_PIECES] = torch.cuda.Event()
        copy.record()
        return sent

    def _new(self, size: int, dtype: np.dtype) -> np.ndarray:
        kind = torch.from_numpy(np.empty(0, dtype)).dtype
        return torch.empty(size, dtype=kind, pin_memory=True).numpy()
