"""Coordinates of ranks in megatron-core's order "tp-cp-ep-dp-pp": tensor ranks are neighbours,
pipeline ranks farthest apart.

The dense part of a model is sharded over tp x cp x dp x pp, its experts over etp x ep x expert-dp x
pp, on the same ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_rl.config import ParallelConfig


@dataclass(frozen=True)
class RankPlace:
    """A rank's coordinates; `replica` is its data-parallel rank, `expert_replica` which copy of its
    experts it holds.
    """

    rank: int
    tp: int
    cp: int
    replica: int
    pp: int
    etp: int
    ep: int
    expert_replica: int


def smallest_world(parallel: ParallelConfig) -> int:
    """The smallest number of ranks that these sizes divide."""
    return math.lcm(
        parallel.tp * parallel.cp * parallel.pp, parallel.expert_tp * parallel.ep * parallel.pp
    )


def dp_size(parallel: ParallelConfig, world_size: int) -> int:
    """Data-parallel replicas of the whole model."""
    return world_size // (parallel.tp * parallel.cp * parallel.pp)


def expert_dp_size(parallel: ParallelConfig, world_size: int) -> int:
    """Copies of every expert."""
    return world_size // (parallel.expert_tp * parallel.ep * parallel.pp)


def place(rank: int, parallel: ParallelConfig, world_size: int) -> RankPlace:
    """Coordinates of one of `world_size` ranks, which the sizes must divide."""
    per_stage = world_size // parallel.pp
    # both grids divide the same ranks: dense tp-cp-dp, experts etp-ep-dp
    pp, inner = divmod(rank, per_stage)
    outer, tp = divmod(inner, parallel.tp)
    replica, cp = divmod(outer, parallel.cp)
    outer, etp = divmod(inner, parallel.expert_tp)
    expert_replica, ep = divmod(outer, parallel.ep)
    return RankPlace(rank, tp, cp, replica, pp, etp, ep, expert_replica)
