"""The override of routes: an object that is set as `router_replay` on every live TopKRouter.

megatron-core calls `router_replay.get_replay_topk(scores, topk, num_groups, group_topk,
default_compute_topk)` instead of its top-k when the attribute is not None (0.16.1 to 0.19.x; the
fused router returns before this call, so it is refused).  Only ids are overridden: gate weights
come from the live scores, so the router still gets gradient.
Shapes: t this rank's rows, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_rl.replay.compatibility import ReplayIncompatible, refusals

if TYPE_CHECKING:
    from megatron.core.transformer.moe.router import TopKRouter

TopK = Callable[..., tuple[Tensor, Tensor]]
"""core's top-k: scores [n, E] -> (scores [n, K], ids int64 [n, K])."""

LiveTopK = Callable[[Tensor | None], tuple[Tensor, Tensor]]
"""The live choice of the router: rows int64 [n] of this call, or None for all t -> (scores [n, K],
ids int64 [n, K]).
"""

Decide = Callable[[int, Tensor, LiveTopK], tuple[Tensor, Tensor]]
"""(MoE layer, scores [t, E], live choice) -> (scores [t, K] of the ids to use, ids int64 [t, K]).
"""


class GroupLimit:
    """A top-k that chooses inside the `group_topk` best of equal groups, where a group is ranked by
    the sum of its `best` largest scores.

    core always sums the best top_k // group_topk.  The model sets this object on its routers where
    `best` is another number; `install` keeps it for live choices.
    """

    def __init__(self, num_groups: int, group_topk: int, best: int) -> None:
        self.num_groups, self.group_topk, self.best = num_groups, group_topk, best

    def get_replay_topk(
        self, scores: Tensor, topk: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Return (scores [n, K], ids int64 [n, K]) for scores [n, E]."""
        groups = scores.unflatten(1, (self.num_groups, -1))
        ranking = groups.topk(self.best, dim=-1).values.sum(-1)
        # their order does not matter: all of their experts compete
        kept = ranking.topk(self.group_topk, dim=-1, sorted=False).indices
        outside = torch.ones_like(ranking, dtype=torch.bool).scatter(1, kept, False)
        limited = groups.masked_fill(outside[..., None], -torch.inf).flatten(1)
        values, ids = limited.topk(topk, dim=1)
        return values, ids


class RouteOverride:
    """The object on one router, which asks `decide` for the ids to use.

    layer: the router's index on the model's MoE-layer axis.
    """

    def __init__(self, decide: Decide, layer: int) -> None:
        self.decide = decide
        self.layer = layer
        self.limit: GroupLimit | None = None
        """The top-k of live choices; None for core's."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: TopK,
    ) -> tuple[Tensor, Tensor]:
        """Return (scores [t, K] of the decided ids, ids int64 [t, K]).

        scores: [t, E], by which the router selects.  With an expert bias they include the bias;
        core then takes gate weights from scores without it, at the same ids.
        """
        compute = default_compute_topk if self.limit is None else self.limit.get_replay_topk

        # core 0.19 sorts its top-k only where gradients are on.  The record of a pass without
        # gradient must have the order of the update's pass, or sums over the K experts would round
        # differently.
        @torch.enable_grad()
        def live_topk(rows: Tensor | None) -> tuple[Tensor, Tensor]:
            if rows is not None and not group_topk:
                return compute(scores[rows], topk)
            # core's group-limited top-k accepts only all rows of its call: compute all, then select
            values, ids = compute(scores, topk, num_groups=num_groups, group_topk=group_topk)
            return (values, ids) if rows is None else (values[rows], ids[rows])

        return self.decide(self.layer, scores, live_topk)


def install(router: TopKRouter, override: RouteOverride) -> None:
    """Set the override on a live router.

    Raises ReplayIncompatible for a router that would bypass or break replay.
    """
    problems = list(refusals(router.config))
    if problems:
        raise ReplayIncompatible("; ".join(problems))
    # a GroupLimit, or the override of an earlier manager of this model, which may have one
    before = router.router_replay
    override.limit = before if isinstance(before, GroupLimit) else getattr(before, "limit", None)
    router.router_replay = override
