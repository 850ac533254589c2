"""Router mismatch: the differences between the trainer's live choice of experts and the rollout's,
measured while replaying.

d(t, l) = K - |S_live(t, l) & S_rollout(t, l)| compares sets, because neither engine promises an
order.  Token t flips in layer l where d(t, l) > 0.  Counts stay on the device and are read once
per step.  Under R3 the live choice of a layer is the one that its router would make after the
replayed layers below it.

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
from megatron_rl.replay.stage_sums import sum_over_stages

MismatchHook = Callable[[int, int, Tensor, Tensor, Tensor], None]
"""An observer of one comparison: (index of this stage's layer, micro-batch, live ids [t, K],
margins [t], flipped [t]).
"""

MANY_FLIPS = 8
"""The largest count of `flips_per_token`, which stands for this number or more."""

NO_FLIP = torch.iinfo(torch.int16).max
"""The first flipped layer of a token without a flip."""

COLUMNS = (
    "pairs", "flips", "used_flips", "missing", "flipped_margin", "kept_margin", "replaced_mass",
)  # fmt: skip
"""The sums of a layer over compared rows, in the order in which `Mismatch.add` stacks them.

pairs: rows; flips: rows with d > 0; used_flips: the same for the experts that were used; missing:
d; flipped_margin, kept_margin: margins of rows with d > 0 and with d = 0; replaced_mass: live gate
weight on experts that the rollout did not use.
"""


class Mismatch:
    """The comparison of one pass on this rank.  Nothing here waits for the device; the sums are
    read by `reduce_mismatch`.

    layers: the indices of this stage's layers on the model's MoE-layer axis.
    compared: bool [t] of every micro-batch, the rows with real ids.
    scores_are_logits: gate weights are a softmax of the selected scores; else they are the shares
    of these scores in their sum.
    hook: called with every comparison; it must not wait for the device either.
    """

    def __init__(
        self,
        layers: Sequence[int],
        compared: Sequence[Tensor],
        *,
        scores_are_logits: bool = True,
        hook: MismatchHook | None = None,
    ) -> None:
        device = compared[0].device
        self.layers = tuple(layers)
        self.compared = tuple(compared)
        self.scores_are_logits = scores_are_logits
        self.hook = hook
        self.sums = torch.zeros(len(self.layers), len(COLUMNS), dtype=torch.float64, device=device)
        self.largest_gap = torch.zeros((), dtype=torch.float64, device=device)
        self.flips = tuple(torch.zeros_like(rows, dtype=torch.int16) for rows in compared)
        """The number of this stage's layers that flip, int16 [t] of every micro-batch."""
        self.first_flip = tuple(
            torch.full_like(rows, NO_FLIP, dtype=torch.int16) for rows in compared
        )
        """The lowest layer of this stage that flips, int16 [t] of every micro-batch."""

    def add(
        self,
        stage_layer: int,
        micro_batch: int,
        scores: Tensor,
        live: Tensor,
        used: Tensor,
        reference: Tensor,
        *,
        bias: Tensor | None = None,
    ) -> None:
        """Compare the ids live [t, K] and used [t, K] with reference [t, K] in layer `stage_layer`.

        scores: [t, E], by which the router selects.
        bias: [E], the part of `scores` that is no part of gate weights (expert bias).
        """
        compared = self.compared[micro_batch]
        # a row without a reference is compared with itself and counts as equal; selecting rows
        # would wait for the device
        reference = torch.where(
            compared[:, None], reference.to(device=live.device, dtype=torch.int64), live
        )
        scores = scores.detach().float()
        shared = contained(live, reference)
        missing = (~shared).sum(1)
        flipped = missing > 0  # never in rows that are not compared
        chosen = scores.gather(1, live)
        lowest = chosen.amin(1)
        # k-th chosen score - best score not chosen
        margin = lowest - scores.scatter(1, live, -math.inf).amax(1)
        gates = chosen if bias is None else chosen - bias.float()[live]
        weights = gates.softmax(1) if self.scores_are_logits else gates / gates.sum(1, keepdim=True)
        self.sums[stage_layer] += torch.stack(
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
        if gap.numel():  # a rank may have no rows, and amax of an empty tensor is an error
            self.largest_gap = torch.maximum(self.largest_gap, gap.amax().double())
        self.flips[micro_batch].add_(flipped)  # adds up over the layers of a pass
        first = self.first_flip[micro_batch]
        first.copy_(torch.where(flipped, first.clamp(max=self.layers[stage_layer]), first))
        if self.hook is not None:
            self.hook(stage_layer, micro_batch, live, margin, flipped)


def flips_per_token(
    mismatch: Mismatch, layout: RankLayout, bounds: Sequence[Tensor], model_group: dist.ProcessGroup
) -> tuple[Tensor, ...]:
    """Return uint8 [T] of every micro-batch, the number of MoE layers of the model in which a token
    flips; MANY_FLIPS means this number or more.

    T are the rows of this context-parallel rank's log-probs, in their order.
    bounds: the cu_seqlens of every micro-batch.
    Collective over `model_group` (tp x pp): T bytes a pass.
    """
    stages = model_group.size() // layout.tp_size
    # the sum must not overflow: every stage adds at most MANY_FLIPS
    dtype = torch.uint8 if stages * MANY_FLIPS <= 255 else torch.int32
    parts = [flips.clamp(max=MANY_FLIPS).to(dtype) for flips in mismatch.flips]
    totals = sum_over_stages(parts, layout, model_group)
    return tuple(
        layout.by_sequence(total.clamp(max=MANY_FLIPS).to(torch.uint8), cu_seqlens)
        for total, cu_seqlens in zip(totals, bounds, strict=True)
    )


@dataclass(frozen=True)
class MismatchReport:
    """The mismatch over all ranks of the job.  A mean is NaN where there is nothing to count."""

    router_mismatch: float
    """The mean over (token, layer) of 1[d > 0], live against rollout."""
    replayed_mismatch: float
    """The same for the experts that were used, instead of live ones: 0 under R3."""
    token_mismatch: float
    """The mean over tokens of 1[max_l d > 0]."""
    layers_per_token: float
    """The mean over tokens of sum_l 1[d > 0]."""
    expert_overlap: float
    """1 - mean d / K."""
    first_flip_layer: float
    """The mean over tokens that flip of the lowest layer with d > 0 (MoE layers, from 0)."""
    flip_margin_max: float
    """The largest (k-th live score - lowest score of a rollout expert) of a flipped row; 0: only
    ties."""
    flipped_margin: float
    """The mean over (token, layer) with d > 0 of (k-th chosen score - best score not chosen)."""
    kept_margin: float
    """The same over (token, layer) with d = 0."""
    replaced_gate_mass: float
    """The mean over (token, layer) of the live gate weight on experts that the rollout did not
    use."""
    flip_rate: list[float]
    """[L]: tokens with d > 0 in the layer / tokens."""
    first_flip: list[float]
    """[L]: tokens that flip in the layer and in no lower one / tokens."""


def reduce_mismatch(
    mismatches: Sequence[Mismatch],
    *,
    layers: tuple[int, ...],
    num_layers: int,
    top_k: int,
    pp_group: dist.ProcessGroup,
    device: torch.device,
) -> MismatchReport | None:
    """Return the mismatch over all ranks, or None where nothing was compared.

    layers: the indices of this stage's layers on the MoE-layer axis of `num_layers`.
    Collective: tokens are gathered over the pipeline stages, which have the same rows, and one sum
    over all ranks (world) follows.  Ranks with the same rows (stages; tensor ranks without sequence
    parallelism) are counted several times, equally in numerator and denominator of every result.
    """
    table = torch.zeros(num_layers, len(COLUMNS), dtype=torch.float64, device=device)
    # one slot per rank, so that the same sum over ranks also carries their maxima
    gaps = torch.zeros(dist.get_world_size(), dtype=torch.float64, device=device)
    for mismatch in mismatches:
        table[list(layers)] += mismatch.sums
        gaps[dist.get_rank()] = torch.maximum(gaps[dist.get_rank()], mismatch.largest_gap)
    tokens = count_tokens(mismatches, num_layers, pp_group, device)
    sums = torch.cat([table.flatten(), tokens, gaps])
    dist.all_reduce(sums)
    flat, counts, maxima = sums.cpu().split([table.numel(), len(tokens), len(gaps)])
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
        # a layer without compared tokens has the rate 0, not NaN
        flip_rate=(table[:, 1] / table[:, 0].clamp(min=1)).tolist(),
        first_flip=[count / compared for count in first],
    )


def count_tokens(
    mismatches: Sequence[Mismatch],
    num_layers: int,
    pp_group: dist.ProcessGroup,
    device: torch.device,
) -> Tensor:
    """Return float64 [2 + L], the same on every pipeline stage: tokens compared, flips, and tokens
    by the first layer that flips.  Collective over `pp_group`.
    """
    if not mismatches:
        return torch.zeros(2 + num_layers, dtype=torch.float64, device=device)
    compared = torch.cat([rows for mismatch in mismatches for rows in mismatch.compared])
    flips = torch.cat([rows for mismatch in mismatches for rows in mismatch.flips])
    first = torch.cat([rows for mismatch in mismatches for rows in mismatch.first_flip])
    if pp_group.size() > 1:
        columns = torch.stack([flips, first]).int()  # neither gloo nor nccl sends int16
        stages = [torch.empty_like(columns) for _ in range(pp_group.size())]
        dist.all_gather(stages, columns, group=pp_group)
        flips = torch.stack([stage[0] for stage in stages]).sum(0)
        first = torch.stack([stage[1] for stage in stages]).amin(0)
    by_layer = torch.bincount(first[first < NO_FLIP].long(), minlength=num_layers)
    return torch.cat([torch.stack([compared.sum(), flips.sum()]), by_layer]).double()


def contained(a: Tensor, b: Tensor) -> Tensor:
    """Return bool [t, K], the ids of a [t, K] that are also in the same row of b [t, K]."""
    return (a[:, :, None] == b[:, None, :]).any(2)


def mean(total: float, count: float) -> float:
    return total / count if count else math.nan
