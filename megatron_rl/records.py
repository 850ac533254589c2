"""The records that travel between stages.  Read this second, after train.py.

Every stage takes and returns records; none is changed in place (`dataclasses.replace` makes a new
one).

Shapes: S tokens of one sequence (prompt + response), R sampled tokens, L MoE layers, K top-k, G
responses of a group, B sequences and T packed tokens of one micro-batch (pads included).
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from megatron_rl.sampling_mask import KeptTokens, SamplingMask

FinishReason = Literal["stop", "length", "abort"]
"""abort: stopped early, to be continued (rollout/client/response.py); such a response never leaves
the client.
"""

Files = Mapping[str, Callable[[Path], None]]
"""File name -> function that writes it; a checkpoint may call it later, in a thread."""


@dataclass(frozen=True)
class Prompt:
    """One question: `token_ids` for the engines, `text` for people, `label` and `metadata` (further
    columns of the row, JSON) for the reward."""

    id: str
    text: str
    token_ids: tuple[int, ...]
    label: str
    metadata: Mapping[str, object] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Rollout:
    """One sampled sequence with everything that the inference engine returned for it; or an episode
    of several sequences.

    The response is what the model sampled, and between its turns what an environment answered: only
    sampled tokens are learned from, and only they are counted as the response's length.
    An episode whose history was edited (Session.branch) has several sequences: this one, in which
    the last turn was sampled, and `earlier`.  They share the episode's reward and advantage; id,
    reward and metrics are the episode's, the other fields this sequence's alone.
    tokens            int64 [S], prompt then response (the matched stop token included)
    prompt_length     tokens before the first sampled one
    environment       (start, end) of each span of `tokens` that an environment wrote after the
                      prompt, in order; () for a rollout of one turn, whose response is all sampled: S = prompt_length + R
    rollout_logprobs  float32 [R], log mu_old(y_t) of the sampled tokens; with a sampling_mask
                      renormalised over each token's set
    sampling_mask     the kept set S_t of each of the R sampled tokens (rollout.top_p, top_k,
                      min_p); None: the entire vocabulary
    routed_experts    uint8 (int16 above 256 experts) [S - 1, L, K], e^mu_old of rows 0..S-2, MoE
                      layers only, in layer order; None when the run does not request routes.  The
                      last token was never an input: no row. Row j comes from the forward pass that
                      sampled token j + 1, or, where token j + 1 was not sampled, from the first one
                      that computed token j (several requests: rollout/client/response.py). Memory
                      is layer-major (a transposed view of [L, S - 1, K]), so that one layer is one
                      contiguous copy
    policy_versions   int32 [R], version of the weights that sampled each token; never decreases
    missing_routes    bool [S - 1], rows of routed_experts without a route in any layer (their ids
                      are meaningless); None: every row has one
    routes_digest     routes_digest() of tokens, environment and routes, computed when the record is
                      made.  It travels with them unchanged (dataclasses.replace too), so that a
                      later mix-up is detected: see check_digest
    reward, metrics   of the rollout function (rollout/agents/); None: the reward function scores
    turns             (end in `tokens`, finish reason) of each complete turn of an episode; () for a
                      response that is one request
    reward_metrics    of the reward function
    turn_rewards      of each turn, a span of sampled tokens, as the rollout function or environment
                      gave them; () where none.  They are recorded only: advantages come from the
                      reward
    messages          what followed the prompt, as chat messages (agent.renderer); () without
    earlier           the episode's other sequences, in the order of their last turns, with ids
                      ID/0, ID/1 ...
    episode_digest    episode_digest() of all sequences, computed when they are put together; None
                      where there is one
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
    environment: tuple[tuple[int, int], ...] = ()
    sampling_mask: SamplingMask | None = None
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    turns: tuple[tuple[int, FinishReason], ...] = ()
    reward_metrics: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: tuple[float, ...] = ()
    messages: tuple[Mapping[str, object], ...] = ()
    earlier: tuple[Rollout, ...] = ()
    episode_digest: bytes | None = None

    def __post_init__(self) -> None:
        if self.earlier and self.episode_digest is None:
            object.__setattr__(self, "episode_digest", episode_digest(self.sequences))
        if self.routed_experts is not None and self.routes_digest is None:
            digest = routes_digest(self.tokens, self.routed_experts, self.environment)
            object.__setattr__(self, "routes_digest", digest)

    @property
    def sequences(self) -> tuple[Rollout, ...]:
        """All sequences of the episode, each alone; most rollouts have one."""
        return (
            *self.earlier,
            replace(self, earlier=(), episode_digest=None) if self.earlier else self,
        )

    @property
    def response_length(self) -> int:
        """R, the number of sampled tokens of this sequence."""
        return len(self.tokens) - self.prompt_length - self.environment_length

    @property
    def episode_length(self) -> int:
        """|y|, the number of sampled tokens of all sequences of the episode."""
        return sum(sequence.response_length for sequence in (*self.earlier, self))

    @property
    def environment_length(self) -> int:
        return sum(end - start for start, end in self.environment)

    @property
    def sampled(self) -> np.ndarray:
        """int64 [R], places of the sampled tokens in `tokens`; row `sampled - 1` predicts them."""
        is_sampled = np.ones(len(self.tokens), bool)
        is_sampled[: self.prompt_length] = False
        for start, end in self.environment:
            is_sampled[start:end] = False
        return np.flatnonzero(is_sampled)

    @property
    def turn_spans(self) -> list[tuple[int, int]]:
        """(start, end) of each turn, a span of sampled tokens; between two of them an environment
        wrote.
        """
        bounds = [
            self.prompt_length,
            *(place for span in self.environment for place in span),
            len(self.tokens),
        ]
        return list(zip(bounds[::2], bounds[1::2], strict=True))

    @property
    def turn_ends(self) -> tuple[FinishReason, ...]:
        """Finish reason of each span of sampled tokens, that of its last turn; () where it is no
        episode.
        """
        ends, reasons = [end for _, end in self.turn_spans], dict(self.turns)
        return tuple(reasons[end] for end in ends) if reasons.keys() >= set(ends) else ()

    @property
    def num_turns(self) -> int:
        """Spans of sampled tokens."""
        return 1 + len(self.environment)

    @property
    def has_routes(self) -> bool:
        return self.routed_experts is not None

    @property
    def oldest_version(self) -> int:
        """Of all sequences."""
        return min(int(sequence.policy_versions.min()) for sequence in (*self.earlier, self))

    @property
    def is_mixed(self) -> bool:
        """Whether weights of more than one version sampled the episode."""
        return any(
            (sequence.policy_versions != self.policy_versions[0]).any()
            for sequence in (*self.earlier, self)
        )

    def named(self, name: str) -> Rollout:
        """The same with this id; its earlier sequences follow."""
        earlier = tuple(
            replace(sequence, id=f"{name}/{number}") for number, sequence in enumerate(self.earlier)
        )
        return replace(self, id=name, earlier=earlier)


def version_spans(versions: np.ndarray) -> list[list[int]]:
    """[[version, tokens], ...]: run-length encoding of int32 [R]."""
    cuts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return [[int(versions[a]), b - a] for a, b in pairwise(cuts)]


def spanned_versions(spans: Sequence[Sequence[int]]) -> np.ndarray:
    """int32 [R]; the inverse of `version_spans`."""
    return np.repeat(np.array([span[0] for span in spans], np.int32), [span[1] for span in spans])


DIGEST_BYTES = 16


def routes_digest(
    tokens: np.ndarray, routed_experts: np.ndarray, environment: Sequence[tuple[int, int]] = ()
) -> bytes:
    """Binds routes [S - 1, L, K] to tokens [S]: blake2b, 16 bytes, of tokens, environment and the
    first MoE layer's ids.

    One layer of every row distinguishes rollouts, rows and lengths with 1/L of the bytes; the id
    checks cover the other layers.  Independent of memory layout and id type.
    """
    first_layer = (
        routed_experts[:, 0]
        if routed_experts.ndim == 3 and routed_experts.shape[1]
        else routed_experts
    )
    digest = hashlib.blake2b(np.ascontiguousarray(tokens, "<i8").data, digest_size=DIGEST_BYTES)
    digest.update(np.ascontiguousarray(first_layer, "<i2").data)
    digest.update(np.array(environment, "<i8").tobytes())
    return digest.digest()


def check_digest(
    name: str,
    tokens: np.ndarray,
    routed_experts: np.ndarray,
    digest: bytes | None,
    environment: Sequence[tuple[int, int]] = (),
) -> None:
    """Raise ValueError, naming the rollout, unless its routes still belong to its tokens."""
    found = routes_digest(tokens, routed_experts, environment)
    if found != digest:
        raise ValueError(
            f"rollout {name}: digest of tokens and routed experts is {found.hex()}, must be that of"
            f" the payload they came from, {'none' if digest is None else digest.hex()}: the routes"
            " are another rollout's, or tokens or rows were edited or cut after sampling, or spans"
            " of the environment moved"
        )


def episode_digest(sequences: Sequence[Rollout]) -> bytes:
    """Binds the sequences of an episode to one another and to where each begins to be learned from:
    blake2b, 16 bytes, of their order, prompt lengths, environments, tokens, log-probs and weight
    versions."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for sequence in sequences:
        head = [
            sequence.prompt_length,
            len(sequence.tokens),
            *np.ravel(sequence.environment).tolist(),
        ]
        digest.update(np.array([len(head), *head], "<i8").tobytes())
        for values, dtype in (
            (sequence.tokens, "<i8"),
            (sequence.rollout_logprobs, "<f4"),
            (sequence.policy_versions, "<i4"),
        ):
            digest.update(np.ascontiguousarray(values, dtype).data)
    return digest.digest()


def check_episode(rollout: Rollout) -> Rollout:
    """The rollout; ValueError, naming it, unless its sequences are those that were put together.

    Else a token might be learned from twice, or with the advantage of another episode.
    """
    if not rollout.earlier and rollout.episode_digest is None:
        return rollout
    found = episode_digest(rollout.sequences)
    if found != rollout.episode_digest:
        recorded = "none" if rollout.episode_digest is None else rollout.episode_digest.hex()
        raise ValueError(
            f"rollout {rollout.id}: digest of its {len(rollout.sequences)} sequences is"
            f" {found.hex()}, must be the one recorded with the episode, {recorded}: a sequence was"
            " lost, swapped or repeated, or where it begins to be learned from was moved"
        )
    return rollout


@dataclass(frozen=True)
class RolloutGroup:
    """The G responses to one prompt; `rewards`, `advantages` and `penalties` are float32 [G],
    filled by their stages.

    rewards are the task's, as people read them, NaN where a response has none (reward.on_error =
    drop); penalties (for length) are added to them where advantages are made.
    """

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    rewards: np.ndarray | None = None
    advantages: np.ndarray | None = None
    penalties: np.ndarray | None = None


@dataclass(frozen=True)
class Sample:
    """A rollout with its advantage; after `sequences`, one sequence of a micro-batch.

    in_loss False: computed, but left out of the loss.  episode_length: of the episode that the
    sequence is of, None for its own; 0 for a copy that only fills a micro-batch (batch/split.py).
    sampled_by: the data-parallel replica that sampled it, whose rollouts*.jsonl has its line;
    save_tokens: its token data is written (trainer/token_recorder.py).
    response: number of the response among those of the job's mini-batch that are in the loss, the
    same for all its sequences; None before `make_mini_batch` and where it is left out.
    """

    rollout: Rollout
    advantage: float
    in_loss: bool = True
    episode_length: int | None = None
    sampled_by: int = 0
    save_tokens: bool = False
    response: int | None = None

    @property
    def length(self) -> int:
        """|y|, the sampled tokens of the whole response."""
        return self.rollout.episode_length if self.episode_length is None else self.episode_length

    @property
    def is_copy(self) -> bool:
        """Whether another sample is this sequence, and learned from in its place."""
        return self.episode_length == 0

    @property
    def sequences(self) -> list[Sample]:
        """The sequences of the rollout, which is one response however many they are."""
        if not self.rollout.earlier:
            return [self]
        return [
            replace(self, rollout=each, episode_length=self.length)
            for each in self.rollout.sequences
        ]


class RowState(enum.IntEnum):
    """What the router does with one packed row under replay.

    Stored next to the ids, never encoded in them.
    """

    REPLAYED = 0  # use the given expert ids
    LIVE = 1  # no ids exist (last token of a response, or a gap in its routes): the router chooses
    PAD = 2  # not a token: synthetic distinct ids spread over EP ranks


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch in packed order: sequences end to end, then pads as separate sequences.

    Row t holds input token t and everything about PREDICTING token t + 1 of the same sequence.  A
    sequence may end with pads, inside its bounds: under context parallelism, and up to the longest
    one in a padded (BSHD) micro-batch, which is the same flat order with equal bounds, T = B x S.
    The engine slices every per-row tensor to its rank's rows; cu_seqlens stays global.
    tokens, labels    int64 [T]; labels[t] = tokens[t + 1] inside a sequence, 0 where there is none
    positions         int64 [T], restart at 0 in every sequence
    cu_seqlens        int32 [B + 1] (a pad sequence counts as one of B)
    loss_mask         bool [T], True where labels[t] is a sampled token to learn from
                      (replay.on_missing_route = mask_token excludes those whose row has no route)
    rollout_logprobs  float32 [T], 0 outside loss_mask
    advantages        float32 [T], 0 outside loss_mask
    sequence_ids      int64 [T], index into `rollout_ids`, -1 on pads
    response_ids      int64 [T], Sample.response of the row's sequence, -1 on pads and where it has
                      none
    response_lengths  int64 [T], |y| of the episode of the row's own sequence, 1 on pads
    routed_experts    per rollout its uint8 | int16 [S - 1, L, K], starting at row cu_seqlens[b]; or
                      None.  Not packed
                      here: each rank copies only its own rows and layers (replay/layout.py)
    row_state         uint8 [T], RowState
    policy_versions   int64 [T], of the weights that sampled the row's label; -1 outside loss_mask
    sampling_masks    per rollout the kept sets of its sampled tokens, encoded; None: none were
                      sampled with top_p, top_k, min_p
    mask_tokens       int64 [T], with sampling_masks: number of the row's label among all their
                      tokens, -1 where it has no set
    kept              of this rank's rows, on the device, decoded by the engine (engine/forward.py);
                      None before
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    cu_seqlens: torch.Tensor
    loss_mask: torch.Tensor
    rollout_logprobs: torch.Tensor
    advantages: torch.Tensor
    sequence_ids: torch.Tensor
    response_ids: torch.Tensor
    response_lengths: torch.Tensor
    routed_experts: tuple[np.ndarray, ...] | None
    row_state: torch.Tensor
    policy_versions: torch.Tensor
    rollout_ids: tuple[str, ...]  # of the sequences
    sampling_masks: tuple[SamplingMask, ...] | None = None
    mask_tokens: torch.Tensor | None = None
    kept: KeptTokens | None = None

    @property
    def num_tokens(self) -> int:
        return self.tokens.numel()


@dataclass(frozen=True)
class MiniBatch:
    """The input of one optimizer update on this data-parallel replica, with the GLOBAL counts that
    divide its loss.
    """

    micro_batches: tuple[PackedBatch, ...]
    num_responses: int  # over all data-parallel replicas; an episode of several sequences is one
    num_response_tokens: int  # over all data-parallel replicas
    index: int = 0  # which of the step's N updates uses it
    lockstep_efficiency: float = 1.0
    """Share of time, planned over all replicas, in which no replica waits for another."""
    samples: tuple[tuple[Sample, ...], ...] = ()
    """The sequences of every micro-batch, from which it was packed."""
    policy_version: int | None = None  # of pi_old, where metrics by the age of tokens are wanted


@dataclass(frozen=True)
class StepResult:
    """The results of one step; `step` counts from 0.

    `metrics` is reduced over all ranks: docs/reference/metrics.md.
    """

    step: int
    policy_version: int
    metrics: dict[str, float]
    per_layer: dict[str, list[float]] = field(default_factory=dict)
    """Metric name -> one value per MoE layer."""
