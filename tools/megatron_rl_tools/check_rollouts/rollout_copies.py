"""Find rollouts with the expert ids of another request: equal ids for other tokens, unless the
model chooses them by chance.

Small models with few experts route similar short answers equally: answers in the demo often differ
only in the last digit, one row of four layers.  How often rows of different contexts are equal is
measured on the same rollouts.
Shapes: S tokens, L MoE layers, K top-k; routes [S - 1, L, K].
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

LEAST_CHANCE = 1e-6
"""A pair is an error if the expected number of such pairs is below this."""
NEIGHBOURS = 16
"""Previous rollouts that a rollout is compared with: mostly of its group, which has the most
similar contexts.
"""
ROWS = 256
"""The most rows of two rollouts that are compared."""
MOST = 4
"""The most differing tokens before a row that are counted."""


@dataclass(frozen=True)
class Routed:
    """A rollout: tokens [S - 1], routes [S - 1, L, K], present bool [S - 1]."""

    tokens: np.ndarray
    routes: np.ndarray
    present: np.ndarray


class Chances:
    """The frequency with which a layer of a row chooses the same experts in two rollouts, by
    row_kinds.

    It is counted only while all routes before it are equal, from the first differing token on and
    in the layers below: layers and neighbouring rows are not independent, and their chances
    multiply only under this condition (the chain rule).
    """

    def __init__(self, layers: int) -> None:
        self.compared = np.zeros((2 * MOST + 2, layers), np.int64)
        self.equal = np.zeros((2 * MOST + 2, layers), np.int64)

    def add(self, a: Routed, b: Routed) -> None:
        size = min(len(a.tokens), len(b.tokens))
        differ = a.tokens[:size] != b.tokens[:size]
        if not differ.any():
            return
        first, kinds = int(differ.argmax()), row_kinds(differ)
        for row in range(first, min(size, first + ROWS)):
            if not (a.present[row] and b.present[row]):
                continue
            equal = (a.routes[row] == b.routes[row]).all(-1)
            same = len(equal) if equal.all() else int(equal.argmin())
            self.compared[kinds[row], : same + 1] += 1
            self.equal[kinds[row], :same] += 1
            if same < len(equal):
                return

    def log_chance(self, kinds: np.ndarray) -> float:
        """Return the log of the chance that rows of these kinds are equal in all layers (rule of
        succession: 1/2 per layer without data).
        """
        return float(np.log((self.equal + 1) / (self.compared + 2)).sum(1)[kinds].sum())


class Copies:
    """A search for copied routes among rollouts with L MoE layers, which are added one by one.

    Keeps 1 KiB of each rollout, and the last NEIGHBOURS in full.
    """

    def __init__(self, layers: int) -> None:
        self.chances = Chances(layers)
        self.near: deque[Routed] = deque(maxlen=NEIGHBOURS)
        # digest of routes -> name, digest of tokens, last tokens
        self.by_digest: dict[bytes, tuple[str, bytes, np.ndarray]] = {}
        # name, the previous one with these routes, kinds of rows
        self.equal: list[tuple[str, str, np.ndarray]] = []
        self.size = 0

    def add(self, name: str, tokens: np.ndarray, routes: np.ndarray, present: np.ndarray) -> None:
        size = min(len(tokens), len(routes))
        if not size:
            return
        routed = Routed(tokens[:size], routes[:size], present[:size])
        digest, of_tokens = blake(routes), blake(routed.tokens)
        last = routed.tokens[-ROWS:].astype(np.int32)
        other, its_tokens, its_last = self.by_digest.setdefault(digest, (name, of_tokens, last))
        if its_tokens != of_tokens:
            self.equal.append((name, other, differing_rows(its_last, last, routed.present[-ROWS:])))
        else:  # a suspected copy must not raise the chance of equal routes
            for before in self.near:
                self.chances.add(before, routed)
            self.near.append(routed)
        self.size += 1

    def found(self) -> Iterator[tuple[str, str]]:
        """Yield (rollout, the one whose routes it has)."""
        limit = np.log(LEAST_CHANCE) - np.log(max(1, self.size * (self.size - 1) // 2))
        for name, other, kinds in self.equal:
            if self.chances.log_chance(kinds) < limit:
                yield name, other


def differing_rows(a: np.ndarray, b: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Return the kinds of the rows of two token sequences from the first difference on, or of all
    rows if there is none.
    """
    size = min(len(a), len(b))  # lengths differ if a rollout has fewer tokens than routes
    differ = a[:size] != b[:size]
    first = int(differ.argmax())
    return row_kinds(differ)[first:][present[first:size]]


def row_kinds(differ: np.ndarray) -> np.ndarray:
    """Return 2 x the number of differing tokens up to each row, + 1 if its own token differs.

    The more similar the contexts, the more routes are equal.
    """
    return 2 * differ.cumsum().clip(1, MOST) + differ


def blake(array: np.ndarray) -> bytes:
    data = np.ascontiguousarray(array).tobytes() + str(array.shape).encode()
    return hashlib.blake2b(data, digest_size=16).digest()
