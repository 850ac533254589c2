"""One request: which answers are tried again, how large one may be, what is sent before it, and the
connection it takes.
"""

import asyncio
import json
from dataclasses import replace

import aiohttp
import httpx
import numpy as np
import pytest

from megatron_rl.config import RolloutConfig
from megatron_rl.config.sections.rollout import Truncation
from megatron_rl.records import Prompt
from megatron_rl.rollout.client import request
from megatron_rl.rollout.client.client import RolloutClient
from megatron_rl.rollout.client.counters import CLASS_OF_REASON
from megatron_rl.rollout.client.request import (
    GenerateRequest,
    RetryableError,
    RolloutError,
    check_prompt,
    check_status,
    connections,
    late_seconds,
)
from megatron_rl.rollout.client.sampling import SampleRules, Sampling
from megatron_rl.rollout.group import Group
from megatron_rl.rollout.server.sampling_defaults import FULL_SOFTMAX
from tests.fake_server import SPEC, VERSION, FakeServer, send
from tests.faults.samples import make_sample, random_routes

PROMPT = Prompt("q", "", (3, 4, 5), "")


def test_only_statuses_that_may_change_are_tried_again():
    retried, refused, start = [], [], "\ufffd" + "x" * 499  # the first 500 bytes of the answer
    for status in range(200, 600):
        try:
            check_status("http://a", PROMPT, status, memoryview(b"\xff" + b"x" * 600 + b"end"))
        except RetryableError as error:
            assert (error.reason, str(error)) == (f"http_{status}", f"http_{status}: {start}")
            retried.append(status)
        except RolloutError as error:
            hint = "; check rollout.api_key_env" if status in (401, 403) else ""
            assert (
                str(error)
                == f"server http://a refused prompt 'q' with status {status}: {start}{hint}"
            )
            refused.append(status)
    assert retried == [408, 425, 429, *range(500, 600)] and {*range(200, 600)} - {
        *retried,
        *refused,
    } == {200}


def test_a_server_without_the_adapter_is_asked_again():
    text = b'{"error":{"message":"Got LoRA adapter that has never been loaded: 3@a"}}'
    with pytest.raises(RetryableError, match="never been loaded: 3@a") as raised:
        check_status("http://a", PROMPT, 400, memoryview(text))
    assert CLASS_OF_REASON[raised.value.reason] == "stale"


@pytest.mark.parametrize(
    ("ids", "wrong"),
    [
        ((0, 63), None),
        ((5,), None),
        ((3, 64, 70, 0), 70),
        ((-2, -1, 3), -2),
        ((-1, 64), -1),
        ((64, 1), 64),
        ((), "no tokens"),
    ],
)
def test_a_prompt_outside_the_vocabulary_is_named_with_its_token(ids, wrong):
    if wrong is None:
        return check_prompt(Prompt("q", "", ids, ""), 64)
    with pytest.raises(
        ValueError,
        match=r"has no tokens" if wrong == "no tokens" else f"has token id {wrong},.*has 64",
    ):
        check_prompt(Prompt("q", "", ids, ""), 64)


@pytest.mark.parametrize("want_routes", [True, False])
@pytest.mark.parametrize("truncation", [None, Truncation(1.0, 40, 0.0)])
def test_the_longest_correct_answer_is_read_and_not_much_more(want_routes, truncation, monkeypatch):
    monkeypatch.setattr(request, "BODY_SLACK_BYTES", 0)
    rng, size, longest, copies = np.random.default_rng(0), 50, 200, 3
    sampling = Sampling(1.0, longest, (), VERSION, truncation=truncation)
    ids = np.full(longest, 2**31 - 1)
    sample = make_sample(
        {"return_routed_experts": want_routes},
        "q",
        size,
        ids,
        -rng.random(longest),
        random_routes(rng, size + longest - 1),
    )
    if truncation is not None:
        sets = {"output_token_sampling_mask": [[2**31 - 1] * truncation.top_k] * longest}
        sample["meta_info"] |= sets | {
            "output_token_sampling_logprobs": (-rng.random(longest)).tolist()
        }
    answer = len(json.dumps([sample] * copies))
    prompt = Prompt("q", "", (3,) * size, "")
    content = GenerateRequest("r", prompt, [()] * copies, sampling, want_routes, in_place=False)
    most = content.max_body_bytes(SPEC)
    assert answer <= most <= 3 * answer
    # of a token: its id and log-prob; base64 of 6 int32, which are 32 characters, and 4; 40 ids of
    # a kept set
    of_token = 128 + (36 if want_routes else 0) + (0 if truncation is None else 40 * 12)
    assert most == copies * (size + longest) * of_token


def test_a_body_states_all_that_shapes_the_distribution():
    params = {
        "n": 1,
        "temperature": 0.7,
        "max_new_tokens": 6,
        "stop_token_ids": [1],
        **FULL_SOFTMAX,
    }
    body = {"rid": "r", "input_ids": [[3, 4, 5]] * 2, "sampling_params": params}
    body |= {"return_logprob": True, "return_routed_experts": False}
    sampling = Sampling(0.7, 6, (1,), 3)
    content = GenerateRequest("r", PROMPT, [(), ()], sampling, want_routes=False, in_place=False)
    assert content.body() == body
    content = replace(content, want_routes=True)
    assert content.body() == body | {"return_routed_experts": True}
    named = replace(content, sampling=replace(sampling, run="a"), by_adapter=True)
    assert named.body() == content.body() | {"lora_path": "3@a"}
    truncated, cut = Truncation(0.9, 40, 0.05), params | {"top_p": 0.9, "top_k": 40, "min_p": 0.05}
    sampling = replace(sampling, truncation=truncated, first_row=4, run="a")
    content = replace(content, prefixes=[(), (7, 8)], sampling=sampling, in_place=True)
    assert content.body() == body | {
        "input_ids": [[3, 4, 5], [3, 4, 5, 7, 8]],
        "sampling_params": [cut, cut | {"max_new_tokens": 4}],
        "return_routed_experts": True,
        "routed_experts_start_len": 4,
        "return_sampling_mask": True,
        "extra_key": "3@a",
    }
    # an evaluation samples from kept sets too, and does not read them
    evaluation = replace(content, sampling=replace(sampling, return_sets=False)).body()
    assert content.body() == evaluation | {"return_sampling_mask": True}
    assert "return_sampling_mask" not in evaluation


def test_an_answer_to_an_abort_at_the_deadline_has_a_tenth_of_it_at_most_half_a_minute():
    seconds = (1.0, 100.0, 299.0, 301.0, 3600.0)
    allowed = [late_seconds(RolloutConfig(request_timeout_seconds=each)) for each in seconds]
    assert allowed == pytest.approx([0.1, 10.0, 29.9, 30.0, 30.0])


def client_of(server: FakeServer, **settings) -> RolloutClient:
    return RolloutClient(
        [server.url], RolloutConfig(**settings), SampleRules(SPEC, want_routes=True)
    )


@pytest.mark.parametrize(
    ("size", "copies", "prefills"), [(341, 4, 0), (342, 4, 1), (512, 3, 1), (5000, 1, 0)]
)
def test_a_prompt_is_prefilled_once_where_its_copies_would_compute_1024_tokens_again(
    size, copies, prefills
):
    long = Prompt("q", "", (3,) * size, "")
    with FakeServer("ok") as server:
        client_of(server).generate(
            [long], copies, temperature=1.0, max_tokens=8, stop_token_ids=(), policy_version=VERSION
        )
    assert len(server.prefills) == prefills and len(server.requests) == 1
    for prefill in server.prefills:
        assert (
            prefill["input_ids"] == [[3] * size]
            and prefill["sampling_params"]["max_new_tokens"] == 0
        )
        assert prefill["return_logprob"] is False and "routed_experts_start_len" not in prefill


def test_a_prefill_asks_for_no_routes_of_known_rows():
    """It is of the prompt alone, which may be shorter than what is known."""
    prompt = Prompt("q", "", (3,) * 602, "")
    with FakeServer("ok") as server:
        client_of(server).fill([Group(prompt, 3, start=599)], Sampling(1.0, 8, (), VERSION))
    (body,), (prefill,) = server.requests, server.prefills
    assert body["routed_experts_start_len"] == 599 and "routed_experts_start_len" not in prefill


@pytest.mark.parametrize(
    ("fault", "what"), [("too_few", "3 samples"), ("too_many", "5 samples"), ("object", "a dict")]
)
def test_another_number_of_samples_is_named(fault, what):
    with FakeServer(fault) as server:
        with pytest.raises(RolloutError, match=f": bad_body: {what} for 4 copies of a prompt$"):
            client_of(server, max_retries=0).fill([Group(PROMPT, 4)], Sampling(1.0, 8, (), VERSION))


def test_a_prefill_that_fails_is_tried_again_like_its_request():
    class Loading(FakeServer):
        def route(self, handler, body) -> None:
            if body.get("rid", "").endswith(".prefill") and not self.prefills:
                self.prefills.append(body)
                send(handler, 503, b"loading")
            else:
                super().route(handler, body)

    with Loading("ok") as server:
        client = client_of(server)
        client.generate(
            [Prompt("q", "", (3,) * 600, "")],
            3,
            temperature=1.0,
            max_tokens=8,
            stop_token_ids=(),
            policy_version=VERSION,
        )
    assert client.counters.failures == {"http_503": 1} and (
        len(server.prefills),
        len(server.requests),
    ) == (2, 1)


def test_connections_have_no_limit_no_total_deadline_and_end_before_a_servers():
    """An abort must not wait for the requests that it ends; SGLang closes what is idle for 5
    seconds.
    """

    async def look():
        async with connections(RolloutConfig(connect_timeout_seconds=7.0), tls) as http:
            timeout, pool = http.timeout, http.connector
            return (
                timeout.total,
                timeout.sock_connect,
                timeout.sock_read,
                pool.limit,
                pool._keepalive_timeout,
                pool._ssl,
                type(http.cookie_jar),
                http.auto_decompress,
            )

    tls = httpx.create_ssl_context(trust_env=False)
    assert asyncio.run(look()) == (None, 7.0, None, 0, 4.0, tls, aiohttp.DummyCookieJar, False)
    with FakeServer("ok") as server:
        client_of(server).generate(
            [PROMPT], 1, temperature=1.0, max_tokens=8, stop_token_ids=(), policy_version=VERSION
        )
    headers = server.requests[0]["headers"]
    assert (headers["Accept-Encoding"], headers["Content-Type"]) == ("identity", "application/json")
