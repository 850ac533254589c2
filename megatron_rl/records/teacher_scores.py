"""The answer of a teacher about the sampled tokens of a sequence, and what a micro-batch reads of
it.

Shapes: R sampled tokens of one sequence, K tokens that the teacher names for each of them, N ids of
several tokens, T rows of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from megatron_rl.records.on_device import on_device
from megatron_rl.records.sampling_mask import KeptSets, SamplingMask, sets_and_places


@dataclass(frozen=True)
class TeacherTop:
    """The K most probable tokens of the teacher in the place of each sampled token."""

    sets: SamplingMask
    """The ids of the K tokens of each of the R sampled tokens."""
    logprobs: np.ndarray
    """float32 [R * K], log pi_T of these ids, in the order of sets.ids(); not renormalised."""

    @classmethod
    def of(cls, ids: np.ndarray, logprobs: np.ndarray) -> TeacherTop:
        """Make it from int [R, K] and float32 [R, K], in any order in a row.

        Raises ValueError for a negative id, an id twice in a row, and for a K that SamplingMask
        cannot hold.
        """
        # SamplingMask stores the ids of a row in ascending order
        order = np.argsort(ids, axis=1)
        sets = SamplingMask.of(np.full(len(ids), ids.shape[1]), ids.ravel())
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


class TopRows(NamedTuple):
    """The teacher's most probable tokens of the rows of a micro-batch, on its device."""

    sets: KeptSets
    """Rows without a teacher have none of the ids."""
    logprobs: torch.Tensor
    """float32 [N], log pi_T of the ids."""


def top_of_rows(
    tops: Sequence[TeacherTop], index: np.ndarray, device: torch.device | str = "cpu"
) -> TopRows:
    """Return the teacher's tokens of the rows of a micro-batch.

    index: int [T], for every row the place of its label among the sampled tokens of all `tops`, end
    to end; -1: the row has no teacher.
    """
    sets, places = sets_and_places([top.sets for top in tops], index, device)
    logprobs = np.concatenate([top.logprobs for top in tops])[places]
    return TopRows(sets, on_device(torch.from_numpy(logprobs), device))
