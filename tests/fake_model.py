"""A model for the fake server in which every number is a fingerprint of the weights' version and
the tokens.

Log-prob of token i and routes of row j follow from the weight version and the tokens up to there,
as those of a real model do: (tokens, versions) determine every log-prob and every row.
Shapes: S tokens, P of them prompt, R = S - P response; routes [S - 1, L, K].
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from megatron_rl.records import Rollout
from tests.faults.samples import SPEC, encode

END = 1  # the stop token


def logprob(version: int, tokens: np.ndarray) -> float:
    """log mu of the last of `tokens`, given the others."""
    return -float(np.float32(random(version, tokens).random()))


def route(version: int, tokens: np.ndarray) -> np.ndarray:
    """[L, K]: the experts of the last of `tokens`."""
    scores = random(version, tokens).random((SPEC.num_layers, SPEC.num_experts))
    return scores.argsort(-1)[:, : SPEC.top_k]


def random(version: int, tokens: np.ndarray) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(np.asarray(tokens, "<i8").tobytes(), version))


class FakeModel:
    """`source` of a FakeServer with weights `version`; responses of `length` tokens in all,
    continuations included.
    """

    def __init__(self, version: int = 0, length: int = 6, prompt_length: int = 3) -> None:
        self.version, self.length, self.prompt_length = version, length, prompt_length

    def __call__(self, body: dict[str, Any], given: list[int], sample_id: str) -> dict[str, Any]:
        rng = np.random.default_rng(zlib.crc32(sample_id.encode()))
        new = rng.integers(2, SPEC.vocab_size, self.length - (len(given) - self.prompt_length))
        return answer(self.version, given, new, sample_id, {"type": "length", "length": len(new)})


class TurnModel:
    """`source` of a FakeServer: turns of `length` tokens, the last of them END, or as many as a
    request allows.
    """

    def __init__(self, version: int = 0, length: int = 5) -> None:
        self.version, self.length = version, length

    def __call__(self, body: dict[str, Any], given: list[int], sample_id: str) -> dict[str, Any]:
        params = body["sampling_params"]
        most = (params[0] if isinstance(params, list) else params)["max_new_tokens"]
        new = np.random.default_rng(zlib.crc32(sample_id.encode())).integers(
            2, SPEC.vocab_size, self.length
        )[:most]
        if self.length < most:
            new[-1] = END
            return answer(self.version, given, new, sample_id, {"type": "stop", "matched": END})
        return answer(self.version, given, new, sample_id, {"type": "length", "length": len(new)})


def answer(
    version: int, given: list[int], new: np.ndarray, sample_id: str, finish_reason: dict[str, Any]
) -> dict[str, Any]:
    """The sample in which the weights `version` continue `given` with `new`."""
    return mixed_answer([version] * len(new), given, new, sample_id, finish_reason)


def mixed_answer(
    versions: list[int],
    given: list[int],
    new: np.ndarray,
    sample_id: str,
    finish_reason: dict[str, Any],
) -> dict[str, Any]:
    """The sample whose token new[i] the weights versions[i] sampled, each by a forward of the token
    before it.
    """
    tokens = np.concatenate([np.asarray(given, np.int64), new])
    of_row = [versions[0]] * (len(given) - 1) + versions
    rows = [route(of_row[j], tokens[: j + 1]) for j in range(len(tokens) - 1)]
    logprobs = [
        logprob(version, tokens[: len(given) + i + 1]) for i, version in enumerate(versions)
    ]
    spans = [{"version": str(v), "start": versions.index(v),
    "end": versions.index(v) + versions.count(v)}
             for v in dict.fromkeys(versions)]  # fmt: skip
    meta = {
        "id": sample_id,
        "finish_reason": finish_reason,
        "prompt_tokens": len(given),
        "completion_tokens": len(new),
        "weight_version": str(versions[-1]),
        "weight_versions": spans,
        "num_retractions": 0,
        "output_token_logprobs": [
            [p, t, None] for p, t in zip(logprobs, new.tolist(), strict=True)
        ],
        "routed_experts": encode(np.stack(rows).astype("<i4")),
    }
    return {"output_ids": new.tolist(), "meta_info": meta}


def assert_fingerprints(rollout: Rollout) -> None:
    """Every log-prob is of the version that sampled its token; every row of the version that
    sampled the token it predicts.
    """
    tokens, versions, first = rollout.tokens, rollout.policy_versions, rollout.prompt_length
    assert len(versions) == rollout.response_length
    expected = [
        logprob(version, tokens[: first + i + 1]) for i, version in enumerate(versions.tolist())
    ]
    assert rollout.rollout_logprobs.tolist() == expected
    # prompt rows: the first request computed them
    of_row = np.concatenate([np.full(first - 1, versions[0]), versions])
    rows = np.stack([route(int(version), tokens[: j + 1]) for j, version in enumerate(of_row)])
    assert rollout.routed_experts is not None and np.array_equal(rollout.routed_experts, rows)
    assert rollout.missing_routes is None


def assert_turn_fingerprints(rollout: Rollout) -> None:
    """As `assert_fingerprints`, for an episode: a row whose next token was not sampled is of the
    version that sampled the next one that was."""
    tokens, versions, sampled = rollout.tokens, rollout.policy_versions, rollout.sampled
    assert (
        len(versions) == len(sampled) == rollout.response_length and sampled[-1] == len(tokens) - 1
    )
    expected = [
        logprob(int(version), tokens[: i + 1]) for i, version in zip(sampled, versions, strict=True)
    ]
    assert rollout.rollout_logprobs.tolist() == expected
    next_sampled = np.searchsorted(sampled, np.arange(1, len(tokens)))
    rows = np.stack([route(int(versions[k]), tokens[: j + 1]) for j, k in enumerate(next_sampled)])
    assert rollout.routed_experts is not None and np.array_equal(rollout.routed_experts, rows)
    assert rollout.missing_routes is None
