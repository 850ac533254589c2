"""A server in front of a real one that edits requests and answers on the way: faults of what is
between.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import numpy as np

Edit = Callable[[str, Any], None]
"""(path, JSON), which it changes in place."""


@contextmanager
def proxy(
    url: str,
    on_answer: Edit = lambda path, answer: None,
    on_request: Edit = lambda path, body: None,
) -> Iterator[str]:
    """A server in front of `url` that edits JSON in place."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.forward("GET", None)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"null")
            on_request(self.path, body)
            self.forward("POST", body)

        def forward(self, method: str, body: Any) -> None:
            answer = httpx.request(method, url + self.path, json=body, timeout=600)
            content = answer.content
            try:
                fields = answer.json()
            except ValueError:
                pass
            else:
                on_answer(self.path, fields)
                content = json.dumps(fields).encode()
            self.send_response(answer.status_code)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            """Not on the console."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def hide_files(path: str, answer: Any) -> None:
    if path.startswith(("/server_info", "/model_info")):
        answer["model_path"] = "/elsewhere/model"


def hide_all(path: str, answer: Any) -> None:
    hide_files(path, answer)
    if path.startswith("/weights_checker"):
        answer["ranks"] = []


def on_routes(edit: Callable[[np.ndarray], np.ndarray], layers: int, top_k: int) -> Edit:
    def on_answer(path: str, answer: Any) -> None:
        if path == "/generate" and (payload := answer["meta_info"].get("routed_experts")):
            ids = np.frombuffer(base64.b64decode(payload), "<i4").reshape(-1, layers, top_k)
            answer["meta_info"]["routed_experts"] = base64.b64encode(edit(ids).tobytes()).decode()

    return on_answer


def next_rows(ids: np.ndarray) -> np.ndarray:
    return np.roll(ids, 1, axis=0)


def next_layers(ids: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(np.roll(ids, 1, axis=1))


def next_logprobs(path: str, answer: Any) -> None:
    if (
        path == "/generate"
        and len(entries := answer["meta_info"].get("output_token_logprobs") or []) > 1
    ):
        values = [entry[0] for entry in entries]
        for entry, value in zip(entries, values[1:] + values[:1], strict=True):
            entry[0] = value


def no_routes(path: str, answer: Any) -> None:
    if path == "/generate":
        answer["meta_info"].pop("routed_experts", None)


def at_temperature_1(path: str, body: Any) -> None:
    if path == "/generate":
        body["sampling_params"]["temperature"] = 1.0


class LastRoutes:
    """Gives every answer the routes of the one before it of the same length."""

    def __init__(self) -> None:
        self.last: dict[int, str] = {}

    def __call__(self, path: str, answer: Any) -> None:
        payload = answer["meta_info"].get("routed_experts") if path == "/generate" else None
        if payload:
            answer["meta_info"]["routed_experts"] = self.last.get(len(payload), payload)
            self.last[len(payload)] = payload
