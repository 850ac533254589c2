"""Records that are trained on: samples, micro-batches in packed order, mini-batches, results.

Shapes: S tokens of one sequence, L MoE layers, K top-k, B sequences and T packed tokens of one
micro-batch (pads included).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import torch

from megatron_rl.records.rollouts import Rollout
from megatron_rl.records.row_sets import RowSets, TopRows
from megatron_rl.records.teacher_scores import TeacherTop
from megatron_rl.records.token_sets import TokenSets


@dataclass(frozen=True)
class Sample:
    """A rollout with its advantage; after `sequences_of` (batch/split.py), one sequence of a
    micro-batch."""

    rollout: Rollout
    advantage: float
    in_loss: bool = True
    """False: computed, but left out of the loss."""
    episode_length: int | None = None
    """|y| of the episode to which the sequence belongs; None: the rollout's.  0 for a copy that
    only fills a micro-batch (batch/split.py)."""
    sampled_by: int = 0
    """The data-parallel replica that sampled it, whose file of rollouts has its line."""
    save_tokens: bool = False
    """Its token data is written (trainer/recording/token_recorder.py)."""
    response: int | None = None
    """Index of this sample's response among the responses in the loss of the mini-batch, over all
    replicas; equal for all sequences of one response.  None before `make_mini_batch`, and for a
    sample that is left out of the loss."""
    teacher_weight: float = 0.0
    """beta of the response's teacher; above 0 only where rollout.teacher_logprobs exist."""

    @property
    def length(self) -> int:
        """|y|, the number of sampled tokens of the whole response."""
        return self.rollout.episode_length if self.episode_length is None else self.episode_length

    @property
    def is_copy(self) -> bool:
        """True for padding: a duplicate of another sample, which is left out of the loss."""
        return self.episode_length == 0


class RowState(enum.IntEnum):
    """Action of the router on one packed row under replay.

    It is stored next to the ids, never encoded in them.
    """

    REPLAYED = 0
    """It uses the recorded expert ids."""
    LIVE = 1
    """No ids exist (last token of a sequence, or a row without a route): the router chooses."""
    PAD = 2
    """Not a token: the ids are synthetic, distinct and spread over the EP ranks."""


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch in packed order: sequences end to end, then pads as separate sequences.

    Row t holds input token t and everything about PREDICTING token t + 1 of the same sequence.  A
    sequence may end with pads, inside its bounds: under context parallelism, and up to the longest
    one in a padded (BSHD) micro-batch, which is the same flat order with equal bounds, T = B x S.
    The engine slices every per-row tensor to its rank's rows; cu_seqlens stays global.  Routes are
    not packed: every rank cuts its rows and layers from those of the rollouts
    (replay/rollout_routes.py).
    """

    tokens: torch.Tensor
    """int64 [T]."""
    labels: torch.Tensor
    """int64 [T], labels[t] = tokens[t + 1] inside a sequence, 0 where there is none."""
    positions: torch.Tensor
    """int64 [T], restart at 0 in every sequence."""
    cu_seqlens: torch.Tensor
    """int32 [B + 1]; a pad sequence counts as one of B."""
    loss_mask: torch.Tensor
    """bool [T], True where labels[t] is a sampled token to learn from.  replay.on_missing_route =
    mask_token excludes those whose row has no route."""
    rollout_logprobs: torch.Tensor
    """float32 [T], 0 outside loss_mask."""
    advantages: torch.Tensor
    """float32 [T], 0 outside loss_mask."""
    sequence_ids: torch.Tensor
    """int64 [T], index into `rollout_ids`, -1 on pads."""
    response_ids: torch.Tensor
    """int64 [T], Sample.response of the row's sequence, -1 on pads and where it has none."""
    response_lengths: torch.Tensor
    """int64 [T], |y| of the episode of the row's sequence, 1 on pads."""
    row_state: torch.Tensor
    """uint8 [T], RowState."""
    policy_versions: torch.Tensor
    """int64 [T], version of the weights that sampled the row's label; -1 outside loss_mask."""
    rollout_ids: tuple[str, ...]
    """Ids of the sequences."""
    sampling_masks: tuple[TokenSets, ...] | None = None
    """For every sequence the kept sets of its sampled tokens, encoded; None: none were sampled with
    top_p, top_k or min_p."""
    set_index: torch.Tensor | None = None
    """int64 [T], with sampling_masks: index of the row's label among the sampled tokens of all
    sequences, end to end, which is also the index of its kept set; -1 where it has no set."""
    teacher_logprobs: torch.Tensor | None = None
    """float32 [T], log pi_T of the row's label, 0 where teacher_weights is 0; None: no teacher."""
    teacher_weights: torch.Tensor | None = None
    """float32 [T], beta of the row's response, 0 outside loss_mask; None: no teacher."""
    teacher_tops: tuple[TeacherTop, ...] | None = None
    """The teacher's most probable tokens, of every sequence with teacher_weights above 0; None:
    loss.teacher_form = token, or no teacher."""
    top_index: torch.Tensor | None = None
    """int64 [T], with teacher_tops: index of the row's label among the sampled tokens of all
    teacher_tops, end to end; -1 where the row has no teacher or is outside loss_mask."""
    kept: RowSets | None = None
    """Kept sets of this rank's rows, on the device, as the engine decodes them (engine/forward.py);
    None before."""
    top: TopRows | None = None
    """The teacher's most probable tokens of this rank's rows, as `kept`."""

    @property
    def num_tokens(self) -> int:
        return self.tokens.numel()


@dataclass(frozen=True)
class MiniBatch:
    """The input of one optimizer update on this data-parallel replica."""

    micro_batches: tuple[PackedBatch, ...]
    num_responses: int
    """GLOBAL count, over all data-parallel replicas, that divides the loss; an episode of several
    sequences is one response."""
    num_response_tokens: int
    """GLOBAL count, over all data-parallel replicas."""
    samples: tuple[tuple[Sample, ...], ...]
    """The sequences of every micro-batch, from which it was packed; they alone have expert ids."""
    index: int = 0
    """Index of the update that uses it, among the step's N."""
    lockstep_efficiency: float = 1.0
    """Share of time, planned over all replicas, in which no replica waits for another."""
    policy_version: int | None = None
    """Version of pi_old, where metrics by the age of tokens are wanted."""


@dataclass(frozen=True)
class StepResult:
    """The results of one step."""

    step: int
    """Counts from 0; -1 for the evaluation before the first step."""
    policy_version: int
    """Version of the weights after the step: step + 1, or that of the step before where nothing was
    trained (--only rollout)."""
    metrics: dict[str, float]
    """Reduced over all ranks: docs/reference/metrics.md."""
    per_layer: dict[str, list[float]] = field(default_factory=dict)
    """Metric name -> one value per MoE layer."""
