"""Fields of one sample of a /generate answer, each read and checked.

SGLang sends {"output_ids": [...], "meta_info": {...}} per sample.  Nothing in it is trusted: a
field that is missing, of another type or inconsistent with the others raises SampleDropped.
Shapes: R sampled tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import cast

import numpy as np

from megatron_rl.records import FinishReason
from megatron_rl.records.token_sets import TokenSets, check_mask
from megatron_rl.weights.version import version_name


class SampleDropped(ValueError):
    """A sample that must not be used; `reason` is a short code for counting."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


def parse_fields(
    sample: object, sample_id: str | None
) -> tuple[Mapping[str, object], Mapping[str, object]]:
    """Return the sample and its meta_info, which must repeat `sample_id` unless that is None."""
    if not isinstance(sample, dict) or not isinstance(meta := sample.get("meta_info"), dict):
        raise SampleDropped("malformed", "expected an object with meta_info")
    if sample_id is not None and meta.get("id") != sample_id:
        raise SampleDropped(
            "wrong_id", f"the server calls it {meta.get('id')!r}, the request {sample_id!r}"
        )
    return sample, meta


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
    """Return (version, index after its last token) of each span of tokens.

    Every token must come from weights `oldest` to `newest` of `run`.  Servers before 0.5.19 name
    only the last version, which is that of all tokens where no other is possible.
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
    """Return int32 [R], the weight version of every token.

    Each span must end where the next one starts, the last one after the last token, and each must
    have newer weights than the one before.
    """
    if len(spans) == 1:
        return np.full(num_tokens, spans[0][0], np.int32)
    versions, ends = zip(*spans, strict=True)
    # `type`, not isinstance: true is an int
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
    """Return int64 [R] with 1 <= R <= max_tokens and every id in the vocabulary."""
    tokens = as_array(sample.get("output_ids"), "bad_tokens", "output_ids", int)
    count = len(tokens)
    if tokens.dtype.kind != "i" or not 1 <= count <= max_tokens:
        raise SampleDropped(
            "bad_tokens", f"output_ids: {tokens.dtype} [{count}], expected 1..{max_tokens} integers"
        )
    if meta.get("completion_tokens", count) != count:
        raise SampleDropped(
            "bad_tokens", f"{count} output_ids, completion_tokens = {meta['completion_tokens']}"
        )
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise SampleDropped(
            "bad_tokens", f"ids {tokens.min()}..{tokens.max()}, vocabulary of {vocab_size}"
        )
    return tokens


def parse_logprobs(meta: Mapping[str, object], response: np.ndarray) -> np.ndarray:
    """Return float32 [R] from [log-prob, token id, text] entries, one for each token, of that
    token, finite and <= 0.
    """
    name, entries = "output_token_logprobs", meta.get("output_token_logprobs")
    # in C: a tenth of the time of a turn went into a loop here
    is_nested = isinstance(entries, list) and set(map(type, entries)) <= {list}
    if not isinstance(entries, list) or not is_nested or min(map(len, entries), default=2) < 2:
        raise SampleDropped("bad_logprobs", f"{name}: expected a list of [log-prob, id, text]")
    logprobs = as_array([entry[0] for entry in entries], "bad_logprobs", name, int, float)
    ids = as_array([entry[1] for entry in entries], "bad_logprobs", name, int)
    if not np.array_equal(ids, response):
        detail = f"log-probs of {ids.size} tokens that are not the {len(response)} output_ids"
        raise SampleDropped("bad_logprobs", detail)
    return checked_logprobs(logprobs)


def checked_logprobs(logprobs: np.ndarray) -> np.ndarray:
    """Return the log-probs as float32 [R]."""
    # log-probs of nearly certain tokens are rounded to slightly above 0
    if logprobs.dtype.kind not in "fi" or not np.isfinite(logprobs).all() or logprobs.max() > 1e-3:
        raise SampleDropped("bad_logprobs", "a log-prob that is not finite or is above 0")
    return logprobs.astype(np.float32)


def parse_mask(
    meta: Mapping[str, object], rollout_id: str, response: np.ndarray, vocab_size: int
) -> tuple[TokenSets, np.ndarray]:
    """Return the kept sets of the R tokens and the log-probs, float32 [R], renormalised over them,
    from the answer to SGLang's return_sampling_mask.
    """
    name, logprobs_name = "output_token_sampling_mask", "output_token_sampling_logprobs"
    sets = meta.get(name)
    if not isinstance(sets, list) or not all(isinstance(kept, list) for kept in sets):
        raise SampleDropped(
            "bad_mask", f"no {name}: expected a list of ids for each token; SGLang 0.5.16 or newer?"
        )
    sizes = np.array([len(kept) for kept in sets], np.int64)
    ids = as_array([token for kept in sets for token in kept], "bad_mask", name, int)
    logprobs = as_array(meta.get(logprobs_name), "bad_mask", logprobs_name, int, float)
    if len(logprobs) != len(response):
        raise SampleDropped(
            "bad_mask", f"{len(logprobs)} log-probs over kept sets for {len(response)} tokens"
        )
    if ids.dtype.kind != "i" or ids.max(initial=0) >= vocab_size:
        raise SampleDropped(
            "bad_mask", f"{name}: ids up to {ids.max(initial=0)}, vocabulary of {vocab_size}"
        )
    try:
        mask = TokenSets.of(sizes, ids)
        check_mask(rollout_id, mask, response)
    except ValueError as error:
        raise SampleDropped("bad_mask", str(error)) from error
    return mask, checked_logprobs(logprobs)


def as_array(value: object, reason: str, name: str, *types: type) -> np.ndarray:
    """Return the array of a list whose entries are of these types."""
    # numpy alone takes true for 1 and false for 0
    if not isinstance(value, list) or not set(map(type, value)) <= set(types):
        expected = " or ".join(kind.__name__ for kind in types)
        raise SampleDropped(reason, f"{name}: expected a list of {expected}")
    return np.asarray(value)  # an int beyond 64 bits gives dtype object, which callers refuse
