"""A server that answers /generate wrongly on purpose: faults a real SGLang cannot be made to show on demand."""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from megatron_rl.rollout.routed_experts import ModelSpec

SPEC = ModelSpec(num_layers=3, moe_layers=(0, 1, 2), top_k=2, num_experts=8, vocab_size=64)
VERSION = 7


class FakeServer:
    """`script` names what each /generate request gets, in order; the last entry repeats.  "ok" is an honest answer."""

    def __init__(self, *script: str) -> None:
        self.script = list(script)
        self.requests: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        self.stopping = threading.Event()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with fake.lock:
                    fake.requests.append(body | {"headers": dict(self.headers)})
                    behaviour = fake.script.pop(0) if len(fake.script) > 1 else fake.script[0]
                fake.behave(self, behaviour, body)

            def log_message(self, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def __enter__(self) -> FakeServer:
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stopping.set()
        self.http.shutdown()
        self.http.server_close()

    def behave(self, handler: BaseHTTPRequestHandler, behaviour: str, body: dict[str, Any]) -> None:
        if behaviour in TRANSPORT_FAULTS:
            TRANSPORT_FAULTS[behaviour](self, handler, body)
            return
        samples = [honest_sample(body, seed=i) for i in range(body["sampling_params"]["n"])]
        if behaviour != "ok":
            samples[0] = (SAMPLE_FAULTS | GAPS)[behaviour](copy.deepcopy(samples[0]))
        send(handler, 200, json.dumps(samples if len(samples) > 1 else samples[0]).encode())


def honest_sample(body: dict[str, Any], seed: int, num_tokens: int = 5) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    rows = len(body["input_ids"]) + num_tokens - 1
    tokens = rng.integers(2, SPEC.vocab_size, num_tokens).tolist()
    logprobs = (-rng.random(num_tokens)).tolist()
    meta = {
        "finish_reason": {"type": "length", "length": num_tokens},
        "prompt_tokens": len(body["input_ids"]),
        "completion_tokens": num_tokens,
        "weight_version": str(VERSION),
        "weight_versions": [{"version": str(VERSION), "start": 0, "end": num_tokens}],
        "num_retractions": 0,
        "output_token_logprobs": [[p, t, None] for p, t in zip(logprobs, tokens, strict=True)],
    }
    if body["return_routed_experts"]:
        meta["routed_experts"] = encode(random_routes(rng, rows))
    return {"output_ids": tokens, "meta_info": meta}


def random_routes(rng: np.random.Generator, rows: int) -> np.ndarray:
    """int32 [rows, L, K], distinct in a row."""
    scores = rng.random((rows, SPEC.num_layers, SPEC.num_experts))
    return scores.argsort(-1)[..., : SPEC.top_k].astype("<i4")


def encode(routes: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(routes).tobytes()).decode()


def send(handler: BaseHTTPRequestHandler, status: int, content: bytes, *, length: int | None = None) -> None:
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(content) if length is None else length))
    handler.end_headers()
    handler.wfile.write(content)


def hang(fake: FakeServer, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    fake.stopping.wait(30)
    handler.close_connection = True


def drip(fake: FakeServer, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    """A byte every 50 ms: no read time-out ever fires."""
    handler.close_connection = True
    send(handler, 200, b"", length=10**6)
    with contextlib.suppress(OSError):  # the client has hung up
        while not fake.stopping.wait(0.05):
            handler.wfile.write(b" ")
            handler.wfile.flush()


def reset(fake: FakeServer, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    handler.close_connection = True
    handler.connection.close()


def cut_body(fake: FakeServer, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    """The connection closes in the middle of the announced body."""
    handler.close_connection = True
    content = json.dumps(honest_sample(body, seed=0)).encode()
    send(handler, 200, content[: len(content) // 2], length=len(content))


def huge(fake: FakeServer, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    handler.close_connection = True
    with contextlib.suppress(OSError):  # the client has hung up
        send(handler, 200, b" " * 2**26)


def answer(status: int, content: bytes) -> Callable[[FakeServer, BaseHTTPRequestHandler, dict[str, Any]], None]:
    return lambda fake, handler, body: send(handler, status, content)


TRANSPORT_FAULTS: dict[str, Callable[[FakeServer, BaseHTTPRequestHandler, dict[str, Any]], None]] = {
    "hang": hang,
    "drip": drip,
    "reset": reset,
    "cut_body": cut_body,
    "huge": huge,
    "http_500": answer(500, b"out of memory"),
    "http_503": answer(503, b"loading"),
    "http_400": answer(400, b'{"error": {"message": "input too long"}}'),
    "http_401": answer(401, b'{"error": "Unauthorized"}'),
    "html": answer(200, b"<html><body>proxy login</body></html>"),
    "cut_json": answer(200, b'[{"output_ids": [1, 2'),
    "empty": answer(200, b""),
    "too_few": answer(200, b"[]"),
}


def with_meta(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda sample: sample | {"meta_info": sample["meta_info"] | changes}


def edit_routes(edit: Callable[[np.ndarray], np.ndarray]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def fault(sample: dict[str, Any]) -> dict[str, Any]:
        ids = np.frombuffer(base64.b64decode(sample["meta_info"]["routed_experts"]), "<i4")
        routes = ids.reshape(-1, SPEC.num_layers, SPEC.top_k).copy()
        return with_meta(routed_experts=encode(edit(routes)))(sample)

    return fault


def edit_logprobs(edit: Callable[[list[Any]], list[Any]]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda sample: with_meta(output_token_logprobs=edit(sample["meta_info"]["output_token_logprobs"]))(sample)


def set_at(index: tuple[int, ...], value: int) -> Callable[[np.ndarray], np.ndarray]:
    def edit(routes: np.ndarray) -> np.ndarray:
        routes[index] = value
        return routes

    return edit


def drop_routes(sample: dict[str, Any]) -> dict[str, Any]:
    del sample["meta_info"]["routed_experts"]
    return sample


SAMPLE_FAULTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "stale": with_meta(weight_version="6", weight_versions=[{"version": "6", "start": 0, "end": 5}]),
    "mixed": with_meta(
        weight_versions=[{"version": "6", "start": 0, "end": 2}, {"version": str(VERSION), "start": 2, "end": 5}]
    ),
    "aborted": with_meta(finish_reason={"type": "abort", "message": "paused"}),
    "no_finish": with_meta(finish_reason=None),
    "retracted": with_meta(num_retractions=1),
    "nan_logprob": edit_logprobs(lambda entries: [[float("nan"), *entries[0][1:]], *entries[1:]]),
    "null_logprob": edit_logprobs(lambda entries: [[None, *entries[0][1:]], *entries[1:]]),
    "positive_logprob": edit_logprobs(lambda entries: [[0.5, *entries[0][1:]], *entries[1:]]),
    "few_logprobs": edit_logprobs(lambda entries: entries[:-1]),
    "other_logprobs": edit_logprobs(lambda entries: [[p, t + 1, text] for p, t, text in entries]),
    "big_id": lambda sample: sample | {"output_ids": [10**6, *sample["output_ids"][1:]]},
    "float_ids": lambda sample: sample | {"output_ids": [1.5, *sample["output_ids"][1:]]},
    "no_tokens": lambda sample: sample | {"output_ids": []},
    "too_long": lambda sample: sample | {"output_ids": sample["output_ids"] * 100},
    "not_object": lambda sample: "text",
    "no_routes": drop_routes,
    "null_routes": with_meta(routed_experts=None),
    "short_routes": edit_routes(lambda routes: routes[:-1]),
    "long_routes": edit_routes(lambda routes: np.concatenate([routes, routes[:1]])),
    "wide_routes": edit_routes(lambda routes: routes.astype("<i8")),
    "big_endian_routes": edit_routes(lambda routes: routes.astype(">i4")),
    "float_routes": edit_routes(lambda routes: routes.astype("<f4")),
    "zero_routes": edit_routes(np.zeros_like),
    "big_route": edit_routes(set_at((1, 2, 0), SPEC.num_experts)),
    "negative_route": edit_routes(set_at((0, 0, 1), -1)),
    "text_routes": with_meta(routed_experts="not base64!"),
}


GAPS: dict[str, Callable[[dict[str, Any]], Any]] = {  # row 4 holds no route, the payload is sound otherwise
    "gap_of_zeros": edit_routes(set_at((4,), 0)),
    "gap_of_minus_one": edit_routes(set_at((4,), -1)),
}


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
