"""How often the trainer's experts differ from the rollout's, per layer and per token, while replaying.

d(t, l) = K - |S_live(t, l) & S_rollout(t, l)| compares SETS: neither engine promises an order.  Counted on the device,
read once per pass.  Under R3 "live" means: what this layer's router would pick given the replayed layers below it.
Shapes: t this rank's rows of a micro-batch, l this stage's MoE layers, E experts, K top-k.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


class Mismatch:
    """Accumulates one pass on this rank.  No host sync until `reduce`."""

    def __init__(self, num_local_layers: int) -> None:
        self.num_local_layers = num_local_layers
        self._layers: dict[int, Tensor] = {}  # local layer -> f64 [5]: rows, flips, used flips, missing experts, margin
        self._tokens: dict[int, Tensor] = {}  # micro-batch -> int64 [t]: layers flipped, -1 where not compared

    def add(
        self,
        local: int,
        micro_batch: int,
        scores: Tensor,
        live: Tensor,
        used: Tensor,
        reference: Tensor,
        compared: Tensor,
    ) -> None:
        """Compare live [t, K] and used [t, K] with reference [t, K] on the `compared` rows [t]; scores are [t, E]."""
        reference = reference.to(device=live.device, dtype=torch.int64)
        reference = torch.where(compared[:, None], reference, live)
        missing = live.shape[1] - overlap(live, reference)
        used_missing = live.shape[1] - overlap(used, torch.where(compared[:, None], reference, used))
        flipped = missing > 0
        scores = scores.detach().float()
        gap = scores.gather(1, live).amin(1) - scores.gather(1, reference).amin(1)
        counts = torch.stack(
            [
                compared.sum(),
                flipped.sum(),
                (used_missing > 0).sum(),
                missing.sum(),
                torch.where(flipped, gap, 0.0).amax(),
            ]
        ).double()
        if local in self._layers:
            margin = torch.maximum(self._layers[local][4], counts[4])
            self._layers[local] = self._layers[local] + counts
            self._layers[local][4] = margin
        else:
            self._layers[local] = counts
        tokens = torch.where(compared, flipped.long(), -1)
        if micro_batch in self._tokens:
            tokens = torch.where(compared, self._tokens[micro_batch] + tokens, -1)
        self._tokens[micro_batch] = tokens


@dataclass(frozen=True)
class MismatchReport:
    """Reduced over the whole job.

    router_mismatch      mean over (token, layer) of 1[d > 0], live against rollout
    replayed_mismatch    the same of what was actually used: 0 under R3
    token_mismatch       mean over tokens of 1[max_l d > 0]
    layers_per_token     mean over tokens of sum_l 1[d > 0]
    expert_overlap       1 - mean d / K
    flip_margin_max      largest (k-th live score - lowest rollout expert's score) of a flipped row; 0 = only ties
    flip_rate            per MoE layer of the model [L]
    """

    router_mismatch: float
    replayed_mismatch: float
    token_mismatch: float
    layers_per_token: float
    expert_overlap: float
    flip_margin_max: float
    flip_rate: list[float]


def reduce_mismatch(
    mismatches: list[Mismatch],
    *,
    layers: tuple[int, ...],
    num_layers: int,
    top_k: int,
    pp_group: dist.ProcessGroup,
    device: torch.device,
) -> MismatchReport | None:
    """Sum over all ranks (world) and, per token, over the pipeline stages.  None when nothing was measured anywhere.

    layers: this stage's indices on the MoE-layer axis of `num_layers`.
    """
    table = torch.zeros(num_layers, 4, dtype=torch.float64, device=device)
    margin = torch.zeros(1, dtype=torch.float64, device=device)
    for mismatch in mismatches:
        for local, counts in mismatch._layers.items():
            table[layers[local]] += counts[:4]
            margin = torch.maximum(margin, counts[4:])
    tokens = token_counts(mismatches, pp_group, device)
    dist.all_reduce(table)
    dist.all_reduce(tokens)
    dist.all_reduce(margin, op=dist.ReduceOp.MAX)
    rows, flips, used_flips, missing = table.sum(0).tolist()
    if rows == 0:
        return None
    compared, flipped, layer_flips = tokens.tolist()
    return MismatchReport(
        router_mismatch=flips / rows,
        replayed_mismatch=used_flips / rows,
        token_mismatch=flipped / compared,
        layers_per_token=layer_flips / compared,
        expert_overlap=1 - missing / (rows * top_k),
        flip_margin_max=float(margin),
        flip_rate=(table[:, 1] / table[:, 0].clamp(min=1)).tolist(),
    )


def token_counts(mismatches: list[Mismatch], pp_group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """f64 [3]: tokens compared, tokens with a flip in any layer, flips; counted on the first stage only."""
    flat = [tokens for mismatch in mismatches for _, tokens in sorted(mismatch._tokens.items())]
    # a stage without MoE layers still takes part: its peers have the same rows
    size = torch.tensor([sum(len(tokens) for tokens in flat)], device=device)
    if pp_group.size() > 1:
        dist.all_reduce(size, op=dist.ReduceOp.MAX, group=pp_group)
    counts = torch.zeros(2, int(size), dtype=torch.int64, device=device)
    if flat:
        tokens = torch.cat(flat)
        counts[0], counts[1] = tokens >= 0, tokens.clamp(min=0)
    if pp_group.size() > 1:
        dist.all_reduce(counts, group=pp_group)
    result = torch.stack([(counts[0] > 0).sum(), (counts[1] > 0).sum(), counts[1].sum()]).double()
    return result if pp_group.rank() == 0 else torch.zeros_like(result)


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """int64 [t]: how many ids of a [t, K] also stand in b [t, K]; both distinct per row."""
    return (a[:, :, None] == b[:, None, :]).sum((1, 2))
