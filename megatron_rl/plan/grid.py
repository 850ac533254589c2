"""Which rank does what: megatron-core's order "tp-cp-ep-dp-pp", tensor ranks neighbours, pipeline ranks farthest apart.

The dense part of a model lies on tp x cp x dp x pp, its experts on etp x ep x expert-dp x pp, over the same ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_rl.config import ParallelConfig


@dataclass(frozen=True)
class Place:
    """A rank's coordinates; `replica` is its data-parallel rank, `expert_replica` which copy of its experts it holds."""

    rank: int
    tp: int
    cp: int
    replica: int
    pp: int
    etp: int
    ep: int
    expert_replica: int


def smallest_world(parallel: ParallelConfig) -> int:
    """The fewest ranks that these sizes tile."""
    return math.lcm(parallel.tp * parallel.cp * parallel.pp, parallel.expert_tp * parallel.ep * parallel.pp)


def dp_size(parallel: ParallelConfig, world_size: int) -> int:
    """Data-parallel replicas of the whole model."""
    return world_size // (parallel.tp * parallel.cp * parallel.pp)


def expert_dp_size(parallel: ParallelConfig, world_size: int) -> int:
    """Copies of every expert."""
    return world_size // (parallel.expert_tp * parallel.ep * parallel.pp)


def place(rank: int, parallel: ParallelConfig, world_size: int) -> Place:
    """Coordinates of one of `world_size` ranks, which the sizes must tile."""
    per_stage = world_size // parallel.pp
    pp, inner = divmod(rank, per_stage)
    outer, tp = divmod(inner, parallel.tp)
    replica, cp = divmod(outer, parallel.cp)
    outer, etp = divmod(inner, parallel.expert_tp)
    expert_replica, ep = divmod(outer, parallel.ep)
    return Place(rank, tp, cp, replica, pp, etp, ep, expert_replica)
