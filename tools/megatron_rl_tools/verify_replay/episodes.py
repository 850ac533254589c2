"""Episodes of several turns for the proof: requests as servers answer them, and the sequence that
must result, by definition.

A request's input is everything before it.  Its forward has a fingerprint route for every row; if
the server has the prefix in its cache, the rows of the prefix have the routes of the forward that
put them there.
    row j     has the route of the forward that sampled token j + 1; if that token was not sampled,
              of the first forward that computed token j
    learned   are the tokens that a request sampled, with its log-probs, and no others
These are plain loops over requests, independent of records.Rollout and rollout/client/response.py.
Shapes: S_k tokens of request k's input and output, R_k sampled, L MoE layers, K top-k.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_rl.batch.pack import Sample
from megatron_rl.records import Rollout
from megatron_rl.records.packed import MiniBatch
from megatron_rl.rollout.client.response import join_parts

PROMPT = 3
LEAST = 2
"""The fewest tokens of a turn, and of an environment's answer."""


@dataclass(frozen=True)
class TurnRequest:
    """One request of an episode, with its answer."""

    tokens: np.ndarray
    """Input and output, int64 [S_k]."""
    first: int
    """Index of the first sampled token."""
    logprobs: np.ndarray
    """Log-probs of the sampled tokens, float32 [R_k]."""
    routes: np.ndarray
    """Expert ids, [S_k - 1, L, K]."""
    is_cached: bool
    """It repeats the routes of the previous request, whose rows are in the cache."""


def least_length(turns: int) -> int:
    return PROMPT + LEAST * (2 * turns - 1)


def turn_bounds(rng: np.random.Generator, length: int, turns: int) -> list[tuple[int, int]]:
    """Return (start, end) of every turn in `length` tokens: a prompt, then turns with the
    environment's answers between them.
    """
    parts = 2 * turns - 1
    extra = rng.multinomial(length - least_length(turns), [1 / parts] * parts)
    ends = [PROMPT, *(PROMPT + np.cumsum(LEAST + extra)).tolist()]
    return list(zip(ends[::2], ends[1::2], strict=True))


def make_request(
    rng: np.random.Generator,
    tokens: np.ndarray,
    first: int,
    routes: np.ndarray,
    vocab_size: int,
    before: TurnRequest | None = None,
) -> TurnRequest:
    """Make a request.  before: the one whose rows are in the server's cache."""
    if before is not None:
        routes[: len(before.routes)] = before.routes
    logprobs = -math.log(vocab_size) + 0.3 * rng.standard_normal(len(tokens) - first)
    return TurnRequest(tokens, first, logprobs.astype(np.float32), routes, before is not None)


def join(name: str, requests: Sequence[TurnRequest]) -> Rollout:
    """Join the turns with the trainer's own code, each read as a part: from the last token of the
    turn before on.
    """
    starts = [0, *(len(request.tokens) - 1 for request in requests[:-1])]
    parts = [
        Rollout(
            id=name,
            tokens=request.tokens[start:],
            prompt_length=request.first - start,
            rollout_logprobs=request.logprobs,
            routed_experts=request.routes[start:],
            finish_reason="stop",
            policy_versions=np.zeros(len(request.logprobs), np.int32),
        )
        for start, request in zip(starts, requests, strict=True)
    ]
    return join_parts(*parts)


# The sequence that must result --------------------------------------------------------------------


def sampled_by(requests: Sequence[TurnRequest], position: int) -> int | None:
    """Return the request that sampled the token at `position`, or None."""
    for number, request in enumerate(requests):
        if request.first <= position < len(request.tokens):
            return number
    return None


def forward_of(requests: Sequence[TurnRequest], position: int) -> int:
    """Return the request whose forward gives the row at `position` its route."""
    number = sampled_by(requests, position + 1)
    if number is not None:
        return number
    return next(number for number, request in enumerate(requests) if position < len(request.routes))


def expected_routes(
    name: str, requests: Sequence[TurnRequest]
) -> Iterator[tuple[tuple[str, int, int], tuple[int, ...]]]:
    """Yield ((rollout, position, MoE layer), route) of every row."""
    for position in range(len(requests[-1].tokens) - 1):
        routes = requests[forward_of(requests, position)].routes[position]
        for layer, ids in enumerate(routes.tolist()):
            yield (name, position, layer), tuple(sorted(ids))


def other_forwards(
    name: str, requests: Sequence[TurnRequest]
) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yield (route, hint) of every row as another request's forward computed it."""
    for number, request in enumerate(requests):
        for position, routes in enumerate(request.routes):
            right = forward_of(requests, position)
            if number == right or np.array_equal(routes, requests[right].routes[position]):
                continue
            text = f"rows of request {number + 1} in place of request {right + 1}, rollout {name}"
            for ids in routes.tolist():
                yield tuple(sorted(ids)), text


def wrong_row(
    requests: Sequence[TurnRequest],
    tokens: Sequence[int],
    is_learned: Sequence[bool],
    logprobs: Sequence[float],
) -> tuple[str, str] | None:
    """Return (hint, finding) of the first packed row of an episode that differs from its requests,
    or None.
    """
    truth = requests[-1].tokens.tolist()
    for position, token in enumerate(tokens):
        if token != truth[position]:
            is_moved = sorted(tokens) == sorted(truth)
            hint = (
                "turn: turns in another order"
                if is_moved
                else "retokenise: not the tokens that the server had"
            )
            return hint, f"position {position}: token {token}, the server had {truth[position]}"
    for position in range(len(truth)):
        number = sampled_by(requests, position + 1)
        who = "the environment wrote" if number is None else f"request {number + 1} sampled"
        if is_learned[position] != (number is not None):
            what = "is" if is_learned[position] else "is not"
            hint = "mask: a span of the environment moved"
            return hint, f"position {position + 1}: {what} learned from, {who} it"
        if number is not None:
            request = requests[number]
            expected = float(request.logprobs[position + 1 - request.first])
            if logprobs[position] != expected:
                value = f"log-prob {logprobs[position]:.4g}"
                return "", f"position {position + 1}: {value}, {who} it with {expected:.4g}"
    return None


def wrong_batch(
    requests: Mapping[str, Sequence[TurnRequest]], batch: MiniBatch, replica: int
) -> tuple[str, str] | None:
    """Return the first result of wrong_row in a replica's mini-batch, or None."""
    for number, micro_batch in enumerate(batch.micro_batches):
        bounds = micro_batch.cu_seqlens.tolist()
        # the last bounds are those of the pads
        for name, start in zip(micro_batch.rollout_ids, bounds, strict=False):
            rows = slice(start, start + len(requests[name][-1].tokens))
            columns = (micro_batch.tokens, micro_batch.loss_mask, micro_batch.rollout_logprobs)
            wrong = wrong_row(requests[name], *(column[rows].tolist() for column in columns))
            if wrong is not None:
                hint, finding = wrong
                place = f"(replica {replica}, micro-batch {number})"
                return hint, f"rollout {name}, {finding} {place}"
    return None


# Faults -------------------------------------------------------------------------------------------


def break_episode(fault: str, rollout: Rollout, requests: Sequence[TurnRequest]) -> Rollout:
    """Join the episode as a bug would, with a matching digest, so that no later check of the
    trainer sees it.
    """
    tokens, environment = rollout.tokens.copy(), rollout.environment
    routes = None if rollout.routed_experts is None else rollout.routed_experts.copy()
    logprobs = rollout.rollout_logprobs
    (start, end), (last, stop) = rollout.turn_spans[-2], rollout.turn_spans[-1]
    match fault:
        case "turn":  # the last two turns in the wrong order, with all that belongs to them
            order = [*range(start), *range(last, stop), *range(end, last), *range(start, end)]
            sampled = np.zeros(len(tokens), np.float32)
            sampled[rollout.sampled] = logprobs
            tokens, sampled = tokens[order], sampled[order]
            moved = start + stop - last
            environment = (*environment[:-1], (moved, moved + last - end))
            places = replace(rollout, tokens=tokens, environment=environment).sampled
            logprobs = sampled[places]
            if routes is not None:
                routes = np.concatenate([routes, routes[:1]])[order][:-1]
        case "mask":
            (first, after), *others = environment
            environment = ((first + 1, after + 1), *others)
        case "retokenise":  # the first turn's text in other tokens
            start, _ = rollout.turn_spans[0]
            tokens[start : start + 2] = [(token + 1) % 32 for token in tokens[start : start + 2]]
        case "forward":  # the routes of all rows are those of the last request's forward
            routes = requests[-1].routes.copy()
    return replace(
        rollout,
        tokens=tokens,
        environment=environment,
        rollout_logprobs=logprobs,
        routed_experts=routes,
        routes_digest=None,
    )


def broken(sample: Sample, requests: Sequence[TurnRequest], fault: str) -> Sample:
    return replace(sample, rollout=break_episode(fault, sample.rollout, requests))
