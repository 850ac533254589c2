"""A process that receives weights as an SGLang server does: one bucket at a time, in the order of
the calls, over real gloo.

    python -m tests.fake_receiver CHECKPOINT PORT

It starts with the tensors of CHECKPOINT (safetensors) as version 0.  GET /held says what it has:
its version, whether it is paused, and the sha256 of each tensor.
"""

import hashlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.distributed_c10d import _new_process_group_helper

from megatron_rl.rollout.server.ports import free_port


class Receiver:
    def __init__(self, checkpoint: Path) -> None:
        self.held = {name: fingerprint(tensor) for name, tensor in load_file(checkpoint).items()}
        self.version, self.paused, self.session = "0", False, False
        self.groups: dict[str, dist.ProcessGroup] = {}
        self.start = time.time()
        self.lock = threading.Lock()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path in ("/held", "/model_info", "/server_info"):
            return 200, {
                "held": self.held, "paused": self.paused, "weight_version": self.version,
                "tp_size": 1, "device": "cpu",
                "startup_time": self.start,
            }  # fmt: skip
        with self.lock:  # as SGLang's is_pause_cond
            try:
                return 200, getattr(self, path.removeprefix("/"))(**body) or {}
            except (RuntimeError, AttributeError) as error:
                return (404 if isinstance(error, AttributeError) else 400), {"message": repr(error)}

    def pause_generation(self, mode: str) -> None:
        self.paused = True

    def continue_generation(self) -> None:
        self.paused = False

    def flush_cache(self) -> None: ...

    def update_weight_version(self, new_version: str, abort_all_requests: bool) -> None:
        self.version = new_version

    def begin_weight_update(self, selector: str) -> None:
        if self.session:
            raise RuntimeError("a weight-update session is already open")
        self.session = True

    def end_weight_update(self) -> None:
        self.session = False

    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        world_size: int,
        group_name: str,
        backend: str,
        rank_offset: int,
    ) -> None:
        limit = timedelta(seconds=30)
        store = dist.TCPStore(master_address, master_port, world_size, False, limit)
        place = dist.PrefixStore(group_name, store)
        group, _ = _new_process_group_helper(
            world_size, rank_offset, [], backend, place, group_name=group_name, timeout=limit
        )
        self.groups[group_name] = group

    def destroy_weights_update_group(self, group_name: str) -> None:
        self.groups.pop(group_name)

    def update_weights_from_distributed(
        self,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group_name: str,
        load_format: str | None = None,
        **rest: Any,
    ) -> None:
        if not self.session:
            raise RuntimeError("update_weights_from_distributed must run between begin and end")
        sizes = [
            torch.Size(shape).numel() * getattr(torch, dtype).itemsize
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        if load_format == "flattened_bucket":
            parts = self.receive(sum(sizes), group_name).split(sizes)
        else:
            parts = tuple(self.receive(size, group_name) for size in sizes)
        for name, part in zip(names, parts, strict=True):
            self.held[name] = fingerprint(part)

    def receive(self, num_bytes: int, group_name: str) -> torch.Tensor:
        flat = torch.zeros(num_bytes, dtype=torch.uint8)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self.groups[group_name].broadcast([flat], options).wait()
        return flat

    def update_weights_from_disk(self, model_path: str, flush_cache: bool) -> None:
        for file in Path(model_path).glob("*.safetensors"):
            for name, tensor in load_file(file).items():
                self.held[name] = fingerprint(tensor)


def fingerprint(tensor: torch.Tensor) -> str:
    return hashlib.sha256(
        tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    ).hexdigest()


def serve(receiver: Receiver, port: int) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            status, answer = receiver.answer(
                self.path, json.loads(self.rfile.read(length)) if length else {}
            )
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    server.serve_forever()


class ReceiverProcess:
    def __init__(self, checkpoint: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "tests.fake_receiver", str(checkpoint), str(self.port)]
        self.process = subprocess.Popen(command)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + 120
        while True:
            try:
                self.state()
                return
            except httpx.TransportError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def state(self) -> dict[str, Any]:
        return httpx.get(f"{self.url}/held", timeout=30).json()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def receivers(checkpoint: Path, count: int) -> Iterator[list[ReceiverProcess]]:
    processes = [ReceiverProcess(checkpoint) for _ in range(count)]
    try:
        for each in processes:
            each.wait_until_ready()
        yield processes
    finally:
        for each in processes:
            each.kill()


if __name__ == "__main__":
    serve(Receiver(Path(sys.argv[1])), int(sys.argv[2]))
