"""[lora]: low-rank adapters in the place of training every weight."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.config.base import AboveZero, Count, Section


class LoraConfig(Section):
    """W + scale B A with frozen W [out, in], and trained B [out, rank] (0 at first), A [rank, in].

    The forward pass multiplies by the sum, rounded to model.dtype: the very weights that servers
    get.
    """

    rank: Count = 0
    """Rank of every adapter; 0 = no adapters, all weights are trained."""
    alpha: AboveZero = 32.0
    """The scale is alpha / rank, or with rslora alpha / sqrt(rank)."""
    rslora: bool = False
    """The scale is alpha / sqrt(rank) (arXiv 2312.03732)."""
    targets: tuple[str, ...] = ("all",)
    """Weights with an adapter: attention, mlp (dense layers), experts (routed), shared_experts,
    all (these four), embedding, lm_head (neither where the two are tied), or Megatron's names of
    modules (linear_qkv, linear_proj, linear_fc1, ...)."""

    shared_pairs: bool = False
    """One A and B for all routed experts of a layer and projection, in the place of a pair for
    each expert."""

    path: Path | None = None
    """Folder of a PEFT adapter whose A and B to start from; its base must be model.path."""

    @property
    def scale(self) -> float:
        return self.alpha / self.alpha_for(1.0, self.rank)

    def alpha_for(self, scale: float, rank: int) -> float:
        """Return the alpha that gives this scale at this rank."""
        return scale * (math.sqrt(rank) if self.rslora else rank)

    def problems(self) -> Iterator[str]:
        if self.rank and not self.targets:
            yield "targets = []: adapters need weights; name some, or set rank = 0"
