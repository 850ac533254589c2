"""A server whose mu is not the trainer's softmax is refused; what has no effect on it is
accepted.
"""

import json
import math
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from megatron_rl.config import RolloutConfig
from megatron_rl.rollout.server.sampling_defaults import (
    FULL_SOFTMAX,
    STATED,
    check_preferred,
    check_sampling,
    is_scaled,
)
from megatron_rl.rollout.server.server_info import ServerError
from tests.fake_server import send

LOGITS = [math.sin(7 * token) * 4 for token in range(64)]


def logprobs(temperature):
    scaled = [logit / temperature for logit in LOGITS]
    return [value - math.log(sum(map(math.exp, scaled))) for value in scaled]


class Handler(BaseHTTPRequestHandler):
    """Answers as SGLang 0.5.21 does; `original` is SGLANG_RETURN_ORIGINAL_LOGPROB."""

    def do_GET(self):
        send(self, 200, json.dumps({"preferred_sampling_params": self.server.preferred}).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        values = logprobs(1.0 if self.server.original else body["sampling_params"]["temperature"])
        given = [[[values[token], token, None] for token in body["token_ids_logprob"]]]
        send(self, 200, json.dumps({"meta_info": {"output_token_ids_logprobs": given}}).encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.preferred, server.original, server.bodies = None, False, []
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_server_that_scales_its_logprobs_passes(server):
    check_sampling(server.url, RolloutConfig(temperature=0.9), vocab_size=64)
    assert [body["sampling_params"]["temperature"] for body in server.bodies] == [1.0, 0.9]
    check_sampling(server.url, RolloutConfig(), vocab_size=64)
    assert len(server.bodies) == 2, "at temperature 1 there is nothing to tell apart"


def test_no_proxy_of_the_environment_is_asked(server, monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    check_sampling(server.url, RolloutConfig(temperature=0.9), vocab_size=64)


def test_logprobs_of_another_temperature_are_refused(server):
    server.original = True
    with pytest.raises(
        ServerError, match=r"rollout\.temperature = 0\.9.*SGLANG_RETURN_ORIGINAL_LOGPROB"
    ):
        check_sampling(server.url, RolloutConfig(temperature=0.9), vocab_size=64)


def test_preferences_that_shape_the_distribution_are_refused(server):
    server.preferred = {"logit_bias": {"7": -100}, "top_p": 0.9}
    with pytest.raises(
        ServerError, match=r"adds \{'logit_bias'.*--preferred-sampling-params"
    ) as caught:
        check_sampling(server.url, RolloutConfig(), vocab_size=64)
    assert server.url in str(caught.value) and "top_p" not in str(caught.value), (
        "a request states top_p and wins"
    )


def test_preferences_without_effect_pass():
    check_preferred("http://server:1", None)
    check_preferred(
        "http://server:1",
        {"top_k": 20, "temperature": 0.6, "skip_special_tokens": False, "regex": None},
    )
    assert {"top_p", "top_k", "min_p", "min_new_tokens", "temperature"} <= STATED and FULL_SOFTMAX[
        "top_k"
    ] == -1


@pytest.mark.parametrize("temperature", [0.8, 0.98, 1.02, 1.3])
def test_precision_noise_does_not_decide(temperature):
    noise = [1e-3 * (-1) ** token for token in range(64)]
    scaled, plain = logprobs(temperature), logprobs(1.0)
    assert is_scaled(plain, [a + b for a, b in zip(scaled, noise, strict=True)], temperature)
    assert not is_scaled(plain, [a + b for a, b in zip(plain, noise, strict=True)], temperature)
