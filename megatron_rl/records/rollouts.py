"""Records that were sampled: responses to prompts, their groups, the episodes of agents, and the
digests that bind them.

Shapes: S tokens of one sequence (prompt + response), R sampled tokens, L MoE layers, K top-k,
G responses of a group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from megatron_rl.records.prompts import Prompt
from megatron_rl.records.teacher_scores import TeacherScores, TeacherTop
from megatron_rl.records.token_sets import TokenSets

FinishReason = Literal["stop", "length", "abort"]
"""abort: stopped early, to be continued (rollout/client/response.py).  Such a response is kept in
Group.prefixes, and in checkpoints; no step trains on it."""


@dataclass(frozen=True)
class EpisodeRecord:
    """Additions of an agent's episode to a sampled sequence.

    The episode's last sequence keeps the fields of the whole episode: reward, metrics, earlier and
    digest.  The other fields belong to the sequence that has them.
    """

    reward: float | None = None
    """Reward of the rollout function or environment; None: the reward function scores."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the rollout function or environment, logged as episode/NAME."""
    turns: tuple[tuple[int, FinishReason], ...] = ()
    """(end in `tokens`, finish reason) of each complete turn; () for a response of one request."""
    turn_rewards: tuple[float, ...] = ()
    """One reward per span of sampled tokens (Rollout.turn_spans), where the episode gave any; turns
    without an observation between them share a span.  They are recorded only: advantages come from
    the reward."""
    turn_seconds: tuple[tuple[float, float], ...] = field(default=(), compare=False)
    """(environment, model) seconds of each entry of `turns`, () where they are not known: since the
    previous turn of the sequence, and from the request to its answer.  They are recorded only:
    neither digests nor comparisons have them."""
    messages: tuple[Mapping[str, object], ...] = ()
    """Chat messages that followed the prompt (agent.renderer)."""
    earlier: tuple[Rollout, ...] = ()
    """The episode's other sequences, in the order of their last turns, with ids ID/0, ID/1 ..."""
    digest: bytes | None = None
    """episode_digest() of all sequences, computed when they are put together; None where there is
    one sequence."""


NO_EPISODE = EpisodeRecord()
"""The record of a response that is one request."""


@dataclass(frozen=True)
class Rollout:
    """One sampled sequence with everything that the inference engine returned for it.

    The response is what the model sampled, and between its turns what an environment answered.
    Only sampled tokens are learned from, and only they count as the response's length.

    An episode whose history was edited (Session.branch) has several sequences: this one, in which
    the last turn was sampled, and `episode.earlier`.  They share the episode's reward and
    advantage; id and reward_metrics are the episode's too, the other fields are this sequence's.
    """

    id: str
    tokens: np.ndarray
    """int64 [S], prompt, then response (the matched stop token included)."""
    prompt_length: int
    """Number of tokens before the first sampled one."""
    rollout_logprobs: np.ndarray
    """float32 [R], log mu(y_t) of the sampled tokens; with a sampling_mask renormalised over
    each token's set."""
    routed_experts: np.ndarray | None
    """uint8 (int16 above 256 experts) [S - 1, L, K], the experts that the server used for rows
    0..S-2, MoE layers only, in layer order; None when the run does not request routes.  The last
    token was never an input: it has no row.  Row j comes from the forward pass that sampled token
    j + 1, or, where token j + 1 was not sampled, from the first one that computed token j (several
    requests: rollout/client/response.py).  Memory is layer-major (a transposed view of
    [L, S - 1, K]), so that one layer is one contiguous copy."""
    finish_reason: FinishReason
    policy_versions: np.ndarray
    """int32 [R], version of the weights that sampled each token; never decreases."""
    response_text: str = ""
    missing_routes: np.ndarray | None = None
    """bool [S - 1], rows of routed_experts without a route in any layer (their ids are
    meaningless); None: every row has one."""
    routes_digest: bytes | None = None
    """routes_digest() of tokens, environment and routes, computed when the record is made.  It
    travels with them unchanged (dataclasses.replace too), so that check_digest detects a later
    mix-up."""
    environment: tuple[tuple[int, int], ...] = ()
    """(start, end) of each span of `tokens` that an environment wrote after the prompt, in order;
    () for a response of one turn, which is all sampled: S = prompt_length + R."""
    sampling_mask: TokenSets | None = None
    """The kept set S_t of each of the R sampled tokens (rollout.top_p, top_k, min_p); None: the
    entire vocabulary."""
    teacher_logprobs: np.ndarray | None = None
    """float32 [R], log pi_T of the sampled tokens, at temperature 1; None: no teacher has scored
    the sequence."""
    teacher_top: TeacherTop | None = None
    """The teacher's most probable tokens in the place of each sampled one; None with
    loss.teacher_form = token."""
    reward_metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the reward function."""
    episode: EpisodeRecord = NO_EPISODE

    def __post_init__(self) -> None:
        if self.episode.earlier and self.episode.digest is None:
            digest = episode_digest(self.sequences)
            object.__setattr__(self, "episode", replace(self.episode, digest=digest))
        if self.routed_experts is not None and self.routes_digest is None:
            digest = routes_digest(self.tokens, self.routed_experts, self.environment)
            object.__setattr__(self, "routes_digest", digest)

    @property
    def sequences(self) -> tuple[Rollout, ...]:
        """Every sequence of the episode, alone; most rollouts have one."""
        return (*self.episode.earlier, self.alone)

    @property
    def alone(self) -> Rollout:
        """This sequence without the episode's other ones."""
        if not self.episode.earlier:
            return self
        return self.with_episode(earlier=(), digest=None)

    @property
    def without_routes(self) -> Rollout:
        """This episode without its expert ids.

        routes_digest stays: it detects ids that are not those of these tokens (`with_routes`).
        """
        earlier = [sequence.without_routes for sequence in self.episode.earlier]
        return replace(self, routed_experts=None).after(earlier)

    def with_routes_of(self, rollout: Rollout) -> Rollout:
        """Return this episode with the expert ids of `rollout`, which has the same sequences."""
        pairs = zip(self.episode.earlier, rollout.episode.earlier, strict=True)
        earlier = [sequence.with_routes_of(other) for sequence, other in pairs]
        return replace(self, routed_experts=rollout.routed_experts).after(earlier)

    @property
    def is_taught(self) -> bool:
        """True if a teacher has scored every sequence of the episode."""
        return all(s.teacher_logprobs is not None for s in (*self.episode.earlier, self))

    def with_teacher(self, scores: Sequence[TeacherScores]) -> Rollout:
        """Return this episode with the teacher's scores, one per sequence in order.

        The digest of an episode is made again, as it covers them.
        """
        sequences = (*self.episode.earlier, check_episode(self).alone)
        *earlier, last = (
            replace(sequence, teacher_logprobs=part.logprobs, teacher_top=part.top)
            for sequence, part in zip(sequences, scores, strict=True)
        )
        return last.after(earlier)

    def with_episode(self, **changes: object) -> Rollout:
        """Return a copy with these fields of `episode` changed."""
        return replace(self, episode=replace(self.episode, **changes))  # type: ignore[arg-type]

    def after(self, earlier: Sequence[Rollout]) -> Rollout:
        """Return the episode of these sequences and this one, which ends it."""
        return self.with_episode(earlier=tuple(earlier)) if earlier else self

    @property
    def response_length(self) -> int:
        """R, the number of sampled tokens of this sequence."""
        return len(self.tokens) - self.prompt_length - self.environment_length

    @property
    def episode_length(self) -> int:
        """|y|, the number of sampled tokens of all sequences of the episode."""
        return sum(sequence.response_length for sequence in (*self.episode.earlier, self))

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
        """(start, end) of each span of sampled tokens; between two of them an environment wrote."""
        places = [place for span in self.environment for place in span]
        bounds = [self.prompt_length, *places, len(self.tokens)]
        return list(zip(bounds[::2], bounds[1::2], strict=True))

    @property
    def span_finish_reasons(self) -> tuple[FinishReason, ...]:
        """Finish reason of the last turn in each span of `turn_spans`; () without an episode."""
        ends, reasons = [end for _, end in self.turn_spans], dict(self.episode.turns)
        return tuple(reasons[end] for end in ends) if reasons.keys() >= set(ends) else ()

    @property
    def span_seconds(self) -> list[list[float]]:
        """[environment, model] seconds of each span of `turn_spans`, [] where they are not known.

        Turns without an observation between them are added: they share a span.
        """
        turns, seconds = self.episode.turns, self.episode.turn_seconds
        if not self.span_finish_reasons or len(seconds) != len(turns):
            return []
        return [
            np.sum([s for (at, _), s in zip(turns, seconds, strict=True) if start < at <= end], 0)
            .round(4)
            .tolist()
            for start, end in self.turn_spans
        ]

    @property
    def num_spans(self) -> int:
        """Number of spans of sampled tokens."""
        return 1 + len(self.environment)

    @property
    def has_routes(self) -> bool:
        return self.routed_experts is not None

    @property
    def oldest_version(self) -> int:
        """The oldest weight version over all sequences of the episode."""
        sequences = (*self.episode.earlier, self)
        return min(int(sequence.policy_versions.min()) for sequence in sequences)

    @property
    def is_mixed(self) -> bool:
        """True if weights of more than one version sampled the episode."""
        first, sequences = self.policy_versions[0], (*self.episode.earlier, self)
        return any((sequence.policy_versions != first).any() for sequence in sequences)

    def named(self, name: str) -> Rollout:
        """Return a copy with this id; earlier sequences get ids derived from it."""
        earlier = tuple(
            replace(sequence, id=f"{name}/{number}")
            for number, sequence in enumerate(self.episode.earlier)
        )
        return replace(self, id=name).with_episode(earlier=earlier)


@dataclass(frozen=True)
class RolloutGroup:
    """The G responses to one prompt.  Stages fill in the arrays."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    rewards: np.ndarray | None = None
    """float32 [G], without `penalties`; those of the reward function include reward.format_penalty
    in training.  NaN where a response has none (reward.on_error = drop, or a failure in
    evaluation)."""
    advantages: np.ndarray | None = None
    """float32 [G]."""
    penalties: np.ndarray | None = None
    """float32 [G], penalties for length, added to the rewards where advantages are made."""
    teacher_weights: np.ndarray | None = None
    """float32 [G], beta of every response, 0 where its teacher does not teach it; None: no run with
    teachers."""


def without_routes(groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """Return the groups without expert ids.

    Rewards, penalties, advantages, names, metrics and lines of files are made from these, so that
    few files can see, and misalign, expert ids (tests/dist/test_id_holders.py).  Arrays are shared,
    not copied.  `with_routes` follows before the groups are trained on.
    """
    return [
        replace(group, rollouts=tuple(rollout.without_routes for rollout in group.rollouts))
        for group in groups
    ]


def with_routes(
    groups: Sequence[RolloutGroup], sampled: Sequence[RolloutGroup]
) -> list[RolloutGroup]:
    """Return the groups with the expert ids of `sampled`, from which without_routes made them."""
    return [
        replace(
            group,
            rollouts=tuple(
                rollout.with_routes_of(other)
                for rollout, other in zip(group.rollouts, origin.rollouts, strict=True)
            ),
        )
        for group, origin in zip(groups, sampled, strict=True)
    ]


def version_spans(versions: np.ndarray) -> list[list[int]]:
    """Return [[version, number of tokens], ...], the run-length encoding of int32 [R]."""
    cuts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return [[int(versions[a]), b - a] for a, b in pairwise(cuts)]


def spanned_versions(spans: Sequence[Sequence[int]]) -> np.ndarray:
    """Return int32 [R], the inverse of `version_spans`."""
    return np.repeat(np.array([span[0] for span in spans], np.int32), [span[1] for span in spans])


DIGEST_BYTES = 16


def routes_digest(
    tokens: np.ndarray, routed_experts: np.ndarray, environment: Sequence[tuple[int, int]] = ()
) -> bytes:
    """Return the digest that binds routes [S - 1, L, K] to tokens [S].

    blake2b, 16 bytes, of tokens, environment and the first MoE layer's ids.  One layer of every row
    distinguishes rollouts, rows and lengths with 1/L of the bytes; the id checks cover the other
    layers.  It depends neither on memory layout nor on the type of the ids.
    """
    has_layers = routed_experts.ndim == 3 and routed_experts.shape[1]
    first_layer = routed_experts[:, 0] if has_layers else routed_experts
    # fixed types and byte order: files have the digest, too, and another machine may read them
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
    actual = routes_digest(tokens, routed_experts, environment)
    if actual != digest:
        raise ValueError(
            f"rollout {name}: digest of tokens and routed experts is {actual.hex()}, must be that"
            f" of the payload they came from, {'none' if digest is None else digest.hex()}: the"
            " routes are another rollout's, or tokens or rows were edited or cut after sampling, or"
            " spans of the environment moved"
        )


def episode_digest(sequences: Sequence[Rollout]) -> bytes:
    """Return the digest that binds the sequences of an episode to one another and to the place
    where learning begins in each.

    blake2b, 16 bytes, of their order, prompt lengths, environments, tokens, log-probs, weight
    versions and, where there are any, the teacher's numbers.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for sequence in sequences:
        spans = np.ravel(sequence.environment).tolist()
        head = [sequence.prompt_length, len(sequence.tokens), *spans]
        # the lengths first: else the bytes of one sequence could be read as those of two
        digest.update(np.array([len(head), *head], "<i8").tobytes())
        for values, dtype in (
            (sequence.tokens, "<i8"),
            (sequence.rollout_logprobs, "<f4"),
            (sequence.policy_versions, "<i4"),
        ):
            digest.update(np.ascontiguousarray(values, dtype).data)
        if sequence.teacher_logprobs is not None:
            digest.update(np.ascontiguousarray(sequence.teacher_logprobs, "<f4").data)
        if sequence.teacher_top is not None:
            digest.update(sequence.teacher_top.tobytes())
    return digest.digest()


def check_episode(rollout: Rollout) -> Rollout:
    """Return the rollout.  Raises ValueError, naming it, unless its sequences are those that were
    put together: a token might be learned from twice, or with the advantage of another episode.
    """
    episode = rollout.episode
    if not episode.earlier and episode.digest is None:
        return rollout
    actual = episode_digest(rollout.sequences)
    if actual != episode.digest:
        recorded = "none" if episode.digest is None else episode.digest.hex()
        raise ValueError(
            f"rollout {rollout.id}: digest of its {len(rollout.sequences)} sequences is"
            f" {actual.hex()}, must be the one recorded with the episode, {recorded}: a sequence"
            " was lost, swapped or repeated, or where it begins to be learned from was moved"
        )
    return rollout
