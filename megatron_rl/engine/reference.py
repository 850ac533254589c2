"""The reference policy for the KL term (loss.kl_coef): a frozen copy of the weights as loaded.

It waits on the host and takes the place of the weights for one forward pass.  That takes no second
model and no device memory, but two copies of the weights in host memory, and the weights cross the
bus three times per pass: out, the reference in, and back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from megatron_rl.engine.offload import HostMemory, bytes_of_storage


class Reference:
    """A copy of the weights of `chunks`, this rank's shards on `device`.

    Make it when the weights have their final places in memory, before they change.
    """

    def __init__(self, chunks: Sequence[nn.Module], device: torch.device) -> None:
        # weights may be views of one storage: tied ones, and all of a distributed optimizer
        storages = [
            parameter.untyped_storage() for chunk in chunks for parameter in chunk.parameters()
        ]
        references, own_weights = (HostMemory(pinned=device.type == "cuda") for _ in range(2))
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []
        """(weights, reference, place of the weights during a pass), bytes of equal number."""
        for storage in {storage._cdata: storage for storage in storages}.values():
            pieces = list(references.pieces(storage.nbytes()))
            weights = bytes_of_storage(storage).split([len(piece) for piece in pieces])
            places = list(own_weights.pieces(storage.nbytes()))
            self._parts += zip(weights, pieces, places, strict=True)
        for weights, reference, _ in self._parts:
            reference.copy_(weights)
        self._outward, self._inward = torch.cuda.Stream(device), torch.cuda.Stream(device)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the model the reference weights inside the context.

        Afterwards, also after an error, it has its own weights again, bit for bit.
        """
        self._exchange()
        try:
            yield
        finally:
            self._restore()

    # On a GPU the copies are queued on streams of their own, and the host waits for none of them.

    def _exchange(self) -> None:
        # the stream that changed the weights
        self._outward.wait_stream(torch.cuda.current_stream())
        for weights, reference, place in self._parts:
            with torch.cuda.stream(self._outward):
                place.copy_(weights, non_blocking=True)
            # both directions of the bus are busy: the next weights leave meanwhile
            self._inward.wait_stream(self._outward)
            with torch.cuda.stream(self._inward):
                weights.copy_(reference, non_blocking=True)
        torch.cuda.current_stream().wait_stream(self._inward)

    def _restore(self) -> None:
        # the pass that reads the reference
        self._inward.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._inward):
            for weights, _, place in self._parts:
                weights.copy_(place, non_blocking=True)
        torch.cuda.current_stream().wait_stream(self._inward)
