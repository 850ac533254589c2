"""Keeps sequences where they were sampled, as far as the balance allows it: every one that stays is
not sent.

`deal` chooses pods, `swap_home` replicas within a pod.  Both are functions of the lengths and
owners alone, in integers, so that every rank computes the same.  Shapes: N sequences, P pods, R
replicas.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from megatron_rl.batch.balance import Slot, Work

LONGEST, TOGETHER = 2, 8
"""The longest sequences, LONGEST x the replicas of a pod for each pod, are dealt one by one, all
others TOGETHER at a time: the more at a time, the more stay, and the more the pods differ in
cost."""
PASSES, TRIED = 3, 4
"""Of `swap_home`; and how many of the next shorter and the next longer sequences are tried."""


def deal(work: Work, pod_of_owner: np.ndarray, pods: int, size: int) -> np.ndarray:
    """int64 [N], a pod for each sequence.  pod_of_owner: int64 [N], of the replica that holds it;
    size: replicas of a pod.

    From long to short in rounds, in which every pod gets the same number of sequences of similar
    lengths, its own first.  Of too many own ones, a pod that has cost more than the mean so far
    gives the longest away; those that are given away go from long to short to the pods that have
    cost least.  So all get the same number and mix of lengths.
    """
    rows = np.asarray(work.rows, np.int64)
    costs = rows * (work.balance_length + rows)
    order = alternating(rows, pod_of_owner)
    found = np.empty(len(rows), np.int64)
    spent = np.zeros(pods, np.int64)
    start = 0
    while start < len(order):
        each = 1 if start < LONGEST * size * pods else TOGETHER
        part = order[start : start + each * pods]
        found[part] = deal_round(pod_of_owner[part], costs[part], spent)
        np.add.at(spent, found[part], costs[part])
        start += len(part)
    return found


def alternating(rows: np.ndarray, pod_of_owner: np.ndarray) -> np.ndarray:
    """int64 [N], the sequences from long to short; of equal ones first one of each pod, then a
    second one of each, and so on.
    """
    order = np.lexsort((pod_of_owner, -rows))
    number = np.arange(len(rows))
    sorted_rows, sorted_pods = rows[order], pod_of_owner[order]
    is_first = np.ones(len(rows), bool)
    is_first[1:] = (sorted_rows[1:] != sorted_rows[:-1]) | (sorted_pods[1:] != sorted_pods[:-1])
    turn = number - np.maximum.accumulate(np.where(is_first, number, 0))
    return order[np.lexsort((sorted_pods, turn, -sorted_rows))]


def deal_round(pod_of_owner: np.ndarray, costs: np.ndarray, spent: np.ndarray) -> np.ndarray:
    """The pods of n sequences, from long to short: n // P each, and one more where P does not
    divide n.
    """
    pods = len(spent)
    owned = np.bincount(pod_of_owner, minlength=pods)
    share = np.full(pods, len(pod_of_owner) // pods)
    share[np.lexsort((spent, -owned))[: len(pod_of_owner) % pods]] += 1
    by_pod = np.argsort(pod_of_owner, kind="stable")
    pod = pod_of_owner[by_pod]
    # among the own ones of its pod, from the longest
    place = np.arange(len(pod)) - (np.cumsum(owned) - owned)[pod]
    is_expensive = spent > spent.sum() // pods
    stays = np.where(is_expensive[pod], owned[pod] - 1 - place, place) < share[pod]
    found = np.full(len(pod), -1)
    found[by_pod[stays]] = pod[stays]
    spent = spent.copy()
    np.add.at(spent, pod[stays], costs[by_pod[stays]])
    lacks = share - np.minimum(owned, share)
    cheapest = np.argsort(spent, kind="stable")
    found[found < 0] = np.repeat(cheapest, lacks[cheapest])
    return found


def swap_home(
    slots: Sequence[Slot], owners: Sequence[int], work: Work, replicas: int
) -> list[Slot]:
    """The slots after swaps, each of which brings a sequence to the replica that holds it (owners:
    that, or any other number).

    The other one of a swap is in the wrong place before and after it, or comes home too.  No swap
    makes a micro-batch costlier than the costliest beside it was, or larger than the largest and
    the cap: `lockstep_efficiency` never falls.  Where sequences are padded, only equal ones are
    swapped.
    """
    swaps = Swaps(slots, owners, work, replicas)
    for _ in range(PASSES):
        if not swaps.run():
            break
    parts: list[list[list[int]]] = [[[] for _ in range(replicas)] for _ in slots]
    for i, place in enumerate(swaps.place):
        parts[place // replicas][place % replicas].append(i)
    return parts


class Swaps:
    """place: slot x R + replica of every sequence."""

    def __init__(
        self, slots: Sequence[Slot], owners: Sequence[int], work: Work, replicas: int
    ) -> None:
        self.owners, self.replicas, self.padded = owners, replicas, work.padded
        self.rows = [int(rows) for rows in work.rows]
        self.cost = [rows * (work.balance_length + rows) for rows in self.rows]
        self.place = [0] * len(self.rows)
        parts = [part for slot in slots for part in slot]
        for place, part in enumerate(parts):
            for i in part:
                self.place[i] = place
        self.part_rows = [sum(self.rows[i] for i in part) for part in parts]
        self.part_cost = [sum(self.cost[i] for i in part) for part in parts]
        ends = range(0, len(parts), replicas)
        self.most_rows = [
            min(max(self.part_rows[at : at + replicas]), work.max_rows) for at in ends
        ]
        self.most_cost = [max(self.part_cost[at : at + replicas]) for at in ends]

    def is_away(self, i: int) -> bool:
        return self.owners[i] != self.place[i] % self.replicas

    def run(self) -> int:
        """Swap once over all sequences, from long to short; returns the number of swaps."""
        # of each replica: what others hold, by length
        guests: list[list[int]] = [[] for _ in range(self.replicas)]
        away = sorted(filter(self.is_away, range(len(self.rows))), key=self.length)
        for i in away:
            guests[self.place[i] % self.replicas].append(i)
        count = 0
        for i in reversed(away):
            home, there = self.owners[i], self.place[i] % self.replicas
            if home == there or not 0 <= home < self.replicas:
                continue
            at = bisect_left(guests[home], self.length(i), key=self.length)
            similar = [
                guest
                for guest in guests[home][max(at - TRIED, 0) : at + TRIED]
                if self.fits(i, guest)
            ]
            if not similar:
                continue
            # one that comes home too, else the most similar one
            guest = min(
                similar, key=lambda g: (self.owners[g] != there, abs(self.rows[g] - self.rows[i]))
            )
            self.swap(i, guest)
            guests[home].remove(guest)
            guests[there].remove(i)
            if self.owners[guest] != there:
                insort(guests[there], guest, key=self.length)
            count += 1
        return count

    def length(self, i: int) -> int:
        return self.rows[i]

    def fits(self, i: int, j: int) -> bool:
        if self.padded:
            return self.rows[i] == self.rows[j]
        rows, cost = self.rows[i] - self.rows[j], self.cost[i] - self.cost[j]
        grows = self.place[j] if rows > 0 else self.place[i]
        slot = grows // self.replicas
        return rows == 0 or (
            self.part_rows[grows] + abs(rows) <= self.most_rows[slot]
            and self.part_cost[grows] + abs(cost) <= self.most_cost[slot]
        )

    def swap(self, i: int, j: int) -> None:
        for total, values in ((self.part_rows, self.rows), (self.part_cost, self.cost)):
            more = values[i] - values[j]
            total[self.place[j]] += more
            total[self.place[i]] -= more
        self.place[i], self.place[j] = self.place[j], self.place[i]
