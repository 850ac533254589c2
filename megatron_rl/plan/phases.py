"""Memory of the fullest GPU of rank 0's host in every phase of a step: trainer and servers.

Sizes are in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_rl.config import Config
from megatron_rl.config.rules.server_gpus import tensor_ranks
from megatron_rl.config.sections import Teacher
from megatron_rl.models.known import find_spec
from megatron_rl.models.spec import ModelSpec
from megatron_rl.plan import memory
from megatron_rl.plan.grid import weight_sources
from megatron_rl.plan.hardware import GIB, Assumptions, Hardware
from megatron_rl.plan.memory import Memory
from megatron_rl.plan.server_time import SERVED, DecodeModel, ServerPlan, configured_servers

SAVE = "saving a checkpoint"
SYNC = "weight sync, on the servers' GPUs"
ADAM = "Adam's update"
SCORING = "scoring by teacher "


@dataclass(frozen=True)
class Phase:
    """Bytes on one GPU in one phase of a step."""

    name: str
    trainer: int
    servers: int
    exact: int
    """The part of `total` that is known exactly: without activations, routes and assumptions."""

    @property
    def total(self) -> int:
        return self.trainer + self.servers


def phases(
    spec: ModelSpec, cfg: Config, world: int, hardware: Hardware, assumed: Assumptions, shared: int
) -> Iterator[Phase]:
    """Yield the memory of every phase of a step.

    shared: the largest number of servers that the run starts on a GPU of a training rank.  Servers
    that the run attaches to do not count.
    """
    rank = fullest(spec, cfg, world, assumed)
    state = rank.weights + rank.gradients + rank.optimizer
    # a checkpoint is written from the state in place; there are no activations then
    without_activations = [(SAVE, state)]
    if copies := update_copies(spec, cfg, world):
        without_activations.append((ADAM, state + copies))
    server = None if cfg.rollout.urls else server_bytes(spec, cfg, hardware, assumed)
    alternates = bool(shared) and cfg.rollout.release_memory
    # every process keeps some memory; all sleeping teachers may be on this GPU
    left = int(assumed.released * GIB)
    asleep = left * len(cfg.teachers.time_shared)
    if server is None or not shared:
        # the trainer and the servers have GPUs of their own
        yield Phase("training", rank.total, 0, state)
        for name, size in without_activations:
            yield Phase(name, size, 0, state)
        if server is not None:
            yield Phase("sampling, on the servers' GPUs", 0, server.total, server.total)
            if cfg.rollout.weight_sync == "distributed":
                beside = left + broadcast_bytes(spec, cfg, assumed)
                yield Phase(SYNC, 0, server.static + beside, server.static)
    elif not alternates:
        served = shared * server.total
        yield Phase("training beside servers", rank.total, served, state + served)
        for name, size in without_activations:
            yield Phase(name, size, served, state + served)
    else:
        # either the trainer or the servers have released most of their memory
        # two buckets: the servers load one while the source prepares the next
        buckets = 2 * cfg.rollout.weight_sync_bucket_mb << 20
        synced, beside = shared * server.weights, shared * left + asleep
        yield Phase("training", rank.total, beside, state)
        for name, size in without_activations:
            yield Phase(name, size, beside, state)
        trainer, servers = rank.weights + buckets, synced + beside
        yield Phase("weight sync", trainer, servers, rank.weights + synced)
        yield Phase("sampling", left, shared * server.total + beside, shared * server.total)
    for name in cfg.teachers.time_shared:
        size = teacher_bytes(cfg.teachers.by_name[name], cfg, hardware, assumed)
        beside = asleep + shared * left if alternates else asleep
        yield Phase(f"{SCORING}{name}", left if alternates else 0, size + beside, size)


def update_copies(spec: ModelSpec, cfg: Config, world: int) -> int:
    """Return the most bytes of float32 copies that Adam makes on a device in an update, with
    what the old-logprob pass recorded there; 0 without copies.
    """
    largest = 0
    for pp in range(cfg.parallel.pp):
        if copies := memory.update_bytes(spec, cfg, world, pp):
            copies += memory.device_recorded_bytes(spec, cfg, world, pp)
        largest = max(largest, copies)
    return largest


def fullest(spec: ModelSpec, cfg: Config, world: int, assumed: Assumptions) -> Memory:
    """Return the memory of the pipeline rank that needs most."""
    ranks = [
        memory.rank_memory(spec, cfg, world, pp, skew=assumed.skew) for pp in range(cfg.parallel.pp)
    ]
    return max(ranks, key=lambda rank: rank.total)


@dataclass(frozen=True)
class ServerBytes:
    """Bytes on every GPU of a server."""

    weights: int
    cache: int
    """KV cache of rollout.max_total_tokens."""
    static: int
    """Weights and KV cache, of which SGLang allocates at most --mem-fraction-static."""

    @property
    def total(self) -> int:
        return self.weights + self.cache


def server_bytes(
    spec: ModelSpec, cfg: Config, hardware: Hardware, assumed: Assumptions
) -> ServerBytes:
    """Return the bytes of a server that the run starts."""
    model = DecodeModel(spec, configured_servers(spec, cfg, hardware, assumed), hardware, assumed)
    cache = cfg.rollout.max_total_tokens * model.cache_bytes()
    return ServerBytes(int(model.weight_bytes()), int(cache), int(model.static_bytes()))


def teacher_bytes(teacher: Teacher, cfg: Config, hardware: Hardware, assumed: Assumptions) -> int:
    """Return the bytes of weights and KV cache on every GPU of a teacher that the run serves."""
    assert teacher.path is not None, "a teacher with urls"
    plan = ServerPlan(1, num_devices(teacher))
    model = DecodeModel(find_spec(teacher.path), plan, hardware, assumed)
    return int(model.weight_bytes() + cfg.rollout.max_total_tokens * model.cache_bytes())


def num_devices(teacher: Teacher) -> int:
    """Return the number of GPUs of the server that the run starts of a teacher's checkpoint."""
    return tensor_ranks(teacher.server_args) or max(1, len(teacher.gpus))


def broadcast_bytes(spec: ModelSpec, cfg: Config, assumed: Assumptions) -> int:
    """Return what weight_sync = distributed takes on every GPU of a server: a communicator for each
    source, which is kept, and twice the largest bucket.

    SGLang allocates a bucket's tensors, and once more the bytes end to end that it receives.  A
    tensor that is larger than a bucket, such as the embedding, is a bucket alone.
    """
    bucket = max(
        cfg.rollout.weight_sync_bucket_mb << 20, SERVED * spec.vocab_size * spec.hidden_size
    )
    return int(weight_sources(cfg) * assumed.communicator * GIB) + 2 * bucket


def check_phases(cfg: Config, phases: Sequence[Phase], hardware: Hardware) -> None:
    """Raise ValueError for a phase whose exact part alone does not fit."""
    for phase in phases:
        if phase.exact > hardware.memory:
            trainer, servers, exact = (
                size / GIB for size in (phase.trainer, phase.servers, phase.exact)
            )
            raise ValueError(
                f"{phase.name}: a GPU would hold {trainer:.1f} GiB of the trainer and {servers:.1f}"
                f" GiB of servers, {exact:.1f} GiB of them weights, gradients, optimizer state and"
                f" KV cache, which must be at most the {hardware.memory / GIB:.1f} GiB of"
                f" {hardware.name}: {remedy(cfg, phase)}"
            )


def check_sync(cfg: Config, phases: Sequence[Phase], hardware: Hardware) -> None:
    """Raise ValueError where a weight sync would take more than a server leaves free on its GPUs:
    the server would end in the first one.
    """
    rollout = cfg.rollout
    for phase in phases:
        if phase.name == SYNC and phase.total > hardware.memory:
            static, beside = phase.exact / GIB, (phase.total - phase.exact) / GIB
            raise ValueError(
                f"rollout.weight_sync_sources = {rollout.weight_sync_sources},"
                f" weight_sync_bucket_mb = {rollout.weight_sync_bucket_mb}: a weight sync and"
                f" SGLang itself would take {beside:.1f} GiB on a GPU beside {static:.1f} GiB of"
                f" weights and KV cache, together more than the {hardware.memory / GIB:.1f} GiB of"
                f" {hardware.name} (--assume communicator, released); lower one of them,"
                " --mem-fraction-static in rollout.server_args, or rollout.max_total_tokens"
            )


def remedy(cfg: Config, phase: Phase) -> str:
    """Return the change that makes a phase fit, for a message.

    Where trainer and servers alternate, it is one to the larger of the two.
    """
    alternates = cfg.rollout.release_memory
    if phase.name.startswith(SCORING):
        name = phase.name.removeprefix(SCORING)
        return f"give it more of teachers.{name}.gpus, or lower rollout.max_total_tokens"
    if not phase.servers or (alternates and phase.trainer > phase.servers):
        return (
            "use more ranks, or another layout (megatron-rl plan); for other hardware of the dry"
            " run, --gpu"
        )
    if not phase.trainer or alternates:
        return "give a server more of rollout.gpus, or lower rollout.max_total_tokens"
    return (
        "set rollout.gpus to GPUs without training ranks, rollout.release_memory = true with"
        " weight_sync = colocated, or rollout.urls"
    )
