"""The reference policy for the KL term (loss.kl_coef): a frozen copy of the weights as loaded.

It is kept on the host and swapped with the weights for one forward pass.  That takes no second
model and no device memory, but the weights cross the bus four times per pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn


class Reference:
    """A copy of the weights of `chunks`, this rank's shards; make it before they change."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._live = [parameter for chunk in chunks for parameter in chunk.parameters()]
        self._kept = [parameter.detach().to("cpu", copy=True) for parameter in self._live]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the model the reference weights inside the context.

        Afterwards, also after an error, it has its own weights again, bit for bit.
        """
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for live, kept in zip(self._live, self._kept, strict=True):
            current = live.detach().to("cpu", copy=True)
            live.copy_(kept)
            kept.copy_(current)
