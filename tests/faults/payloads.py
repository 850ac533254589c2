"""Random damage to routed_experts payloads and to complete samples, classified by an oracle that
shares no code with the decoder.

Verdicts: refused; same: accepted with the ids of the undamaged payload; gaps: accepted, rows
without a route marked as such, the rest unchanged; other: ids that obey every rule and are not the
original's, which the structure cannot show (tools/rollout_canary and replay.measure compare with
the model); and the two that must never occur: wrong (accepted although a rule is broken, or read as
other ids than those sent; or refused although no rule is broken) and crash.
Shapes: N rows, L layers, K top-k, E experts.
"""

from __future__ import annotations

import base64
import binascii
import copy
import json
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from megatron_rl.models.spec import ModelSizes
from megatron_rl.records import Prompt
from megatron_rl.rollout.client.response import ExpectedSample, parse_sample
from megatron_rl.rollout.client.routed_experts import RoutedExpertsError, decode_routed_experts
from megatron_rl.rollout.client.sample_fields import SampleDropped
from megatron_rl.rollout.client.sampling import SampleRules, Sampling
from tests.faults import samples

SPECS = (
    ModelSizes(num_layers=6, moe_layers=(0, 1, 2, 3, 4, 5), top_k=4, num_experts=32, vocab_size=64),
    ModelSizes(num_layers=6, moe_layers=(1, 2, 3, 4, 5), top_k=4, num_experts=300, vocab_size=64),
    ModelSizes(num_layers=4, moe_layers=(1, 3), top_k=1, num_experts=8, vocab_size=64),
)
BASE64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
HOSTILE = (
    None, True, False, -1, 0, 1, 63, 64, 10**6, 2**31, 2**63, 10**30, 0.5, -0.5, 1.5, 1e308,
    math.nan, math.inf, -math.inf,
    "", "stop", "x", "7", [], [None], [[1]], {}, {"type": "abort"},
)  # fmt: skip

Routes = tuple[np.ndarray, np.ndarray]
"""ids [N, L, K] of the MoE layers, and bool [N]: rows that hold no route."""


def routes_of(rng: np.random.Generator, spec: ModelSizes, rows: int) -> np.ndarray:
    """int32 [rows, layers, K], distinct in a row; dense layers are zero, as servers leave them."""
    scores = rng.random((rows, spec.num_layers, spec.num_experts))
    ids = scores.argpartition(spec.top_k - 1, -1)[..., : spec.top_k].astype("<i4")
    ids[:, [layer for layer in range(spec.num_layers) if layer not in spec.moe_layers]] = 0
    return ids


# Damage -------------------------------------------------------------------------------------------


def of_text(rng: np.random.Generator, ids: np.ndarray, spec: ModelSizes) -> Any:
    text = base64.b64encode(ids.tobytes()).decode()
    at, length = int(rng.integers(len(text))), int(rng.integers(1, 9))
    foreign = "-_=*\n\t \x00\u00e9\u0416"[int(rng.integers(10))]
    edits: tuple[Callable[[], Any], ...] = (
        lambda: text[:at] + BASE64[int(rng.integers(64))] + text[at + 1 :],
        lambda: text[:at] + foreign + text[at + 1 :],
        lambda: text[:at] + foreign + text[at:],
        lambda: text[:at] + text[at + length :],
        lambda: text[:at] + text[at : at + length] + text[at:],
        lambda: text[:at],
        lambda: text[: at // 4 * 4],
        lambda: text + "=" * length,
        lambda: text[:-1] + "=",
        lambda: text[at:] + text[:at],
        lambda: text.encode(),
        lambda: "",
    )
    return edits[int(rng.integers(len(edits)))]()


def of_bytes(rng: np.random.Generator, ids: np.ndarray, spec: ModelSizes) -> bytes:
    data = bytearray(ids.tobytes())
    at, length = int(rng.integers(len(data))), int(rng.integers(1, 17))
    kind = int(rng.integers(7))
    if kind == 0:
        data[at] ^= 1 << int(rng.integers(8))
    elif kind == 1:
        data[at : at + length] = rng.bytes(len(data[at : at + length]))
    elif kind == 2:
        data[at : at + length] = bytes(len(data[at : at + length]))
    elif kind == 3:
        del data[at : at + length]
    elif kind == 4:
        data[at:at] = rng.bytes(length)
    elif kind == 5:
        data = data[at:] + data[:at]
    else:
        data[at:] = bytes(len(data) - at)
    return bytes(data)


def of_dtype(rng: np.random.Generator, ids: np.ndarray, spec: ModelSizes) -> bytes:
    kinds = ("<i2", "<i8", "<u1", "<f2", "<f4", "<f8", ">i4", ">i2", ">i8")
    return ids.astype(kinds[int(rng.integers(len(kinds)))]).tobytes()


def of_shape(rng: np.random.Generator, ids: np.ndarray, spec: ModelSizes) -> bytes:
    count = int(rng.integers(1, 4))
    edits = (
        ids[:-count],
        ids[count:],
        np.concatenate([ids, ids[:count]]),
        ids[:, :-1],
        ids[:, :, 1:],
        ids[::2],
        ids[:0],
    )
    return np.ascontiguousarray(edits[int(rng.integers(len(edits)))]).tobytes()


def of_values(rng: np.random.Generator, ids: np.ndarray, spec: ModelSizes) -> bytes:
    ids = ids.copy()
    row, layer, column = (int(rng.integers(size)) for size in ids.shape)
    bad = (
        spec.num_experts,
        -1,
        -(2**31),
        2**31 - 1,
        65_536 + 3,
        256 + int(ids[row, layer, column]),
        0,
        1,
    )
    kind = int(rng.integers(9))
    if kind < 4:
        ids[row, layer, column] = bad[int(rng.integers(len(bad)))]
    elif kind == 4:
        ids[row, layer] = ids[row, layer, column]
    elif kind == 5:
        ids[row, layer] = -(int(rng.integers(2)))
    elif kind == 6:
        ids[row:] = -(int(rng.integers(2)))
    elif kind == 7:
        ids[row] = -(int(rng.integers(2)))
    else:
        ids[:, layer] = -(int(rng.integers(2)))
    return ids.tobytes()


def of_order(rng: np.random.Generator, ids: np.ndarray, spec: ModelSizes) -> bytes:
    edits = (
        ids.transpose(1, 0, 2), ids.transpose(2, 1, 0), ids.transpose(0, 2, 1), ids[:, ::-1],
        ids[::-1], ids[..., ::-1],
        np.roll(ids, 1, 0), np.roll(ids, 1, 1), routes_of(rng, spec, len(ids)),
    )  # fmt: skip
    return np.ascontiguousarray(edits[int(rng.integers(len(edits)))]).tobytes()


DAMAGE: dict[str, Callable[[np.random.Generator, np.ndarray, ModelSizes], Any]] = {
    "text": of_text,
    "bytes": of_bytes,
    "dtype": of_dtype,
    "shape": of_shape,
    "values": of_values,
    "order": of_order,
}


def damage_payloads(count: int, seed: int) -> dict[str, Counter[str]]:
    """Kind of damage -> verdicts of `count` mutations."""
    verdicts: dict[str, Counter[str]] = {kind: Counter() for kind in DAMAGE}
    for index in range(count):
        rng = np.random.default_rng([seed, index])
        kind, spec = list(DAMAGE)[index % len(DAMAGE)], SPECS[index // len(DAMAGE) % len(SPECS)]
        ids = routes_of(rng, spec, int(rng.integers(2, 41)))
        payload = DAMAGE[kind](rng, ids, spec)
        payload = (
            base64.b64encode(payload).decode()
            if isinstance(payload, bytes) and kind != "text"
            else payload
        )
        verdicts[kind][verdict(payload, ids, spec)] += 1
    return verdicts


def verdict(payload: str | bytes, truth: np.ndarray, spec: ModelSizes) -> str:
    expected = oracle(payload, len(truth), spec)
    try:
        ids, missing = decode(payload, len(truth), spec)
    except RoutedExpertsError:
        return "refused" if expected is None else "wrong"
    except Exception:
        return "crash"
    if (
        expected is None
        or not np.array_equal(ids[~missing], expected[0][~missing])
        or (missing != expected[1]).any()
    ):
        return "wrong"
    if not np.array_equal(ids[~missing], truth[~missing][:, spec.moe_layers]):
        return "other"
    return "gaps" if missing.any() else "same"


def decode(payload: str | bytes, rows: int, spec: ModelSizes) -> Routes:
    ids, missing = decode_routed_experts(
        payload,
        num_rows=rows,
        num_layers=spec.num_layers,
        moe_layers=spec.moe_layers,
        top_k=spec.top_k,
        num_experts=spec.num_experts,
    )
    return ids, np.zeros(rows, bool) if missing is None else missing


def oracle(payload: str | bytes, rows: int, spec: ModelSizes) -> Routes | None:
    """The ids in the payload, None where it breaks a rule.

    The rules are those of docs/concepts/routing_replay.md.
    """
    num_bytes = rows * spec.num_layers * spec.top_k * 4
    # Python's own decoder accepts too much padding
    if len(payload) != 4 * math.ceil(num_bytes / 3):
        return None
    try:
        data = base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError):
        return None
    if len(data) != num_bytes:
        return None
    ids = (
        np.frombuffer(data, "<i4")
        .reshape(rows, spec.num_layers, spec.top_k)
        .astype(np.int64)[:, spec.moe_layers]
    )
    flat = ids.reshape(rows, -1)
    missing = (flat == -1).all(1) | ((flat == 0).all(1) & (spec.top_k > 1))
    ordered = np.sort(ids[~missing], axis=-1)
    broken = ordered.size == 0 or ordered.min() < 0 or ordered.max() >= spec.num_experts
    return None if broken or (np.diff(ordered, axis=-1) == 0).any() else (ids, missing)


# Whole samples ------------------------------------------------------------------------------------

PROMPT = Prompt(id="q", text="", token_ids=(3, 4, 5), label="")
MAX_TOKENS = 16


def damage_samples(count: int, seed: int) -> Counter[str]:
    """Verdicts of `count` samples with one to three random edits anywhere in their JSON."""
    verdicts: Counter[str] = Counter()
    for index in range(count):
        rng = np.random.default_rng([seed, 1, index])
        honest = samples.honest_sample(
            {"return_routed_experts": True}, [3, 4, 5], f"r_{index}", int(rng.integers(1, 9))
        )
        sample = copy.deepcopy(honest)
        for _ in range(int(rng.integers(1, 4))):
            sample = damaged(rng, sample)
        verdicts[judge_sample(json.loads(json.dumps(sample)), honest)] += 1
    return verdicts


def damaged(rng: np.random.Generator, value: Any) -> Any:
    """Replace, drop, repeat or swap something at a random place of nested lists and objects."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.15:
        return HOSTILE[int(rng.integers(len(HOSTILE)))]
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = keys[int(rng.integers(len(keys)))]
    kind = rng.random()
    if kind < 0.6:
        value[key] = damaged(rng, value[key])
    elif kind < 0.8:
        del value[key]
    elif isinstance(value, list):
        value.insert(int(rng.integers(len(value))), value[key])
    else:
        other = keys[int(rng.integers(len(keys)))]
        value[key], value[other] = value[other], value[key]
    return value


def judge_sample(sample: Any, honest: dict[str, Any]) -> str:
    sample_id = honest["meta_info"]["id"]
    try:
        rollout = parse_sample(
            sample,
            ExpectedSample(PROMPT, "q/0", sample_id),
            Sampling(1.0, MAX_TOKENS, (), samples.VERSION),
            SampleRules(samples.SPEC, want_routes=True),
        )
    except SampleDropped:
        return "refused"
    except Exception:
        return "crash"
    if not is_sound(sample, sample_id):
        return "wrong"
    meta, response = sample["meta_info"], rollout.tokens[3:].tolist()
    expected = oracle(meta["routed_experts"], 2 + len(response), samples.SPEC)
    logprobs = np.array([entry[0] for entry in meta["output_token_logprobs"]], np.float32)
    same_reading = (
        expected is not None
        and response == sample["output_ids"]
        and np.array_equal(rollout.rollout_logprobs, logprobs)
        and np.array_equal(rollout.routed_experts, expected[0])
    )
    if not same_reading:
        return "wrong"
    content = (
        ("output_ids", honest["output_ids"]),
        ("output_token_logprobs", honest["meta_info"]["output_token_logprobs"]),
    )
    is_same = sample["output_ids"] == content[0][1] and [e[:2] for e in meta[content[1][0]]] == [
        e[:2] for e in content[1][1]
    ]
    return "same" if is_same else "other"


def is_sound(sample: dict[str, Any], sample_id: str) -> bool:
    """Every rule of a sample, one by one."""
    meta, tokens = sample["meta_info"], sample["output_ids"]
    finish = meta["finish_reason"]
    spans = meta.get("weight_versions") or [{"version": meta.get("weight_version")}]
    entries = meta["output_token_logprobs"]
    return all(
        [
            meta["id"] == sample_id,
            (finish["type"] if isinstance(finish, dict) else finish) in ("stop", "length"),
            all(str(span["version"]) == str(samples.VERSION) for span in spans),
            meta.get("prompt_tokens", 3) == 3
            and meta.get("completion_tokens", len(tokens)) == len(tokens),
            1 <= len(tokens) <= MAX_TOKENS,
            all(type(token) is int and 0 <= token < samples.SPEC.vocab_size for token in tokens),
            [entry[1] for entry in entries] == tokens
            and all(type(entry[1]) is int for entry in entries),
            all(
                type(e[0]) in (int, float) and math.isfinite(e[0]) and e[0] <= 1e-3 for e in entries
            ),
        ]
    )


def refuse_good(count: int, seed: int) -> Counter[str]:
    """Verdicts of `count` valid payloads of many shapes: all must be "same"."""
    verdicts: Counter[str] = Counter()
    for index in range(count):
        rng = np.random.default_rng([seed, 2, index])
        layers = int(rng.integers(1, 9))
        moe = tuple(np.flatnonzero(rng.random(layers) < 0.8).tolist()) or (layers - 1,)
        experts = (4, 8, 64, 128, 256, 257, 512)[int(rng.integers(7))]
        spec = ModelSizes(
            num_layers=layers,
            moe_layers=moe,
            top_k=int(rng.integers(1, 5)),
            num_experts=experts,
            vocab_size=64,
        )
        ids = routes_of(rng, spec, int(rng.integers(1, 65)))
        if spec.top_k > 1 or len(ids) == 1:  # a real zero route needs K = 1
            ids[(ids == 0).all((1, 2))] = np.arange(spec.top_k)
        verdicts[verdict(base64.b64encode(ids.tobytes()).decode(), ids, spec)] += 1
    return verdicts
