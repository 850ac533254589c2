"""A server that answers /generate wrongly on purpose: faults a real SGLang cannot be made to show
on demand.

A behaviour is a name, or NAME@POINT: a fault of the transport (reset, close, die, hang, drip)
happens at that point of the request; a wrong answer is complete, and its delivery pauses there.
POINTS are in the order in which a request passes them.
"""

from __future__ import annotations

import contextlib
import copy
import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import numpy as np

from tests.fake_model import mixed_answer
from tests.faults.samples import (
    GAPS,
    HARMLESS,
    ROUTE_FAULTS,
    SAMPLE_FAULTS,
    SPEC,
    VERSION,
    cut_short,
    cut_start,
    honest_sample,
)

__all__ = [
    "GAPS",
    "POINTS",
    "ROUTE_FAULTS",
    "SAMPLE_FAULTS",
    "SPEC",
    "VERSION",
    "FakeServer",
    "send",
    "wait_for",
]

POINTS = ("connect", "before_headers", "in_headers", "mid_body", "end")
PAUSE_SECONDS = 0.02
DRIP_SECONDS = 0.05

Samples = list[Any]
Answer = tuple[int, bytes]


class FakeServer:
    """`script` names what each /generate request gets, in order; the last entry repeats.  "ok" is
    an honest answer.

    source: body, prompt, sample id -> an honest sample.  served: sample id -> the honest samples of
    complete answers, without those that a fault changed; what a client returns must be among them.
    aborted: sample ids of /abort_request.
    late: called when a request begins to hang, drip or be slow: a test's clock moves on.
    "slow" answers when it is aborted; "all_rows" ignores routed_experts_start_len.
    "growing" samples a token every `step_seconds`, of the version that `source` has then, until it
    is aborted, and at most `most_tokens`; while the server is paused it samples none, and returns
    none.  progress: request id -> how many there are.
    pauses: the modes of /pause_generation.  control_faults: path -> how it fails.
    """

    def __init__(
        self, *script: str, source: Callable[[dict[str, Any], list[int], str], dict] = honest_sample
    ) -> None:
        self.script = list(script)
        self.source = source
        self.requests: list[dict[str, Any]] = []
        self.prefills: list[dict[str, Any]] = []
        self.served: dict[str, dict[str, Any]] = {}
        self.aborted: list[str] = []
        self.lock = threading.Lock()
        self.stopping = threading.Event()
        self.is_dead = False
        self.late: Callable[[], object] = lambda: None
        self.patience = 30.0  # seconds that a slow request takes at most
        self.step_seconds, self.most_tokens = 0.03, 10**6
        self.progress: dict[str, int] = {}
        self.is_paused = False
        self.pauses: list[str] = []
        self.control_faults: dict[str, str] = {}
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle(self) -> None:
                with contextlib.suppress(OSError):  # the client has hung up
                    behaviour = fake.next_behaviour("connect")
                    if fake.is_dead or (behaviour and not fake.inject(self, behaviour)):
                        reset(self)
                        return
                    super().handle()

            def do_POST(self) -> None:
                content = self.rfile.read(length := int(self.headers["Content-Length"]))
                if len(content) < length:  # the client has hung up
                    return
                body = json.loads(content or b"{}")
                if fake.is_dead:
                    self.close_connection = True
                    reset(self)
                    return
                fake.route(self, body | {"headers": dict(self.headers)})

            def log_message(self, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        # with the default of 5, a busy machine resets connections that come together
        self.http.socket.listen(1024)
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(
            target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stopping.set()
        self.http.shutdown()
        self.http.server_close()

    def next_behaviour(self, point: str = "") -> str:
        """Take the next entry of the script; with `point`, only if it is for that point, else
        "".
        """
        with self.lock:
            if point and not self.script[0].endswith(f"@{point}"):
                return ""
            taken = self.script.pop(0) if len(self.script) > 1 else self.script[0]
            if point and taken.split("@")[0] not in TRANSPORT_FAULTS:
                self.script.insert(0, taken.split("@")[0])  # the wrong answer itself follows
            return taken

    def route(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        if handler.path == "/abort_request":
            with self.lock:
                self.aborted.append(body["rid"])
            send(handler, 200, b"")
        elif handler.path in ("/pause_generation", "/continue_generation"):
            self.control(handler, body)
        elif body["rid"].endswith(".prefill"):
            with self.lock:
                self.prefills.append(body)
            send(handler, 200, b"[{}]")
        else:
            with self.lock:
                self.requests.append(body)
            self.behave(handler, self.next_behaviour(), body)

    def control(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        """Pause or continue, unless a fault is set: "http_500", or "die" after it is done."""
        fault = self.control_faults.get(handler.path, "")
        if fault == "http_500":
            send(handler, 500, b"out of memory")
            return
        self.is_paused = handler.path == "/pause_generation"
        self.pauses += [body["mode"]] if self.is_paused else []
        if fault == "die":
            self.is_dead = True
        send(handler, 200, b"{}")

    def behave(self, handler: BaseHTTPRequestHandler, behaviour: str, body: dict[str, Any]) -> None:
        """Answer one /generate request with `behaviour`."""
        name, _, point = behaviour.partition("@")
        honest = self.honest(body)
        sent = [cut_start(sample, body) for sample in copy.deepcopy(honest).values()]
        if name in TRANSPORT_FAULTS:
            self.deliver(handler, 200, json.dumps(sent).encode(), name, point or "mid_body")
            return
        if name in ANSWERS:
            status, content = ANSWERS[name](sent)
            with self.lock:
                self.served |= honest if status == 200 else {}
        else:
            if name == "growing":
                sent = [cut_start(sample, body) for sample in self.grown(body, [*honest.values()])]
                if self.is_dead:
                    handler.close_connection = True
                    reset(handler)
                    return
            elif name == "slow":
                sent = [
                    cut_start(sample, body) for sample in self.until_aborted([*honest.values()])
                ]
            elif name == "all_rows":
                sent = [*honest.values()]
            elif name != "ok":
                sent[0] = (SAMPLE_FAULTS | GAPS | HARMLESS)[name](sent[0])
                honest.pop(next(iter(honest)))
            with self.lock:
                self.served |= honest if name not in ("slow", "growing") else {}
            status, content = 200, json.dumps(sent).encode()
        self.deliver(handler, status, content, "pause" if point else "", point)

    def honest(self, body: dict[str, Any]) -> dict[str, dict[str, Any]]:
        ids = [f"{body['rid']}_{index}" for index in range(len(body["input_ids"]))]
        return {
            name: self.source(body, prompt, name)
            for name, prompt in zip(ids, body["input_ids"], strict=True)
        }

    def until_aborted(self, samples: Samples) -> Samples:
        """Wait for the abort of all samples, then return 2 tokens of each; after `patience` return
        all tokens.
        """
        names = {s["meta_info"]["id"] for s in samples}
        self.late()
        is_cut = wait_for(
            lambda: self.stopping.is_set() or names <= set(self.aborted), self.patience
        )
        return [cut_short(sample, 2) for sample in samples] if is_cut else samples

    def grown(self, body: dict[str, Any], samples: Samples) -> Samples:
        """`samples`, token by token, until they are complete or aborted."""
        names, versions = {s["meta_info"]["id"] for s in samples}, []
        size = max(len(sample["output_ids"]) for sample in samples)
        while len(versions) < size and not (self.stopping.is_set() or self.is_dead):
            if names <= set(self.aborted) and not self.is_paused:
                break
            time.sleep(self.step_seconds)
            with self.lock:
                versions += (
                    []
                    if self.is_paused or len(versions) >= self.most_tokens
                    else [self.source.version]
                )
                self.progress[body["rid"]] = len(versions)
        return [
            grown_sample(sample, versions[: len(sample["output_ids"])], prompt)
            for sample, prompt in zip(samples, body["input_ids"], strict=True)
        ]

    def deliver(
        self, handler: BaseHTTPRequestHandler, status: int, content: bytes, fault: str, point: str
    ) -> None:
        """Send the answer up to `point`, inject the fault, and send the rest unless the fault ends
        the answer.
        """
        length = len(content) + (10**6 if fault == "drip" else 0)
        head = (
            f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length:"
            f" {length}\r\n\r\n".encode()
        )
        places = {"in_headers": len(head) // 2, "mid_body": len(head) + len(content) // 2}
        cut = places.get(point, len(head) + len(content) - 1 if point == "end" else 0)
        try:
            handler.wfile.write((head + content)[:cut])
            if not fault or self.inject(handler, fault):
                handler.wfile.write((head + content)[cut:])
        except OSError:  # the client has hung up
            handler.close_connection = True

    def inject(self, handler: BaseHTTPRequestHandler, behaviour: str) -> bool:
        """Inject a fault of the transport; whether the request is served nevertheless."""
        name = behaviour.split("@")[0]
        if name not in TRANSPORT_FAULTS:
            time.sleep(PAUSE_SECONDS)
            return True
        handler.close_connection = True
        TRANSPORT_FAULTS[name](self, handler)
        return False


def grown_sample(sample: dict[str, Any], versions: list[int], prompt: list[int]) -> dict[str, Any]:
    """The first tokens of an honest sample, each of its version."""
    meta, tokens = sample["meta_info"], sample["output_ids"]
    reason = (
        meta["finish_reason"]
        if len(versions) == len(tokens)
        else {"type": "abort", "message": "Abort"}
    )
    if not versions:  # as SGLang answers for a request in its queue
        return {"output_ids": [], "meta_info": {"id": meta["id"], "finish_reason": reason}}
    return mixed_answer(versions, prompt, np.array(tokens[: len(versions)]), meta["id"], reason)


def reset(handler: BaseHTTPRequestHandler) -> None:
    """An RST instead of a FIN."""
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()


def close(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.flush()
    handler.connection.shutdown(socket.SHUT_RDWR)


def die(fake: FakeServer, handler: BaseHTTPRequestHandler) -> None:
    """Reset this connection, and refuse all later ones."""
    fake.is_dead = True
    fake.http.shutdown()
    fake.http.socket.close()
    reset(handler)


def hang(fake: FakeServer, handler: BaseHTTPRequestHandler) -> None:
    fake.late()
    fake.stopping.wait(30)


def drip(fake: FakeServer, handler: BaseHTTPRequestHandler) -> None:
    """A byte from time to time: no pause is ever long."""
    fake.late()
    with contextlib.suppress(OSError):  # the client has hung up
        while not fake.stopping.wait(DRIP_SECONDS):
            handler.wfile.write(b" ")


TRANSPORT_FAULTS: dict[str, Callable[[FakeServer, BaseHTTPRequestHandler], None]] = {
    "die": die,
    "reset": lambda fake, handler: reset(handler),
    "close": lambda fake, handler: close(handler),
    "hang": hang,
    "drip": drip,
}


def always(status: int, content: bytes) -> Callable[[Samples], Answer]:
    return lambda samples: (status, content)


def as_json(edit: Callable[[Samples], Any]) -> Callable[[Samples], Answer]:
    return lambda samples: (200, json.dumps(edit(samples)).encode())


ANSWERS: dict[str, Callable[[Samples], Answer]] = {
    "http_500": always(500, b"out of memory"),
    "http_503": always(503, b"loading"),
    "http_429": always(429, b"queue full"),
    "http_400": always(400, b'{"error": {"message": "input too long"}}'),
    "http_401": always(401, b'{"error": "Unauthorized"}'),
    "http_413": always(413, b"too large"),
    "html": always(200, b"<html><body>proxy login</body></html>"),
    "cut_json": lambda samples: (200, json.dumps(samples).encode()[:-40]),
    "deep_json": always(200, b"[" * 100_000),
    "not_utf8": always(200, b'[{"output_ids": "\xff\xfe"}]'),
    "empty": always(200, b""),
    "null": always(200, b"null"),
    "object": as_json(lambda samples: samples[0]),
    "too_few": as_json(lambda samples: samples[1:]),
    "too_many": as_json(lambda samples: [*samples, samples[0]]),
    "twice_the_first": as_json(lambda samples: [samples[0]] * len(samples)),
    "reordered": as_json(lambda samples: samples[1:] + samples[:1]),
    "huge": always(200, b" " * 2**26),
}
"""Answers that are wrong in all samples: honest samples -> status, content."""


def send(handler: BaseHTTPRequestHandler, status: int, content: bytes) -> None:
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content)


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
