"""The packed order, defined once: sequences end to end, then pads.  Everything per token is built here together.

Row t holds input token t and what is known about predicting token t + 1 of the same sequence, so a response token y at
sequence position s lives in row s - 1.  Context parallelism cuts every sequence into equal chunks, so each is followed by
pads of its own, inside its bounds in cu_seqlens: causal attention keeps them unseen.
Shapes: S tokens of a sequence, T packed rows, L MoE layers, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from megatron_rl.records import PackedBatch, Rollout, RowState


@dataclass(frozen=True)
class Sample:
    """A rollout with its advantage: what one sequence of a micro-batch needs."""

    rollout: Rollout
    advantage: float


@dataclass(frozen=True)
class PackRule:
    """What the engine's layout asks of a micro-batch's size T.

    pad_multiple: T is a multiple of it (tensor ranks under sequence parallelism); itself one of sequence_multiple.
    equal_sizes: T is equal on all data-parallel replicas (the allgather dispatcher gathers tokens over them).
    sequence_multiple: every sequence's rows are a multiple of it (2 x cp under context parallelism).
    count_multiple: the number of micro-batches is a multiple of it (pp under the interleaved schedule).
    """

    pad_multiple: int = 1
    equal_sizes: bool = False
    sequence_multiple: int = 1
    count_multiple: int = 1

    def sequence_rows(self, num_tokens: int) -> int:
        """Rows of one sequence with this many tokens, its own pads included."""
        return -(-num_tokens // self.sequence_multiple) * self.sequence_multiple

    def rows(self, num_tokens: int) -> int:
        """T for a micro-batch whose sequences have this many rows together."""
        return -(-num_tokens // self.pad_multiple) * self.pad_multiple


def pack(samples: Sequence[Sample], *, num_rows: int | None = None, sequence_multiple: int = 1) -> PackedBatch:
    """Pack `samples` in the given order into one micro-batch of T = `num_rows` rows (default: no pads at the end).

    Rows S - 1 of every sequence (the last token) have no routes: RowState.LIVE.  Each sequence is followed by pads up to
    `sequence_multiple`; pads at the end form a pseudo-sequence of their own: no real token attends to one.
    Raises ValueError when array lengths disagree with the tokens.
    """
    if not samples:
        raise ValueError("a micro-batch needs at least one sequence")
    for sample in samples:
        check_rollout(sample.rollout)
    lengths = [len(sample.rollout.tokens) for sample in samples]
    rule = PackRule(sequence_multiple=sequence_multiple)
    starts = np.concatenate([[0], np.cumsum([rule.sequence_rows(length) for length in lengths])])
    end = int(starts[-1])
    num_rows = end if num_rows is None else num_rows
    assert num_rows >= end, "a micro-batch cannot have fewer rows than its sequences"
    columns = {
        "tokens": np.zeros(num_rows, np.int64),
        "labels": np.zeros(num_rows, np.int64),
        "positions": np.zeros(num_rows, np.int64),
        "loss_mask": np.zeros(num_rows, bool),
        "rollout_logprobs": np.zeros(num_rows, np.float32),
        "advantages": np.zeros(num_rows, np.float32),
        "sequence_ids": np.full(num_rows, -1, np.int64),
        "response_lengths": np.ones(num_rows, np.int64),
        "row_state": np.full(num_rows, RowState.PAD, np.uint8),
    }
    for index, (sample, start, length) in enumerate(zip(samples, starts, lengths, strict=False)):
        fill_sequence({name: column[start : start + length] for name, column in columns.items()}, index, sample)
    boundaries = starts if num_rows == end else np.append(starts, num_rows)
    for start, stop in pairwise(boundaries):
        columns["positions"][start:stop] = np.arange(stop - start)
    return PackedBatch(
        **{name: torch.from_numpy(column) for name, column in columns.items()},
        cu_seqlens=torch.from_numpy(boundaries.astype(np.int32)),
        routed_experts=pack_routes([sample.rollout for sample in samples]),
        rollout_ids=tuple(sample.rollout.id for sample in samples),
    )


def fill_sequence(rows: dict[str, np.ndarray], index: int, sample: Sample) -> None:
    """Write one sequence into its rows (views of the packed columns)."""
    rollout = sample.rollout
    length, first = len(rollout.tokens), rollout.prompt_length - 1  # row `first` predicts the first response token
    rows["tokens"][:] = rollout.tokens
    rows["labels"][:-1] = rollout.tokens[1:]
    rows["loss_mask"][first : length - 1] = True
    rows["rollout_logprobs"][first : length - 1] = rollout.rollout_logprobs
    rows["advantages"][first : length - 1] = sample.advantage
    rows["sequence_ids"][:] = index
    rows["response_lengths"][:] = max(rollout.response_length, 1)
    rows["row_state"][:-1] = RowState.REPLAYED if rollout.routed_experts is not None else RowState.LIVE
    rows["row_state"][-1] = RowState.LIVE


def pack_routes(rollouts: Sequence[Rollout]) -> tuple[np.ndarray, ...] | None:
    """Each rollout's expert ids [S - 1, L, K], not copied: most ranks need a small part of them."""
    routes = [rollout.routed_experts for rollout in rollouts if rollout.routed_experts is not None]
    if routes and len(routes) < len(rollouts):
        missing = [rollout.id for rollout in rollouts if rollout.routed_experts is None]
        raise ValueError(f"rollouts {missing} carry no routed experts but others of the same micro-batch do")
    return tuple(routes) or None


def check_rollout(rollout: Rollout) -> None:
    """Raise ValueError when a rollout's arrays do not describe the same tokens."""
    length = len(rollout.tokens)
    if not 1 <= rollout.prompt_length < length:
        raise ValueError(
            f"rollout {rollout.id}: prompt of {rollout.prompt_length} in {length} tokens leaves no response"
        )
    if len(rollout.rollout_logprobs) != rollout.response_length:
        raise ValueError(
            f"rollout {rollout.id}: {len(rollout.rollout_logprobs)} rollout_logprobs for "
            f"{rollout.response_length} response tokens"
        )
    if rollout.routed_experts is not None and len(rollout.routed_experts) != length - 1:
        raise ValueError(
            f"rollout {rollout.id}: routed_experts has {len(rollout.routed_experts)} rows, rule is tokens - 1 = {length - 1}"
        )
