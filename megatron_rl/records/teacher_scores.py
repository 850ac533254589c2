"""The answer of a teacher about the sampled tokens of a sequence.

Shapes: R sampled tokens of one sequence, K tokens that the teacher names for each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_rl.records.token_sets import TokenSets


@dataclass(frozen=True)
class TeacherTop:
    """The K most probable tokens of the teacher in the place of each sampled token."""

    sets: TokenSets
    """The ids of the K tokens of each of the R sampled tokens."""
    logprobs: np.ndarray
    """float32 [R * K], log pi_T of these ids, in the order of sets.ids(); not renormalised."""

    @classmethod
    def of(cls, ids: np.ndarray, logprobs: np.ndarray) -> TeacherTop:
        """Make it from int [R, K] and float32 [R, K], in any order in a row.

        Raises ValueError for a negative id, an id twice in a row, and for a K that TokenSets
        cannot hold.
        """
        # TokenSets stores the ids of a row in ascending order
        order = np.argsort(ids, axis=1)
        sets = TokenSets.of(np.full(len(ids), ids.shape[1]), ids.ravel())
        return cls(sets, np.take_along_axis(logprobs, order, axis=1).astype(np.float32).ravel())

    def tobytes(self) -> bytes:
        """Return its bytes, for a digest: the sizes tell where codes and log-probs end."""
        parts = ((self.sets.sizes, "<u2"), (self.sets.codes, "u1"), (self.logprobs, "<f4"))
        return b"".join(np.ascontiguousarray(part, kind).tobytes() for part, kind in parts)

    def check(self, num_sampled: int) -> TeacherTop:
        """Return it; raise ValueError unless it has finite log-probs for `num_sampled` tokens."""
        if len(self.sets) != num_sampled or len(self.logprobs) != int(self.sets.sizes.sum()):
            raise ValueError(
                f"{len(self.sets)} sets with {len(self.logprobs)} log-probs of a teacher's most"
                f" probable tokens for {num_sampled} sampled tokens"
            )
        if not np.isfinite(self.logprobs).all():
            raise ValueError("a log-prob of the teacher's most probable tokens is not finite")
        return self


class TeacherScores(NamedTuple):
    """The teacher's numbers of one sequence."""

    logprobs: np.ndarray
    """float32 [R], log pi_T of the sampled tokens."""
    top: TeacherTop | None = None
    """None with loss.teacher_form = token."""
