"""How often, where and by how much the trainer's own choice of experts differs from the rollout's,
measured while replaying.

d(t, l) = K - |S_live(t, l) & S_rollout(t, l)| compares SETS: neither engine promises an order.
Counted on the device, read once per step.  Under R3 "live" means: what this layer's router would
pick given the replayed layers below it.
Shapes: t this rank's rows of a micro-batch, l this stage's MoE layers, L the model's, E experts, K
top-k.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.replay.layout import RankLayout
from megatron_rl.replay.router_shift import sum_over_stages

ObserveRoutes = Callable[[int, int, Tensor, Tensor, Tensor], None]
"""(this stage's layer, micro-batch, live ids [t, K], margins [t], flipped [t]) of one router call.
"""

MANY_FLIPS = 8
"""`flips_per_token` stops counting here."""

NO_FLIP = torch.iinfo(torch.int16).max
"""The first flipped layer of a token that has none."""

COLUMNS = (
    "pairs",
    "flips",
    "used_flips",
    "missing",
    "flipped_margin",
    "kept_margin",
    "replaced_mass",
)
"""Sums kept per layer over compared rows; see MismatchReport for what they become."""


class Mismatch:
    """Accumulates one pass on this rank.  No host sync here: everything is read by
    `reduce_mismatch`.

    layers: this stage's indices on the model's MoE-layer axis; compared: per micro-batch bool [t],
    rows that hold real ids.  scores_are_logits: gate weights are a softmax of the selected scores,
    otherwise their shares.  observe: called with every comparison, and must not wait for the device
    either.
    """

    def __init__(
        self,
        layers: Sequence[int],
        compared: Sequence[Tensor],
        *,
        scores_are_logits: bool = True,
        observe: ObserveRoutes | None = None,
    ) -> None:
        device = compared[0].device
        self.layers = tuple(layers)
        self.compared = tuple(compared)
        self.scores_are_logits = scores_are_logits
        self.observe = observe
        self.sums = torch.zeros(len(self.layers), len(COLUMNS), dtype=torch.float64, device=device)
        self.largest_gap = torch.zeros((), dtype=torch.float64, device=device)
        self.flips = tuple(torch.zeros_like(rows, dtype=torch.int16) for rows in compared)
        """Per micro-batch [t]: how many of this stage's layers flip."""
        self.first_flip = tuple(
            torch.full_like(rows, NO_FLIP, dtype=torch.int16) for rows in compared
        )
        """Per micro-batch [t]: the lowest of this stage's layers that flips."""

    def add(
        self,
        local: int,
        micro_batch: int,
        scores: Tensor,
        live: Tensor,
        used: Tensor,
        reference: Tensor,
        *,
        bias: Tensor | None = None,
    ) -> None:
        """Compare live [t, K] and used [t, K] with reference [t, K]; `scores` [t, E] are what the
        router selects by.

        bias: the part [E] of `scores` that selects but is no part of gate weights (expert bias).
        """
        compared = self.compared[micro_batch]
        # rows without a reference are compared with themselves: they count nowhere, and no row
        # needs to be selected
        reference = torch.where(
            compared[:, None], reference.to(device=live.device, dtype=torch.int64), live
        )
        scores = scores.detach().float()
        shared = contained(live, reference)
        missing = (~shared).sum(1)
        flipped = missing > 0  # never where not compared
        chosen = scores.gather(1, live)
        lowest = chosen.amin(1)
        margin = lowest - scores.scatter(1, live, -math.inf).amax(1)
        gates = chosen if bias is None else chosen - bias.float()[live]
        weights = gates.softmax(1) if self.scores_are_logits else gates / gates.sum(1, keepdim=True)
        self.sums[local] += torch.stack(
            [
                compared.sum(),
                flipped.sum(),
                (compared & ~contained(used, reference).all(1)).sum(),
                missing.sum(),
                torch.where(flipped, margin, 0.0).sum(dtype=torch.float64),
                torch.where(compared & ~flipped, margin, 0.0).sum(dtype=torch.float64),
                torch.where(shared, 0.0, weights).sum(dtype=torch.float64),
            ]
        )
        gap = torch.where(flipped, lowest - scores.gather(1, reference).amin(1), 0.0)
        if gap.numel():  # amax of nothing is an error: a rank may have no rows
            self.largest_gap = torch.maximum(self.largest_gap, gap.amax().double())
        self.flips[micro_batch].add_(flipped)  # layers add up over the calls of a pass
        first = self.first_flip[micro_batch]
        first.copy_(torch.where(flipped, first.clamp(max=self.layers[local]), first))
        if self.observe is not None:
            self.observe(local, micro_batch, live, margin, flipped)


def flips_per_token(
    mismatch: Mismatch, layout: RankLayout, bounds: Sequence[Tensor], model_group: dist.ProcessGroup
) -> tuple[Tensor, ...]:
    """Per micro-batch uint8 [T]: in how many of all MoE layers a token flips; MANY_FLIPS means so
    many or more.

    T are the rows of this context rank's log-probs, in their order; `bounds`: each micro-batch's
    cu_seqlens. Collective over `model_group` (tp x pp): T bytes a pass.
    """
    stages = model_group.size() // layout.tp_size
    # each stage adds at most MANY_FLIPS
    dtype = torch.uint8 if stages * MANY_FLIPS <= 255 else torch.int32
    parts = [flips.clamp(max=MANY_FLIPS).to(dtype) for flips in mismatch.flips]
    totals = sum_over_stages(parts, layout, model_group)
    return tuple(
        layout.by_sequence(total.clamp(max=MANY_FLIPS).to(torch.uint8), cu_seqlens)
        for total, cu_seqlens in zip(totals, bounds, strict=True)
    )


@dataclass(frozen=True)
class MismatchReport:
    """Reduced over all ranks of the job.  Means are NaN where there is nothing to count."""

    router_mismatch: float  # mean over (token, layer) of 1[d > 0], live against rollout
    replayed_mismatch: float  # the same of the experts that were used: 0 under R3
    token_mismatch: float  # mean over tokens of 1[max_l d > 0]
    layers_per_token: float  # mean over tokens of sum_l 1[d > 0]
    expert_overlap: float  # 1 - mean d / K
    first_flip_layer: float
    """Mean over tokens that flip of the lowest layer with d > 0 (MoE layers, from 0)."""
    flip_margin_max: float
    """Largest (k-th live score - lowest rollout expert's score) of a flipped row; 0 = only ties."""
    flipped_margin: float
    """Mean over (token, layer) with d > 0 of k-th chosen score - best score not chosen."""
    kept_margin: float  # the same over (token, layer) with d = 0
    replaced_gate_mass: (
        # mean over (token, layer) of the live gate weight on experts that the rollout did not use
        float
    )
    flip_rate: list[float]  # per MoE layer of the model [L]: tokens with d > 0 / tokens
    first_flip: list[float]
    """Per MoE layer [L]: tokens that flip here and in no lower layer / tokens."""


def reduce_mismatch(
    mismatches: Sequence[Mismatch],
    *,
    layers: tuple[int, ...],
    num_layers: int,
    top_k: int,
    pp_group: dist.ProcessGroup,
    device: torch.device,
) -> MismatchReport | None:
    """Gather tokens over the pipeline stages, then one sum over all ranks (world).  None when
    nothing was compared.

    layers: this stage's indices on the MoE-layer axis of `num_layers`.  Every stage has the same
    rows.
    """
    table = torch.zeros(num_layers, len(COLUMNS), dtype=torch.float64, device=device)
    # one slot per rank, so that the one sum over ranks also carries their maxima
    gaps = torch.zeros(dist.get_world_size(), dtype=torch.float64, device=device)
    for mismatch in mismatches:
        table[list(layers)] += mismatch.sums
        gaps[dist.get_rank()] = torch.maximum(gaps[dist.get_rank()], mismatch.largest_gap)
    tokens = count_tokens(mismatches, num_layers, pp_group, device)
    everything = torch.cat([table.flatten(), tokens, gaps])
    dist.all_reduce(everything)
    flat, counts, maxima = everything.cpu().split([table.numel(), len(tokens), len(gaps)])
    table = flat.view(num_layers, len(COLUMNS))
    total = dict(zip(COLUMNS, table.sum(0).tolist(), strict=True))
    compared, layer_flips, *first = counts.tolist()
    pairs, flips = total["pairs"], total["flips"]
    if not pairs:
        return None
    return MismatchReport(
        router_mismatch=flips / pairs,
        replayed_mismatch=total["used_flips"] / pairs,
        token_mismatch=sum(first) / compared,
        layers_per_token=layer_flips / compared,
        expert_overlap=1 - total["missing"] / (pairs * top_k),
        first_flip_layer=mean(sum(layer * count for layer, count in enumerate(first)), sum(first)),
        flip_margin_max=float(maxima.max()),
        flipped_margin=mean(total["flipped_margin"], flips),
        kept_margin=mean(total["kept_margin"], pairs - flips),
        replaced_gate_mass=total["replaced_mass"] / pairs,
        flip_rate=(table[:, 1] / table[:, 0].clamp(min=1)).tolist(),
        first_flip=[count / compared for count in first],
    )


def count_tokens(
    mismatches: Sequence[Mismatch],
    num_layers: int,
    pp_group: dist.ProcessGroup,
    device: torch.device,
) -> Tensor:
    """f64 [2 + L]: tokens compared, flips, tokens by the first layer that flips; the same on every
    pipeline stage.
    """
    if not mismatches:
        return torch.zeros(2 + num_layers, dtype=torch.float64, device=device)
    compared = torch.cat([rows for mismatch in mismatches for rows in mismatch.compared])
    flips = torch.cat([rows for mismatch in mismatches for rows in mismatch.flips])
    first = torch.cat([rows for mismatch in mismatches for rows in mismatch.first_flip])
    if pp_group.size() > 1:
        mine = torch.stack([flips, first]).int()  # neither gloo nor nccl sends int16
        stages = [torch.empty_like(mine) for _ in range(pp_group.size())]
        dist.all_gather(stages, mine, group=pp_group)
        flips, first = (
            torch.stack([s[0] for s in stages]).sum(0),
            torch.stack([s[1] for s in stages]).amin(0),
        )
    by_layer = torch.bincount(first[first < NO_FLIP].long(), minlength=num_layers)
    return torch.cat([torch.stack([compared.sum(), flips.sum()]), by_layer]).double()


def contained(a: Tensor, b: Tensor) -> Tensor:
    """bool [t, K]: which ids of a [t, K] are also in the same row of b [t, K]."""
    return (a[:, :, None] == b[:, None, :]).any(2)


def mean(total: float, count: float) -> float:
    return total / count if count else math.nan
