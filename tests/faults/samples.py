"""Samples as SGLang sends them, honest and wrong in every way we know.  Each fault edits a copy of
one honest sample.

Shapes: R response tokens, N = prompt + R - 1 rows, L layers, K top-k of SPEC.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.models.spec import ModelSizes

SPEC = ModelSizes(num_layers=3, moe_layers=(0, 1, 2), top_k=2, num_experts=8, vocab_size=64)
VERSION = 7
Fault = Callable[[dict[str, Any]], Any]


def honest_sample(
    body: dict[str, Any], prompt: list[int], sample_id: str, num_tokens: int = 5
) -> dict[str, Any]:
    """A sample of its own: its tokens, log-probs and routes follow from its id."""
    rng = np.random.default_rng(zlib.crc32(sample_id.encode()))
    tokens = rng.integers(2, SPEC.vocab_size, num_tokens)
    routes = random_routes(rng, len(prompt) + num_tokens - 1)
    return make_sample(body, sample_id, len(prompt), tokens, -rng.random(num_tokens), routes)


def recorded_samples(
    folder: Path, step: int
) -> Callable[[dict[str, Any], list[int], str], dict[str, Any]]:
    """Serve what a run recorded (rollout.save_tensors) in `folder` at `step`: the responses to each
    prompt, in turn.
    """
    # here: it imports torch, for which every stub server would wait
    from megatron_rl.config.run_paths import RunFolder
    from megatron_rl.rollout.saved.recorded_rollouts import read_rollouts
    from megatron_rl.rollout.saved.rollout_tensors import read_tensors

    tensors = read_tensors(folder, step)
    waiting: dict[tuple[int, ...], list[tuple[np.ndarray, np.ndarray, np.ndarray | None]]] = {}
    for record in read_rollouts(RunFolder(folder).lines_of("rollouts", step)):
        if record.step == step:
            tokens, length = tensors[f"{record.id}:tokens"], record.prompt_length
            parts = (
                tokens[length:],
                tensors[f"{record.id}:logprobs"],
                tensors.get(f"{record.id}:routed_experts"),
            )
            waiting.setdefault(tuple(tokens[:length].tolist()), []).append(parts)

    def serve(body: dict[str, Any], prompt: list[int], sample_id: str) -> dict[str, Any]:
        return make_sample(body, sample_id, len(prompt), *waiting[tuple(prompt)].pop(0))

    return serve


def make_sample(
    body: dict[str, Any],
    sample_id: str,
    prompt_length: int,
    tokens: np.ndarray,
    logprobs: np.ndarray,
    routes: np.ndarray | None,
) -> dict[str, Any]:
    num_tokens = len(tokens)
    meta = {
        "id": sample_id,
        "finish_reason": {"type": "length", "length": num_tokens},
        "prompt_tokens": prompt_length,
        "cached_tokens": prompt_length - 1,
        "completion_tokens": num_tokens,
        "weight_version": str(VERSION),
        "weight_versions": [{"version": str(VERSION), "start": 0, "end": num_tokens}],
        "num_retractions": 0,
        "output_token_logprobs": [
            [p, t, None] for p, t in zip(logprobs.tolist(), tokens.tolist(), strict=True)
        ],
    }
    if body["return_routed_experts"] and routes is not None:
        meta["routed_experts"] = encode(routes.astype("<i4"))
    return {"output_ids": tokens.tolist(), "meta_info": meta}


def cut_short(sample: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    """What an abort leaves of an honest sample after so many tokens."""
    meta = dict(sample["meta_info"])
    meta |= {
        "finish_reason": {"type": "abort", "message": "Abort"},
        "completion_tokens": num_tokens,
        "output_token_logprobs": meta["output_token_logprobs"][:num_tokens],
    }
    if "weight_versions" in meta:
        meta["weight_versions"] = [
            {"version": meta["weight_version"], "start": 0, "end": num_tokens}
        ]
    if "routed_experts" in meta:
        routes = np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4")
        rows = meta["prompt_tokens"] + num_tokens - 1
        meta["routed_experts"] = encode(routes[: rows * SPEC.num_layers * SPEC.top_k])
    return {"output_ids": sample["output_ids"][:num_tokens], "meta_info": meta}


def cut_start(sample: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    """Without the routes of the rows that the request leaves out."""
    if "routed_experts" not in (meta := sample["meta_info"]):
        return sample
    routes = np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4")
    width, rest = divmod(len(routes), meta["prompt_tokens"] + len(sample["output_ids"]) - 1)
    if rest:  # a payload of a wrong size
        width = SPEC.num_layers * SPEC.top_k
    start = body.get("routed_experts_start_len", 0) * width
    return with_meta(routed_experts=encode(routes[start:]))(sample)


def random_routes(rng: np.random.Generator, rows: int) -> np.ndarray:
    """int32 [rows, L, K], distinct in a row."""
    scores = rng.random((rows, SPEC.num_layers, SPEC.num_experts))
    return scores.argsort(-1)[..., : SPEC.top_k].astype("<i4")


def encode(routes: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(routes).tobytes()).decode()


# Faults of one sample -----------------------------------------------------------------------------


def with_meta(**changes: Any) -> Fault:
    return lambda sample: sample | {"meta_info": sample["meta_info"] | changes}


def without_meta(name: str) -> Fault:
    return lambda sample: (
        sample | {"meta_info": {k: v for k, v in sample["meta_info"].items() if k != name}}
    )


def edit_routes(edit: Callable[[np.ndarray], np.ndarray]) -> Fault:
    def fault(sample: dict[str, Any]) -> dict[str, Any]:
        ids = np.frombuffer(base64.b64decode(sample["meta_info"]["routed_experts"]), "<i4")
        routes = ids.reshape(-1, SPEC.num_layers, SPEC.top_k).copy()
        return with_meta(routed_experts=encode(edit(routes)))(sample)

    return fault


def edit_text(edit: Callable[[str], Any]) -> Fault:
    """Edit the base64 text of the routes."""
    return lambda sample: with_meta(routed_experts=edit(sample["meta_info"]["routed_experts"]))(
        sample
    )


def edit_logprobs(edit: Callable[[list[Any]], list[Any]]) -> Fault:
    return lambda sample: with_meta(
        output_token_logprobs=edit(sample["meta_info"]["output_token_logprobs"])
    )(sample)


def set_at(index: tuple[Any, ...], value: int) -> Callable[[np.ndarray], np.ndarray]:
    def edit(routes: np.ndarray) -> np.ndarray:
        routes[index] = value
        return routes

    return edit


ROUTE_FAULTS: dict[str, Fault] = {
    "no_routes": without_meta("routed_experts"),
    "null_routes": with_meta(routed_experts=None),
    "list_routes": edit_text(lambda text: [text]),
    "empty_routes": with_meta(routed_experts=""),
    "text_routes": with_meta(routed_experts="not base64!"),
    "star_in_routes": edit_text(lambda text: text[:40] + "*" + text[41:]),
    "newline_in_routes": edit_text(lambda text: text[:40] + "\n" + text[41:]),
    "accent_in_routes": edit_text(lambda text: text[:40] + "\u00e9" + text[41:]),
    "half_routes": edit_text(lambda text: text[: len(text) // 8 * 4]),
    "short_routes": edit_routes(lambda routes: routes[:-1]),
    "long_routes": edit_routes(lambda routes: np.concatenate([routes, routes[:1]])),
    "thin_routes": edit_routes(lambda routes: routes[:, :-1]),
    "narrow_routes": edit_routes(lambda routes: routes.astype("<i2")),
    "wide_routes": edit_routes(lambda routes: routes.astype("<i8")),
    "big_endian_routes": edit_routes(lambda routes: routes.astype(">i4")),
    "float_routes": edit_routes(lambda routes: routes.astype("<f4")),
    "zero_routes": edit_routes(np.zeros_like),
    "minus_routes": edit_routes(lambda routes: np.full_like(routes, -1)),
    "zero_layer": edit_routes(set_at((slice(None), 1), 0)),
    "zero_row_of_a_layer": edit_routes(set_at((2, 1), 0)),
    "minus_row_of_a_layer": edit_routes(set_at((2, 1), -1)),
    "duplicate_route": edit_routes(lambda routes: routes[..., :1].repeat(SPEC.top_k, -1)),
    "big_route": edit_routes(set_at((1, 2, 0), SPEC.num_experts)),
    "wrapping_route": edit_routes(set_at((1, 2, 0), 65_536 + 3)),
    "negative_route": edit_routes(set_at((0, 0, 1), -1)),
}


SAMPLE_FAULTS: dict[str, Fault] = {
    "stale": with_meta(
        weight_version="6", weight_versions=[{"version": "6", "start": 0, "end": 5}]
    ),
    "mixed": with_meta(
        weight_versions=[
            {"version": "6", "start": 0, "end": 2},
            {"version": str(VERSION), "start": 2, "end": 5},
        ]
    ),
    "no_version": lambda sample: without_meta("weight_version")(
        without_meta("weight_versions")(sample)
    ),
    "odd_versions": with_meta(weight_versions=7),
    "aborted": with_meta(finish_reason={"type": "abort", "message": "paused"}),
    "no_finish": with_meta(finish_reason=None),
    "other_id": with_meta(id="another attempt"),
    "no_id": without_meta("id"),
    "nan_logprob": edit_logprobs(lambda entries: [[float("nan"), *entries[0][1:]], *entries[1:]]),
    "null_logprob": edit_logprobs(lambda entries: [[None, *entries[0][1:]], *entries[1:]]),
    "positive_logprob": edit_logprobs(lambda entries: [[0.5, *entries[0][1:]], *entries[1:]]),
    "few_logprobs": edit_logprobs(lambda entries: entries[:-1]),
    "other_logprobs": edit_logprobs(lambda entries: [[p, t + 1, text] for p, t, text in entries]),
    "no_logprobs": without_meta("output_token_logprobs"),
    "big_id": lambda sample: sample | {"output_ids": [10**6, *sample["output_ids"][1:]]},
    "huge_id": lambda sample: sample | {"output_ids": [10**30, *sample["output_ids"][1:]]},
    "float_ids": lambda sample: sample | {"output_ids": [1.5, *sample["output_ids"][1:]]},
    "ragged_ids": lambda sample: sample | {"output_ids": [[1], *sample["output_ids"][1:]]},
    "true_id": lambda sample: sample | {"output_ids": [True, *sample["output_ids"][1:]]},
    "false_logprob": edit_logprobs(lambda entries: [[False, *entries[0][1:]], *entries[1:]]),
    "other_prompt": with_meta(prompt_tokens=99),
    "no_tokens": lambda sample: sample | {"output_ids": []},
    "too_long": lambda sample: sample | {"output_ids": sample["output_ids"] * 100},
    "not_object": lambda sample: "text",
    "no_meta": lambda sample: {"output_ids": sample["output_ids"]},
    **ROUTE_FAULTS,
}


GAPS: dict[str, Fault] = {  # row 4 holds no route, the payload is sound otherwise
    "gap_of_zeros": edit_routes(set_at((4,), 0)),
    "gap_of_minus_one": edit_routes(set_at((4,), -1)),
}

HARMLESS: dict[str, Fault] = {"retracted": with_meta(num_retractions=2)}
"""What a sample may say without being unusable."""
