"""The plan of a mini-batch over all data-parallel replicas, at a cost per rank that does not grow
with their number.

Planning takes little time for some tens of replicas (balance.py).  More are divided into pods of
neighbours: sequences are assigned to the pods so that each gets the same mix of lengths
(stay_home.py); every pod makes its own plan, all with the same number of slots; then the pods
exchange their plans.  Each rank computes the plan of its own pod, as all ranks of the pod do.
Shapes: N sequences of the whole job, in the order of their owners; R replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch.distributed as dist

from megatron_rl.batch.balance import Slot, Work, assign, plan_slots
from megatron_rl.batch.stay_home import deal, swap_home

POD, LEAST_POD = 32, 8
IMPOSSIBLE = 1 << 40  # number of slots of a pod that has no plan

AllReduce = Callable[[np.ndarray, dist.ReduceOp.RedOpType], np.ndarray]
"""Reduces integers over all replicas; the result is the same on each."""


@dataclass(frozen=True)
class Plan:
    """places: int64 [N], slot x R + replica of every sequence."""

    places: np.ndarray
    num_slots: int
    replicas: int

    def destinations(self, sequences: slice) -> list[int]:
        """The replicas that compute these."""
        return (self.places[sequences] % self.replicas).tolist()

    def micro_batches(self, replica: int) -> list[list[int]]:
        """A replica's sequences, slot by slot; ascending in each."""
        own = np.flatnonzero(self.places % self.replicas == replica)
        slots = self.places[own] // self.replicas
        return [own[slots == slot].tolist() for slot in range(self.num_slots)]

    def side_by_side(self, slot: int) -> list[list[int]]:
        """The sequences of every replica in one slot."""
        inside = np.flatnonzero(self.places // self.replicas == slot)
        of = self.places[inside] % self.replicas
        order = np.argsort(of, kind="stable")
        return [
            part.tolist()
            for part in np.split(
                inside[order], np.cumsum(np.bincount(of, minlength=self.replicas))[:-1]
            )
        ]

    def lockstep_efficiency(self, work: Work) -> float:
        """Work / (R x sum over slots of the costliest micro-batch): 1 = no replica ever waits for
        another.
        """
        rows, size = np.asarray(work.rows, np.int64), self.num_slots * self.replicas
        if work.padded:
            longest = np.zeros(size, np.int64)
            np.maximum.at(longest, self.places, rows)
            rows = longest[self.places]
        costs = np.bincount(self.places, rows * (work.balance_length + rows).astype(float), size)
        return float(costs.sum() / (self.replicas * costs.reshape(-1, self.replicas).max(1).sum()))


def plan_of(slots: Sequence[Slot]) -> Plan:
    """The plan of these slots, whose r-th micro-batch is replica r's."""
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
    own: int,
    all_reduce: AllReduce,
    *,
    count_multiple: int = 1,
    equal_sizes: bool = False,
) -> Plan:
    """The plan of the entire job, the same on every rank; owners: [N], the replica that holds each
    sequence; own: this rank's.

    equal_sizes: micro-batches side by side are padded to the rows of the largest.  Where sequences
    are padded too, all replicas are one pod: padding to the longest sequence of another pod might
    exceed the cap. Over all N sequences a rank does a few array operations only; the rest is for
    the sequences of its pod.

    Collective through `all_reduce` where there are several pods.  Raises ValueError, on every rank,
    where no plan exists.
    """
    size = replicas if work.padded and equal_sizes else pod_size(replicas)
    # this pod is of the replicas `first` to first + size
    pods, first = replicas // size, own // size * size
    if pods > 1:
        rows = np.asarray(work.rows, np.int64)
        members = np.flatnonzero(deal(work, owners // size, pods, size) == own // size)
        inside = replace(work, rows=rows[members].tolist())
        slots = plan_alike(inside, size, all_reduce, count_multiple)
        if slots is not None:
            dealt = plan_of(stay(slots, (owners[members] - first).tolist(), inside, size))
            places = np.zeros(len(work.rows), np.int64)
            if own == first:  # one replica contributes the plan of its pod to the sum
                places[members] = dealt.places // size * replicas + first + dealt.places % size
            return Plan(all_reduce(places, dist.ReduceOp.SUM), dealt.num_slots, replicas)
    together = replace(work, rows=list(map(int, work.rows)))
    slots = plan_slots(together, replicas, count_multiple=count_multiple)
    return plan_of(stay(slots, owners.tolist(), together, replicas))


def stay(slots: Sequence[Slot], owners: Sequence[int], work: Work, replicas: int) -> list[Slot]:
    """The slots with micro-batch r for replica r, where as much as the balance allows stays with
    its owner.
    """
    return swap_home(assign(slots, owners, work.rows, replicas), owners, work, replicas)


def pod_size(replicas: int) -> int:
    """The largest divisor of `replicas` up to POD, where that is LEAST_POD or more; else all of
    them are one pod.
    """
    size = max(size for size in range(1, POD + 1) if replicas % size == 0)
    return size if size >= min(LEAST_POD, POD) else replicas


def plan_alike(
    work: Work, replicas: int, all_reduce: AllReduce, count_multiple: int
) -> list[Slot] | None:
    """This pod's plan with the number of slots of the pod that needs most; None, on every rank,
    where a pod has no plan.
    """
    count, fewest = 1, 0
    slots: list[Slot] = []
    while fewest < count:  # a pod that needs more slots makes all others plan again
        try:
            slots = plan_slots(work, replicas, count_multiple=count_multiple, at_least=count)
        except ValueError:
            slots = []
        own = len(slots) if len(slots) >= count else IMPOSSIBLE
        count, fewest = (
            int(sign * most)
            for sign, most in zip(
                (1, -1), all_reduce(np.array([own, -own]), dist.ReduceOp.MAX), strict=True
            )
        )
    return None if count == IMPOSSIBLE else slots
