"""Finds rollouts with the expert ids of another request: equal ids for other tokens, unless the
model does so by chance.

Small models with few experts route similar short answers equally: those of the demo often differ in
the last digit only, one row of four layers.  How often rows of different contexts are equal is
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
"""A pair is an error where the expected number of such pairs is below this."""
# previous rollouts that each is compared with: mostly of its group, the most similar contexts
NEIGHBOURS = 16
ROWS = 256  # compared rows of two rollouts
MOST = 4  # differing tokens up to a row are counted up to this


@dataclass(frozen=True)
class Routed:
    """A rollout: tokens [S - 1], routes [S - 1, L, K], present bool [S - 1]."""

    tokens: np.ndarray
    routes: np.ndarray
    present: np.ndarray


class Chances:
    """How often a layer of a row chooses the same experts in two rollouts whose routes are equal up
    to there, by row_kinds.

    Up to there: from the first differing token on, the layers below included.  Layers and
    neighbouring rows are not independent: their chances multiply only under this condition (the
    chain rule).
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
        """Log of the chance that rows of these kinds are equal in all layers (rule of succession:
        1/2 per layer without data).
        """
        return float(np.log((self.equal + 1) / (self.compared + 2)).sum(1)[kinds].sum())


class Copies:
    """Of rollouts with L MoE layers, added one by one.

    Keeps 1 KiB of each, and the last NEIGHBOURS in full.
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
        this = Routed(tokens[:size], routes[:size], present[:size])
        digest, last, of_tokens = (
            blake(routes),
            this.tokens[-ROWS:].astype(np.int32),
            blake(this.tokens),
        )
        other, its_tokens, its_last = self.by_digest.setdefault(digest, (name, of_tokens, last))
        if its_tokens != of_tokens:
            self.equal.append((name, other, differing_rows(its_last, last, this.present[-ROWS:])))
        else:  # a suspected copy is no evidence of chance
            for before in self.near:
                self.chances.add(before, this)
            self.near.append(this)
        self.size += 1

    def found(self) -> Iterator[tuple[str, str]]:
        """(rollout, the one whose routes it has)"""
        limit = np.log(LEAST_CHANCE) - np.log(max(1, self.size * (self.size - 1) // 2))
        for name, other, kinds in self.equal:
            if self.chances.log_chance(kinds) < limit:
                yield name, other


def differing_rows(a: np.ndarray, b: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Kinds of the rows of two token sequences from the first difference on; of all rows where
    there is none.
    """
    size = min(len(a), len(b))  # they differ where a rollout has fewer tokens than routes
    differ = a[:size] != b[:size]
    first = int(differ.argmax())
    return row_kinds(differ)[first:][present[first:size]]


def row_kinds(differ: np.ndarray) -> np.ndarray:
    """2 x the number of differing tokens up to the row, + 1 where its own differs: similar contexts
    have more equal routes.
    """
    return 2 * differ.cumsum().clip(1, MOST) + differ


def blake(array: np.ndarray) -> bytes:
    return hashlib.blake2b(
        np.ascontiguousarray(array).tobytes() + str(array.shape).encode(), digest_size=16
    ).digest()
