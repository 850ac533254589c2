"""Which replica computes which sequences, micro-batch by micro-batch: equal work side by side, none
above the token cap.

With expert parallelism the all-to-all of every layer spans data-parallel replicas, so replicas run
in lockstep, one micro-batch at a time: an unequal count would hang the job, and in a slot (the
micro-batches that run side by side) all wait for the slowest.  Responses to one prompt have similar
lengths, so the replicas' work differs: sequences are redistributed over all replicas.  The plan is
a pure function of the lengths, in integers: every rank computes it (many replicas: assignment.py).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

Slot = list[list[int]]
"""The sequences of the micro-batches that run side by side, one micro-batch per replica."""

SLACK = 1.3
"""A slot is filled to this x the mean of what is left: less takes more slots, more makes the first
ones uneven.
"""


@dataclass(frozen=True)
class Work:
    """Rows of every sequence, the cap on the rows of a micro-batch, and what a sequence costs: rows
    x (balance_length + rows).

    balance_length: the number of rows at which a sequence's attention costs as much as everything
    else.
    padded: every sequence of a micro-batch counts the rows of its longest.
    """

    rows: Sequence[int] | np.ndarray
    max_rows: int
    balance_length: int
    padded: bool = False

    def cost(self, sequences: Sequence[int]) -> int:
        """What a micro-batch of these sequences costs."""
        rows = [self.rows[i] for i in sequences]
        rows = [max(rows)] * len(rows) if self.padded else rows
        return sum(n * (self.balance_length + n) for n in rows)


def plan_slots(
    work: Work, replicas: int, *, count_multiple: int = 1, at_least: int = 1
) -> list[Slot]:
    """Assign all sequences to slots of one micro-batch per replica, costliest first; as few as the
    cap and `at_least` allow.

    No micro-batch is empty; one above the cap holds a single sequence; the number of slots is a
    multiple of `count_multiple`. Raises ValueError where there are too few sequences for that.
    """
    most = len(work.rows) // replicas // count_multiple * count_multiple
    if most == 0:
        raise ValueError(
            f"cannot make {count_multiple * replicas} non-empty micro-batches from {len(work.rows)}"
            f" sequences: {count_multiple} for each of {replicas} data-parallel replicas"
        )
    # a sequence above the cap takes one micro-batch, like one at the cap
    least_rows = sum(min(rows, work.max_rows) for rows in work.rows)
    fewest = max(-(-least_rows // (work.max_rows * replicas)), at_least)
    fewest = -(-fewest // count_multiple) * count_multiple
    for count in range(min(fewest, most), most + 1, count_multiple):
        slots = (
            plan_padded(work, count, replicas)
            if work.padded
            else plan_packed(work, count, replicas)
        )
        if slots is not None:
            return sorted(slots, key=lambda slot: -max(work.cost(part) for part in slot))
    raise ValueError(
        f"{len(work.rows)} sequences do not fit into {most} micro-batches of {work.max_rows} rows"
        f" on each of {replicas} data-parallel replicas, and more would leave one empty; raise"
        " run.max_tokens_per_micro_batch"
    )


def plan_packed(work: Work, count: int, replicas: int) -> list[Slot] | None:
    """`count` slots, each filled from the longest sequences left, up to the cost of the longest or
    its share; None: no room.
    """
    costs = [work.cost([i]) for i in range(len(work.rows))]
    left = sorted(range(len(work.rows)), key=lambda i: -work.rows[i])
    slots, cost_left = [], sum(costs)
    for slots_left in range(count, 0, -1):
        share = SLACK * cost_left / (slots_left * replicas)
        limit = max(costs[left[0]], share) if slots_left > 1 else cost_left
        slot, left = fill_slot(work, costs, left, replicas, limit, keep=(slots_left - 1) * replicas)
        slots.append(slot)
        cost_left -= sum(costs[i] for part in slot for i in part)
    return None if left else slots


def fill_slot(
    work: Work,
    costs: Sequence[int],
    descending: Sequence[int],
    replicas: int,
    limit: float,
    *,
    keep: int,
) -> tuple[Slot, list[int]]:
    """(a slot, the rest): the longest sequence to each replica, then from long to short to the
    cheapest one so far.

    A sequence that would exceed `limit` (cost) or the cap there is left, and so are the shortest
    `keep` sequences.
    """
    slot = [[i] for i in descending[:replicas]]
    rows = [work.rows[i] for i in descending[:replicas]]
    cheapest = [(costs[i], number) for number, i in enumerate(descending[:replicas])]
    heapq.heapify(cheapest)  # a linear search for the cheapest would cost sequences x replicas
    shortest = descending[-1]
    left: list[int] = []
    may_take = len(descending) - replicas - keep
    for at in range(replicas, len(descending)):
        while cheapest and no_room(
            work, rows[cheapest[0][1]], cheapest[0][0], work.rows[shortest], costs[shortest], limit
        ):
            heapq.heappop(cheapest)
        if not cheapest or not may_take:
            return slot, [*left, *descending[at:]]
        i, (cost, number) = descending[at], cheapest[0]
        if no_room(work, rows[number], cost, work.rows[i], costs[i], limit):
            left.append(i)
            continue
        slot[number].append(i)
        rows[number] += work.rows[i]
        heapq.heapreplace(cheapest, (cost + costs[i], number))
        may_take -= 1
    return slot, left


def no_room(work: Work, rows: int, cost: int, more_rows: int, more_cost: int, limit: float) -> bool:
    return rows + more_rows > work.max_rows or cost + more_cost > limit


def plan_padded(work: Work, count: int, replicas: int) -> list[Slot] | None:
    """`count` slots of sequences of similar length: few pads, and one shape side by side; None: no
    room.

    A slot is a run of the sequences in descending order, assigned to the replicas one by one.  The
    shortest sequences, which `replicas` does not divide, go into a slot with room for one more.
    """
    order = sorted(range(len(work.rows)), key=lambda i: -work.rows[i])
    whole = len(order) // replicas * replicas
    # the longest of each `replicas` neighbours
    sizes = [work.rows[i] for i in order[:whole:replicas]]
    if len(cuts(sizes, work.max_rows)) > count:
        return None
    lowest_cap = bisect_left(range(work.max_rows), -count, key=lambda cap: -len(cuts(sizes, cap)))
    runs = [range(a, b) for a, b in pairwise([*cuts(sizes, lowest_cap), len(sizes)])]
    while len(runs) < count:
        costliest = max(
            (run for run in runs if len(run) > 1), key=lambda run: len(run) * sizes[run.start]
        )
        at = runs.index(costliest)
        half = len(costliest) // 2
        runs[at : at + 1] = [costliest[:half], costliest[half:]]
    rest = order[whole:]
    slots = []
    for run in reversed(runs):
        dealt = order[run.start * replicas : run.stop * replicas]
        if (len(run) + 1) * sizes[run.start] <= work.max_rows:
            dealt, rest = dealt + rest, []
        slots.append([dealt[replica::replicas] for replica in range(replicas)])
    return None if rest else slots


def cuts(descending: Sequence[int], cap: int) -> list[int]:
    """Where the runs of `descending` start; each is filled while its first length x its size stays
    under the cap.
    """
    starts, at = [], 0
    while at < len(descending):
        starts.append(at)
        at += max(1, cap // descending[at])
    return starts


def assign(
    slots: Sequence[Slot], owners: Sequence[int], rows: Sequence[int] | np.ndarray, replicas: int
) -> list[Slot]:
    """The slots with micro-batch r for replica r: each goes to the replica that holds most of its
    rows, so that few are sent.

    owners: the replica that holds each sequence, or any other number.  Sequences of a micro-batch
    are in ascending order.
    """
    return [assign_slot(slot, owners, rows, replicas) for slot in slots]


def assign_slot(
    slot: Slot, owners: Sequence[int], rows: Sequence[int] | np.ndarray, replicas: int
) -> Slot:
    given: dict[int, list[int]] = {}  # the first parts, which cost most, choose first
    unassigned = []
    for part in slot:
        held: dict[int, int] = {}
        for i in part:
            if 0 <= owners[i] < replicas and owners[i] not in given:
                held[owners[i]] = held.get(owners[i], 0) + rows[i]
        if held:
            given[max(held, key=lambda replica: held[replica])] = part
        else:
            unassigned.append(part)
    return [
        sorted(given[replica] if replica in given else unassigned.pop())
        for replica in range(replicas)
    ]
