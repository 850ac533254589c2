"""The assignment of sequences to micro-batches and replicas: equal work side by side, and no
micro-batch above the token cap.

With expert parallelism the all-to-all of every layer spans data-parallel replicas, so replicas run
in lockstep, one micro-batch at a time: an unequal count would hang the job, and in a slot (the
micro-batches that run side by side) all wait for the slowest.  Responses to one prompt have similar
lengths, so the work of replicas differs, and sequences are redistributed over all replicas.  The
plan is a pure function of the lengths, in integers, so that every rank computes the same.  Plans
for many replicas are in assignment.py.
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
"""A slot is filled to SLACK x the mean cost of the micro-batches left: a smaller value takes more
slots, a larger one makes the first slots uneven.
"""


@dataclass(frozen=True)
class Work:
    """The sequences to assign.  The cost of a sequence is rows x (balance_length + rows)."""

    rows: Sequence[int] | np.ndarray
    """The number of rows of every sequence."""
    max_rows: int
    """The cap on the rows of a micro-batch."""
    balance_length: int
    """The number of rows at which a sequence's attention costs as much as everything else."""
    padded: bool = False
    """Every sequence of a micro-batch has the rows of its longest."""

    def cost(self, sequences: Sequence[int]) -> int:
        """Return the cost of a micro-batch of these sequences."""
        rows = [self.rows[i] for i in sequences]
        rows = [max(rows)] * len(rows) if self.padded else rows
        return sum(n * (self.balance_length + n) for n in rows)


def plan_slots(
    work: Work, replicas: int, *, count_multiple: int = 1, at_least: int = 1
) -> list[Slot]:
    """Assign all sequences to slots of one micro-batch per replica, the costliest slot first.

    The number of slots is the smallest multiple of `count_multiple` that the cap and `at_least`
    allow.  No micro-batch is empty, and one above the cap has a single sequence.  Raises ValueError
    where there are too few sequences.
    """
    # no micro-batch may be empty
    most = len(work.rows) // replicas // count_multiple * count_multiple
    if most == 0:
        raise ValueError(
            f"cannot make {count_multiple * replicas} non-empty micro-batches from {len(work.rows)}"
            f" sequences: {count_multiple} for each of {replicas} data-parallel replicas; use fewer"
            " replicas, or more prompts or a larger group per mini-batch"
        )
    # a sequence above the cap takes one micro-batch, like one at the cap
    least_rows = sum(min(rows, work.max_rows) for rows in work.rows)
    # no two sequences above half of the cap fit into one micro-batch
    num_long = sum(2 * rows > work.max_rows for rows in work.rows)
    fewest = max(-(-least_rows // (work.max_rows * replicas)), -(-num_long // replicas), at_least)
    fewest = -(-fewest // count_multiple) * count_multiple
    # `fewest` may exceed `most`: then only `most` is tried, the largest number that leaves none
    # empty
    for count in range(min(fewest, most), most + 1, count_multiple):
        plan = plan_padded if work.padded else plan_packed
        slots = plan(work, count, replicas)
        if slots is not None:
            return sorted(slots, key=lambda slot: -max(work.cost(part) for part in slot))
    raise ValueError(
        f"{len(work.rows)} sequences do not fit into {most} micro-batches of {work.max_rows} rows"
        f" on each of {replicas} data-parallel replicas, and more would leave one empty; raise"
        " run.max_tokens_per_micro_batch"
    )


def plan_packed(work: Work, count: int, replicas: int) -> list[Slot] | None:
    """Return `count` slots, or None where they have no room for all sequences.

    A slot is filled with the longest sequences left, up to the cost of the longest one or to its
    share of the cost left.
    """
    costs = [work.cost([i]) for i in range(len(work.rows))]
    left = sorted(range(len(work.rows)), key=lambda i: -work.rows[i])
    slots, cost_left = [], sum(costs)
    for slots_left in range(count, 0, -1):
        share = SLACK * cost_left / (slots_left * replicas)
        # the last slot takes everything that is left
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
    """Return (a slot, the sequences left).  Every replica gets one of the longest sequences; the
    others go, from long to short, to the replica that has cost least so far.

    A sequence is left where it would exceed `limit` (cost) or the cap there; so are at least `keep`
    sequences, so that later slots are not empty.
    """
    slot = [[i] for i in descending[:replicas]]
    rows = [work.rows[i] for i in descending[:replicas]]
    cheapest = [(costs[i], number) for number, i in enumerate(descending[:replicas])]
    heapq.heapify(cheapest)  # a linear search for the cheapest would cost sequences x replicas
    shortest = descending[-1]
    left: list[int] = []
    may_take = len(descending) - replicas - keep
    for at in range(replicas, len(descending)):
        # a replica without room for the shortest sequence gets no more
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
    """Return True where a sequence would exceed the cap or the limit on the cost."""
    return rows + more_rows > work.max_rows or cost + more_cost > limit


def plan_padded(work: Work, count: int, replicas: int) -> list[Slot] | None:
    """Return `count` slots of sequences of similar length, or None where they have no room for all
    sequences.  Similar lengths need few pads, and give micro-batches of one slot one shape.

    A slot is a run of the sequences in descending order, assigned to the replicas one by one.  The
    shortest sequences, the remainder of a division by `replicas`, go to a slot with room for one
    more on every replica.
    """
    order = sorted(range(len(work.rows)), key=lambda i: -work.rows[i])
    whole = len(order) // replicas * replicas
    # the longest of every `replicas` neighbours
    sizes = [work.rows[i] for i in order[:whole:replicas]]
    if len(cuts(sizes, work.max_rows)) > count:
        return None
    # the lowest cap that `count` runs can keep gives the most even runs
    # bisect needs an ascending key: a larger cap makes fewer runs, hence the minus signs
    lowest_cap = bisect_left(range(work.max_rows), -count, key=lambda cap: -len(cuts(sizes, cap)))
    runs = [range(a, b) for a, b in pairwise([*cuts(sizes, lowest_cap), len(sizes)])]
    while len(runs) < count:  # halve the run with most rows until there are `count`
        costliest = max(
            (run for run in runs if len(run) > 1), key=lambda run: len(run) * sizes[run.start]
        )
        at = runs.index(costliest)
        half = len(costliest) // 2
        runs[at : at + 1] = [costliest[:half], costliest[half:]]
    remaining = order[whole:]
    slots = []
    # from the shortest: the first slot with room takes the remainder, the shortest of all
    for run in reversed(runs):
        sequences = order[run.start * replicas : run.stop * replicas]
        if (len(run) + 1) * sizes[run.start] <= work.max_rows:
            sequences, remaining = sequences + remaining, []
        slots.append([sequences[replica::replicas] for replica in range(replicas)])
    return None if remaining else slots


def cuts(descending: Sequence[int], cap: int) -> list[int]:
    """Return the starts of runs of `descending`, of which every one is as long as its first length
    x its size is at most `cap`.
    """
    starts, at = [], 0
    while at < len(descending):
        starts.append(at)
        at += max(1, cap // descending[at])
    return starts


def assign(
    slots: Sequence[Slot], owners: Sequence[int], rows: Sequence[int] | np.ndarray, replicas: int
) -> list[Slot]:
    """Return the slots with micro-batch r for replica r.  A micro-batch goes to the replica that
    has most of its rows, so that few are sent.

    owners: the replica that has each sequence; any other number for none.  The sequences of a
    micro-batch are returned in ascending order.
    """
    return [assign_slot(slot, owners, rows, replicas) for slot in slots]


def assign_slot(
    slot: Slot, owners: Sequence[int], rows: Sequence[int] | np.ndarray, replicas: int
) -> Slot:
    # replica -> its part.  The first parts, which cost most, choose first.
    assigned: dict[int, list[int]] = {}
    unassigned = []
    for part in slot:
        owned_rows: dict[int, int] = {}  # of the part, by free replica
        for i in part:
            if 0 <= owners[i] < replicas and owners[i] not in assigned:
                owned_rows[owners[i]] = owned_rows.get(owners[i], 0) + rows[i]
        if owned_rows:
            assigned[max(owned_rows, key=lambda replica: owned_rows[replica])] = part
        else:
            unassigned.append(part)
    return [
        sorted(assigned[replica] if replica in assigned else unassigned.pop())
        for replica in range(replicas)
    ]
