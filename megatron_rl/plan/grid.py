"""Coordinates of ranks in megatron-core's order "tp-cp-ep-dp-pp": tensor ranks are neighbours,
pipeline ranks are farthest apart.

The dense part of a model is sharded over tp x cp x dp x pp, its experts over etp x ep x expert-dp x
pp, on the same ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

from megatron_rl.config import Config, ParallelConfig
from megatron_rl.models.spec import ModelSpec


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
    most = {
        "distributed": rollout.weight_sync_sources, "disk": holders, "colocated": 1, "adapter": 1,
    }  # fmt: skip
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


def stage_layers(spec: ModelSpec, parallel: ParallelConfig) -> list[range]:
    """Return the 0-based layers of each of the pp x vp stages, in forward order.

    Stage i is on pipeline rank i % pp.
    """
    stages = parallel.pp * parallel.vp
    counts = parallel.layers_per_stage or (spec.num_layers // stages,) * stages
    ends = accumulate(counts)
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def rank_layers(spec: ModelSpec, parallel: ParallelConfig, pp_rank: int) -> list[int]:
    """Return the layers of one pipeline rank, over its chunks."""
    stages = stage_layers(spec, parallel)[pp_rank :: parallel.pp]
    return [layer for stage in stages for layer in stage]


def micro_batches_in_flight(cfg: Config, pp_rank: int) -> int:
    """Return how many passes over a chunk have activations on a rank at the same time, under 1F1B
    or its interleaved form.
    """
    pp, vp = cfg.parallel.pp, cfg.parallel.vp
    if vp == 1:
        return pp - pp_rank  # the first stage runs ahead of the last one by pp - 1
    return 2 * (pp - pp_rank - 1) + (vp - 1) * pp + 1


def most_rows(cfg: Config) -> int:
    """Return the rows of the largest micro-batch of a replica: a full one, or the longest sequence,
    which is a micro-batch by itself where it exceeds run.max_tokens_per_micro_batch.
    """
    return max(cfg.run.max_tokens_per_micro_batch, cfg.longest_sequence)


def rows(cfg: Config) -> int:
    """Return T, the rows of the largest micro-batch on one context-parallel rank."""
    return most_rows(cfg) // cfg.parallel.cp


def sequence_shards(cfg: Config) -> int:
    """Return the tensor ranks that share a micro-batch's rows outside of attention and MLP."""
    return cfg.parallel.tp if cfg.parallel.use_sequence_parallel else 1


def element_size(cfg: Config) -> int:
    return 2 if cfg.model.dtype == "bfloat16" else 4


def wants_te(cfg: Config) -> bool:
    """Return True if layers are TransformerEngine's on a GPU where it is installed."""
    return cfg.run.device != "cpu" and cfg.model.layer_spec != "local" and not cfg.model.is_exact
