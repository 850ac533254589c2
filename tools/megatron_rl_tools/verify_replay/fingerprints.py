"""Inputs of the proof: random sequences, with one fingerprint route per (token, MoE layer).

The row in which each token must be is computed here in plain loops, from the definition of the
layout, independently of replay/layout.py.  The tests of replay on real ranks (tests/dist) use the
same fingerprints and the same loops.
Shapes: S tokens of a sequence, L MoE layers, E experts, K top-k.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from megatron_rl.batch.pack import PackRule, Sample, pack
from megatron_rl.records import Rollout
from megatron_rl.records.packed import MiniBatch
from megatron_rl_tools.verify_replay.episodes import (
    LEAST,
    TurnRequest,
    broken,
    expected_routes,
    join,
    make_request,
    other_forwards,
    turn_bounds,
)

ROUNDS = 2
"""Batches in a row: a route that outlives its batch shows in the second one."""
SEQUENCES_PER_MICRO_BATCH = 2

Key = tuple[str, int, int]
"""(rollout, position, MoE layer)."""
Route = tuple[int, ...]
"""Expert ids, ascending."""
Owner = tuple[str, int] | None
"""The token that a row belongs to: (rollout, position), or None for a pad."""


@dataclass(frozen=True)
class Shape:
    """The sizes that the random data depends on."""

    num_layers: int
    num_experts: int
    top_k: int
    vocab_size: int
    dp_size: int
    cp_size: int
    micro_batches: int
    turns: int = 1


@dataclass(frozen=True)
class Given:
    """The inputs of all ranks, from one seed and thus the same in every process."""

    samples: tuple[tuple[tuple[tuple[Sample, ...], ...], ...], ...]
    """[round][replica][micro-batch] -> sequences."""
    is_unique: bool
    """No two (token, MoE layer) have the same set of experts."""
    requests: Mapping[str, Sequence[TurnRequest]] = field(default_factory=dict)
    """Rollout -> its turns as servers answered them; {} if rollouts have one turn."""

    def rollouts(self, index: int) -> Iterator[Rollout]:
        for replica in self.samples[index]:
            for micro_batch in replica:
                yield from (sample.rollout for sample in micro_batch)

    def routes(self, index: int) -> dict[Key, Route]:
        """Return the route of every token of a round; the last token of a sequence has none."""
        if self.requests:
            names = [rollout.id for rollout in self.rollouts(index)]
            return dict(
                pair for name in names for pair in expected_routes(name, self.requests[name])
            )
        return fingerprint_routes(self.rollouts(index))

    def forwards(self, index: int) -> dict[Route, str]:
        """Return the routes of forwards that no row may have, see episodes.other_forwards."""
        requests = {
            rollout.id: self.requests.get(rollout.id, ()) for rollout in self.rollouts(index)
        }
        return dict(
            pair for name, turns in requests.items() for pair in other_forwards(name, turns)
        )

    def broken(self, fault: str) -> Given:
        """Return the inputs with this fault of EPISODE_FAULTS in the last sequence of every round's
        first micro-batch.
        """
        rounds = []
        for (first, *others), *replicas in self.samples:
            *sound, sample = first
            wrong = broken(sample, self.requests[sample.rollout.id], fault)
            rounds.append((((*sound, wrong), *others), *replicas))
        return replace(self, samples=tuple(rounds))

    def places(self, index: int) -> dict[str, tuple[int, int]]:
        """Return rollout -> (replica, micro-batch)."""
        return {
            sample.rollout.id: (replica, number)
            for replica, micro_batches in enumerate(self.samples[index])
            for number, micro_batch in enumerate(micro_batches)
            for sample in micro_batch
        }


def make_given(shape: Shape, *, seed: int = 0) -> Given:
    """Make random sequences with a random set of K experts for every (token, layer).

    All sets are different if C(E, K) is large enough.  Lengths are the same in every round, and in
    micro-batches 2i and 2i + 1: exchanging two of them changes no shape, so that only the routes
    show it.
    """
    rng = np.random.default_rng(seed)
    pairs = -(-shape.micro_batches // 2)
    size = (shape.dp_size, pairs, SEQUENCES_PER_MICRO_BATCH)
    longer = 2 * LEAST * (shape.turns - 1)
    lengths = rng.integers(2 * shape.cp_size + 3 + longer, 6 * shape.cp_size + 7 + longer, size)
    num_routes = ROUNDS * 2 * int(lengths.sum()) * shape.num_layers * shape.turns
    is_unique = math.comb(shape.num_experts, shape.top_k) >= 2 * num_routes
    used: set[Route] | None = set() if is_unique else None
    requests: dict[str, Sequence[TurnRequest]] = {}

    def sample(name: str, length: int, *, is_cached: bool) -> Sample:
        if shape.turns == 1:
            routes = random_routes(
                rng, length - 1, shape.num_layers, shape.num_experts, shape.top_k, used
            )
            return make_sample(rng, name, routes, shape.vocab_size)
        requests[name] = make_requests(rng, shape, length, used, is_cached=is_cached)
        return Sample(join(name, requests[name]), float(rng.normal()))

    rounds = tuple(
        tuple(
            tuple(
                tuple(
                    sample(f"{index}.{replica}.{number}.{i}", int(length), is_cached=i == 0)
                    for i, length in enumerate(lengths[replica, number // 2])
                )
                for number in range(shape.micro_batches)
            )
            for replica in range(shape.dp_size)
        )
        for index in range(ROUNDS)
    )
    return Given(rounds, is_unique, requests)


def make_requests(
    rng: np.random.Generator, shape: Shape, length: int, used: set[Route] | None, *, is_cached: bool
) -> list[TurnRequest]:
    """Make the turns of an episode of `length` tokens.

    is_cached: whether the server has each turn's input in its cache, up to the last token sampled
    before, or computes everything again.
    """
    tokens = rng.integers(2, shape.vocab_size, length)
    requests: list[TurnRequest] = []
    for start, end in turn_bounds(rng, length, shape.turns):
        routes = random_routes(rng, end - 1, shape.num_layers, shape.num_experts, shape.top_k, used)
        before = requests[-1] if requests and is_cached else None
        requests.append(make_request(rng, tokens[:end], start, routes, shape.vocab_size, before))
    return requests


def random_routes(
    rng: np.random.Generator,
    num_rows: int,
    num_layers: int,
    num_experts: int,
    top_k: int,
    used: set[Route] | None,
) -> np.ndarray:
    """Return random ids [num_rows, L, K], distinct in a row.

    No set of ids is in `used`, to which the new ones are added; None allows any set.
    """
    routes = np.empty((num_rows, num_layers, top_k), np.uint8 if num_experts <= 256 else np.int16)
    for row in routes.reshape(-1, top_k):
        row[:] = rng.permutation(num_experts)[:top_k]
        while used is not None and tuple(sorted(row.tolist())) in used:
            row[:] = rng.permutation(num_experts)[:top_k]
        if used is not None:
            used.add(tuple(sorted(row.tolist())))
    return routes


def make_sample(rng: np.random.Generator, name: str, routes: np.ndarray, vocab_size: int) -> Sample:
    """Make a random sequence with these routes [S - 1, L, K]: 3 prompt tokens, log-probs near
    uniform, a random advantage.
    """
    prompt, length = 3, len(routes) + 1
    rollout = Rollout(
        id=name,
        tokens=rng.integers(2, vocab_size, length),
        prompt_length=prompt,
        rollout_logprobs=(
            -math.log(vocab_size) + 0.3 * rng.standard_normal(length - prompt)
        ).astype(np.float32),
        routed_experts=routes,
        finish_reason="stop",
        policy_versions=np.zeros(length - prompt, np.int32),
    )
    return Sample(rollout, float(rng.normal()))


def fingerprint_routes(rollouts: Iterable[Rollout]) -> dict[Key, Route]:
    """Return the route of every (rollout, position, MoE layer); last tokens have none."""
    routes = {}
    for rollout in rollouts:
        assert rollout.routed_experts is not None
        for position, layers in enumerate(rollout.routed_experts.tolist()):
            for layer, ids in enumerate(layers):
                routes[rollout.id, position, layer] = tuple(sorted(ids))
    return routes


def make_batch(
    replicas: Sequence[Sequence[Sequence[Sample]]], replica: int, rule: PackRule
) -> MiniBatch:
    """Make this replica's mini-batch.

    Each micro-batch ends in a few pad rows, and micro-batches 2i and 2i + 1 have equally many rows.
    """
    micro_batches = []
    for number, samples in enumerate(replicas[replica]):
        peers = replicas if rule.equal_sizes else [replicas[replica]]
        lengths = [
            max(rule.sequence_rows(len(peer[number][i].rollout.tokens)) for peer in peers)
            for i in range(len(samples))
        ]
        micro_batches.append(pack(samples, rule.rows([*lengths, rule.sequence_rows(4)])))
    everyone = [
        sample.rollout for peer in replicas for micro_batch in peer for sample in micro_batch
    ]
    num_tokens = sum(rollout.response_length for rollout in everyone)
    return MiniBatch(
        tuple(micro_batches),
        num_responses=len(everyone),
        num_response_tokens=num_tokens,
        samples=tuple(map(tuple, replicas[replica])),
    )


def rows_on_rank(
    cu_seqlens: Sequence[int],
    cp_rank: int,
    cp_size: int,
    part: int = 0,
    parts: int = 1,
    padded: bool = False,
) -> list[int]:
    """Return the packed row that each row of a rank's routers must be, in their order.

    CP rank r keeps chunks r and 2 cp - 1 - r of the 2 x cp chunks of every sequence, pads included.
    Packed: these rows follow each other, and sequence parallelism gives tensor rank `part` the
    part-th of `parts` equal slices.  Padded: the rows are ordered by position, then by sequence,
    and the slice is one of positions.
    """
    rows = []
    for start, end in itertools.pairwise(cu_seqlens):
        for row in range(start, end):
            chunk = (row - start) * 2 * cp_size // (end - start)
            if cp_size == 1 or chunk in (cp_rank, 2 * cp_size - 1 - cp_rank):
                rows.append(row)
    if padded:
        rows.sort(key=lambda row: (row % cu_seqlens[1], row))
    size = len(rows) // parts
    return rows[part * size : (part + 1) * size]


def owners_of(rollouts: Sequence[Rollout], cu_seqlens: Sequence[int]) -> list[Owner]:
    """Return the owner of each packed row.  rollouts: the micro-batch's, in order."""
    owners: list[Owner] = [None] * cu_seqlens[-1]
    # the last bounds are those of the pads
    for rollout, start in zip(rollouts, cu_seqlens, strict=False):
        for position in range(len(rollout.tokens)):
            owners[start + position] = (rollout.id, position)
    return owners


def owners_on_rank(
    rollouts: Sequence[Rollout],
    cu_seqlens: Sequence[int],
    cp_rank: int,
    cp_size: int,
    part: int = 0,
    parts: int = 1,
    padded: bool = False,
) -> list[Owner]:
    """Return the owner of each row of a rank's routers; see rows_on_rank."""
    owners = owners_of(rollouts, cu_seqlens)
    return [owners[row] for row in rows_on_rank(cu_seqlens, cp_rank, cp_size, part, parts, padded)]


def logprob_keys(
    rollouts: Sequence[Rollout], cu_seqlens: Sequence[int], cp_rank: int, cp_size: int
) -> list[Owner]:
    """Return the owner of each row of a rank's log-probs that predicts a response token, and None
    for all other rows.
    """
    predicting = {
        (rollout.id, place - 1) for rollout in rollouts for place in rollout.sampled.tolist()
    }
    rows = owners_on_rank(rollouts, cu_seqlens, cp_rank, cp_size)
    return [who if who in predicting else None for who in rows]
