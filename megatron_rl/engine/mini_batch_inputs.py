"""Inputs of the loss that depend on the complete mini-batch, computed on the last pipeline stage
before the update.

Shapes: T packed rows of a micro-batch (this rank's, under context parallelism).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_rl.config import LossConfig
from megatron_rl.distributed import Parallel
from megatron_rl.loss import Sequences, count_kept, kept_tokens, select_tokens, token_keys
from megatron_rl.loss.ratios import finite_tokens
from megatron_rl.loss.teacher import with_teacher_term
from megatron_rl.records.packed import MiniBatch, PackedBatch


def with_teachers(
    batches: Sequence[PackedBatch], old_logprobs: Sequence[Tensor], loss: LossConfig
) -> list[PackedBatch]:
    """Return the micro-batches with their teachers' terms in their advantages; unchanged without
    `old_logprobs`, which only the last pipeline stage has, and where loss.teacher_form is a
    divergence, which the update adds to the loss.
    """
    if not old_logprobs or loss.teacher_form != "token":
        return list(batches)
    return [with_teacher_term(batch, old) for batch, old in zip(batches, old_logprobs, strict=True)]


def selected_tokens(
    micro_batches: Sequence[PackedBatch],
    old_logprobs: Sequence[Tensor],
    loss: LossConfig,
    parallel: Parallel,
) -> tuple[Tensor, ...] | None:
    """Return the tokens that loss.select chooses, bool [T] per micro-batch; None without it."""
    switches = loss.switches
    if switches.select == "none":
        return None
    keys = [
        token_keys(b.rollout_ids, b.sequence_ids, b.positions, b.rollout_logprobs)
        for b in micro_batches
    ]
    old = torch.cat(list(old_logprobs))
    mask = torch.cat([batch.loss_mask for batch in micro_batches]) & finite_tokens(old)
    advantages = torch.cat([batch.advantages for batch in micro_batches])
    chosen = select_tokens(old, advantages, mask, torch.cat(keys), switches, parallel.dp_cp_group)
    return chosen.split([len(part) for part in old_logprobs])


def make_sequences(
    batch: MiniBatch,
    micro_batches: Sequence[PackedBatch],
    old_logprobs: Sequence[Tensor],
    loss: LossConfig,
    parallel: Parallel,
) -> list[Sequences]:
    """Return the sequences of every micro-batch, with n_i where loss.aggregation = kept_mean.

    batch: this replica's mini-batch on the host.  micro_batches: this rank's rows of it on the
    device.  Raises ValueError for kept_mean where the mini-batch does not record which sequences
    are one response.
    """
    # on context ranks a sequence's sums are all-reduced over the CP group
    every = [
        Sequences(
            part.sequence_ids, len(part.rollout_ids), part.response_lengths, parallel.cp_group
        )
        for part in micro_batches
    ]
    if loss.switches.aggregation != "kept_mean":
        return every
    if any((part.loss_mask & (part.response_ids < 0)).any() for part in batch.micro_batches):
        raise ValueError(
            "loss.aggregation = kept_mean needs Sample.response of every sequence in the loss, and"
            " this mini-batch lacks it: an earlier version saved it; compute it with the program"
            " that saved it"
        )
    kept = [
        kept_tokens(old, part.rollout_logprobs, part.loss_mask, sequences, loss)
        for part, old, sequences in zip(micro_batches, old_logprobs, every, strict=True)
    ]
    responses = torch.cat([part.response_ids for part in micro_batches])
    lengths = count_kept(torch.cat(kept), responses, batch.num_responses, parallel.dp_cp_group)
    parts = lengths.split([len(part) for part in kept])
    return [
        replace(sequences, kept_lengths=part) for sequences, part in zip(every, parts, strict=True)
    ]
