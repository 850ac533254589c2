"""A teacher's server that answers wrongly on purpose; its log-probs depend on the tokens alone."""

import json
from http.server import BaseHTTPRequestHandler
from typing import Any

import numpy as np

from tests.fake_server import ANSWERS, TRANSPORT_FAULTS, FakeServer


def teacher_logprob(tokens: list[int], place: int) -> float:
    """log pi_T of tokens[place] after those before it: any function of both, to four digits."""
    total = sum((i + 1) * token for i, token in enumerate(tokens[: place + 1]))
    return -round(0.1 + (total * 37 % 101) / 20, 4)


def expected_logprobs(tokens: np.ndarray, places: np.ndarray) -> np.ndarray:
    ids = tokens.tolist()
    return np.array([teacher_logprob(ids, place) for place in places.tolist()], np.float32)


def honest(body: dict[str, Any]) -> dict[str, Any]:
    """The answer of a real server (SGLang 0.5.21), without the keys that nothing reads."""
    tokens, start = body["input_ids"], body["logprob_start_len"]
    entries = [[teacher_logprob(tokens, at), tokens[at], None] for at in range(start, len(tokens))]
    entries[0][0] = None
    meta = {"id": body["rid"], "input_token_logprobs": entries, "output_token_logprobs": []}
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


class FakeTeacher(FakeServer):
    """`script` as that of FakeServer, with the wrong answers of TEACHER_ANSWERS."""

    def behave(self, handler: BaseHTTPRequestHandler, behaviour: str, body: dict[str, Any]) -> None:
        name, _, point = behaviour.partition("@")
        answer = honest(body)
        status = 200
        if name in TEACHER_ANSWERS:
            answer = TEACHER_ANSWERS[name](answer)
        content = json.dumps(answer).encode()
        if name in ANSWERS and name not in TEACHER_ANSWERS:
            status, content = ANSWERS[name]([answer])
        is_fault = name in TRANSPORT_FAULTS
        self.deliver(handler, status, content, name if is_fault else "", point or "mid_body")
