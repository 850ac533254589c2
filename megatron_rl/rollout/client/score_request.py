"""The request for a teacher's log-probs of one sequence, and its answer.

It asks for nothing new: the server computes the sequence once and returns the log-prob of every
token after the prompt, at temperature 1 whatever the request says.  The answer repeats request id
and token ids, and both are compared: the answer to another request or text is never used.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.records.teacher_scores import TeacherScores, TeacherTop
from megatron_rl.rollout.client.counters import meta_info
from megatron_rl.rollout.client.request import RetryableError

TOP = "input_top_logprobs"
FLAT = {"return_flat_raw_top_logprobs": True, "return_flat_raw_top_logprobs_b64": True}
"""SGLang sends ids and log-probs as two arrays in base64: 11 bytes a token, not 30 to 50."""
TOP_BYTES = 12
CLOSE = 1e-3
"""Difference of two log-probs of one token in one answer that rounding explains."""
ROUNDING = 1e-3
"""A log-prob may be above 0 by the rounding of a server, and no further."""


@dataclass(frozen=True)
class ScoreRequest:
    """The request for the log-probs of one sequence's tokens after its prompt."""

    rid: str
    tokens: Sequence[int]
    prompt_length: int
    vocab_size: int
    top_k: int = 0
    """Most probable tokens of the teacher in the place of every token after the prompt."""

    def body(self) -> dict[str, object]:
        """Return the JSON body."""
        top = {"top_logprobs_num": self.top_k, **FLAT} if self.top_k else {}
        return top | {
            "rid": self.rid,
            "input_ids": list(self.tokens),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            # the first entry, of the last token of the prompt, has no log-prob
            "logprob_start_len": self.prompt_length - 1,
        }

    def scores(self, answer: object, sampled: np.ndarray) -> TeacherScores:
        """Return the teacher's numbers of the tokens `sampled`, int [R], places after the prompt,
        from an answer.

        Raises RetryableError for an answer to another request or text, with another number of
        tokens, or with a value that is no log-prob.
        """
        meta = meta_info(answer)
        logprobs = self.logprobs(meta)
        if not self.top_k:
            return TeacherScores(logprobs[sampled])
        ids, values = read_top(meta, (len(logprobs), self.top_k), self.vocab_size)
        check_sampled(np.asarray(self.tokens[self.prompt_length :]), logprobs, ids, values)
        try:
            return TeacherScores(logprobs[sampled], TeacherTop.of(ids[sampled], values[sampled]))
        except ValueError as error:  # an id twice
            raise RetryableError(
                "bad_body", f"the teacher's most probable tokens: {error}"
            ) from error

    def logprobs(self, meta: Mapping[str, object]) -> np.ndarray:
        """Return the log-probs of the tokens after the prompt, float32 [S - prompt], from an
        answer's meta_info.  Raises RetryableError as `scores`.
        """
        if meta.get("id") != self.rid:
            raise RetryableError("bad_body", f"the answer to {meta.get('id')!r}, not {self.rid!r}")
        entries, expected = meta.get("input_token_logprobs"), self.tokens[self.prompt_length - 1 :]
        if not isinstance(entries, list) or not all(is_entry(entry) for entry in entries):
            raise RetryableError("bad_body", "input_token_logprobs is no list of [log-prob, id]")
        if len(entries) != len(expected):
            raise RetryableError(
                "wrong_count", f"log-probs of {len(entries)} tokens for {len(expected)}"
            )
        # SGLang 0.5.21 names the last id of the vocabulary 0, as it does placeholders of images
        # (logprob_result_processor.py); the log-prob is that of the token
        for place, (entry, token) in enumerate(zip(entries, expected, strict=True)):
            if entry[1] != token and not (entry[1] == 0 and token >= self.vocab_size - 1):
                raise RetryableError(
                    "other_text", f"token {place} after the prompt is {entry[1]}, not {token}"
                )
        # None, as JSON has no NaN, becomes NaN; the first entry has no log-prob
        values = np.array([entry[0] for entry in entries[1:]], np.float32)
        wrong = np.flatnonzero(~(np.isfinite(values) & (values <= ROUNDING)))
        if len(wrong):
            value = entries[wrong[0] + 1][0]
            raise RetryableError(
                "not_logprob", f"the log-prob of token {wrong[0] + 1} after the prompt is {value}"
            )
        return values


def read_top(
    meta: Mapping[str, object], shape: tuple[int, int], vocab_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return (ids int64, log-probs float32), [S - prompt, K] each, of a flat answer of SGLang.

    Raises RetryableError for another shape, an id that is no token, or a value that is no log-prob.
    """
    # the first place of the answer, of the last token of the prompt, has none
    if meta.get(f"{TOP}_shape") != list(shape) or meta.get(f"{TOP}_null_prefix") != 1:
        raise RetryableError(
            "wrong_count",
            f"most probable tokens of shape {meta.get(f'{TOP}_shape')} after"
            f" {meta.get(f'{TOP}_null_prefix')} places without, must be {list(shape)} after 1",
        )
    try:
        parts = [
            np.frombuffer(
                base64.b64decode(str(meta[f"{TOP}_{name}_flat_b64"]), validate=True), kind
            )
            for name, kind in (("idx", "<i4"), ("val", "<f4"))
        ]
        ids, values = (part.reshape(shape) for part in parts)
    except (KeyError, ValueError) as error:
        raise RetryableError("bad_body", f"{TOP}: {error!r}") from error
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise RetryableError(
            "bad_body", f"a most probable token is {ids.max()}, the vocabulary has {vocab_size}"
        )
    wrong = ~(np.isfinite(values) & (values <= ROUNDING))
    if wrong.any():
        raise RetryableError(
            "not_logprob", f"the log-prob of a most probable token is {values[wrong][0]}"
        )
    return ids.astype(np.int64), values.astype(np.float32)


def check_sampled(
    tokens: np.ndarray, logprobs: np.ndarray, ids: np.ndarray, values: np.ndarray
) -> None:
    """Raise RetryableError where the most probable tokens contradict the log-prob of the token in
    their place: they are of another place or text.

    tokens: int [n].  logprobs: float32 [n].  ids, values: [n, K].
    """
    same = ids == tokens[:, None]
    expected = np.where(same.any(1), np.where(same, values, 0).sum(1), logprobs)
    # a token that is not among them has at most the probability of the last of them
    beyond = ~same.any(1) & (logprobs > values.min(1) + CLOSE)
    wrong = np.flatnonzero((np.abs(expected - logprobs) > CLOSE) | beyond)
    if len(wrong):
        raise RetryableError(
            "other_text",
            f"the most probable tokens in place {wrong[0]} after the prompt are not of this place:"
            f" token {tokens[wrong[0]]} has log-prob {logprobs[wrong[0]]}",
        )


def is_entry(entry: object) -> bool:
    """Return True for [log-prob or None, token id, ...]."""
    return (
        isinstance(entry, list)
        and len(entry) >= 2
        and (entry[0] is None or type(entry[0]) in (int, float))
        and type(entry[1]) is int
    )
