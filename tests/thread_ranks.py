"""Ranks as threads of this process, over real gloo: for collective code whose process group is an
argument.

Quick (some 20 ms for a few ranks).  torch has one default group for all threads, so dist.get_rank
and sums over the world are patched meanwhile to use the thread's own group.
"""

import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_rl.distributed.node_ranks import NodeRanks


def run_thread_ranks(fn: Callable[[dist.ProcessGroup, int], Any], world_size: int) -> list[Any]:
    """Call fn(group, rank) on every rank, and return the results in rank order.

    The first error of a rank is raised.
    """
    store, results, errors = dist.HashStore(), [None] * world_size, []
    own, all_reduce = threading.local(), dist.all_reduce

    def sum_over(
        tensor: torch.Tensor, *args: Any, group: dist.ProcessGroup | None = None, **options: Any
    ) -> Any:
        return all_reduce(tensor, *args, group=own.group if group is None else group, **options)

    def run(rank: int) -> None:
        own.group = group = gloo_group(store, rank, world_size)
        try:
            results[rank] = fn(group, rank)
        except BaseException as error:
            errors.append(error)
        finally:
            del distributed_c10d._world.pg_map[group], distributed_c10d._world.pg_group_ranks[group]

    threads = [
        threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)
    ]
    with (
        patch.object(dist, "all_reduce", sum_over),
        patch.object(dist, "get_rank", lambda: own.group.rank()),
    ):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20 if not errors else 1)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "ranks wait for each other"
    return results


def node_ranks(group: dist.ProcessGroup, firsts: tuple[int, ...]) -> NodeRanks:
    """Return the ranks of a replica, `group`, on nodes whose first ranks are `firsts`."""
    places = sorted(set(firsts))
    is_between = group.rank() in places and len(places) > 1
    return NodeRanks(group, firsts, subgroup(group, places, "between") if is_between else None)


def subgroup(group: dist.ProcessGroup, ranks: list[int], name: str) -> dist.ProcessGroup:
    """Return the group of these ranks of `group`; only they call it."""
    _, store = distributed_c10d._world.pg_map[group]
    return gloo_group(dist.PrefixStore(name, store), ranks.index(group.rank()), len(ranks))


def gloo_group(store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
    """A gloo group as torch makes it, without a default group."""
    group = dist.ProcessGroup(store, rank, world_size)
    backend = dist.ProcessGroupGloo(dist.PrefixStore("threads", store), rank, world_size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    distributed_c10d._world.pg_map[group] = ("gloo", store)
    distributed_c10d._world.pg_group_ranks[group] = {other: other for other in range(world_size)}
    return group
