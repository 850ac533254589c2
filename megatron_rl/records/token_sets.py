"""A set of ids for every sampled token of a rollout, in a compact encoding: the kept set S_t that
top-k, top-p and min-p left, or the most probable tokens of a teacher (teacher_scores.py).

A server that samples from a truncated distribution draws y_t from mu renormalised over S_t.  The
trainer computes its log-prob over the same set, log pi~(y_t) = z_t[y_t] - logsumexp_{v in S_t}
z_t[v] with z = logits / temperature.

Shapes: R sampled tokens of one rollout, N ids of all their sets, T rows of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.config.sections.rollout import MOST_KEPT


@dataclass(frozen=True)
class TokenSets:
    """A set of ids for each sampled token of one rollout.

    A set of n ids takes 2 bytes and 1 to 3 bytes an id: results/sampling.md.
    """

    sizes: np.ndarray
    """uint16 [R], number of ids of each set."""
    codes: np.ndarray
    """uint8 [bytes], the ids of set after set, ascending: the first as it is, every other as its
    distance from the one before, in groups of 7 bits with the lowest first; all bytes of a number
    but its last have the top bit set (LEB128)."""

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def nbytes(self) -> int:
        return self.sizes.nbytes + self.codes.nbytes

    @classmethod
    def of(cls, sizes: np.ndarray, ids: np.ndarray) -> TokenSets:
        """Make it from sizes int [R] and ids int [N] of set after set, in any order in a set.

        Raises ValueError for an empty set, one of more than MOST_KEPT ids, a negative id and an id
        twice in a set.
        """
        if int(sizes.sum()) != len(ids):
            raise ValueError(f"{len(ids)} ids for sets of {int(sizes.sum())} in all")
        if len(sizes) and not 1 <= sizes.min() <= sizes.max() <= MOST_KEPT:
            raise ValueError(
                f"sets of {sizes.min()} to {sizes.max()} ids, must be 1 to {MOST_KEPT}"
            )
        token = np.repeat(np.arange(len(sizes)), sizes)
        # by token, then by id: the last key of lexsort is its first criterion
        ids = ids[np.lexsort((ids, token))].astype(np.int64)
        steps = np.diff(ids, prepend=0)
        first = first_of_sets(sizes)
        steps[first] = ids[first]
        is_first = np.zeros(len(ids), bool)
        is_first[first] = True
        if (wrong := (steps < 0) | ((steps == 0) & ~is_first)).any():
            at = int(wrong.argmax())
            raise ValueError(
                f"set {token[at]} has id {ids[at]}: must be 0 or more, and once in a set"
            )
        return cls(sizes.astype(np.uint16), to_varints(steps))

    def part(self, start: int, stop: int) -> TokenSets:
        """Return the sets of tokens start..stop."""
        ends = np.concatenate([[0], np.flatnonzero(self.codes < 128) + 1])  # of the ids in `codes`
        places = np.concatenate([[0], np.cumsum(self.sizes, dtype=np.int64)])
        first, last = ends[places[[start, stop]]]
        return TokenSets(self.sizes[start:stop], self.codes[first:last])

    def ids(self) -> np.ndarray:
        """int64 [N], ascending within a set.

        Raises ValueError where codes and sizes do not belong together.
        """
        steps = from_varints(self.codes)
        if len(steps) != int(self.sizes.sum()) or not self.sizes.all():
            raise ValueError(
                f"{len(steps)} ids are encoded for {len(self.sizes)} sets of"
                f" {int(self.sizes.sum())} in all"
            )
        total = np.cumsum(steps)
        first = first_of_sets(self.sizes)
        return total - np.repeat(total[first] - steps[first], self.sizes)


def join_masks(parts: Sequence[TokenSets]) -> TokenSets:
    """Return the sets of the tokens of all `parts`, in order."""
    return TokenSets(
        np.concatenate([part.sizes for part in parts]),
        np.concatenate([part.codes for part in parts]),
    )


def check_mask(name: str, mask: TokenSets, sampled: np.ndarray) -> np.ndarray:
    """Return the ids int64 [N] of `mask`, which must belong to the tokens `sampled` int [R] of
    rollout `name`.

    Raises ValueError, naming rollout, token and position among the sampled ones, for a token
    outside its own set: it was sampled from another one.
    """
    if len(mask) != len(sampled):
        raise ValueError(f"rollout {name}: {len(mask)} kept sets for {len(sampled)} sampled tokens")
    try:
        ids = mask.ids()
    except ValueError as error:
        raise ValueError(f"rollout {name}: kept sets: {error}") from error
    if not len(sampled):
        return ids
    is_kept = ids == np.repeat(sampled, mask.sizes)
    in_its_set = np.logical_or.reduceat(is_kept, first_of_sets(mask.sizes))
    if not in_its_set.all():
        at = int(in_its_set.argmin())
        kept = ids[int(mask.sizes[:at].sum()) :][: int(mask.sizes[at])]
        shown = f"{kept[:8].tolist()}{' ...' if len(kept) > 8 else ''}"
        raise ValueError(
            f"rollout {name}: sampled token {at} of {len(sampled)} is {int(sampled[at])}, not in"
            f" its kept set of {len(kept)} ids {shown}: the set is another token's, or tokens were"
            " edited after sampling"
        )
    return ids


def first_of_sets(sizes: np.ndarray) -> np.ndarray:
    """Return int64 [R], the place of each set's first id."""
    return np.cumsum(sizes, dtype=np.int64) - sizes


def to_varints(values: np.ndarray) -> np.ndarray:
    """Encode int64 [N], none negative, as uint8 [bytes]; see TokenSets.codes."""
    lengths = np.ones(len(values), np.int64)
    # one byte more for every value with bits beyond those that fit
    while (more := values >> (7 * lengths)).any():
        lengths += more > 0
    starts = np.cumsum(lengths) - lengths
    out = np.empty(int(lengths.sum()), np.uint8)
    for group in range(int(lengths.max(initial=0))):
        longer = lengths > group
        is_last = lengths[longer] == group + 1
        bits = (values[longer] >> (7 * group)) & 127
        out[starts[longer] + group] = bits | np.where(is_last, 0, 128)
    return out


def from_varints(codes: np.ndarray) -> np.ndarray:
    """Return int64 [N], the inverse of `to_varints`.

    Raises ValueError where the last number has no end, or is too long.
    """
    if not len(codes):
        return np.zeros(0, np.int64)
    ends = np.flatnonzero(codes < 128)
    starts = np.concatenate([[0], ends[:-1] + 1])
    # 5 bytes have 35 bits, more than any id
    if not len(ends) or ends[-1] != len(codes) - 1 or (ends - starts).max() > 4:
        raise ValueError("the encoded ids are cut or damaged")
    group = np.arange(len(codes)) - np.repeat(starts, ends - starts + 1)
    return np.add.reduceat((codes & np.uint8(127)).astype(np.int64) << (7 * group), starts)
