"""A teacher's server that answers wrongly on purpose; its log-probs depend on the tokens alone."""

import base64
import json
from http.server import BaseHTTPRequestHandler
from typing import Any

import numpy as np

from tests.fake_server import ANSWERS, SPEC, TRANSPORT_FAULTS, FakeServer

TOP, VOCABULARY = "input_top_logprobs", SPEC.vocab_size


def teacher_logprob(tokens: list[int], place: int) -> float:
    """log pi_T of tokens[place] after those before it: any function of both, to four digits."""
    total = sum((i + 1) * token for i, token in enumerate(tokens[: place + 1]))
    return -round(0.1 + (total * 37 % 101) / 20, 4)


def expected_logprobs(tokens: np.ndarray, places: np.ndarray) -> np.ndarray:
    ids = tokens.tolist()
    return np.array([teacher_logprob(ids, place) for place in places.tolist()], np.float32)


def top_of(tokens: list[int], places: list[int], k: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids, log-probs) [places, k]: the token of the place and the k - 1 ids after it."""
    steps = np.arange(k)
    ids = np.array([tokens[at] for at in places])[:, None] + steps
    values = np.array([teacher_logprob(tokens, at) for at in places])[:, None] - 0.5 * steps
    return (ids % VOCABULARY).astype("<i4"), values.round(4).astype("<f4")


def flat(ids: np.ndarray, values: np.ndarray) -> dict[str, Any]:
    """The fields of SGLang 0.5.21 for arrays [n, k] in base64."""
    texts = [base64.b64encode(array.tobytes()).decode() for array in (ids, values)]
    return {
        f"{TOP}_idx_flat_b64": texts[0],
        f"{TOP}_val_flat_b64": texts[1],
        f"{TOP}_shape": list(ids.shape),
        f"{TOP}_null_prefix": 1,
    }


def honest(body: dict[str, Any]) -> dict[str, Any]:
    """The answer of a real server (SGLang 0.5.21), without the keys that nothing reads."""
    tokens, start = body["input_ids"], body["logprob_start_len"]
    entries = [[teacher_logprob(tokens, at), tokens[at], None] for at in range(start, len(tokens))]
    entries[0][0] = None
    meta = {"id": body["rid"], "input_token_logprobs": entries, "output_token_logprobs": []}
    if (k := body.get("top_logprobs_num", 0)) and body["return_flat_raw_top_logprobs_b64"]:
        meta |= flat(*top_of(tokens, list(range(start + 1, len(tokens))), k))
    return {"output_ids": [], "meta_info": meta}


def edited(change) -> Any:
    def apply(answer: dict[str, Any]) -> dict[str, Any]:
        change(answer["meta_info"])
        return answer

    return apply


def entry(place: int, index: int, value: object):
    return edited(lambda meta: meta["input_token_logprobs"][place].__setitem__(index, value))


TEACHER_ANSWERS = {
    "nan": entry(-1, 0, float("nan")),
    "null": entry(-1, 0, None),
    "infinite": entry(1, 0, float("-inf")),
    "positive": entry(-1, 0, 0.5),
    "a_text": entry(-1, 0, "-1.0"),
    "other_text": entry(-1, 1, 99),
    "one_token_less": edited(lambda meta: meta["input_token_logprobs"].pop()),
    "one_token_more": edited(lambda meta: meta["input_token_logprobs"].append([-1.0, 5, None])),
    "no_logprobs": edited(lambda meta: meta.pop("input_token_logprobs")),
    "not_entries": edited(lambda meta: meta.update(input_token_logprobs=[-1.0, -2.0])),
    "another_request": edited(lambda meta: meta.update(id="x")),
    "a_list": lambda answer: [answer],
}
"""Wrong answers: an honest one -> what is sent."""


def edited_top(change) -> Any:
    """`change` edits copies of ids and log-probs [n, k], or returns others."""

    def apply(answer: dict[str, Any]) -> dict[str, Any]:
        meta = answer["meta_info"]
        shape = meta[f"{TOP}_shape"]
        arrays = [
            np.frombuffer(base64.b64decode(meta[f"{TOP}_{name}_flat_b64"]), kind).reshape(shape)
            for name, kind in (("idx", "<i4"), ("val", "<f4"))
        ]
        ids, values = (array.copy() for array in arrays)
        meta |= flat(*(change(ids, values) or (ids, values)))
        return answer

    return apply


def at_end(which: int, value: float):
    return edited_top(lambda *arrays: arrays[which].__setitem__((-1, -1), value))


TOP_ANSWERS = {
    "top_of_fewer_tokens": edited_top(lambda ids, values: (ids[1:], values[1:])),
    "fewer_in_top": edited_top(lambda ids, values: (ids[:, 1:], values[:, 1:])),
    "no_top": edited(lambda meta: meta.pop(f"{TOP}_val_flat_b64")),
    "top_cut": edited(
        lambda meta: meta.update({f"{TOP}_idx_flat_b64": meta[f"{TOP}_idx_flat_b64"][:-4]})
    ),
    "top_no_base64": edited(lambda meta: meta.update({f"{TOP}_val_flat_b64": "\u00e9"})),
    "top_nan": at_end(1, float("nan")),
    "top_infinite": at_end(1, float("-inf")),
    "top_positive": at_end(1, 0.5),
    "top_beyond_the_vocabulary": at_end(0, VOCABULARY),
    "top_negative_id": at_end(0, -1),
    "top_id_twice": edited_top(lambda ids, values: ids.__setitem__((-1, -1), ids[-1, 1])),
    "top_of_other_places": edited_top(
        lambda ids, values: (np.roll(ids, 1, 0), np.roll(values, 1, 0))
    ),
    "top_of_another_text": edited_top(lambda ids, values: (ids, values - 0.3)),
}
"""Wrong tokens of a teacher: an honest answer -> what is sent."""


class FakeTeacher(FakeServer):
    """`script` as that of FakeServer, with the wrong answers of TEACHER_ANSWERS."""

    def behave(self, handler: BaseHTTPRequestHandler, behaviour: str, body: dict[str, Any]) -> None:
        name, _, point = behaviour.partition("@")
        answer = honest(body)
        status = 200
        wrong = TEACHER_ANSWERS | TOP_ANSWERS
        if name in wrong:
            answer = wrong[name](answer)
        content = json.dumps(answer).encode()
        if name in ANSWERS and name not in wrong:
            status, content = ANSWERS[name]([answer])
        is_fault = name in TRANSPORT_FAULTS
        self.deliver(handler, status, content, name if is_fault else "", point or "mid_body")
