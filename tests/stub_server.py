"""A process that replaces an SGLang server in tests: its control calls and honest samples, ready in
half a second.

    python -m tests.stub_server --host H --port P --weight-version V   (other options are ignored)

What real servers do beyond that is tested in tests/e2e.
"""

import argparse
import json
import os
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.faults.samples import honest_sample


class Stub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    version = ""

    def do_GET(self) -> None:
        longest = {"max_req_input_len": 30} if self.path == "/server_info" else {}
        self.reply({"weight_version": Stub.version, **longest})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        self.reply(self.generate(body) if self.path == "/generate" else self.control(body))

    def control(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.path == "/update_weight_version":
            Stub.version = body["new_version"]
        return {}

    def generate(self, body: dict[str, Any]) -> Any:
        print("generating", flush=True)
        time.sleep(float(os.environ.get("STUB_SECONDS", "0")))
        version = {
            "weight_version": Stub.version,
            "weight_versions": [{"version": Stub.version, "start": 0, "end": 5}],
        }
        if "rid" not in body:  # server_info samples a token
            return {"output_ids": [0], "meta_info": version}
        samples = [
            honest_sample(body, prompt, f"{body['rid']}_{i}")
            for i, prompt in enumerate(body["input_ids"])
        ]
        return [sample | {"meta_info": sample["meta_info"] | version} for sample in samples]

    def reply(self, answer: Any) -> None:
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


if __name__ == "__main__":
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--weight-version")
    options, _ = parser.parse_known_args()
    Stub.version = options.weight_version
    print("stub is up", flush=True)
    ThreadingHTTPServer((options.host, options.port), Stub).serve_forever()
