"""Memory of the fullest GPU of rank 0's host in each phase of a step, trainer and servers together.

Bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_rl.config import Config
from megatron_rl.models.spec import ModelSpec
from megatron_rl.plan import memory
from megatron_rl.plan.hardware import GIB, Assumptions, Hardware
from megatron_rl.plan.memory import Memory
from megatron_rl.plan.server_time import DecodeModel, configured_servers

SAVE = "saving a checkpoint"


@dataclass(frozen=True)
class Phase:
    """Bytes on one GPU.

    exact: of `trainer` and `servers`, without activations, routes and what is assumed.
    """

    name: str
    trainer: int
    servers: int
    exact: int

    @property
    def total(self) -> int:
        return self.trainer + self.servers


def phases(
    spec: ModelSpec, cfg: Config, world: int, hardware: Hardware, assumed: Assumptions, shared: int
) -> Iterator[Phase]:
    """shared: servers that the run starts on a GPU of a training rank, at most.  Attached servers
    are not counted.

    A checkpoint is written from the state in place: of the trainer it has no activations.
    """
    rank = fullest(spec, cfg, world)
    state = rank.weights + rank.gradients + rank.optimizer
    held = state + rank.reference
    server = None if cfg.rollout.urls else server_bytes(spec, cfg, hardware, assumed)
    if server is None or not shared:
        yield Phase("training", rank.total, 0, state)
        yield Phase(SAVE, held, 0, state)
        if server is not None:
            yield Phase("sampling, on the servers' GPUs", 0, server.total, server.total)
    elif not cfg.rollout.release_memory:
        served = shared * server.total
        yield Phase("training beside servers", rank.total, served, state + served)
        yield Phase(SAVE, held, served, state + served)
    else:
        left, buckets = int(assumed.released * GIB), 2 * cfg.rollout.weight_sync_bucket_mb << 20
        weights = shared * server.weights
        yield Phase("training", rank.total, shared * left, state)
        yield Phase(SAVE, held, shared * left, state)
        yield Phase(
            "weight sync", rank.weights + buckets, weights + shared * left, rank.weights + weights
        )
        yield Phase("sampling", left, shared * (server.total + left), shared * server.total)


def fullest(spec: ModelSpec, cfg: Config, world: int) -> Memory:
    """Of the pipeline rank with the most."""
    ranks = [memory.rank_memory(spec, cfg, world, pp) for pp in range(cfg.parallel.pp)]
    return max(ranks, key=lambda each: each.total)


@dataclass(frozen=True)
class ServerBytes:
    """On each GPU of a server."""

    weights: int
    cache: int

    @property
    def total(self) -> int:
        return self.weights + self.cache


def server_bytes(
    spec: ModelSpec, cfg: Config, hardware: Hardware, assumed: Assumptions
) -> ServerBytes:
    """Of a server that the run starts, with the KV cache of rollout.max_total_tokens."""
    model = DecodeModel(spec, configured_servers(spec, cfg, hardware, assumed), hardware, assumed)
    return ServerBytes(
        int(model.weight_bytes()), int(cfg.rollout.max_total_tokens * model.cache_bytes())
    )


def host_bytes(spec: ModelSpec, cfg: Config, world: int) -> int:
    """Of a rank's weights and optimizer state on its host while the servers have its GPU
    (rollout.release_memory).
    """
    ranks = [memory.rank_memory(spec, cfg, world, pp) for pp in range(cfg.parallel.pp)]
    return max(each.weights + each.optimizer for each in ranks) if cfg.rollout.release_memory else 0


def check_phases(found: Sequence[Phase], hardware: Hardware) -> None:
    """Raise ValueError for a phase whose exact part alone does not fit."""
    for phase in found:
        if phase.exact > hardware.memory:
            trainer, servers, exact = (
                each / GIB for each in (phase.trainer, phase.servers, phase.exact)
            )
            raise ValueError(
                f"{phase.name}: a GPU would hold {trainer:.1f} GiB of the trainer and {servers:.1f}"
                f" GiB of servers, {exact:.1f} GiB of them weights, gradients, optimizer state and"
                f" KV cache, which must be at most the {hardware.memory / GIB:.1f} GiB of"
                f" {hardware.name}: {remedy(phase)}"
            )


def remedy(phase: Phase) -> str:
    if not phase.servers:
        return (
            "use more ranks, or another layout (megatron-rl plan); for other hardware of the dry"
            " run, --gpu"
        )
    if not phase.trainer:
        return "give a server more of rollout.gpus, or lower rollout.max_total_tokens"
    return (
        "set rollout.gpus to GPUs without training ranks, rollout.release_memory = true with"
        " weight_sync = colocated, or rollout.urls"
    )
