"""Base64 routes of one long response -> compact storage: ours, verl's and slime's own functions,
memcpy of the text.

    OMP_NUM_THREADS=1 python benchmarks/decode.py [--repeats 9] [--tokens 32768] [--peers VERL \
SLIME] [--json]

One response of 32,768 tokens, 48 MoE layers, top-8 of 128 experts: 67 MB of text.  The candidates
alternate.  Times are CPU time of the calling thread, minimum and median, so that other processes do
not count.  `ours` decodes, checks range and distinct ids and returns layer-major uint8; memcpy
copies the text into warm memory.  Peers, from source checkouts given with --peers:

slime     slime.utils.misc.decode_int32_meta_array, its own function -> int32; no check.
verl      the steps of its SGLang server and agent loop: SGLang's
          extract_routed_experts_from_meta_info -> int32, then the tensor operations of \
AgentLoopOutput.as_dict -> int16 with a zero row.  Copied, because their modules need the complete
          engine and trainer; skipped for a checkout that no longer has these lines.

`extra` is the peak of memory allocated beyond the result, by tracemalloc (NumPy's and Python's
memory).  It does not see torch's memory, so peers have no value.

`loop` is the longest time in which the event loop of a RolloutClient did not run while one such
answer arrived from a server in another process: minimum and median of --repeats answers, after one
that is not counted.  It is CPU time of the process, all threads together, because wall time
includes other processes.  It is an upper bound: it includes work that another thread does without
holding the interpreter lock.  For comparison, the same with json.loads instead of parse_body.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import gc
import importlib
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import pybase64
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.peers import make_packages
from megatron_rl.config import RolloutConfig
from megatron_rl.models.spec import ModelSizes
from megatron_rl.records import Prompt
from megatron_rl.rollout.client.client import RolloutClient
from megatron_rl.rollout.client.response_json import parse_body
from megatron_rl.rollout.client.routed_experts import decode_routed_experts
from megatron_rl.rollout.client.sampling import SampleRules

LAYERS, EXPERTS, TOP_K, VOCABULARY = 48, 128, 8, 151_936
SPEC = ModelSizes(
    num_layers=LAYERS,
    moe_layers=tuple(range(LAYERS)),
    top_k=TOP_K,
    num_experts=EXPERTS,
    vocab_size=VOCABULARY,
)
PROMPT = Prompt("q", "", (1,), "")
AS_DICT = (
    "routed_experts = torch.tensor(routed_experts, dtype=torch.int16)",
    "aligned = routed_experts.new_zeros((total_length, *routed_experts.shape[1:]))",
    "aligned[:num_rows] = routed_experts[:num_rows]",
)
Decode = Callable[[], Any]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument(
        "--peers",
        type=Path,
        nargs="+",
        default=[],
        metavar="DIR",
        help="checkouts of verl and slime",
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ids = make_ids(arguments.tokens - 1)
    text = base64.b64encode(ids.tobytes()).decode()
    if arguments.serve:
        return serve(text, arguments.tokens - 1)
    result = measure(ids, text, arguments.peers, arguments.repeats)
    result |= measure_loop(arguments.tokens, arguments.repeats)
    print(json.dumps(result, indent=1) if arguments.json else to_text(result))
    return 0


def make_ids(rows: int) -> np.ndarray:
    """Return int32 [rows, L, K], distinct in a row."""
    rng = np.random.default_rng(0)
    base = np.argsort(rng.random((4096, EXPERTS)), axis=-1)[:, :TOP_K].astype("<i4")
    return base[rng.integers(0, len(base), (rows, LAYERS))]


def ours(payload: str | memoryview, rows: int) -> np.ndarray:
    decoded, missing = decode_routed_experts(
        payload,
        num_rows=rows,
        num_layers=LAYERS,
        moe_layers=SPEC.moe_layers,
        top_k=TOP_K,
        num_experts=EXPERTS,
    )
    assert missing is None
    return decoded


def measure(ids: np.ndarray, text: str, checkouts: list[Path], repeats: int) -> dict[str, Any]:
    """Return CPU milliseconds (minimum, median) of each way, and our peak of memory."""
    rows, content = len(ids), text.encode()
    source = np.frombuffer(content, np.uint8)
    copy = source.copy()
    decoders: dict[str, Decode] = {
        "ours": lambda: ours(memoryview(content), rows),  # as the client has it
        "ours, of a str": lambda: ours(text, rows),
        "memcpy": lambda: np.copyto(copy, source),
        **dict(peer for checkout in checkouts for peer in peers_of(checkout, text, rows)),
    }
    for name, decode in decoders.items():  # what is timed is right
        if name != "memcpy":
            decoded = decode()
            assert np.array_equal(np.asarray(decoded).reshape(-1, LAYERS, TOP_K)[:rows], ids), name
            del decoded
    times: dict[str, list[float]] = {name: [] for name in decoders}
    for _ in range(repeats):
        for name, decode in decoders.items():
            start = time.thread_time()
            decoded = decode()
            times[name].append(1e3 * (time.thread_time() - start))
            del decoded
    extra = {name: extra_bytes(decoders[name]) for name in ("ours", "ours, of a str")}
    return {
        "load": os.getloadavg()[0],
        "text_bytes": len(content),
        "cpu_ms": {
            name: (min(values), statistics.median(values)) for name, values in times.items()
        },
        "extra_mib": {name: value / 2**20 for name, value in extra.items()},
    }


def extra_bytes(decode: Decode) -> int:
    tracemalloc.start()
    try:
        result = decode()
        current, peak = tracemalloc.get_traced_memory()
        kept = result.nbytes
    finally:
        tracemalloc.stop()
    assert current >= kept
    return peak - kept


def peers_of(checkout: Path, text: str, rows: int) -> Iterator[tuple[str, Decode]]:
    """Return (name, its decoding of `text`) of each peer in a checkout; prints a line on stderr for
    a missing one.
    """
    meta = {"routed_experts": text}
    if (checkout / "slime").is_dir():
        make_packages(checkout, "slime", "slime.utils")
        decode = importlib.import_module("slime.utils.misc").decode_int32_meta_array
        yield "slime", lambda: decode(meta, "routed_experts")
    elif (checkout / "verl").is_dir():
        agent_loop = (checkout / "verl/experimental/agent_loop/agent_loop.py").read_text()
        server = (
            checkout / "verl/workers/rollout/sglang_rollout/async_sglang_server.py"
        ).read_text()
        if (
            not all(line in agent_loop for line in AS_DICT)
            or "extract_routed_experts_from_meta_info(output)" not in server
        ):
            print(f"peers: {checkout} decodes routes in another way: skipped", file=sys.stderr)
            return

        def verl() -> torch.Tensor:
            extracted = np.frombuffer(
                pybase64.b64decode(meta["routed_experts"].encode("utf-8")), dtype=np.int32
            )
            routed_experts = torch.tensor(extracted.reshape(-1, LAYERS, TOP_K), dtype=torch.int16)
            aligned = routed_experts.new_zeros((rows + 1, *routed_experts.shape[1:]))
            aligned[:rows] = routed_experts[:rows]
            return aligned

        yield "verl", verl
    else:
        print(f"peers: {checkout} has neither verl/ nor slime/: skipped", file=sys.stderr)


def serve(text: str, rows: int) -> int:
    """Answer every request with the response; prints the server's port."""
    tokens = np.random.default_rng(1).integers(2, VOCABULARY, rows).tolist()
    meta = {
        "finish_reason": {"type": "length", "length": rows},
        "weight_version": "0",
        "completion_tokens": rows,
        "output_token_logprobs": [
            [-0.123456789 - i / rows, token, None] for i, token in enumerate(tokens)
        ],
        "routed_experts": text,
    }
    mark = "the sample's name, asked for with the request"
    content = json.dumps(
        [{"output_ids": tokens, "meta_info": {"id": mark} | meta}], separators=(",", ":")
    ).encode()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = content.replace(mark.encode(), f"{asked['rid']}_0".encode(), 1)
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args: object) -> None:
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    print(http.server_port, flush=True)
    http.serve_forever()
    return 0


@contextmanager
def server(tokens: int) -> Iterator[str]:
    command = [sys.executable, __file__, "--serve", "--tokens", str(tokens)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def measure_loop(tokens: int, repeats: int) -> dict[str, Any]:
    """Return milliseconds (minimum, median) of the longest wait for a turn of the client's event
    loop.
    """
    cfg = RolloutConfig(request_timeout_seconds=120, max_retries=0)
    gc.collect()
    gc.freeze()  # as a run does
    waits: dict[str, list[float]] = {"parse_body": [], "json.loads": []}
    parsers = (("parse_body", parse_body), ("json.loads", lambda body: json.loads(bytes(body))))
    with server(tokens) as url:
        for repeat, (name, parse) in itertools.product(range(-1, repeats), parsers):
            client = RolloutClient([url], cfg, SampleRules(SPEC, want_routes=True))
            with (
                patch.object(module_of_requests(), "parse_body", parse),
                patched_loop(client, waits[name]),
            ):
                (group,) = client.generate(
                    [PROMPT],
                    1,
                    temperature=1.0,
                    max_tokens=tokens,
                    stop_token_ids=[0],
                    policy_version=0,
                )
            assert group.rollouts[0].response_length == tokens - 1
            if repeat < 0:  # the first one loads modules and compiled code
                waits[name].clear()
    return {
        "loop_ms": {
            name: (1e3 * min(seconds), 1e3 * statistics.median(seconds))
            for name, seconds in waits.items()
        }
    }


def module_of_requests() -> ModuleType:
    """Return the module of the client that calls parse_body."""
    for name in ("megatron_rl.rollout.client.request", "megatron_rl.rollout.client.client"):
        if importlib.util.find_spec(name) is not None and hasattr(
            module := importlib.import_module(name), "parse_body"
        ):
            return module
    raise RuntimeError("no module of the client calls parse_body")


@contextmanager
def patched_loop(client: RolloutClient, waits: list[float]) -> Iterator[None]:
    """Run a heartbeat beside the client's tasks."""
    original = client._generate

    async def watched(*args: Any, **kwargs: Any) -> Any:
        beat = asyncio.create_task(heartbeat(waits))
        await asyncio.sleep(0.01)
        try:
            return await original(*args, **kwargs)
        finally:
            beat.cancel()

    with patch.object(client, "_generate", watched):
        yield


async def heartbeat(waits: list[float]) -> None:
    """Append the longest CPU time of the process between two turns, until cancelled."""
    longest, last = 0.0, time.process_time()
    try:
        while True:
            await asyncio.sleep(0.0005)
            now = time.process_time()
            longest, last = max(longest, now - last), now
    finally:
        waits.append(longest)


def to_text(result: dict[str, Any]) -> str:
    least, median = result["cpu_ms"]["ours"]
    lines = ["| | CPU ms (median) | / ours (median) | extra MiB |", "|---|---|---|---|"]
    for name, (best, middle) in result["cpu_ms"].items():
        extra = result["extra_mib"].get(name)
        lines.append(
            f"| {name} | {best:.1f} ({middle:.1f}) | {best / least:.2f} ({middle / median:.2f}) | "
            f"{'-' if extra is None else f'{extra:.2f}'} |"
        )
    for name, (best, middle) in result["loop_ms"].items():
        lines.append(f"event loop blocked at most {best:.1f} ms ({middle:.1f}) with {name}")
    lines.append(f"{result['text_bytes'] / 1e6:.1f} MB of text; load average {result['load']:.1f}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
