"""Sets of ids of the rows of a micro-batch, on the device of a rank: kept sets of tokens, and the
most probable tokens of a teacher.

Shapes: N ids of all sets, T rows of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from megatron_rl.records.on_device import on_device
from megatron_rl.records.teacher_scores import TeacherTop
from megatron_rl.records.token_sets import TokenSets

BLOCK_IDS = 1 << 22
"""Ids whose logits are gathered at a time: 32 MiB of float64."""


@dataclass(frozen=True)
class RowSets:
    """Sets of ids of the rows of a micro-batch, on its device: kept sets, or the most probable
    tokens of a teacher (records/teacher_scores.py).

    A row without a set (prompt, pad) has none of the ids.
    """

    offsets: np.ndarray
    """int64 [T + 1] on the host: row t has the ids offsets[t] to offsets[t + 1]."""
    ids: torch.Tensor
    """int64 [N]."""
    rows: torch.Tensor
    """int64 [N], the row of each id."""
    is_empty: torch.Tensor
    """bool [T], rows without a set."""

    def blocks(self, start: int, stop: int) -> Iterator[slice]:
        """Yield rows start..stop in blocks of at most BLOCK_IDS ids (or one row)."""
        while start < stop:
            last = self.offsets[start] + BLOCK_IDS
            end = int(np.searchsorted(self.offsets, last, side="right")) - 1
            end = min(max(end, start + 1), stop)
            yield slice(start, end)
            start = end


def sets_of_tokens(
    masks: Sequence[TokenSets], set_index: np.ndarray, device: torch.device | str = "cpu"
) -> RowSets:
    """Return the kept sets of the rows of a micro-batch.

    set_index: int [T], for every row the place of its set among the sets of all `masks`, end to
    end; -1: the row has no set.
    """
    return sets_and_places(masks, set_index, device)[0]


def sets_and_places(
    masks: Sequence[TokenSets], set_index: np.ndarray, device: torch.device | str
) -> tuple[RowSets, np.ndarray]:
    """Return `sets_of_tokens`, and int64 [N], the place of each of its ids among those of all
    `masks`, end to end.
    """
    sizes = np.concatenate([mask.sizes for mask in masks]).astype(np.int64)
    ids = np.concatenate([mask.ids() for mask in masks])
    # index -1 reads the last set, whose size is not used
    row_sizes = np.where(set_index < 0, 0, sizes[set_index])
    offsets = np.concatenate([[0], np.cumsum(row_sizes)])
    rows = np.repeat(np.arange(len(set_index)), row_sizes)
    first = (np.cumsum(sizes) - sizes)[set_index]  # of the token's ids in `ids`
    places = np.arange(len(rows)) - offsets[rows] + first[rows]
    sets = RowSets(
        offsets,
        on_device(torch.from_numpy(ids[places]), device),
        on_device(torch.from_numpy(rows), device),
        on_device(torch.from_numpy(row_sizes == 0), device),
    )
    return sets, places


class TopRows(NamedTuple):
    """The teacher's most probable tokens of the rows of a micro-batch, on its device."""

    sets: RowSets
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
