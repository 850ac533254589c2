"""A server that is not the one this run needs is refused; the message has its URL and both
values.
"""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from megatron_rl.metrics.console import Console
from megatron_rl.models.spec import ModelSizes
from megatron_rl.rollout.server.server_info import (
    ServerError,
    ServerInfo,
    check_identical,
    check_server,
    server_info,
    tokenizer_digest,
)
from megatron_rl.trainer import build_inference as build
from tests.one_rank import one_rank_config

SPEC = ModelSizes(num_layers=4, moe_layers=(0, 1, 2, 3), top_k=2, num_experts=8, vocab_size=64)
GOOD = ServerInfo(
    url="http://server:1",
    version="0.5.21",
    model_path="/models/tiny",
    dtype="float32",
    weight_version="0",
    routed_experts=True,
    route_width=8,
    num_layers=4,
    num_experts=8,
    top_k=2,
    vocab_size=64,
    tokenizer="0123456789abcdef",
    max_input_tokens=4090,
)
KEY = {"Authorization": "Bearer sesame"}


@contextmanager
def answering(answers: dict[str, object]) -> Iterator[str]:
    """A server that answers these paths, with 200 (or the status of a (status, answer) pair), and
    others with 404.

    An answer may be a function that returns it.
    """

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            found = answers.get(self.path, (404, {"detail": "Not Found"}))
            found = found() if callable(found) else found
            status, body = found if isinstance(found, tuple) else (200, found)
            content = json.dumps(body).encode()
            with suppress(OSError):  # the client has hung up
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        do_GET = do_POST = answer

        def log_message(self, *args: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        http.server_close()


def sglang(model_path: object, *, routes: bool = True, **changes: object) -> dict[str, object]:
    """What a server of SPEC answers; it tells its API key, as SGLang's does."""
    payload = base64.b64encode(bytes(4 * 8)).decode()
    return {
        "/model_info": {"weight_version": "0"},
        "/server_info": {
            "model_path": str(model_path),
            "version": "0.5.21",
            "dtype": "float32",
            "enable_return_routed_experts": True,
            "api_key": "sesame",
            "max_req_input_len": 4090,
        },
        "/generate": {
            "output_ids": [1],
            "meta_info": {"routed_experts": payload} if routes else {},
        },
    } | changes


@pytest.fixture
def model(tmp_path):
    config = {"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def test_server_info_is_read_without_its_key(model):
    with answering(sglang(model)) as url:
        info = server_info(url, KEY)
    settings = {"enable_return_routed_experts": True, "version": "0.5.21"}
    digest = tokenizer_digest(model)
    assert info == replace(
        GOOD, url=url, model_path=str(model), tokenizer=digest, settings=settings
    )
    assert "sesame" not in repr(info)
    check_server(info, SPEC, want_routes=True, dtype="float32", tokenizer=tokenizer_digest(model))


def test_no_proxy_of_the_environment_sees_the_key(model, monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with answering(sglang(model)) as url:
        assert server_info(url, KEY).url == url


def test_an_error_that_quotes_a_server_hides_the_key(model):
    with answering(sglang(model, **{"/server_info": (500, {"api_key": "sesame"})})) as url:
        with pytest.raises(ServerError, match=r"answered 500.*\*\*\*") as caught:
            server_info(url, KEY)
    assert "sesame" not in str(caught.value)


def test_a_router_in_front_that_drops_the_field_is_named(model):
    """Control calls go through (say, by nginx), /generate is rebuilt on the way."""
    with answering(sglang(model, routes=False)) as url:
        info = server_info(url)
    with pytest.raises(
        ServerError, match="drops return_routed_experts, as sglang-router does"
    ) as caught:
        check_server(info, SPEC, want_routes=True)
    assert url in str(caught.value) and "this run needs 8 per token" in str(caught.value)


@pytest.mark.parametrize("path", ["/workers", "/list_workers"])
def test_a_router_instead_of_a_server_is_named(path):
    with answering({path: {"workers": []}, "/generate": {}}) as url:
        with pytest.raises(ServerError, match=rf"is a router.*answers {path}.*rollout\.urls"):
            server_info(url)


def test_a_server_that_a_run_left_paused_is_continued_by_the_next_one(model):
    """The run died between pause and continue of a weight sync.

    Tools, which send no weights, say what to do.
    """
    running = threading.Event()

    def generate() -> object:
        return sglang(model)["/generate"] if running.wait(30) else (503, {})

    paused = {
        "/generate": generate,
        "/continue_generation": lambda: running.set() or {"status": "ok"},
    }
    with answering(sglang(model, **paused)) as url, ExitStack() as stack:
        with pytest.raises(
            ServerError, match=r"did not answer /generate.*paused: POST /continue_generation"
        ):
            server_info(url, timeout=2.0)
        cfg = one_rank_config(model, urls=(url,))
        assert not running.is_set()
        found = build.find_servers(cfg, SPEC, "cpu", None, stack, Console(enabled=False))
        assert found.urls == (url,) and running.is_set()


@pytest.mark.parametrize("version", ["0.5.9", "0.5.10.post1"])
def test_a_version_with_another_route_format_is_refused(version):
    old = replace(GOOD, version=version)
    with pytest.raises(
        ServerError, match=rf"is version {version}, expert ids need 0\.5\.11 or newer"
    ):
        check_server(old, SPEC, want_routes=True)
    check_server(old, SPEC, want_routes=False)
    check_server(replace(GOOD, version="0.0.0.dev1+mine"), SPEC, want_routes=False)
    check_server(replace(GOOD, version="main-a1b2c3"), SPEC, want_routes=True)


@pytest.mark.parametrize(("what", "value"), [("version", "0.5.23"), ("dtype", "bfloat16")])
def test_servers_of_one_run_are_the_same(what, value):
    other = replace(GOOD, url="http://server:2", **{what: value})
    check_identical([GOOD, replace(GOOD, url="http://server:2", model_path="/elsewhere")])
    with pytest.raises(
        ServerError,
        match=rf"server:2 has {what} = {value}, http://server:1 has {getattr(GOOD, what)}",
    ):
        check_identical([GOOD, other])


def test_another_tokenizer_has_another_digest(model):
    first = tokenizer_digest(model)
    assert first == tokenizer_digest(model) and len(first) == 16
    (model / "tokenizer.json").write_text('{"added": 1}')
    assert tokenizer_digest(model) != first and tokenizer_digest(model / "absent") is None


def test_the_right_server_passes_also_when_its_config_cannot_be_read():
    check_server(GOOD, SPEC, want_routes=True, dtype="float32")
    unread = replace(GOOD, num_layers=None, num_experts=None, top_k=None, vocab_size=None)
    check_server(unread, SPEC, want_routes=True, dtype="float32")
    check_server(replace(GOOD, routed_experts=False, route_width=None), SPEC, want_routes=False)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_layers", 2, "layers = 2, this run needs 4"),
        ("num_experts", 16, "experts = 16, this run needs 8"),
        ("top_k", 4, "experts per token = 4, this run needs 2"),
        ("vocab_size", 128, "vocabulary size = 128, this run needs 64"),
        ("dtype", "float16", "dtype = float16, this run needs float32"),
        ("route_width", 16, "layers x experts per token = 16, this run needs 8"),
        ("routed_experts", False, "--enable-return-routed-experts"),
        ("tokenizer", "ff", "tokenizer digest = ff, this run needs 0123456789abcdef"),
    ],
)
def test_a_difference_is_named_with_both_values(field, value, message):
    with pytest.raises(ServerError, match="http://server:1") as caught:
        check_server(
            replace(GOOD, **{field: value}),
            SPEC,
            want_routes=True,
            dtype="float32",
            tokenizer="0123456789abcdef",
        )
    assert message in str(caught.value)


def test_another_kind_of_server_is_named():
    with answering({}) as url:
        with pytest.raises(ServerError, match="is it an SGLang server") as caught:
            server_info(url)
    assert url in str(caught.value)
    with pytest.raises(ServerError, match="did not answer"):
        server_info(url)
