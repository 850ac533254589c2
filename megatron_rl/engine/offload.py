"""Offload of a rank's weights, gradients and optimizer state to host memory while servers have its
GPU (rollout.release_memory).

The memory of a tensor's storage is freed in place (resize_(0)) and allocated again at its size.
Every view of it, of which megatron-core keeps many, is valid again after `restore`, with the same
bits.  The order is free_training (gradients, optimizer state), weight sync, free_weights; then
restore, in reverse.  Gradients are not copied: every update starts by zeroing them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import (
    _ParamAndGradBuffer as ParamAndGradBuffer,
)
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from megatron_rl.engine.optim import core_optimizers, torch_optimizers

CHUNK_BYTES = 1 << 30
"""Size of a chunk of host memory: a power of two, to which torch rounds up pinned memory."""


@dataclass
class HostMemory:
    """Host memory in chunks, which are kept for the run: pinning takes longer than copying."""

    pinned: bool
    """True for a GPU, which copies to pinned memory faster."""
    chunk_bytes: int = CHUNK_BYTES
    chunks: list[Tensor] = field(default_factory=list)
    used: int = 0
    """Bytes of the chunks that are in use; set it to 0 to use all of them again."""

    def pieces(self, num_bytes: int) -> Iterator[Tensor]:
        """Yield uint8 tensors of `num_bytes` in all, from the memory after `used`."""
        while num_bytes:
            index, start = divmod(self.used, self.chunk_bytes)
            if index == len(self.chunks):
                self.chunks.append(
                    torch.empty(self.chunk_bytes, dtype=torch.uint8, pin_memory=self.pinned)
                )
            piece = self.chunks[index][start : start + num_bytes]
            self.used += len(piece)
            num_bytes -= len(piece)
            yield piece


@dataclass(frozen=True)
class Freed:
    """A storage whose memory is freed."""

    storage: torch.UntypedStorage
    num_bytes: int
    """Size to which it is restored."""
    copies: Sequence[Tensor] | None
    """Its content on the host, in order; None: it is restored as zeros."""


class Offload:
    """Frees and restores the memory of one rank's models and their optimizer on `device`.

    Tensors on other devices are left alone.
    """

    def __init__(
        self,
        models: Sequence[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        device: torch.device,
        kept: Sequence[Tensor] = (),
    ) -> None:
        """kept: tensors that live as long as the optimizer's state (optim.measure_cosine)."""
        self.models = models
        self.optimizer = optimizer
        self.kept = kept
        self.device = device
        self.host = HostMemory(pinned=device.type == "cuda")
        self.freed: list[Freed] = []

    def free_training(self) -> int:
        """Free gradients and optimizer state; return the bytes.

        No forward with gradient may follow before `restore`.
        """
        weights = self._storages(self._weights())
        gradients = self._storages(self._gradients())
        state = self._storages(self._optimizer_state())
        # float32 weights are the optimizer's own parameters, and a buffer that weights and
        # gradients share (MXFP8) has weights: free_weights frees both
        copied = [state[key] for key in state if key not in weights and key not in gradients]
        zeroed = [gradients[key] for key in gradients if key not in weights]
        return self._free(copied, copy=True) + self._free(zeroed, copy=False)

    def free_weights(self) -> int:
        """Free the weights; return the bytes.

        The model cannot be used or exported before `restore`.
        """
        return self._free(self._storages(self._weights()).values(), copy=True)

    def restore(self) -> None:
        """Allocate everything again, with the content that it had; gradients become zeros."""
        while self.freed:
            freed = self.freed.pop()
            freed.storage.resize_(freed.num_bytes)
            content = bytes_of_storage(freed.storage)
            if freed.copies is None:
                content.zero_()
                continue
            parts = content.split([len(piece) for piece in freed.copies])
            for piece, part in zip(freed.copies, parts, strict=True):
                part.copy_(piece)
        self.host.used = 0

    def _free(self, storages: Iterable[torch.UntypedStorage], *, copy: bool) -> int:
        total = 0
        for storage in storages:
            if not (size := storage.nbytes()):  # empty, or already freed
                continue
            copies = self._copied(storage) if copy else None
            self.freed.append(Freed(storage, size, copies))
            storage.resize_(0)
            total += size
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # else torch's allocator keeps the memory
        return total

    def _copied(self, storage: torch.UntypedStorage) -> list[Tensor]:
        content = bytes_of_storage(storage)
        copies = list(self.host.pieces(len(content)))
        parts = content.split([len(piece) for piece in copies])
        for piece, part in zip(copies, parts, strict=True):
            piece.copy_(part)
        return copies

    def _storages(self, tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
        """Return every storage on the device once, by its address in torch."""
        # many tensors are views of one storage
        storages = (
            tensor.untyped_storage() for tensor in tensors if tensor.device.type == self.device.type
        )
        return {storage._cdata: storage for storage in storages}

    def _weights(self) -> Iterator[Tensor]:
        for model in self.models:
            yield from (parameter.data for parameter in model.parameters())
            yield from (
                buffer.param_data for buffer in buffers(model) if buffer.param_data is not None
            )

    def _gradients(self) -> Iterator[Tensor]:
        for model in self.models:
            yield from (buffer.grad_data for buffer in buffers(model))
        for parameter in self._optimizer_parameters():
            if parameter.is_leaf and parameter.grad is not None:  # torch warns where it is a view
                yield parameter.grad

    def _optimizer_state(self) -> Iterator[Tensor]:
        yield from (parameter.data for parameter in self._optimizer_parameters())
        for optimizer in self._optimizers():
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))
        yield from self.kept

    def _optimizer_parameters(self) -> Iterator[Tensor]:
        for optimizer in self._optimizers():
            for group in optimizer.param_groups:
                yield from group["params"]

    def _optimizers(self) -> Iterator[torch.optim.Optimizer]:
        """Yield torch's optimizers inside core's.

        One that offloads to the CPU has parameters of its own beside those of its parts.
        """
        for core in core_optimizers(self.optimizer):
            if core.optimizer is not None:  # None on a rank that owns no parameters
                yield core.optimizer
                yield from torch_optimizers(core.optimizer)


def buffers(model: DistributedDataParallel) -> list[ParamAndGradBuffer]:
    """Return core's buffers of weights and gradients."""
    return [*model.buffers, *model.expert_parallel_buffers]


def bytes_of_storage(storage: torch.UntypedStorage) -> Tensor:
    """Return a uint8 tensor [num_bytes] in the memory of `storage`."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
