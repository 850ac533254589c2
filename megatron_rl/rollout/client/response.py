"""One sample of a /generate answer -> Rollout, or the reason why it must not be trained on.

SGLang answers {"output_ids": [...], "meta_info": {...}} per sample; nothing in it is trusted.
Shapes: S tokens of the sequence, R of the response, L MoE layers, K top-k.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_rl.models.spec import ModelSizes
from megatron_rl.records import Prompt, Rollout
from megatron_rl.rollout.client.routed_experts import RoutedExpertsError, decode_routed_experts
from megatron_rl.rollout.partial import join_rollouts

ROUTES_MISSING_ROWS = "routes_gap"
"""The reason of a sample that replay.on_missing_route = drop_sample refused."""


class SampleDropped(ValueError):
    """A sample that must not be used; `reason` is a short code for counting."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


def parse_sample(
    sample: Any,
    prompt: Prompt,
    rollout_id: str,
    *,
    spec: ModelSizes,
    want_routes: bool,
    policy_version: int,
    max_tokens: int,
    drop_missing_routes: bool = False,
    sample_id: str | None = None,
    prefix: Rollout | None = None,
    may_be_cut: bool = False,
) -> Rollout:
    """Check one sample and return it as a Rollout (response_text empty: the caller owns the tokenizer).

    sample_id: what the server must call it, so that the answer to another request is not taken for this one's.
    prefix: what the response began with, which the request gave as input; returned is the whole (see partial.joined).
    may_be_cut: a sample that an abort cut short is a Rollout with finish_reason abort.
    A sample that the server retracted is as good as any other: its tokens and log-probs are those that were sampled, its rows
    up to the retraction are of a second forward of the same weights (docs/rollout.md, Retractions).
    Raises SampleDropped: malformed, wrong_id, aborted, stale_version, bad_tokens, bad_logprobs, routes_missing, routes_REASON
    (see decode_routed_experts); with `drop_missing_routes` also routes_gap, where a row holds no route.
    """
    if not isinstance(sample, dict) or not isinstance(sample.get("meta_info"), dict):
        raise SampleDropped("malformed", "an object with meta_info expected")
    meta = sample["meta_info"]
    if sample_id is not None and meta.get("id") != sample_id:
        raise SampleDropped("wrong_id", f"the server calls it {meta.get('id')!r}, asked for was {sample_id!r}")
    finish_reason = parse_finish_reason(meta, may_be_cut=may_be_cut)
    check_version(meta, policy_version)
    given = np.asarray(prompt.token_ids, dtype=np.int64) if prefix is None else prefix.tokens
    if meta.get("prompt_tokens", len(given)) != len(given):
        raise SampleDropped("bad_tokens", f"prompt_tokens = {meta['prompt_tokens']}, {len(given)} were sent")
    limit = max_tokens - (0 if prefix is None else prefix.response_length)
    response = parse_tokens(sample, meta, spec.vocab_size, limit)
    logprobs = parse_logprobs(meta, response)
    routes, missing = None, None
    if want_routes:
        routes, missing = parse_routes(meta, rollout_id, len(given) + len(response), spec)
    rollout = Rollout(
        id=rollout_id,
        tokens=np.concatenate([given, response]),
        prompt_length=len(given),
        rollout_logprobs=logprobs,
        routed_experts=routes,
        finish_reason=finish_reason,
        policy_versions=np.full(len(response), policy_version, np.int32),
        missing_routes=missing,
    )
    if drop_missing_routes and missing is not None:
        raise SampleDropped(
            ROUTES_MISSING_ROWS, f"rollout {rollout_id}: {int(missing.sum())} of {len(missing)} rows hold no route"
        )
    return rollout if prefix is None else join_rollouts(prefix, rollout)


def parse_finish_reason(meta: dict[str, Any], *, may_be_cut: bool) -> Any:
    finish = meta.get("finish_reason")
    kind = finish.get("type") if isinstance(finish, dict) else finish
    if kind == "abort" and may_be_cut:
        return kind
    if kind == "abort":
        raise SampleDropped("aborted", f"finish_reason = {finish}")
    if kind not in ("stop", "length"):
        raise SampleDropped("malformed", f"finish_reason = {finish!r}")
    return kind


def check_version(meta: dict[str, Any], policy_version: int) -> None:
    """Every token must come from the weights of `policy_version`; servers before 0.5.19 only name the last version."""
    spans = meta.get("weight_versions") or [{"version": meta.get("weight_version")}]
    try:
        versions = {str(span["version"]) for span in spans}
    except (TypeError, KeyError) as error:
        raise SampleDropped("malformed", f"weight_versions = {spans!r}") from error
    if versions != {str(policy_version)}:
        raise SampleDropped("stale_version", f"sampled by weight version {sorted(versions)}, wanted {policy_version}")


def parse_tokens(sample: dict[str, Any], meta: dict[str, Any], vocab_size: int, max_tokens: int) -> np.ndarray:
    """int64 [R] with 1 <= R <= max_tokens and every id in the vocabulary."""
    tokens = as_array(sample.get("output_ids"), "bad_tokens", "output_ids", int)
    if tokens.ndim != 1 or tokens.dtype.kind != "i" or not 1 <= len(tokens) <= max_tokens:
        shape = list(tokens.shape)
        raise SampleDropped("bad_tokens", f"output_ids: {tokens.dtype} {shape}, wanted 1..{max_tokens} integers")
    if meta.get("completion_tokens", len(tokens)) != len(tokens):
        raise SampleDropped("bad_tokens", f"{len(tokens)} output_ids, completion_tokens = {meta['completion_tokens']}")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise SampleDropped("bad_tokens", f"ids {tokens.min()}..{tokens.max()}, vocabulary of {vocab_size}")
    return tokens.astype(np.int64)


def parse_logprobs(meta: dict[str, Any], response: np.ndarray) -> np.ndarray:
    """float32 [R] from [log-prob, token id, text] entries: one for each token, of that token, finite and <= 0."""
    entries = meta.get("output_token_logprobs")
    if not isinstance(entries, list) or not all(isinstance(entry, list) and len(entry) >= 2 for entry in entries):
        raise SampleDropped("bad_logprobs", "output_token_logprobs: a list of [log-prob, id, text] expected")
    logprobs = as_array([entry[0] for entry in entries], "bad_logprobs", "output_token_logprobs", int, float)
    ids = as_array([entry[1] for entry in entries], "bad_logprobs", "output_token_logprobs", int)
    if not np.array_equal(ids, response):
        detail = f"log-probs of {ids.size} tokens that are not the {len(response)} output_ids"
        raise SampleDropped("bad_logprobs", detail)
    if logprobs.dtype.kind not in "fi" or not np.isfinite(logprobs).all() or logprobs.max() > 1e-3:
        raise SampleDropped("bad_logprobs", "a log-prob that is not finite or is above 0")
    return logprobs.astype(np.float32)


def parse_routes(
    meta: dict[str, Any], rollout_id: str, length: int, spec: ModelSizes
) -> tuple[np.ndarray, np.ndarray | None]:
    """(ids uint8 | int16 [S - 1, L, K], rows without a route bool [S - 1] or None)."""
    payload = meta.get("routed_experts")
    if not isinstance(payload, str | memoryview):
        raise SampleDropped("routes_missing", "no routed_experts; does the server run --enable-return-routed-experts?")
    try:
        return decode_routed_experts(
            payload,
            num_rows=length - 1,
            num_layers=spec.num_layers,
            moe_layers=spec.moe_layers,
            top_k=spec.top_k,
            num_experts=spec.num_experts,
        )
    except RoutedExpertsError as error:
        raise SampleDropped(f"routes_{error.reason}", f"rollout {rollout_id}: {error}") from error


def as_array(value: Any, reason: str, name: str, *types: type) -> np.ndarray:
    """The array of a list whose entries are of these types; numpy alone takes true for 1 and false for 0."""
    if not isinstance(value, list) or not set(map(type, value)) <= set(types):
        wanted = " or ".join(kind.__name__ for kind in types)
        raise SampleDropped(reason, f"{name}: a list of {wanted} expected")
    return np.asarray(value)
