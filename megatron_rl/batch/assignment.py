"""The plan of a mini-batch over all data-parallel replicas, at a cost per rank that does not grow
with their number.

Planning takes little time for some tens of replicas (balance.py).  More replicas are divided into
pods of neighbours.  Sequences are assigned to pods so that every pod gets the same mix of lengths
(locality.py), every pod makes its plan, all with the same number of slots, and the pods exchange
their plans.  A rank computes the plan of its pod, as all ranks of the pod do.
Shapes: N sequences of the whole job, in the order of their owners; R replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch.distributed as dist

from megatron_rl.batch.balance import Slot, Work, assign, plan_slots
from megatron_rl.batch.locality import assign_pods, swap_to_owners

POD, LEAST_POD = 32, 8
"""The largest, and the smallest, number of replicas of a pod."""
IMPOSSIBLE = 1 << 40
"""The number of slots of a pod that has no plan: larger than every real number."""

AllReduce = Callable[[np.ndarray, dist.ReduceOp.RedOpType], np.ndarray]
"""A reduction of integers over all replicas, with the same result on every one."""


@dataclass(frozen=True)
class Plan:
    """The slot and the replica of every sequence of a mini-batch."""

    places: np.ndarray
    """int64 [N]: slot x R + replica."""
    num_slots: int
    replicas: int

    def destinations(self, sequences: slice) -> list[int]:
        """Return the replicas that compute these sequences."""
        return (self.places[sequences] % self.replicas).tolist()

    def micro_batches(self, replica: int) -> list[list[int]]:
        """Return the sequences of a replica, slot by slot, in ascending order in every slot."""
        sequences = np.flatnonzero(self.places % self.replicas == replica)
        slots = self.places[sequences] // self.replicas
        return [sequences[slots == slot].tolist() for slot in range(self.num_slots)]

    def side_by_side(self, slot: int) -> list[list[int]]:
        """Return the sequences in one slot, replica by replica."""
        sequences = np.flatnonzero(self.places // self.replicas == slot)
        replica_of = self.places[sequences] % self.replicas
        order = np.argsort(replica_of, kind="stable")
        ends = np.cumsum(np.bincount(replica_of, minlength=self.replicas))
        return [part.tolist() for part in np.split(sequences[order], ends[:-1])]

    def lockstep_efficiency(self, work: Work) -> float:
        """Return work / (R x sum over slots of the costliest micro-batch); 1 means that no replica
        waits for another.
        """
        rows, size = np.asarray(work.rows, np.int64), self.num_slots * self.replicas
        if work.padded:  # every sequence has the rows of the longest in its micro-batch
            longest = np.zeros(size, np.int64)
            np.maximum.at(longest, self.places, rows)
            rows = longest[self.places]
        costs = np.bincount(self.places, rows * (work.balance_length + rows).astype(float), size)
        return float(costs.sum() / (self.replicas * costs.reshape(-1, self.replicas).max(1).sum()))


def plan_of(slots: Sequence[Slot]) -> Plan:
    """Return the plan of these slots, in which micro-batch r is that of replica r."""
    replicas = len(slots[0])
    parts = [part for slot in slots for part in slot]
    places = np.empty(sum(map(len, parts)), np.int64)
    for place, part in enumerate(parts):
        places[part] = place
    return Plan(places, len(slots), replicas)


def make_plan(
    work: Work,
    owners: np.ndarray,
    replicas: int,
    replica: int,
    all_reduce: AllReduce,
    *,
    count_multiple: int = 1,
    equal_sizes: bool = False,
) -> Plan:
    """Return the plan of the entire job, the same on every rank.

    owners: int [N], the replica that has each sequence.
    replica: the one of this rank.
    equal_sizes: micro-batches of a slot are padded to the rows of the largest.  Where sequences are
    padded too, all replicas are one pod, because padding to the longest sequence of another pod
    might exceed the cap.

    A rank does only a few array operations over all N sequences, and plans those of its pod.
    Collective through `all_reduce` where there are several pods.  Raises ValueError, on every rank,
    where no plan exists.
    """
    size = replicas if work.padded and equal_sizes else pod_size(replicas)
    # the replicas of this pod are `first` to first + size - 1
    pods, first = replicas // size, replica // size * size
    if pods > 1:
        rows = np.asarray(work.rows, np.int64)
        pod_of = assign_pods(work, owners // size, pods, size)
        members = np.flatnonzero(pod_of == replica // size)
        pod_work = replace(work, rows=rows[members].tolist())
        slots = plan_alike(pod_work, size, all_reduce, count_multiple)
        if slots is not None:
            near = assign_near_owners(slots, (owners[members] - first).tolist(), pod_work, size)
            pod_plan = plan_of(near)
            places = np.zeros(len(work.rows), np.int64)
            if replica == first:  # one replica contributes the plan of its pod to the sum
                places[members] = (
                    pod_plan.places // size * replicas + first + pod_plan.places % size
                )
            return Plan(all_reduce(places, dist.ReduceOp.SUM), pod_plan.num_slots, replicas)
    # one pod; also where a pod has no plan, since all sequences together may have one
    together = replace(work, rows=list(map(int, work.rows)))
    slots = plan_slots(together, replicas, count_multiple=count_multiple)
    return plan_of(assign_near_owners(slots, owners.tolist(), together, replicas))


def assign_near_owners(
    slots: Sequence[Slot], owners: Sequence[int], work: Work, replicas: int
) -> list[Slot]:
    """Return the slots with micro-batch r for replica r, with as many sequences at their owners as
    the balance allows.
    """
    return swap_to_owners(assign(slots, owners, work.rows, replicas), owners, work, replicas)


def pod_size(replicas: int) -> int:
    """Return the largest divisor of `replicas` up to POD where it is at least LEAST_POD; else
    `replicas`, which is one pod.
    """
    size = max(size for size in range(1, POD + 1) if replicas % size == 0)
    return size if size >= LEAST_POD else replicas


def plan_alike(
    work: Work, replicas: int, all_reduce: AllReduce, count_multiple: int
) -> list[Slot] | None:
    """Return this pod's plan, with the number of slots of the pod that needs most; None, on every
    rank, where a pod has no plan.
    """
    count, fewest = 1, 0
    slots: list[Slot] = []
    while fewest < count:  # a pod that needs more slots makes all others plan again
        try:
            slots = plan_slots(work, replicas, count_multiple=count_multiple, at_least=count)
        except ValueError:
            slots = []
        num_slots = len(slots) if len(slots) >= count else IMPOSSIBLE
        # the maximum of -x is -minimum of x: one reduction gives both
        most, least = all_reduce(np.array([num_slots, -num_slots]), dist.ReduceOp.MAX)
        count, fewest = int(most), -int(least)
    return None if count == IMPOSSIBLE else slots
