"""The records that travel between stages.  Read this second, after train.py.

Every stage takes records and returns records; none is changed in place (`dataclasses.replace` makes a new one).

Shapes: S tokens of one sequence (prompt + response), R response tokens, L MoE layers, K top-k, G responses of a group,
B sequences and T packed tokens of one micro-batch (pads included).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Prompt:
    """One question.  `token_ids` is what the engines see; `text` is what people read; `label` is what the reward compares."""

    id: str
    text: str
    token_ids: tuple[int, ...]
    label: str


@dataclass(frozen=True)
class Rollout:
    """One sampled sequence with everything the inference engine said about it.

    tokens            int64 [S], prompt then response (the matched stop token included)
    prompt_length     S - R
    rollout_logprobs  float32 [R], log mu_old(y_t) of the sampled tokens
    routed_experts    uint8 (int16 above 256 experts) [S - 1, L, K], e^mu_old of rows 0..S-2, MoE layers only, in layer
                      order, or None when the run does not ask for routes.  The last token was never an input: no row.
                      In memory layer-major where it is made (a transposed view of [L, S - 1, K]): layers copy whole
    policy_version    version of the weights that sampled every token
    """

    id: str
    tokens: np.ndarray
    prompt_length: int
    rollout_logprobs: np.ndarray
    routed_experts: np.ndarray | None
    finish_reason: FinishReason
    policy_version: int
    response_text: str = ""

    @property
    def response_length(self) -> int:
        return len(self.tokens) - self.prompt_length


@dataclass(frozen=True)
class RolloutGroup:
    """The G responses to one prompt; `rewards`, `advantages` and `penalties` are float32 [G], filled by their stages.

    rewards are the task's, as people read them; penalties (for length) are added to them where advantages are made.
    """

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    rewards: np.ndarray | None = None
    advantages: np.ndarray | None = None
    penalties: np.ndarray | None = None


class RowState(enum.IntEnum):
    """What the router does with one packed row under replay.  Kept beside the ids, never encoded in them."""

    REPLAYED = 0  # use the given expert ids
    LIVE = 1  # no ids exist (last token of a response): the router chooses
    PAD = 2  # not a token: synthetic distinct ids spread over EP ranks


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch in packed order: sequences end to end, then pads as sequences of their own.

    Row t holds input token t and everything about PREDICTING token t + 1 of the same sequence.  Each sequence may be
    followed by pads, inside its bounds: under context parallelism, and up to the longest in a padded (BSHD) micro-batch,
    which is the same flat order with equal bounds, T = B x S.  The engine cuts every per-row tensor to its rank's rows;
    cu_seqlens stays global.
    tokens, labels    int64 [T]; labels[t] = tokens[t + 1] inside a sequence, 0 where there is none
    positions         int64 [T], restart at 0 in every sequence
    cu_seqlens        int32 [B + 1] (a pad sequence counts as one of B)
    loss_mask         bool [T], True where labels[t] is a response token
    rollout_logprobs  float32 [T], 0 outside loss_mask
    advantages        float32 [T], 0 outside loss_mask
    sequence_ids      int64 [T], index into `rollout_ids`, -1 on pads
    response_lengths  int64 [T], |y| of the row's own sequence, 1 on pads
    routed_experts    per rollout its uint8 | int16 [S - 1, L, K], which begins at row cu_seqlens[b], or None.  Not packed
                      here: each rank copies its own rows and layers only (replay/layout.py)
    row_state         uint8 [T], RowState
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    cu_seqlens: torch.Tensor
    loss_mask: torch.Tensor
    rollout_logprobs: torch.Tensor
    advantages: torch.Tensor
    sequence_ids: torch.Tensor
    response_lengths: torch.Tensor
    routed_experts: tuple[np.ndarray, ...] | None
    row_state: torch.Tensor
    rollout_ids: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        return self.tokens.numel()


@dataclass(frozen=True)
class MiniBatch:
    """What one optimizer update consumes on this data-parallel replica, with the GLOBAL counts that divide its loss."""

    micro_batches: tuple[PackedBatch, ...]
    num_responses: int  # over all data-parallel replicas
    num_response_tokens: int  # over all data-parallel replicas
    index: int = 0  # which of the step's N updates consumes it


@dataclass(frozen=True)
class StepResult:
    """Everything one step reports.  `metrics` is reduced over all ranks; names are documented in docs/metrics.md."""

    step: int
    policy_version: int
    metrics: dict[str, float]
    per_layer: dict[str, list[float]] = field(default_factory=dict)  # metric name -> one value per MoE layer
