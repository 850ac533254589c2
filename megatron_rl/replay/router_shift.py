"""Router shift (RSPO, arXiv 2510.23027): how far the router's probabilities of the old pass's
experts have moved since.

    shift_t = 1/(L K) sum_l sum_{e in S_old} |log r(e) - log r_old(e)|

r: the router's softmax over all E experts; S_old: the K experts that the old-logprob pass used, in
each of the L MoE layers.
Shapes: t this rank's router rows of a micro-batch, T the rows of its log-probs, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.replay.layout import RankLayout


def router_logprobs(scores: Tensor, ids: Tensor, *, scores_are_logits: bool) -> Tensor:
    """float32 [t, K]: log of the router's softmax over all experts, at ids [t, K].

    scores [t, E]: logits, or that softmax.
    """
    scores = scores.detach().float()
    if scores_are_logits:
        return scores.gather(1, ids) - scores.logsumexp(1, keepdim=True)
    return scores.gather(1, ids).log()


@dataclass
class RouterRecord:
    """Of a pass: experts that were used and their log-probabilities, per (micro-batch, this stage's
    layer).

    On the device until the update: rows x MoE layers of the stage x K x (4 bytes + 1 of an id, 2
    above 256 experts).
    """

    scores_are_logits: bool
    id_dtype: torch.dtype
    kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __call__(self, local: int, micro_batch: int, scores: Tensor, used: Tensor) -> None:
        values = router_logprobs(scores, used, scores_are_logits=self.scores_are_logits)
        self.kept[micro_batch, local] = used.to(self.id_dtype), values

    def stacked(self, micro_batch: int) -> tuple[Tensor, Tensor] | None:
        """(ids, log-probabilities) [l, t, K] of this stage's l layers; None where it has none."""
        found = [self.kept[key] for key in sorted(self.kept) if key[0] == micro_batch]
        if not found:
            return None
        ids, values = zip(*found, strict=True)
        return torch.stack(ids), torch.stack(values)

    def put(self, micro_batch: int, ids: Tensor, values: Tensor) -> None:
        """What `stacked` gave."""
        self.kept |= {
            (micro_batch, local): parts for local, parts in enumerate(zip(ids, values, strict=True))
        }


@dataclass
class RouterShift:
    """Of a later pass over the same micro-batches: sums over this stage's layers of the change,
    averaged over K.
    """

    old: RouterRecord
    sums: dict[int, Tensor] = field(default_factory=dict)  # micro-batch -> float32 [t]

    def __call__(self, local: int, micro_batch: int, scores: Tensor, used: Tensor) -> None:
        ids, before = self.old.kept[micro_batch, local]
        now = router_logprobs(scores, ids.long(), scores_are_logits=self.old.scores_are_logits)
        change = (now - before).abs().mean(1)
        self.sums[micro_batch] = (
            self.sums[micro_batch] + change if micro_batch in self.sums else change
        )


def shift_per_token(
    shift: RouterShift,
    layout: RankLayout,
    bounds: Sequence[Tensor],
    model_group: dist.ProcessGroup,
    *,
    num_layers: int,
    device: torch.device,
) -> tuple[Tensor, ...]:
    """Per micro-batch shift_t, float32 [T]; the layers of all pipeline stages are added before
    anything else is done with it.

    bounds: each micro-batch's cu_seqlens; num_layers: L, MoE layers of the model.  Collective over
    `model_group` (tp x pp).
    """
    rows = [layout.num_rows(int(cu_seqlens[-1])) for cu_seqlens in bounds]
    # a stage without MoE layers adds zeros
    parts = [
        shift.sums.get(index, torch.zeros(count, device=device)) for index, count in enumerate(rows)
    ]
    totals = sum_over_stages(parts, layout, model_group)
    return tuple(
        layout.by_sequence(total, cu_seqlens) / num_layers
        for total, cu_seqlens in zip(totals, bounds, strict=True)
    )


def sum_over_stages(
    parts: Sequence[Tensor], layout: RankLayout, model_group: dist.ProcessGroup
) -> list[Tensor]:
    """Values [t] of this stage's layers, per micro-batch -> their sums over all stages, for the
    rows of every tensor rank.

    A tensor rank has its slice of the rows under sequence parallelism, else all of them: every rank
    fills its part of a table of zeros, and the tables are added.  Collective over `model_group` (tp
    x pp).
    """
    slices, mine = (layout.tp_size, layout.tp_rank) if layout.sequence_parallel else (1, 0)
    tables = []
    for values in parts:
        table = values.new_zeros(slices, len(values))
        if layout.sequence_parallel or layout.tp_rank == 0:  # else tensor ranks have the same rows
            table[mine] = values
        tables.append(table.flatten())
    everything = torch.cat(tables)
    if model_group.size() > 1:
        dist.all_reduce(everything, group=model_group)
    return list(everything.split([len(table) for table in tables]))
