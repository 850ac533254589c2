"""The packed order of a micro-batch: sequences end to end, then pads.  All columns with a value per
token are built here.

Row t holds input token t and everything about predicting token t + 1 of the same sequence, so a
sampled token at sequence position s is in row s - 1.  A sequence may be followed by pads inside its
bounds in cu_seqlens, which causal attention hides: context parallelism cuts every sequence into
equal chunks, and a padded (BSHD) micro-batch has the same number of rows for all sequences.
Shapes: S tokens of a sequence, T packed rows, B sequences, L MoE layers, K top-k.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from megatron_rl.records import Rollout, check_digest
from megatron_rl.records.packed import PackedBatch, RowState, Sample
from megatron_rl.records.teacher_scores import TeacherTop
from megatron_rl.records.token_sets import TokenSets, check_mask

TEACHER_COLUMNS = ("teacher_logprobs", "teacher_weights")
"""Columns of micro-batches with a sequence that a teacher has scored."""


@dataclass(frozen=True)
class PackRule:
    """The requirements of the engine's layout on the rows of a micro-batch."""

    pad_multiple: int = 1
    """T is a multiple of it (tensor ranks under sequence parallelism).  It is a multiple of
    sequence_multiple."""
    equal_sizes: bool = False
    """T is equal on all data-parallel replicas (the allgather dispatcher gathers tokens over
    them)."""
    sequence_multiple: int = 1
    """The rows of every sequence are a multiple of it (2 x cp under context parallelism)."""
    count_multiple: int = 1
    """The number of micro-batches is a multiple of it (pp under the interleaved schedule)."""
    padded: bool = False
    """All sequences of a micro-batch have the rows of its longest, T = B x rows; pad_multiple then
    has no effect."""
    mask_missing_routes: bool = False
    """A token predicted by a row without a route leaves the loss (replay.on_missing_route =
    mask_token)."""
    balance_length: int = 16_384
    """The number of rows at which a sequence's attention costs as much as everything else
    (models/cost.py)."""

    def sequence_rows(self, num_tokens: int) -> int:
        """Return the rows of a sequence of `num_tokens`, with the pads inside its bounds."""
        return -(-num_tokens // self.sequence_multiple) * self.sequence_multiple

    def rows(self, lengths: Sequence[int], beside: Sequence[Sequence[int]] = ()) -> list[int]:
        """Return the rows of every sequence of a micro-batch, then of the pad sequences, if any.

        lengths: the rows that the sequences need (`sequence_rows`).
        beside: for equal_sizes, the lengths of the micro-batches of the same slot on all replicas.
        """
        equal = [lengths, *beside] if self.equal_sizes else [lengths]
        if self.padded:
            return [max(map(max, equal))] * max(map(len, equal))
        num_rows = max(sum(part) + -sum(part) % self.pad_multiple for part in equal)
        pads = num_rows - sum(lengths)
        return [*lengths, pads] if pads else list(lengths)


def pack(
    samples: Sequence[Sample],
    rows: Sequence[int] | None = None,
    *,
    mask_missing_routes: bool = False,
) -> PackedBatch:
    """Pack `samples`, in their order, into one micro-batch.

    rows: the rows of every sample, then of pad sequences, see PackRule.rows; by default no pads.  A
    sequence with fewer tokens than rows is followed by pads.  No real token attends to a pad.
    mask_missing_routes: the token that a row without a route predicts is left out of the loss mask.
    response_lengths and the counts that divide the loss still include it, so that the weight of all
    other tokens does not change; kept_mean alone, which divides by the tokens that stay, leaves it
    out.
    The last row of every sequence, and rows without a route, are RowState.LIVE.  Raises ValueError
    where arrays do not match the tokens in length, or routes do not match them by their digest.
    """
    if not samples:
        raise ValueError("a micro-batch needs at least one sequence")
    for sample in samples:
        check_sample(sample)
    lengths = [len(sample.rollout.tokens) for sample in samples]
    rows = lengths if rows is None else rows
    assert len(rows) >= len(lengths) and all(a >= b for a, b in zip(rows, lengths, strict=False)), (
        "too few rows"
    )
    boundaries = np.concatenate([[0], np.cumsum(rows)])
    num_rows = int(boundaries[-1])
    columns = make_columns(samples, num_rows)
    for index, (sample, start, length) in enumerate(
        zip(samples, boundaries, lengths, strict=False)
    ):
        views = {name: column[start : start + length] for name, column in columns.items()}
        fill_sequence(views, index, sample)
        mark_missing_routes(views, sample.rollout, mask=mask_missing_routes)
    for start, stop in pairwise(boundaries):  # pads have positions too
        columns["positions"][start:stop] = np.arange(stop - start)
    check_routes_alike([sample.rollout for sample in samples])
    masks, set_index = pack_masks([sample.rollout for sample in samples], boundaries)
    tops, top_index = pack_tops(samples, boundaries, columns["loss_mask"])
    return PackedBatch(
        **{name: torch.from_numpy(column) for name, column in columns.items()},
        # int32, as attention kernels take them
        cu_seqlens=torch.from_numpy(boundaries.astype(np.int32)),
        rollout_ids=tuple(sample.rollout.id for sample in samples),
        sampling_masks=masks,
        set_index=set_index,
        teacher_tops=tops,
        top_index=top_index,
        kept=None,
        top=None,
    )


def make_columns(samples: Sequence[Sample], num_rows: int) -> dict[str, np.ndarray]:
    """Return the columns of rows that are all pads, [T] each."""
    return {
        "tokens": np.zeros(num_rows, np.int64),
        "labels": np.zeros(num_rows, np.int64),
        "positions": np.zeros(num_rows, np.int64),
        "loss_mask": np.zeros(num_rows, bool),
        "rollout_logprobs": np.zeros(num_rows, np.float32),
        "advantages": np.zeros(num_rows, np.float32),
        "sequence_ids": np.full(num_rows, -1, np.int64),
        "response_ids": np.full(num_rows, -1, np.int64),
        "response_lengths": np.ones(num_rows, np.int64),  # 1 on pads: the loss divides by it
        "row_state": np.full(num_rows, RowState.PAD, np.uint8),
        "policy_versions": np.full(num_rows, -1, np.int64),
    } | teacher_columns(samples, num_rows)


def teacher_columns(samples: Sequence[Sample], num_rows: int) -> dict[str, np.ndarray]:
    """Return TEACHER_COLUMNS as zeros [T]; {} where no teacher has scored a sequence."""
    if all(sample.rollout.teacher_logprobs is None for sample in samples):
        return {}
    return {name: np.zeros(num_rows, np.float32) for name in TEACHER_COLUMNS}


def fill_sequence(rows: dict[str, np.ndarray], index: int, sample: Sample) -> None:
    """Write one sequence into its rows (views of the packed columns)."""
    rollout = sample.rollout
    predicts = rollout.sampled - 1  # the rows whose next token was sampled
    rows["tokens"][:] = rollout.tokens
    rows["labels"][:-1] = rollout.tokens[1:]  # the last row predicts nothing: its label stays 0
    if sample.in_loss:
        rows["loss_mask"][predicts] = True
        rows["rollout_logprobs"][predicts] = rollout.rollout_logprobs
        rows["advantages"][predicts] = sample.advantage
        rows["policy_versions"][predicts] = rollout.policy_versions
        if sample.teacher_weight:
            rows["teacher_logprobs"][predicts] = rollout.teacher_logprobs
            rows["teacher_weights"][predicts] = sample.teacher_weight
    rows["sequence_ids"][:] = index
    rows["response_ids"][:] = -1 if sample.response is None else sample.response
    rows["response_lengths"][:] = max(sample.length, 1)
    rows["row_state"][:-1] = (
        RowState.REPLAYED if rollout.routed_experts is not None else RowState.LIVE
    )
    rows["row_state"][-1] = RowState.LIVE  # the last token was never an input of the server


def mark_missing_routes(rows: dict[str, np.ndarray], rollout: Rollout, *, mask: bool) -> None:
    """Let the router choose in rows without a route; with `mask` leave the tokens that they predict
    out of the loss.
    """
    if rollout.missing_routes is None:
        return
    missing = np.append(rollout.missing_routes, False)  # the row of the last token is live anyway
    rows["row_state"][missing] = RowState.LIVE
    if mask:
        # PackedBatch promises that log-probs and advantages are 0 outside the mask
        for name in ("loss_mask", "rollout_logprobs", "advantages", *TEACHER_COLUMNS):
            if name in rows:
                rows[name][missing] = 0
        rows["policy_versions"][missing] = -1


def check_routes_alike(rollouts: Sequence[Rollout]) -> None:
    """Raise ValueError where some rollouts of a micro-batch have routes and others have none."""
    missing = [rollout.id for rollout in rollouts if not rollout.has_routes]
    if 0 < len(missing) < len(rollouts):
        raise ValueError(
            f"rollouts {missing} have no routed experts but others of the same micro-batch do; all"
            " or none must have them"
        )


def pack_masks(
    rollouts: Sequence[Rollout], boundaries: np.ndarray
) -> tuple[tuple[TokenSets, ...] | None, torch.Tensor | None]:
    """Return PackedBatch.sampling_masks, not decoded, and set_index; (None, None) where no
    rollout has a mask.
    """
    masks = tuple(
        rollout.sampling_mask for rollout in rollouts if rollout.sampling_mask is not None
    )
    if not masks:
        return None, None
    if len(masks) < len(rollouts):
        missing = [rollout.id for rollout in rollouts if rollout.sampling_mask is None]
        raise ValueError(
            f"rollouts {missing} have no kept sets but others of the same micro-batch do; all or"
            " none must have them"
        )
    return masks, torch.from_numpy(
        number_tokens(zip(rollouts, boundaries, strict=False), boundaries)
    )


def pack_tops(
    samples: Sequence[Sample], boundaries: np.ndarray, loss_mask: np.ndarray
) -> tuple[tuple[TeacherTop, ...] | None, torch.Tensor | None]:
    """Return PackedBatch.teacher_tops and top_index; (None, None) where no sample has any."""
    placed, tops = [], []
    for sample, start in zip(samples, boundaries, strict=False):
        top = sample.rollout.teacher_top
        if sample.teacher_weight and top is not None:
            placed.append((sample.rollout, start))
            tops.append(top)
    if not tops:
        return None, None
    tokens = number_tokens(placed, boundaries)
    return tuple(tops), torch.from_numpy(np.where(loss_mask, tokens, -1))


def number_tokens(placed: Iterable[tuple[Rollout, int]], boundaries: np.ndarray) -> np.ndarray:
    """Return int64 [T]: for every row the number of the sampled token that it predicts, counted
    over the sampled tokens of all rollouts end to end; -1: none.

    placed: rollouts and their first rows.
    """
    tokens, first = np.full(int(boundaries[-1]), -1, np.int64), 0
    for rollout, start in placed:
        count = rollout.response_length
        tokens[start + rollout.sampled - 1] = np.arange(first, first + count)
        first += count
    return tokens


def check_rollout(rollout: Rollout) -> None:
    """Raise ValueError when a rollout's arrays do not describe the same tokens."""
    length, name = len(rollout.tokens), f"rollout {rollout.id}"
    if rollout.episode.earlier:
        raise ValueError(
            f"{name}: an episode of {len(rollout.sequences)} sequences; pack sequences_of, one by"
            " one"
        )
    if not 1 <= rollout.prompt_length < length:
        raise ValueError(
            f"{name}: prompt of {rollout.prompt_length} in {length} tokens leaves no response"
        )
    check_environment_tokens(rollout)
    per_token = {
        "rollout_logprobs": rollout.rollout_logprobs,
        "policy_versions": rollout.policy_versions,
    }
    for key, values in per_token.items():
        if len(values) != rollout.response_length:
            raise ValueError(
                f"{name}: {len(values)} {key} for {rollout.response_length} sampled tokens"
            )
    if rollout.sampling_mask is not None:
        check_mask(rollout.id, rollout.sampling_mask, rollout.tokens[rollout.sampled])
    routes, missing = rollout.routed_experts, rollout.missing_routes
    if routes is None:
        return
    if len(routes) != length - 1:
        raise ValueError(
            f"{name}: routed_experts has {len(routes)} rows, must be tokens - 1 = {length - 1}"
        )
    if missing is not None and (missing.shape != (length - 1,) or missing.dtype != bool):
        got = f"{missing.dtype} {list(missing.shape)}"
        raise ValueError(f"{name}: missing_routes is {got}, must be bool [{length - 1}]")
    check_digest(rollout.id, rollout.tokens, routes, rollout.routes_digest, rollout.environment)


def check_sample(sample: Sample) -> None:
    """Raise ValueError when a sample's arrays do not describe the same tokens, or when a sample
    with a beta lacks a finite log-prob of its teacher for a sampled token.
    """
    check_rollout(sample.rollout)
    rollout, logprobs = sample.rollout, sample.rollout.teacher_logprobs
    if logprobs is None:
        if sample.teacher_weight:
            raise ValueError(
                f"rollout {rollout.id}: beta = {sample.teacher_weight:g}, and it has no log-probs"
                " of a teacher; score it, or set beta = 0"
            )
        return
    if len(logprobs) != rollout.response_length:
        raise ValueError(
            f"rollout {rollout.id}: {len(logprobs)} teacher_logprobs for"
            f" {rollout.response_length} sampled tokens"
        )
    if not np.isfinite(logprobs).all():
        raise ValueError(f"rollout {rollout.id}: a log-prob of its teacher is not finite")
    if rollout.teacher_top is not None:
        try:
            rollout.teacher_top.check(rollout.response_length)
        except ValueError as error:
            raise ValueError(f"rollout {rollout.id}: {error}") from error


def check_environment_tokens(rollout: Rollout) -> None:
    """Raise ValueError unless there are sampled tokens before, between and after the spans of the
    environment.
    """
    bounds = [
        rollout.prompt_length,
        *(place for span in rollout.environment for place in span),
        len(rollout.tokens),
    ]
    if any(a >= b for a, b in pairwise(bounds)):
        raise ValueError(
            f"rollout {rollout.id}: environment = {list(rollout.environment)} in tokens"
            f" {rollout.prompt_length} to {len(rollout.tokens)}: must be (start, end) in order,"
            " with sampled tokens before, between and after them"
        )
