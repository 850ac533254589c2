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
Shapes: S tokens of the sequence, R sampled, L MoE layers, K top-k; P prompt, n prefix.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from megatron_rl.models.spec import ModelSizes
from megatron_rl.records import Prompt, Rollout, check_digest
from megatron_rl.records.sampling_mask import join_masks
from megatron_rl.rollout.client.counters import meta_info, num_tokens
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
    known: Rollout | None = None
    """The sampled part of the input: the prefix or earlier turns.  Its rows before
    Sampling.first_row were not requested again."""

    @property
    def num_prefix_tokens(self) -> int:
        return 0 if self.prefix is None else self.prefix.response_length


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
    inputs = np.asarray(expected.prompt.token_ids) if prefix is None else prefix.tokens
    check_input(meta, len(inputs))
    max_tokens = sampling.max_tokens - expected.num_prefix_tokens
    response = parse_tokens(fields, meta, spec.vocab_size, max_tokens)
    logprobs, mask, routes, missing = parse_logprobs(meta, response), None, None, None
    if sampling.truncation is not None:
        # over the kept sets: these replace the log-probs over the vocabulary
        mask, logprobs = parse_mask(meta, rollout_id, response, spec.vocab_size)
    # its adapter sampled all tokens of a request, also those after a later weight sync
    versions = parse_versions([(version, None)] if rules.by_adapter else spans, len(response))
    if rules.want_routes:
        known, first_row = expected.known, sampling.first_row
        length = len(inputs) + len(response)
        routes, missing = parse_routes(meta, rollout_id, length, spec, known, first_row)
        if versions[-1] > version:
            # the weights changed during this request: after a retraction only rows that were known
            # before it keep their routes
            first_row = 0 if known is None else first_row
            routes, missing = after_retraction(meta, routes, missing, first_row)
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
    return rollout if prefix is None else join_rollouts(prefix, rollout)


def check_all_rows(rollout_id: str, missing: np.ndarray | None) -> None:
    if missing is not None:
        raise SampleDropped(
            ROUTES_MISSING_ROWS,
            f"rollout {rollout_id}: {int(missing.sum())} of {len(missing)} rows hold no route",
        )


def is_small(sample: object, prompt: Prompt, rules: SampleRules) -> bool:
    """Return True if reading the sample takes less time than starting a thread for it."""
    tokens = len(prompt.token_ids) + num_tokens(sample)
    # per token its id, and its expert ids where they are requested
    ids_per_token = rules.spec.num_layers * rules.spec.top_k * rules.want_routes
    return tokens * (1 + ids_per_token) < SMALL_VALUES


def join_rollouts(prefix: Rollout, more: Rollout) -> Rollout:
    """Return the response that starts with `prefix` and continues with `more`.

    The prompt of `more` is prompt + prefix, for another turn followed by what an environment
    answered.  Raises ValueError where the routes of one are not those of its tokens, or `more` does
    not continue `prefix`.
    """
    check_continues(prefix, more)
    size = len(prefix.tokens)
    routes, missing = more.routed_experts, more.missing_routes
    if routes is not None:
        rows = size - 1  # the prefix's last token has no row of its own
        missing = None if missing is None else missing[rows:]
        routes, missing = after_known(prefix, rows, routes[rows:], missing)
    turns = (*prefix.episode.turns, *more.episode.turns)
    seconds = (*prefix.episode.turn_seconds, *more.episode.turn_seconds)
    # a checkpoint of an older version has turns without seconds
    seconds = seconds if len(seconds) == len(turns) else ()
    masks = [part.sampling_mask for part in (prefix, more) if part.sampling_mask is not None]
    between = ((size, more.prompt_length),) if more.prompt_length > size else ()
    return replace(
        more,
        prompt_length=prefix.prompt_length,
        environment=(*prefix.environment, *between, *more.environment),
        episode=replace(more.episode, turns=turns, turn_seconds=seconds),
        rollout_logprobs=np.concatenate([prefix.rollout_logprobs, more.rollout_logprobs]),
        policy_versions=np.concatenate([prefix.policy_versions, more.policy_versions]),
        routed_experts=routes,
        missing_routes=missing,
        sampling_mask=join_masks(masks) if masks else None,
        routes_digest=None,  # the joined record computes that of the joined routes
    )


def check_continues(prefix: Rollout, more: Rollout) -> None:
    """Raise ValueError unless `more` continues `prefix` and each has the routes of its tokens."""
    size = len(prefix.tokens)
    if more.prompt_length < size or not np.array_equal(more.tokens[:size], prefix.tokens):
        raise ValueError(
            f"rollout {prefix.id}: its continuation begins with other tokens than were sampled"
            " before"
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
    known: Rollout | None = None,
    first_row: int = 0,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the ids, uint8 | int16 [S - 1, L, K], and the rows without a route, bool [S - 1], or
    None where every row has one.

    length: S.  Rows before `first_row` are copied from `known`, unless the server sent all rows.
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
    return sent if known is None or not first_row else after_known(known, first_row, *sent)


def after_retraction(
    meta: Mapping[str, object], ids: np.ndarray, missing: np.ndarray | None, first_row: int
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return routes and missing rows of a request during which weights changed: if the server
    retracted it, no row from `first_row` on has a route.

    A retraction alone does no harm: tokens and log-probs are those that were sampled, and rows up
    to the retraction come from a second forward of the same weights (docs/guides/sampling.md,
    Retractions).  Here the second forward may have had other weights.
    """
    if meta.get("num_retractions") in (None, 0):
        return ids, missing
    flags = np.zeros(len(ids), bool) if missing is None else missing
    ids[first_row:], flags[first_row:] = 0, True
    return ids, flags


def after_known(
    known: Rollout, first_row: int, ids: np.ndarray, missing: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the rows of `known` up to `first_row`, followed by these: routes, copied and
    layer-major, and missing rows.
    """
    assert known.routed_experts is not None, "rows are known only where there are routes"
    before = known.routed_experts[:first_row]
    layer_major = np.concatenate([part.transpose(1, 0, 2) for part in (before, ids)], axis=1)
    flags = np.concatenate(
        [
            np.zeros(len(rows), bool) if lost is None else lost[: len(rows)]
            for rows, lost in ((before, known.missing_routes), (ids, missing))
        ]
    )
    return np.ascontiguousarray(layer_major).transpose(1, 0, 2), flags if flags.any() else None


def payload_length(num_rows: int, spec: ModelSizes) -> int:
    """Return the number of base64 characters of so many rows of int32 ids."""
    return encoded_length(num_rows * spec.num_layers * spec.top_k * 4)


def sends_all_rows(sample: object, rollout: Rollout, spec: ModelSizes) -> bool:
    """Return True if the sample that became `rollout` holds the routes of all tokens."""
    payload = meta_info(sample).get("routed_experts")
    if not isinstance(payload, str | memoryview):
        return False
    return len(payload) == payload_length(len(rollout.tokens) - 1, spec)
