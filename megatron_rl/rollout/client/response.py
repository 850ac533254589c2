"""One sample of a /generate answer -> Rollout, or the reason why it must not be trained on.

SGLang answers {"output_ids": [...], "meta_info": {...}} per sample; nothing in it is trusted.

A response that was cut short is continued by a request whose input is prompt + prefix: the server
computes the prefix once more, under the weights that it has now, and reports routes for all of it.
What a token keeps is what it was sampled with:

    log mu(y_i)   of the request that sampled y_i
    route of row  of the request that sampled the token the row predicts: row j predicts token j + 1

So of P + n tokens of prompt and prefix the rows 0 .. P + n - 2 stay those of the prefix's own
sampling; row P + n - 1, the prefix's last token, was never an input before: it predicts the first
token of the continuation, which computed it. A further turn is the same with an environment's
tokens between prefix and continuation: their rows, too, are of the request that first computed
them.
Shapes: S tokens of the sequence, R sampled, L MoE layers, K top-k; P prompt, n prefix.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import cast

import numpy as np

from megatron_rl.models.spec import ModelSizes
from megatron_rl.records import FinishReason, Prompt, Rollout, check_digest
from megatron_rl.records.sampling_mask import SamplingMask, check_mask, join_masks
from megatron_rl.rollout.client.counters import meta_info, num_tokens
from megatron_rl.rollout.client.routed_experts import (
    RoutedExpertsError,
    decode_routed_experts,
    encoded_length,
)
from megatron_rl.weights.version import version_name

ROUTES_MISSING_ROWS = "routes_gap"
"""The reason of a sample that replay.on_missing_route = drop_sample refused."""


SMALL_VALUES = 16_384
"""Token and expert ids of a sample that are read in about a millisecond."""


class SampleDropped(ValueError):
    """A sample that must not be used; `reason` is a short code for counting."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


def parse_sample(
    sample: object,
    prompt: Prompt,
    rollout_id: str,
    *,
    spec: ModelSizes,
    want_routes: bool,
    policy_version: int,
    max_tokens: int,
    newest_version: int = 0,
    drop_missing_routes: bool = False,
    sample_id: str | None = None,
    prefix: Rollout | None = None,
    known: Rollout | None = None,
    first_row: int = 0,
    may_be_cut: bool = False,
    want_mask: bool = False,
    run: str = "",
) -> Rollout:
    """Check one sample and return it as a Rollout (response_text empty: the caller owns the
    tokenizer).

    policy_version, newest_version: weights of `run`: those of the server at the request, and the
    newest ones possible at its end.
    sample_id: the name that the server must repeat, so that the answer to another request is not
    taken for this one's.
    prefix: the start of the response, which the request gave as input; the Rollout is of prefix and
    continuation.
    known: what was sampled of the input, a prefix or earlier turns.  Its rows before `first_row`
    were not requested again; those of the Rollout are `known`'s, unless the server sent all.
    may_be_cut: a sample that an abort cut short is a Rollout with finish_reason abort.
    want_mask: it was sampled from kept sets, which come with it; log-probs are then those over the
    sets. Raises SampleDropped: malformed, wrong_id, aborted, stale_version, bad_tokens,
    bad_logprobs, bad_mask, routes_missing, routes_REASON (see decode_routed_experts); with
    `drop_missing_routes` also routes_gap, where a row holds no route.
    """
    fields, meta = parse_fields(sample, sample_id)
    # cheap checks first: decoding routes takes long
    finish_reason = parse_finish_reason(meta, may_be_cut=may_be_cut)
    spans = parse_spans(meta, policy_version, max(policy_version, newest_version), run)
    given = np.asarray(prompt.token_ids) if prefix is None else prefix.tokens
    check_input(meta, len(given))
    limit = max_tokens - (0 if prefix is None else prefix.response_length)
    response = parse_tokens(fields, meta, spec.vocab_size, limit)
    logprobs, mask, routes, missing = parse_logprobs(meta, response), None, None, None
    if want_mask:
        mask, logprobs = parse_mask(meta, rollout_id, response, spec.vocab_size)
    versions = parse_versions(spans, len(response))
    if want_routes:
        routes, missing = parse_routes(
            meta, rollout_id, len(given) + len(response), spec, known, first_row
        )
        if versions[-1] > policy_version:
            routes, missing = after_retraction(
                meta, routes, missing, 0 if known is None else first_row
            )
    if drop_missing_routes:
        check_all_rows(rollout_id, missing)
    rollout = Rollout(
        id=rollout_id,
        tokens=np.concatenate([given, response]),
        prompt_length=len(given),
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


def is_small(sample: object, prompt: Prompt, spec: ModelSizes, want_routes: bool) -> bool:
    """Whether a thread to read the sample would cost more than reading it."""
    tokens = len(prompt.token_ids) + num_tokens(sample)
    return tokens * (1 + spec.num_layers * spec.top_k * want_routes) < SMALL_VALUES


def parse_fields(
    sample: object, sample_id: str | None
) -> tuple[Mapping[str, object], Mapping[str, object]]:
    """(sample, its meta_info)."""
    if not isinstance(sample, dict) or not isinstance(meta := sample.get("meta_info"), dict):
        raise SampleDropped("malformed", "expected an object with meta_info")
    if sample_id is not None and meta.get("id") != sample_id:
        raise SampleDropped(
            "wrong_id", f"the server calls it {meta.get('id')!r}, the request {sample_id!r}"
        )
    return sample, meta


def join_rollouts(prefix: Rollout, more: Rollout) -> Rollout:
    """The response that starts with `prefix` and continues with `more`, whose prompt is prompt +
    prefix, and for another turn what an environment answered.

    Raises ValueError where either's routes are not those of its tokens, or `more` does not continue
    `prefix`.
    """
    # the prefix's last token has no row of its own
    size, rows = len(prefix.tokens), len(prefix.tokens) - 1
    if more.prompt_length < size or not np.array_equal(more.tokens[:size], prefix.tokens):
        raise ValueError(
            f"rollout {prefix.id}: its continuation begins with other tokens than were sampled"
            " before"
        )
    if more.oldest_version < prefix.policy_versions[-1]:
        raise ValueError(
            f"rollout {prefix.id}: its continuation is of older weights than its prefix"
        )
    for part in (prefix, more):
        if part.routed_experts is not None:
            check_digest(
                part.id, part.tokens, part.routed_experts, part.routes_digest, part.environment
            )
    routes, missing = more.routed_experts, more.missing_routes
    if routes is not None:
        if prefix.routed_experts is None:
            raise ValueError(
                f"rollout {prefix.id}: its continuation has routes, its prefix has none"
            )
        routes, missing = after_known(
            prefix, rows, routes[rows:], None if missing is None else missing[rows:]
        )
    masks = [part.sampling_mask for part in (prefix, more) if part.sampling_mask is not None]
    if len(masks) == 1:
        raise ValueError(f"rollout {prefix.id}: kept sets of only one of prefix and continuation")
    between = ((size, more.prompt_length),) if more.prompt_length > size else ()
    return replace(
        more,
        prompt_length=prefix.prompt_length,
        environment=(*prefix.environment, *between, *more.environment),
        episode=replace(more.episode, turns=(*prefix.episode.turns, *more.episode.turns)),
        rollout_logprobs=np.concatenate([prefix.rollout_logprobs, more.rollout_logprobs]),
        policy_versions=np.concatenate([prefix.policy_versions, more.policy_versions]),
        routed_experts=routes,
        missing_routes=missing,
        sampling_mask=join_masks(masks) if masks else None,
        routes_digest=None,  # of the joined routes: made again
    )


def ended(rollout: Rollout, stop_token_ids: Collection[int], max_tokens: int) -> Rollout:
    """`rollout` with its real finish reason: an abort that arrives with the last token hides why
    the response ended.
    """
    if rollout.finish_reason != "abort":
        return rollout
    if int(rollout.tokens[-1]) in stop_token_ids:
        return replace(rollout, finish_reason="stop")
    return (
        replace(rollout, finish_reason="length")
        if rollout.response_length >= max_tokens
        else rollout
    )


def parse_finish_reason(meta: Mapping[str, object], *, may_be_cut: bool) -> FinishReason:
    finish = meta.get("finish_reason")
    kind = finish.get("type") if isinstance(finish, dict) else finish
    if kind == "abort" and not may_be_cut:
        raise SampleDropped("aborted", f"finish_reason = {finish}")
    if kind not in ("stop", "length", "abort"):
        raise SampleDropped("malformed", f"finish_reason = {finish!r}")
    return cast(FinishReason, kind)


def parse_spans(
    meta: Mapping[str, object], oldest: int, newest: int, run: str = ""
) -> list[tuple[int, object]]:
    """(version, its last token + 1) of each span of tokens: every token must come from weights
    `oldest` to `newest` of `run`.

    Servers before 0.5.19 only name the last version, which is that of all tokens where no other is
    possible.
    """
    spans = meta.get("weight_versions") or (
        [{"version": meta.get("weight_version")}] if oldest == newest else None
    )
    if not isinstance(spans, list) or not all(
        isinstance(span, dict) and "version" in span for span in spans
    ):
        raise SampleDropped("malformed", f"weight_versions = {spans!r}")
    known = {version_name(version, run): version for version in range(oldest, newest + 1)}
    versions = {str(span["version"]) for span in spans}
    if not versions <= known.keys():
        expected = " to ".join(dict.fromkeys(version_name(end, run) for end in (oldest, newest)))
        raise SampleDropped(
            "stale_version", f"sampled by weight version {sorted(versions)}, expected {expected}"
        )
    return [(known[str(span["version"])], span.get("end")) for span in spans]


def parse_versions(spans: Sequence[tuple[int, object]], num_tokens: int) -> np.ndarray:
    """int32 [R].

    The spans must end where the next one starts, the last one after the last token, with newer
    weights each.
    """
    if len(spans) == 1:
        return np.full(num_tokens, spans[0][0], np.int32)
    versions, ends = zip(*spans, strict=True)
    sizes = [
        end - start if type(end) is type(start) is int else 0 for start, end in pairwise((0, *ends))
    ]
    if min(sizes) < 1 or ends[-1] != num_tokens or any(a >= b for a, b in pairwise(versions)):
        raise SampleDropped("malformed", f"weight_versions of {num_tokens} tokens: {list(spans)}")
    return np.repeat(np.array(versions, np.int32), sizes)


def check_input(meta: Mapping[str, object], num_tokens: int) -> None:
    if meta.get("prompt_tokens", num_tokens) != num_tokens:
        raise SampleDropped(
            "bad_tokens", f"prompt_tokens = {meta['prompt_tokens']}, {num_tokens} were sent"
        )


def parse_tokens(
    sample: Mapping[str, object], meta: Mapping[str, object], vocab_size: int, max_tokens: int
) -> np.ndarray:
    """int64 [R] with 1 <= R <= max_tokens and every id in the vocabulary."""
    tokens = as_array(sample.get("output_ids"), "bad_tokens", "output_ids", int)
    if tokens.dtype.kind != "i" or not 1 <= len(tokens) <= max_tokens:
        count = len(tokens)
        raise SampleDropped(
            "bad_tokens", f"output_ids: {tokens.dtype} [{count}], expected 1..{max_tokens} integers"
        )
    if meta.get("completion_tokens", len(tokens)) != len(tokens):
        raise SampleDropped(
            "bad_tokens",
            f"{len(tokens)} output_ids, completion_tokens = {meta['completion_tokens']}",
        )
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise SampleDropped(
            "bad_tokens", f"ids {tokens.min()}..{tokens.max()}, vocabulary of {vocab_size}"
        )
    return tokens


def parse_logprobs(meta: Mapping[str, object], response: np.ndarray) -> np.ndarray:
    """float32 [R] from [log-prob, token id, text] entries: one for each token, of that token,
    finite and <= 0.
    """
    name, entries = "output_token_logprobs", meta.get("output_token_logprobs")
    if not isinstance(entries, list) or not all(
        isinstance(entry, list) and len(entry) >= 2 for entry in entries
    ):
        raise SampleDropped("bad_logprobs", f"{name}: expected a list of [log-prob, id, text]")
    logprobs = as_array([entry[0] for entry in entries], "bad_logprobs", name, int, float)
    ids = as_array([entry[1] for entry in entries], "bad_logprobs", name, int)
    if not np.array_equal(ids, response):
        detail = f"log-probs of {ids.size} tokens that are not the {len(response)} output_ids"
        raise SampleDropped("bad_logprobs", detail)
    return checked_logprobs(logprobs)


def checked_logprobs(logprobs: np.ndarray) -> np.ndarray:
    """float32 [R]."""
    # log-probs of nearly certain tokens are rounded to slightly above 0
    if logprobs.dtype.kind not in "fi" or not np.isfinite(logprobs).all() or logprobs.max() > 1e-3:
        raise SampleDropped("bad_logprobs", "a log-prob that is not finite or is above 0")
    return logprobs.astype(np.float32)


def parse_mask(
    meta: Mapping[str, object], rollout_id: str, response: np.ndarray, vocab_size: int
) -> tuple[SamplingMask, np.ndarray]:
    """(kept sets of the R tokens, log-probs float32 [R] renormalised over them), of SGLang's
    return_sampling_mask.
    """
    sets, name = meta.get("output_token_sampling_mask"), "output_token_sampling_mask"
    if not isinstance(sets, list) or not all(isinstance(own, list) for own in sets):
        raise SampleDropped(
            "bad_mask", f"no {name}: expected a list of ids for each token; SGLang 0.5.16 or newer?"
        )
    sizes = np.array([len(own) for own in sets], np.int64)
    ids = as_array([token for own in sets for token in own], "bad_mask", name, int)
    logprobs = as_array(
        meta.get("output_token_sampling_logprobs"),
        "bad_mask",
        "output_token_sampling_logprobs",
        int,
        float,
    )
    if len(logprobs) != len(response):
        raise SampleDropped(
            "bad_mask", f"{len(logprobs)} log-probs over kept sets for {len(response)} tokens"
        )
    if ids.dtype.kind != "i" or ids.max(initial=0) >= vocab_size:
        raise SampleDropped(
            "bad_mask", f"{name}: ids up to {ids.max(initial=0)}, vocabulary of {vocab_size}"
        )
    try:
        mask = SamplingMask.of(sizes, ids)
        check_mask(rollout_id, mask, response)
    except ValueError as error:
        raise SampleDropped("bad_mask", str(error)) from error
    return mask, checked_logprobs(logprobs)


def parse_routes(
    meta: Mapping[str, object],
    rollout_id: str,
    length: int,
    spec: ModelSizes,
    known: Rollout | None = None,
    first_row: int = 0,
) -> tuple[np.ndarray, np.ndarray | None]:
    """(ids uint8 | int16 [S - 1, L, K], rows without a route bool [S - 1] or None); rows before
    `first_row` are `known`'s.
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
    """Routes and missing rows of a request whose weights changed: if the server retracted it, no
    row from `first_row` on has one.

    A retracted sample is as good as any other: its tokens and log-probs are those that were
    sampled, its rows up to the retraction are of a second forward (docs/guides/sampling.md,
    Retractions).  But here this may be one of other weights.
    """
    if meta.get("num_retractions") in (None, 0):
        return ids, missing
    flags = np.zeros(len(ids), bool) if missing is None else missing
    ids[first_row:], flags[first_row:] = 0, True
    return ids, flags


def after_known(
    known: Rollout, first_row: int, ids: np.ndarray, missing: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Routes, layer-major in memory of their own, and missing rows of a sequence: of `known` up to
    `first_row`, then these.
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
    """Characters of the base64 of so many rows."""
    return encoded_length(num_rows * spec.num_layers * spec.top_k * 4)


def sends_all_rows(sample: object, rollout: Rollout, spec: ModelSizes) -> bool:
    """Whether the sample, from which `rollout` was made, holds the routes of all tokens."""
    payload = meta_info(sample).get("routed_experts")
    return isinstance(payload, str | memoryview) and len(payload) == payload_length(
        len(rollout.tokens) - 1, spec
    )


def as_array(value: object, reason: str, name: str, *types: type) -> np.ndarray:
    """The array of a list whose entries are of these types; numpy alone takes true for 1 and false
    for 0.
    """
    if not isinstance(value, list) or not set(map(type, value)) <= set(types):
        expected = " or ".join(kind.__name__ for kind in types)
        raise SampleDropped(reason, f"{name}: expected a list of {expected}")
    return np.asarray(value)  # an int beyond 64 bits gives dtype object, which callers refuse
