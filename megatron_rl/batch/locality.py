"""Locality of sequences: computing them on the replica that sampled them, as far as the balance of
work allows, because such a sequence is not sent.

The owner of a sequence is the replica that sampled it; a pod is a group of neighbouring replicas
(assignment.py).  `assign_pods` chooses a pod for every sequence, `swap_to_owners` changes replicas
within a pod.  Both depend only on lengths and owners, in integers, so that every rank computes the
same.
Shapes: N sequences, P pods, R replicas.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from megatron_rl.batch.balance import Slot, Work

LONGEST, TOGETHER = 2, 8
"""The sizes of rounds: a pod gets one sequence in a round until LONGEST x R sequences are assigned,
then TOGETHER.  Larger rounds keep more sequences with their owners, and make the costs of the pods
differ more."""
PASSES = 3
"""The largest number of passes of swaps over all sequences."""
CANDIDATES = 4
"""The number of next shorter, and of next longer, sequences that a swap is tried with."""


def assign_pods(work: Work, pod_of_owner: np.ndarray, pods: int, size: int) -> np.ndarray:
    """Return int64 [N], a pod for every sequence, so that all pods get the same number and mix of
    lengths.

    pod_of_owner: int64 [N], the pod of the sequence's owner; size: the replicas of a pod.

    Sequences are assigned from long to short in rounds, in which every pod gets the same number of
    sequences of similar lengths.  A pod keeps sequences that it owns.  Where it owns too many, it
    gives up the shortest ones, or the longest where it has cost more than the mean so far.  The
    sequences given up go, from long to short, to the pods that have cost least.
    """
    rows = np.asarray(work.rows, np.int64)
    costs = rows * (work.balance_length + rows)
    order = alternating(rows, pod_of_owner)
    pod_of = np.empty(len(rows), np.int64)
    spent = np.zeros(pods, np.int64)  # the cost of the sequences that a pod has so far
    start = 0
    while start < len(order):
        per_pod = 1 if start < LONGEST * size * pods else TOGETHER
        part = order[start : start + per_pod * pods]
        pod_of[part] = assign_round(pod_of_owner[part], costs[part], spent)
        np.add.at(spent, pod_of[part], costs[part])
        start += len(part)
    return pod_of


def alternating(rows: np.ndarray, pod_of_owner: np.ndarray) -> np.ndarray:
    """Return int64 [N], the sequences from long to short; equal lengths alternate between the pods
    of their owners.
    """
    order = np.lexsort((pod_of_owner, -rows))
    number = np.arange(len(rows))
    sorted_rows, sorted_pods = rows[order], pod_of_owner[order]
    is_first = np.ones(len(rows), bool)
    is_first[1:] = (sorted_rows[1:] != sorted_rows[:-1]) | (sorted_pods[1:] != sorted_pods[:-1])
    # its number among the sequences of its length and pod
    turn = number - np.maximum.accumulate(np.where(is_first, number, 0))
    return order[np.lexsort((sorted_pods, turn, -sorted_rows))]


def assign_round(pod_of_owner: np.ndarray, costs: np.ndarray, spent: np.ndarray) -> np.ndarray:
    """Return the pods of n sequences, which come from long to short: a pod gets n // P of them, and
    n % P pods get one more.
    """
    pods = len(spent)
    owned = np.bincount(pod_of_owner, minlength=pods)
    share = np.full(pods, len(pod_of_owner) // pods)
    # the remainder goes to pods that own most, of these to those that have cost least
    share[np.lexsort((spent, -owned))[: len(pod_of_owner) % pods]] += 1
    by_pod = np.argsort(pod_of_owner, kind="stable")
    pod = pod_of_owner[by_pod]
    # the place among the sequences of its owner's pod, from the longest
    place = np.arange(len(pod)) - (np.cumsum(owned) - owned)[pod]
    # a pod keeps its share: its longest sequences, or its shortest where it has cost more than the
    # mean so far
    is_expensive = spent > spent.sum() // pods
    stays = np.where(is_expensive[pod], owned[pod] - 1 - place, place) < share[pod]
    pod_of = np.full(len(pod), -1)
    pod_of[by_pod[stays]] = pod[stays]
    # the longest of the others go to the pods that have cost least, with the sequences they keep
    # a copy: the caller adds the costs of the round itself
    spent = spent.copy()
    np.add.at(spent, pod[stays], costs[by_pod[stays]])
    lacking = share - np.minimum(owned, share)
    cheapest = np.argsort(spent, kind="stable")
    pod_of[pod_of < 0] = np.repeat(cheapest, lacking[cheapest])
    return pod_of


def swap_to_owners(
    slots: Sequence[Slot], owners: Sequence[int], work: Work, replicas: int
) -> list[Slot]:
    """Return the slots after swaps, every one of which brings a sequence to its owner.

    The other sequence of a swap is away from its owner before and after it, or is brought to its
    owner too.  A swap makes no micro-batch costlier than the costliest of its slot was, and none
    larger than the largest of its slot and the cap, so `lockstep_efficiency` never falls.  Where
    sequences are padded, only equal lengths are swapped.
    owners: [N]; a number that is no replica of this pod: the sequence has no owner here.
    """
    swaps = Swaps(slots, owners, work, replicas)
    for _ in range(PASSES):  # a swap may give room for another one
        if not swaps.run():
            break
    parts: list[list[list[int]]] = [[[] for _ in range(replicas)] for _ in slots]
    for i, place in enumerate(swaps.place):
        parts[place // replicas][place % replicas].append(i)
    return parts


class Swaps:
    """The state of swaps between the micro-batches ("parts") of a plan."""

    def __init__(
        self, slots: Sequence[Slot], owners: Sequence[int], work: Work, replicas: int
    ) -> None:
        self.owners, self.replicas, self.padded = owners, replicas, work.padded
        self.rows = [int(rows) for rows in work.rows]
        # Python integers, which are faster than NumPy's one by one
        self.cost = [rows * (work.balance_length + rows) for rows in self.rows]
        self.place = [0] * len(self.rows)
        """The part of every sequence: slot x R + replica."""
        parts = [part for slot in slots for part in slot]
        for place, part in enumerate(parts):
            for i in part:
                self.place[i] = place
        self.part_rows = [sum(self.rows[i] for i in part) for part in parts]
        self.part_cost = [sum(self.cost[i] for i in part) for part in parts]
        # limits of every slot, from its parts before any swap
        starts = range(0, len(parts), replicas)
        self.most_rows = [
            min(max(self.part_rows[at : at + replicas]), work.max_rows) for at in starts
        ]
        self.most_cost = [max(self.part_cost[at : at + replicas]) for at in starts]

    def is_away(self, i: int) -> bool:
        return self.owners[i] != self.place[i] % self.replicas

    def run(self) -> int:
        """Try a swap for every sequence, from long to short; return the number of swaps."""
        # for every replica the sequences on it that other replicas own, by length
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
            nearest = guests[home][max(at - CANDIDATES, 0) : at + CANDIDATES]
            similar = [guest for guest in nearest if self.fits(i, guest)]
            if not similar:
                continue
            # prefer a guest whose owner is `there`, then the one of the most similar length
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
        """Return True where swapping i and j exceeds no limit of the part that grows."""
        if self.padded:  # another length would change the rows of the complete micro-batch
            return self.rows[i] == self.rows[j]
        rows, cost = self.rows[i] - self.rows[j], self.cost[i] - self.cost[j]
        grows = self.place[j] if rows > 0 else self.place[i]
        slot = grows // self.replicas
        return rows == 0 or (
            self.part_rows[grows] + abs(rows) <= self.most_rows[slot]
            and self.part_cost[grows] + abs(cost) <= self.most_cost[slot]
        )

    def swap(self, i: int, j: int) -> None:
        """Swap the places of i and j, and update the sums of their parts."""
        for total, values in ((self.part_rows, self.rows), (self.part_cost, self.cost)):
            more = values[i] - values[j]
            total[self.place[j]] += more
            total[self.place[i]] -= more
        self.place[i], self.place[j] = self.place[j], self.place[i]
