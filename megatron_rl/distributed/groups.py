"""Process groups and seeds from the configuration.

The groups are torch.distributed's (nccl or gloo) and megatron-core's.  Rank order is
megatron-core's "tp-cp-ep-dp-pp": tensor ranks are neighbours, pipeline ranks are farthest apart.
"""

from __future__ import annotations

import datetime
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megatron_rl.config import ParallelConfig
from megatron_rl.config.device_limits import Device
from megatron_rl.distributed.node_ranks import NodeRanks, firsts_of, node_name
from megatron_rl.models.fit import check_sizes

T = TypeVar("T")
LAZY_GLOO = "TORCH_GLOO_LAZY_INIT"
"""torch's variable, which it reads whenever it makes a gloo group."""


@dataclass(frozen=True)
class Parallel:
    """This rank's place in the job, with all process groups.

    Nothing else reads megatron's globals for groups.  A data-parallel replica is one complete
    model: tp x cp x pp ranks with the same `dp_rank`.  They train on the same sequences
    (`replica_group`), and the one at tp 0, cp 0, pp 0 (`replica_leader`, a global rank) fetches
    them.
    """

    rank: int
    world_size: int
    device: torch.device
    tp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup
    cp_group: dist.ProcessGroup
    ep_group: dist.ProcessGroup
    etp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    """Ranks with equal tp, cp, pp: other data, same part of the model."""
    dp_cp_group: dist.ProcessGroup
    """dp_group and the context-parallel ranks: all that add gradient to the same dense parameters.
    """
    expert_dp_group: dist.ProcessGroup
    """Ranks that have the same experts, or the same shards of them."""
    model_group: dist.ProcessGroup
    """tp x pp: the ranks that compute one context rank's rows together."""
    replica_group: dist.ProcessGroup
    """Ranks of this replica, over gloo as host_group."""
    node: NodeRanks
    """The ranks of this replica by node, which share the memory of its rollouts."""
    host_group: dist.ProcessGroup
    """All ranks, over gloo: a rank that waits there, for minutes while responses are sampled,
    leaves its GPU idle.  NCCL would run a kernel all the time.
    """
    replica_leader: int
    vp_size: int
    owns_process_group: bool

    tp_rank: int = field(init=False)
    tp_size: int = field(init=False)
    pp_rank: int = field(init=False)
    pp_size: int = field(init=False)
    cp_rank: int = field(init=False)
    cp_size: int = field(init=False)
    ep_rank: int = field(init=False)
    ep_size: int = field(init=False)
    etp_rank: int = field(init=False)
    etp_size: int = field(init=False)
    dp_rank: int = field(init=False)
    dp_size: int = field(init=False)

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "cp", "ep", "etp", "dp"):
            group: dist.ProcessGroup = getattr(self, f"{axis}_group")
            object.__setattr__(self, f"{axis}_rank", group.rank())  # the class is frozen
            object.__setattr__(self, f"{axis}_size", group.size())

    @property
    def is_first_stage(self) -> bool:
        """This rank has the embedding."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """This rank computes logits."""
        return self.pp_rank == self.pp_size - 1

    @property
    def is_replica_leader(self) -> bool:
        return self.rank == self.replica_leader

    def store(self) -> dist.Store | None:
        """Return the job's key-value store, with its own connection; None for a world of one."""
        if self.world_size == 1:
            return None
        default = dist.distributed_c10d._get_default_store()
        # not in torch's stub
        return dist.PrefixStore("megatron_rl", default.clone())  # type: ignore[attr-defined]

    def destroy(self) -> None:
        """End every group that make_parallel made.  Collective.

        torch.distributed itself ends where make_parallel started it.  megatron-core only forgets
        its groups: on gloo each would keep three threads, which add up where one process builds
        several layouts.
        """
        if self.owns_process_group:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
            return
        groups = _groups_of(vars(parallel_state).values()) | {self.replica_group, self.host_group}
        groups |= _groups_of([self.node.between])
        parallel_state.destroy_model_parallel()
        # a rank that is still inside a collective would fail with a closed connection
        dist.barrier()
        for group in groups - {dist.group.WORLD}:
            dist.destroy_process_group(group)


def device_of(setting: str) -> Device:
    """Return the device that run.device = `setting` means on this machine."""
    if setting == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return "cuda" if setting == "cuda" else "cpu"


@contextmanager
def lazy_gloo() -> Iterator[None]:
    """Let gloo groups made inside connect two ranks when one first sends to the other.

    Without this each rank connects to all n ranks as a group is made: 2n + 1 requests to the job's
    store instead of 1 (benchmarks/scaling.py).  A value of TORCH_GLOO_LAZY_INIT that is set already
    is kept.  Otherwise the variable is removed afterwards: servers that this process starts would
    inherit it.
    """
    if LAZY_GLOO in os.environ:
        yield
        return
    os.environ[LAZY_GLOO] = "1"
    try:
        yield
    finally:
        del os.environ[LAZY_GLOO]


@lazy_gloo()
def make_parallel(
    cfg: ParallelConfig, *, device: str = "auto", timeout_minutes: float = 30.0, seed: int = 0
) -> Parallel:
    """Start torch.distributed where it is not running, and build all groups.

    Under torchrun it starts from the environment (env://), else as a world of one.  `device` is
    auto, cpu or cuda (nccl, one GPU per local rank).  Seeds every random generator; tensor and
    expert ranks get different seeds.  Raises ValueError, naming key, value and rule, for sizes that
    do not fit the number of ranks.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("run.device = cuda: torch sees no GPU; use auto or cpu")
    use_cuda = device_of(device) == "cuda"
    # torch.distributed of another owner stays after `destroy`
    owns = not dist.is_initialized()
    world_size = int(os.environ.get("WORLD_SIZE", "1")) if owns else dist.get_world_size()
    check_sizes(cfg, world_size)
    if owns:
        _start(use_cuda, timeout_minutes)
    target = torch.device("cuda", torch.cuda.current_device()) if use_cuda else torch.device("cpu")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=cfg.tp,
        pipeline_model_parallel_size=cfg.pp,
        virtual_pipeline_model_parallel_size=cfg.vp if cfg.vp > 1 else None,
        context_parallel_size=cfg.cp,
        expert_model_parallel_size=cfg.ep,
        expert_tensor_parallel_size=cfg.expert_tp,
        # core takes whole minutes
        distributed_timeout_minutes=math.ceil(timeout_minutes),
        # core's are for its own checkpoints, which are not used
        create_gloo_process_groups=False,
    )
    # the same seed on all ranks; core's tracker gives tensor and expert ranks different ones
    random.seed(seed)
    np.random.seed(seed % 2**32)  # numpy takes 32 bits
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    timeout = datetime.timedelta(minutes=timeout_minutes)
    host_group = make_host_group(timeout)
    node, leader = _make_replica_group(cfg, host_group, timeout)
    return Parallel(
        rank=dist.get_rank(),
        world_size=world_size,
        device=target,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        pp_group=parallel_state.get_pipeline_model_parallel_group(),
        cp_group=parallel_state.get_context_parallel_group(),
        ep_group=parallel_state.get_expert_model_parallel_group(),
        etp_group=parallel_state.get_expert_tensor_parallel_group(),
        dp_group=parallel_state.get_data_parallel_group(with_context_parallel=False),
        dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        expert_dp_group=parallel_state.get_expert_data_parallel_group(),
        model_group=parallel_state.get_model_parallel_group(),
        replica_group=node.group,
        host_group=host_group,
        node=node,
        replica_leader=leader,
        vp_size=cfg.vp,
        owns_process_group=owns,
    )


def from_rank_0(make: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Return on every rank what `make` returns on rank 0.  Collective over all ranks of the job.

    The result is small, plain data.  `group` is Parallel.host_group where `make` takes long, such
    as the start of a server; None means the default group.  Rank 0 raises what `make` raises; then
    the other ranks raise RuntimeError with the same message.
    """
    box: list[tuple[T | None, str | None]] = [(None, None)]
    if dist.get_rank() == 0:
        try:
            box = [(make(), None)]
        except Exception as error:
            # the others wait for an answer, whatever failed: send them the reason, then raise it
            dist.broadcast_object_list([(None, str(error))], group=group)
            raise
    dist.broadcast_object_list(box, group=group)
    value, failure = box[0]
    if failure is not None:
        raise RuntimeError(f"rank 0 stopped: {failure}")
    return value  # type: ignore[return-value]  # rank 0's


def _groups_of(values: Iterable[object]) -> set[dist.ProcessGroup]:
    """Return the process groups among `values` and in lists of them."""
    groups: set[dist.ProcessGroup] = set()
    for value in values:
        if isinstance(value, dist.ProcessGroup):
            groups.add(value)
        elif isinstance(value, list | tuple):
            groups |= {item for item in value if isinstance(item, dist.ProcessGroup)}
    return groups


def _start(use_cuda: bool, timeout_minutes: float) -> None:
    timeout = datetime.timedelta(minutes=timeout_minutes)
    backend = "nccl" if use_cuda else "gloo"
    if use_cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(
            backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1
        )


def make_host_group(timeout: datetime.timedelta) -> dist.ProcessGroup:
    """Make the group of all ranks over gloo.  Collective.

    Returns the default group where that is one.
    """
    world = dist.group.WORLD
    if world is not None and dist.get_backend() == "gloo":
        return world
    return dist.new_group(backend="gloo", timeout=timeout)


def _make_replica_group(
    cfg: ParallelConfig, host_group: dist.ProcessGroup, timeout: datetime.timedelta
) -> tuple[NodeRanks, int]:
    """Make the gloo group of all ranks with this rank's data-parallel rank.

    Returns it by node, and its first global rank.  Without cfg.share_host_memory every rank is a
    node of its own.  megatron-core's own model-parallel group leaves context-parallel ranks out.
    Raises RuntimeError where the ranks of a node cannot share memory.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    neighbours = cfg.tp * cfg.cp  # ranks of one stage of a replica, in the order tp-cp-ep-dp-pp
    num_replicas = size // (neighbours * cfg.pp)
    replicas = [other // neighbours % num_replicas for other in range(size)]
    my_replica = parallel_state.get_data_parallel_rank(with_context_parallel=False)
    assert replicas[rank] == my_replica, "megatron-core's order of ranks has changed"
    nodes: list[object] = list(range(size))
    if cfg.share_host_memory:
        dist.all_gather_object(nodes, node_name(), group=host_group)
    # every rank makes the groups of all replicas: new_group is collective over all ranks
    groups: dict[int, tuple[NodeRanks, int]] = {}
    for replica in range(num_replicas):
        ranks = [other for other, its_replica in enumerate(replicas) if its_replica == replica]
        firsts = firsts_of([nodes[other] for other in ranks])
        group = between = dist.new_group(ranks, timeout=timeout, backend="gloo")
        senders = [ranks[first] for first in sorted(set(firsts))]
        if 1 < len(senders) < len(ranks):
            between = dist.new_group(senders, timeout=timeout, backend="gloo")
        is_sender = rank in senders and len(senders) > 1
        groups[replica] = NodeRanks(group, firsts, between if is_sender else None), ranks[0]
    of_rank, leader = groups[my_replica]
    if of_rank.is_shared:
        of_rank.tell()  # a trial, before anything is sampled
    return of_rank, leader
