"""A frozen copy of the weights as they were loaded, for the KL to the reference policy
(`loss.kl_coef`).

It is kept on the host and swapped with the weights for one forward pass: no second model and no
device memory, but the weights cross the bus four times a pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn


class Reference:
    """Build it before anything changes the weights of `chunks`, this rank's shards."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._live = [parameter for chunk in chunks for parameter in chunk.parameters()]
        self._kept = [parameter.detach().to("cpu", copy=True) for parameter in self._live]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model has the reference weights; afterwards its own again, bit for bit, also
        after an error.
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
