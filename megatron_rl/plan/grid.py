"""Coordinates of ranks in megatron-core's order "tp-cp-ep-dp-pp": tensor ranks are neighbours,
pipeline ranks are farthest apart.

The dense part of a model is sharded over tp x cp x dp x pp, its experts over etp x ep x expert-dp x
pp, on the same ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_rl.config import Config, ParallelConfig


@dataclass(frozen=True)
class RankPlace:
    """The coordinates of a rank."""

    rank: int
    tp: int
    cp: int
    replica: int
    """Data-parallel rank."""
    pp: int
    etp: int
    ep: int
    expert_replica: int
    """Number of the copy of its experts that the rank has."""


def smallest_world(parallel: ParallelConfig) -> int:
    """Return the smallest number of ranks that these sizes divide."""
    dense = parallel.tp * parallel.cp * parallel.pp
    return math.lcm(dense, parallel.expert_tp * parallel.ep * parallel.pp)


def dp_size(parallel: ParallelConfig, world_size: int) -> int:
    """Return the number of data-parallel replicas of the whole model."""
    return world_size // (parallel.tp * parallel.cp * parallel.pp)


def expert_dp_size(parallel: ParallelConfig, world_size: int) -> int:
    """Return the number of copies of every expert."""
    return world_size // (parallel.expert_tp * parallel.ep * parallel.pp)


def weight_holders(parallel: ParallelConfig) -> int:
    """Return the number of ranks with different weights: pipeline stages x ranks of experts."""
    return parallel.pp * parallel.ep


def weight_sources(cfg: Config) -> int:
    """Return the number of ranks that send in a weight sync."""
    rollout, holders = cfg.rollout, weight_holders(cfg.parallel)
    most = {"distributed": rollout.weight_sync_sources, "disk": holders, "colocated": 1}
    return min(holders, most[rollout.weight_sync])


def place(rank: int, parallel: ParallelConfig, world_size: int) -> RankPlace:
    """Return the coordinates of one of `world_size` ranks, which the sizes must divide."""
    per_stage = world_size // parallel.pp
    # both grids divide the same ranks: dense tp-cp-dp, experts etp-ep-dp
    pp, inner = divmod(rank, per_stage)
    outer, tp = divmod(inner, parallel.tp)
    replica, cp = divmod(outer, parallel.cp)
    outer, etp = divmod(inner, parallel.expert_tp)
    expert_replica, ep = divmod(outer, parallel.ep)
    return RankPlace(rank, tp, cp, replica, pp, etp, ep, expert_replica)
