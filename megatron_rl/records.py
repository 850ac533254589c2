"""The records that travel between stages.  Read this second, after train.py.

Every stage takes records and returns records; none is changed in place (`dataclasses.replace` makes a new one).

Shapes: S tokens of one sequence (prompt + response), R response tokens, L MoE layers, K top-k, G responses of a group,
B sequences and T packed tokens of one micro-batch (pads included).
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import torch

FinishReason = Literal["stop", "length", "abort"]
"""abort: cut short, to be resumed (rollout/client/response.py); such a response never leaves the client."""

Files = Mapping[str, Callable[[Path], None]]
"""File name -> what writes it, for a checkpoint: perhaps later and in a thread."""


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
                      Each of the forward that sampled the token it predicts (of several versions: rollout/client/response.py)
                      In memory layer-major where it is made (a transposed view of [L, S - 1, K]): layers copy whole
    policy_versions   int32 [R], version of the weights that sampled each response token; never falls
    missing_routes    bool [S - 1], rows of routed_experts for which the engine holds no route in any layer (their ids are
                      meaningless), or None: every row holds one
    routes_digest     routes_digest() of tokens and routes as they were when the two first met, made here.  It travels with
                      them unchanged (dataclasses.replace too), so that a later mix-up is noticed: see check_digest
    """

    id: str
    tokens: np.ndarray
    prompt_length: int
    rollout_logprobs: np.ndarray
    routed_experts: np.ndarray | None
    finish_reason: FinishReason
    policy_versions: np.ndarray
    response_text: str = ""
    missing_routes: np.ndarray | None = None
    routes_digest: bytes | None = None

    def __post_init__(self) -> None:
        if self.routed_experts is not None and self.routes_digest is None:
            object.__setattr__(self, "routes_digest", routes_digest(self.tokens, self.routed_experts))

    @property
    def response_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def has_routes(self) -> bool:
        return self.routed_experts is not None

    @property
    def oldest_version(self) -> int:
        return int(self.policy_versions.min())

    @property
    def is_mixed(self) -> bool:
        """Whether weights of more than one version sampled it."""
        return bool((self.policy_versions != self.policy_versions[0]).any())


def version_spans(versions: np.ndarray) -> list[list[int]]:
    """[[version, tokens], ...]: the runs of equal values in int32 [R], in order."""
    cuts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return [[int(versions[a]), b - a] for a, b in pairwise(cuts)]


def spanned_versions(spans: Sequence[Sequence[int]]) -> np.ndarray:
    """int32 [R]; the inverse of `version_spans`."""
    return np.repeat(np.array([span[0] for span in spans], np.int32), [span[1] for span in spans])


DIGEST_BYTES = 16


def routes_digest(tokens: np.ndarray, routed_experts: np.ndarray) -> bytes:
    """What says that these routes [S - 1, L, K] are of these tokens [S]: blake2b of the tokens and of every row's ids in
    the first MoE layer, 16 bytes.

    One layer of every row is enough to tell rollouts, rows and lengths apart, and is 1/L of the bytes; damage to other
    layers is the business of the id checks.  Independent of memory layout and id type.
    """
    first_layer = routed_experts[:, 0] if routed_experts.ndim == 3 and routed_experts.shape[1] else routed_experts
    digest = hashlib.blake2b(np.ascontiguousarray(tokens, "<i8").data, digest_size=DIGEST_BYTES)
    digest.update(np.ascontiguousarray(first_layer, "<i2").data)
    return digest.digest()


def check_digest(name: str, tokens: np.ndarray, routed_experts: np.ndarray, digest: bytes | None) -> None:
    """Raise ValueError, naming the rollout, unless its routes still are those of its tokens."""
    found = routes_digest(tokens, routed_experts)
    if found != digest:
        raise ValueError(
            f"rollout {name}: digest of tokens and routed experts is {found.hex()}, rule is that of the payload they came "
            f"from, {'none' if digest is None else digest.hex()}: the routes are another rollout's, or tokens or rows were "
            "edited or cut after sampling"
        )


@dataclass(frozen=True)
class RolloutGroup:
    """The G responses to one prompt; `rewards`, `advantages` and `penalties` are float32 [G], filled by their stages.

    rewards are the task's, as people read them, NaN where a response has none (reward.on_error = drop); penalties (for
    length) are added to them where advantages are made.
    """

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    rewards: np.ndarray | None = None
    advantages: np.ndarray | None = None
    penalties: np.ndarray | None = None


class RowState(enum.IntEnum):
    """What the router does with one packed row under replay.  Kept beside the ids, never encoded in them."""

    REPLAYED = 0  # use the given expert ids
    LIVE = 1  # no ids exist (last token of a response, or a gap in its routes): the router chooses
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
    loss_mask         bool [T], True where labels[t] is a response token to learn from (replay.on_missing_route =
    mask_token leaves
                      those out whose row has no route)
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
    lockstep_efficiency: float = (
        1.0  # of the plan, over all replicas: the share of their time in which none waits for another
    )


@dataclass(frozen=True)
class StepResult:
    """Everything one step reports; `step` counts from 0.  `metrics` is reduced over all ranks; names are documented
    in docs/reference/metrics.md."""

    step: int
    policy_version: int
    metrics: dict[str, float]
    per_layer: dict[str, list[float]] = field(default_factory=dict)  # metric name -> one value per MoE layer
