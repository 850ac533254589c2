"""A process that replaces an SGLang server in a run that trains: a response follows from its prompt
and its place in the group.

    python -m tests.token_server --model-path M --host H --port P --weight-version V

Other options are ignored.

It keeps the version of its weights, not the weights; a token takes TOKEN_SECONDS, and an abort cuts
a request short.  So runs of other timing, with servers that die, train on the same tokens,
log-probs and routes.
"""

import argparse
import json
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import numpy as np

from tests.fake_model import answer, route
from tests.faults.samples import cut_start, encode

TOKEN_SECONDS = 0.03
MOST_TOKENS = 8
END, ZERO, END_OF_PROMPT = 1, 3, 15
"""<eos>, 0 and = in tools/megatron_rl_tools/tiny_text.VOCABULARY, which takes seconds to import."""


def response(prompt: list[int], place: int) -> list[int]:
    """Of 2 to MOST_TOKENS tokens.

    The first one names the place, so that a continuation is of a known response.
    """
    rng = np.random.default_rng(zlib.crc32(bytes(prompt), place))
    tokens = [ZERO + place, *(ZERO + rng.integers(0, 10, MOST_TOKENS - 1)).tolist()]
    length = int(rng.integers(2, MOST_TOKENS + 1))
    return tokens if length == MOST_TOKENS else [*tokens[: length - 1], END]


def score(body: dict[str, Any]) -> dict[str, Any]:
    """The answer of a teacher."""
    from tests.fake_teacher import honest  # takes seconds to import, and few servers are teachers

    return honest(body)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    version, model_path, start = "", "", time.time()
    aborted: ClassVar[set[str]] = set()
    has_memory = True
    lock = threading.Lock()

    def do_GET(self) -> None:
        self.reply({
            "weight_version": Handler.version, "version": "0.5.21",
            "model_path": Handler.model_path, "dtype": "float32",
            "enable_return_routed_experts": True, "tp_size": 1, "startup_time": Handler.start,
        })  # fmt: skip

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        if self.path == "/generate":
            assert Handler.has_memory, "asked while it sleeps"
            if "rid" not in body:
                self.reply(self.probe())
            elif "logprob_start_len" in body:
                self.reply(score(body))
            else:
                self.reply(self.generate(body))
            return
        if self.path == "/abort_request":
            with Handler.lock:
                Handler.aborted.add(body["rid"])
        elif self.path == "/update_weight_version":
            Handler.version = body["new_version"]
        elif self.path in ("/release_memory_occupation", "/resume_memory_occupation"):
            Handler.has_memory = "resume" in self.path
        self.reply({})

    def probe(self) -> dict[str, Any]:
        return {"meta_info": {"routed_experts": encode(route(0, np.zeros(1))[None].astype("<i4"))}}

    def generate(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        names = {f"{body['rid']}_{place}" for place in range(len(body["input_ids"]))}
        wanted = [self.missing(given, place) for place, given in enumerate(body["input_ids"])]
        sampled = 0
        while sampled < max(map(len, wanted)) and not names & Handler.aborted:
            time.sleep(TOKEN_SECONDS)
            sampled += 1
        return [
            self.sample(body, given, rest, sampled, f"{body['rid']}_{place}")
            for place, (given, rest) in enumerate(zip(body["input_ids"], wanted, strict=True))
        ]

    def missing(self, given: list[int], place: int) -> list[int]:
        """The rest of a response to `given`: a prompt, perhaps with the start of a response, which
        names its own place.
        """
        start = given.index(END_OF_PROMPT) + 1
        prompt, prefix = given[:start], given[start:]
        tokens = response(prompt, prefix[0] - ZERO if prefix else place)
        assert tokens[: len(prefix)] == prefix, "the continuation of another response"
        return tokens[len(prefix) :]

    def sample(
        self, body: dict[str, Any], given: list[int], rest: list[int], sampled: int, name: str
    ) -> dict[str, Any]:
        new = rest[:sampled]
        if len(new) < len(rest):
            reason: dict[str, Any] = {"type": "abort", "message": "Abort"}
        else:
            reason = (
                {"type": "stop", "matched": END}
                if new[-1] == END
                else {"type": "length", "length": MOST_TOKENS}
            )
        found = answer(0, given, np.array(new, np.int64), name, reason)
        spans = [{"version": Handler.version, "start": 0, "end": len(new)}]
        found["meta_info"].update(weight_version=Handler.version, weight_versions=spans)
        return cut_start(found, body)

    def reply(self, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


if __name__ == "__main__":
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model-path")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--weight-version")
    options, _ = parser.parse_known_args()
    Handler.version, Handler.model_path = options.weight_version, options.model_path
    ThreadingHTTPServer((options.host, options.port), Handler).serve_forever()
