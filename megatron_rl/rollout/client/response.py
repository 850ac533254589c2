"""One sample of a /generate answer -> Rollout, or the reason why it must not be trained on.

A response that was cut short is continued by a request whose input is prompt + prefix.  The server
computes the prefix again, under the weights that it has then, and reports routes for all of it.
A token keeps what it was sampled with:

    log mu(y_i)     from the request that sampled y_i
    route of row j  from the request that sampled token j + 1, which row j predicts

So of P + n tokens of prompt and prefix, rows 0 .. P + n - 2 keep the routes of the requests that
sampled the prefix.  Row P + n - 1, the prefix's last token, was never an input before: it predicts
the first token of the continuation and comes from the request for it.  A further turn is the same
with an environment's tokens between prefix and continuation: their rows, too, come from the request
that first computed them.

So a continuation is read as a part: a record that begins with the last token before it, and holds
the rows from this token on.  Reading it does not depend on the length of what is known.
Shapes: S tokens of the sequence, R sampled, L MoE layers, K top-k; P prompt, n prefix.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from megatron_rl.models.spec import ModelSizes
from megatron_rl.records import Prompt, Rollout, check_digest
from megatron_rl.records.token_sets import join_masks
from megatron_rl.rollout.client.counters import meta_info, num_tokens
from megatron_rl.rollout.client.pages import empty
from megatron_rl.rollout.client.routed_experts import (
    RoutedExpertsError,
    decode_routed_experts,
    encoded_length,
)
from megatron_rl.rollout.client.sample_fields import (
    SampleDropped,
    check_input,
    parse_fields,
    parse_finish_reason,
    parse_logprobs,
    parse_mask,
    parse_spans,
    parse_tokens,
    parse_versions,
)
from megatron_rl.rollout.client.sampling import SampleRules, Sampling

ROUTES_MISSING_ROWS = "routes_gap"
"""Reason of a sample that replay.on_missing_route = drop_sample refused."""

SMALL_VALUES = 16_384
"""Number of token and expert ids that are read in about a millisecond."""


@dataclass(frozen=True)
class ExpectedSample:
    """One sample that a request asked for."""

    prompt: Prompt
    rollout_id: str
    """Id of the rollout that the sample becomes."""
    sample_id: str | None = None
    """Name that the server must repeat, so that the answer to another request is never used; None:
    the name is not checked."""
    prefix: Rollout | None = None
    """The start of the response, which the request had as input."""
    start: int = 0
    """Tokens of the prompt that are not part of the record, nor of the prefix: their rows are
    known."""

    @property
    def num_prefix_tokens(self) -> int:
        return 0 if self.prefix is None else self.prefix.response_length

    @property
    def num_inputs(self) -> int:
        """Number of tokens that the server had as input."""
        return len(self.prompt.token_ids) + self.num_prefix_tokens

    @property
    def inputs(self) -> np.ndarray:
        """int64, the tokens of the input with which the record of the sample begins."""
        if self.prefix is not None:
            return self.prefix.tokens[-1:]
        return np.asarray(self.prompt.token_ids[self.start :], np.int64)


def parse_sample(
    sample: object,
    expected: ExpectedSample,
    sampling: Sampling,
    rules: SampleRules,
    *,
    newest_version: int = 0,
    may_be_cut: bool = False,
) -> Rollout:
    """Check one sample and return it as a Rollout, of prefix and continuation where there is a
    prefix.  Its response_text is empty: the caller owns the tokenizer.

    sampling: settings of the request, with the version of the weights when it was sent.
    newest_version: the newest weights that a token may come from.
    may_be_cut: a sample that an abort cut short is a Rollout with finish_reason abort.

    Raises SampleDropped: malformed, wrong_id, aborted, stale_version, bad_tokens, bad_logprobs,
    bad_mask, routes_missing, routes_REASON (see decode_routed_experts), or routes_gap (see
    SampleRules.drop_missing_routes).
    """
    fields, meta = parse_fields(sample, expected.sample_id)
    # cheap checks first: decoding routes takes long
    finish_reason = parse_finish_reason(meta, may_be_cut=may_be_cut)
    version = sampling.policy_version
    spans = parse_spans(meta, version, max(version, newest_version), sampling.run)
    prefix, rollout_id, spec = expected.prefix, expected.rollout_id, rules.spec
    inputs, num_inputs = expected.inputs, expected.num_inputs
    check_input(meta, num_inputs)
    max_tokens = sampling.max_tokens - expected.num_prefix_tokens
    response = parse_tokens(fields, meta, spec.vocab_size, max_tokens)
    logprobs, mask, routes, missing = parse_logprobs(meta, response), None, None, None
    if sampling.wants_sets:
        # over the kept sets: these replace the log-probs over the vocabulary
        mask, logprobs = parse_mask(meta, rollout_id, response, spec.vocab_size)
    # its adapter sampled all tokens of a request, also those after a later weight sync
    versions = parse_versions([(version, None)] if rules.by_adapter else spans, len(response))
    if rules.want_routes:
        first_row, start = sampling.first_row, num_inputs - len(inputs)
        length = num_inputs + len(response)
        routes, missing = parse_routes(meta, rollout_id, length, spec, first_row, start)
        if versions[-1] > version:  # the weights changed during this request
            routes, missing = after_retraction(meta, routes, missing)
    if rules.drop_missing_routes:
        check_all_rows(rollout_id, missing)
    rollout = Rollout(
        id=rollout_id,
        tokens=np.concatenate([inputs, response]),
        prompt_length=len(inputs),
        rollout_logprobs=logprobs,
        routed_experts=routes,
        finish_reason=finish_reason,
        policy_versions=versions,
        missing_routes=missing,
        sampling_mask=mask,
    )
    return rollout if prefix is None else join_parts(prefix, rollout)


def check_all_rows(rollout_id: str, missing: np.ndarray | None) -> None:
    if missing is not None:
        raise SampleDropped(
            ROUTES_MISSING_ROWS,
            f"rollout {rollout_id}: {int(missing.sum())} of {len(missing)} rows hold no route",
        )


def is_small(sample: object, num_inputs: int) -> bool:
    """Return True if reading the sample takes less time than starting a thread for it.

    num_inputs: number of input tokens in its record.
    """
    routes = meta_info(sample).get("routed_experts")
    num_ids = len(routes) * 3 // 16 if isinstance(routes, str | memoryview) else 0
    return num_inputs + num_tokens(sample) + num_ids < SMALL_VALUES


def join_parts(*parts: Rollout) -> Rollout:
    """Return the response of these parts: each begins with the last token of the one before, and
    holds the rows from there on.

    Raises ValueError where the routes of one are not those of its tokens, or it does not continue
    the one before.
    """
    for before, after in pairwise(parts):
        check_continues(before, after)
    last = parts[-1]
    starts = list(accumulate((len(part.tokens) - 1 for part in parts[:-1]), initial=0))
    environment: list[tuple[int, int]] = []
    for start, part in zip(starts, parts, strict=True):
        if start and part.prompt_length > 1:
            environment.append((start + 1, start + part.prompt_length))
        environment += [(start + begin, start + end) for begin, end in part.environment]
    turns = tuple(
        (start + end, reason)
        for start, part in zip(starts, parts, strict=True)
        for end, reason in part.episode.turns
    )
    seconds = tuple(pair for part in parts for pair in part.episode.turn_seconds)
    # a checkpoint of an older version has turns without seconds
    seconds = seconds if len(seconds) == len(turns) else ()
    masks = [part.sampling_mask for part in parts if part.sampling_mask is not None]
    routes, missing = joined_routes(parts)
    return replace(
        last,
        tokens=np.concatenate([parts[0].tokens, *(part.tokens[1:] for part in parts[1:])]),
        prompt_length=parts[0].prompt_length,
        environment=tuple(environment),
        episode=replace(last.episode, turns=turns, turn_seconds=seconds),
        rollout_logprobs=np.concatenate([part.rollout_logprobs for part in parts]),
        policy_versions=np.concatenate([part.policy_versions for part in parts]),
        routed_experts=routes,
        missing_routes=missing,
        sampling_mask=join_masks(masks) if masks else None,
        routes_digest=None,  # the joined record computes that of the joined routes
    )


def joined_routes(parts: Sequence[Rollout]) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return the rows of all parts, copied and layer-major, and those without a route."""
    rows = [part.routed_experts for part in parts if part.routed_experts is not None]
    if len(rows) < len(parts):
        return None, None
    _, num_layers, top_k = rows[0].shape
    layer_major = empty((num_layers, sum(map(len, rows)), top_k), rows[0].dtype)
    np.concatenate([ids.transpose(1, 0, 2) for ids in rows], axis=1, out=layer_major)
    flags = np.concatenate(
        [
            np.zeros(len(ids), bool) if part.missing_routes is None else part.missing_routes
            for ids, part in zip(rows, parts, strict=True)
        ]
    )
    return layer_major.transpose(1, 0, 2), flags if flags.any() else None


def check_continues(prefix: Rollout, more: Rollout) -> None:
    """Raise ValueError unless `more` is a part that begins with the last token of `prefix`, and
    each has the routes of its tokens.
    """
    if more.prompt_length < 1 or more.tokens[0] != prefix.tokens[-1]:
        raise ValueError(
            f"rollout {prefix.id}: its continuation begins with another token than the last before"
        )
    # servers' weights only become newer, and so do the versions of a response's tokens
    if more.oldest_version < prefix.policy_versions[-1]:
        raise ValueError(
            f"rollout {prefix.id}: its continuation is of older weights than its prefix"
        )
    for part in (prefix, more):
        routes, digest = part.routed_experts, part.routes_digest
        if routes is not None:
            check_digest(part.id, part.tokens, routes, digest, part.environment)
    if more.has_routes and not prefix.has_routes:
        raise ValueError(f"rollout {prefix.id}: its continuation has routes, its prefix has none")
    if (prefix.sampling_mask is None) != (more.sampling_mask is None):
        raise ValueError(f"rollout {prefix.id}: kept sets of only one of prefix and continuation")


def ended(rollout: Rollout, stop_token_ids: Collection[int], max_tokens: int) -> Rollout:
    """Return the rollout with its real finish reason: an abort that arrives with the last token
    hides why the response ended.
    """
    if rollout.finish_reason != "abort":
        return rollout
    if int(rollout.tokens[-1]) in stop_token_ids:
        return replace(rollout, finish_reason="stop")
    is_full = rollout.response_length >= max_tokens
    return replace(rollout, finish_reason="length") if is_full else rollout


def parse_routes(
    meta: Mapping[str, object],
    rollout_id: str,
    length: int,
    spec: ModelSizes,
    first_row: int = 0,
    start: int = 0,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the ids of the rows from `start` on, uint8 | int16 [S - 1 - start, L, K], and those
    without a route, bool [S - 1 - start], or None where every row has one.

    length: S.  first_row: the first row that was asked for.
    """
    payload = meta.get("routed_experts")
    # a memoryview where response_json cut it out of the body
    if not isinstance(payload, str | memoryview):
        raise SampleDropped(
            "routes_missing",
            "no routed_experts; does the server run --enable-return-routed-experts?",
        )
    # all rows: the server does not know routed_experts_start_len
    if len(payload) == payload_length(length - 1, spec):
        first_row = 0
    try:
        sent = decode_routed_experts(
            payload,
            num_rows=length - 1 - first_row,
            num_layers=spec.num_layers,
            moe_layers=spec.moe_layers,
            top_k=spec.top_k,
            num_experts=spec.num_experts,
        )
    except RoutedExpertsError as error:
        raise SampleDropped(f"routes_{error.reason}", f"rollout {rollout_id}: {error}") from error
    ids, missing = sent
    if not (known := start - first_row):
        return ids, missing
    kept = np.ascontiguousarray(ids[known:].transpose(1, 0, 2)).transpose(1, 0, 2)
    lost = None if missing is None or not missing[known:].any() else missing[known:]
    return kept, lost


def after_retraction(
    meta: Mapping[str, object], ids: np.ndarray, missing: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return routes and missing rows of a request during which weights changed: if the server
    retracted it, no row of its part has a route.

    A retraction alone does no harm: tokens and log-probs are those that were sampled, and rows up
    to the retraction come from a second forward of the same weights (docs/guides/sampling.md,
    Retractions).  Here the second forward may have had other weights.
    """
    if meta.get("num_retractions") in (None, 0):
        return ids, missing
    return np.zeros_like(ids), np.ones(len(ids), bool)


def payload_length(num_rows: int, spec: ModelSizes) -> int:
    """Return the number of base64 characters of so many rows of int32 ids."""
    return encoded_length(num_rows * spec.num_layers * spec.top_k * 4)


def sends_all_rows(sample: object, length: int, spec: ModelSizes) -> bool:
    """Return True if the sample of a sequence of `length` tokens holds the routes of all."""
    payload = meta_info(sample).get("routed_experts")
    if not isinstance(payload, str | memoryview):
        return False
    return len(payload) == payload_length(length - 1, spec)
