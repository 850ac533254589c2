"""Router shift (RSPO, arXiv 2510.23027): the change of the router's probabilities of the experts
that the old-logprob pass used.

    shift_t = 1/(L K) sum_l sum_{e in S_old} |log r(e) - log r_old(e)|

r: the router's softmax over all E experts; S_old: the K experts that the old-logprob pass used, in
every one of the L MoE layers.
Shapes: t this rank's router rows of a micro-batch, T the rows of its log-probs, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.replay.layout import RankLayout
from megatron_rl.replay.stage_sums import sum_over_stages


def router_logprobs(scores: Tensor, ids: Tensor, *, scores_are_logits: bool) -> Tensor:
    """Return float32 [t, K], the log of the router's softmax over all experts, at ids [t, K].

    scores: [t, E], logits or that softmax.
    """
    # a factor of the ratio, which carries no gradient
    scores = scores.detach().float()
    if scores_are_logits:
        return scores.gather(1, ids) - scores.logsumexp(1, keepdim=True)
    return scores.gather(1, ids).log()


@dataclass
class RouterRecord:
    """The experts that a pass used, and their log-probabilities: a RouterHook for the old-logprob
    pass.

    It is on the device until the update, and takes rows x MoE layers of the stage x K x (4 bytes,
    and 1 for an id, or 2 above 256 experts).
    """

    scores_are_logits: bool
    id_dtype: torch.dtype
    kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    """(micro-batch, index of this stage's layer) -> (ids [t, K], log-probabilities [t, K])."""

    def __call__(self, stage_layer: int, micro_batch: int, scores: Tensor, used: Tensor) -> None:
        values = router_logprobs(scores, used, scores_are_logits=self.scores_are_logits)
        self.kept[micro_batch, stage_layer] = used.to(self.id_dtype), values

    def stacked(self, micro_batch: int) -> tuple[Tensor, Tensor] | None:
        """Return (ids, log-probabilities), [l, t, K] each, of this stage's l layers; None where it
        has no layer.
        """
        layers = [self.kept[key] for key in sorted(self.kept) if key[0] == micro_batch]
        if not layers:
            return None
        ids, values = zip(*layers, strict=True)
        return torch.stack(ids), torch.stack(values)

    def put(self, micro_batch: int, ids: Tensor, values: Tensor) -> None:
        """Restore the record of a micro-batch from the result of `stacked`."""
        self.kept |= {
            (micro_batch, stage_layer): parts
            for stage_layer, parts in enumerate(zip(ids, values, strict=True))
        }


@dataclass
class RouterShift:
    """The change since the record `old`, averaged over K and added over this stage's layers: a
    RouterHook for a later pass over the same micro-batches.
    """

    old: RouterRecord
    sums: dict[int, Tensor] = field(default_factory=dict)
    """Micro-batch -> float32 [t]."""

    def __call__(self, stage_layer: int, micro_batch: int, scores: Tensor, used: Tensor) -> None:
        ids, before = self.old.kept[micro_batch, stage_layer]
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
    """Return shift_t, float32 [T], of every micro-batch, over the layers of all pipeline stages.

    bounds: the cu_seqlens of every micro-batch.
    num_layers: L, the MoE layers of the model.
    Collective over `model_group` (tp x pp).
    """
    rows = [layout.num_router_rows(int(cu_seqlens[-1])) for cu_seqlens in bounds]
    # a stage without MoE layers adds zeros
    parts = [
        shift.sums.get(index, torch.zeros(count, device=device)) for index, count in enumerate(rows)
    ]
    totals = sum_over_stages(parts, layout, model_group)
    return tuple(
        layout.by_sequence(total, cu_seqlens) / num_layers
        for total, cu_seqlens in zip(totals, bounds, strict=True)
    )
