"""Push new weights to the SGLang servers: pause, flush, send, set the version, confirm it everywhere, continue.

Runs on the trainer's global rank 0; it never imports SGLang.  The order is the one that cannot serve stale or half-new
weights:

    pause_generation(abort) -> flush_cache until it is accepted -> version "updating to N" -> send -> version N -> confirm
    -> continue

A flush is refused while a finished request still counts as running; a refused flush would keep key-values and expert
ids of the OLD weights for every cached prefix, and letting the update flush (flush_cache = true) kills servers up to
0.5.21.
After a failure the servers stay paused, under a version that no sample may have: nobody trains on half-updated weights.  The
next push heals them: it sends every tensor.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_all
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megatron_rl.weights.broadcast import BroadcastError, Bucket, BucketSender, connect
from megatron_rl.weights.fp8 import rounded_to_fp8
from megatron_rl.weights.hf_files import is_left_out, outline, tensor_files

logger = logging.getLogger(__name__)

FLUSH_RETRY_SECONDS = 0.02
CONNECT_TIMEOUT_SECONDS = 10.0
SETTLE_SECONDS = 10.0  # for the other servers to notice that a broadcast was given up
ONE_CALL = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")
"""SGLang fuses these two, and drops them without a word where one call to load weights has not both: they share a bucket."""
SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class WeightPushError(RuntimeError):
    """New weights did not reach every server, which stay paused; the message names server, call and answer."""


@dataclass(frozen=True)
class PushReport:
    """seconds: pause to continue; num_bytes: of one copy, not per server; refused_flushes: see the module docstring."""

    seconds: float
    num_bytes: int
    num_buckets: int
    refused_flushes: int


class WeightPusher:
    """Sends streams of HF tensors to the servers at `urls`.

    checkpoint  HF directory the servers were started on: names, shapes and stored dtypes every push must match
                (SGLang skips an unknown name and keeps an old tensor without saying so)
    dtype       what the servers run in; tensors the checkpoint keeps in another dtype than most keep that one
    transport   "distributed": one broadcast per bucket; "disk": safetensors in `disk_dir`, which the servers can read
    device      where buckets are built: cpu broadcasts over gloo, cuda over nccl
    fp8_keep    None: weights as they are; else rounded to FP8 and back, but for names that match these patterns
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        checkpoint: Path,
        dtype: torch.dtype,
        transport: Literal["distributed", "disk"],
        bucket_mb: int,
        device: torch.device,
        timeout_seconds: float,
        disk_dir: Path,
        headers: dict[str, str] | None = None,
        fp8_keep: Sequence[str] | None = None,
    ) -> None:
        self.servers = Servers(urls, headers or {}, timeout_seconds)
        self.checkpoint = checkpoint
        self.expected = expected_tensors(checkpoint, dtype)
        self.transport = transport
        self.bucket_bytes = bucket_mb * 2**20
        self.device = device
        self.disk_dir = disk_dir
        self.fp8_keep = fp8_keep
        self.sender: BucketSender | None = None
        self.last_dir: Path | None = None

    def push(self, tensors: Iterable[tuple[str, torch.Tensor | None]], version: int) -> PushReport:
        """Replace every weight of every server by `tensors` (HF name, full tensor, any order, dtype or layout).

        On return every server is running again and reports weight version `version`.  Raises WeightPushError; the
        stream may then be left undrained, which hangs other ranks that drive it: drain it, or stop the run.
        """
        start = time.monotonic()
        self.servers.post("/pause_generation", {"mode": "abort"})
        refused = sum(self.servers.each(self.servers.flush_until_accepted))
        self.servers.set_version(f"updating to {version}")
        stream = checked(tensors, self.expected, self.checkpoint)
        buckets = self._buckets(stream if self.fp8_keep is None else rounded_to_fp8(stream, self.fp8_keep))
        num_bytes, num_buckets = (
            self._broadcast(buckets) if self.transport == "distributed" else self._write(buckets, version)
        )
        self.servers.set_version(str(version))
        self.servers.post("/continue_generation", {})
        return PushReport(time.monotonic() - start, num_bytes, num_buckets, refused)

    def set_urls(self, urls: Sequence[str]) -> None:
        """Push to these servers from now on.  The process group is made anew when they are others than before."""
        urls = [url.rstrip("/") for url in urls]
        if urls == self.servers.urls:
            return
        self._leave_group([url for url in self.servers.urls if url in urls])  # the others are gone
        self.servers.close()
        self.servers = Servers(urls, self.servers.headers, self.servers.timeout)

    def close(self) -> None:
        """Leave the process group and remove the last weights on disk.  The servers keep what they have."""
        self._leave_group(self.servers.urls)
        self.servers.close()
        if self.last_dir is not None:
            shutil.rmtree(self.last_dir)
            self.last_dir = None

    def _leave_group(self, urls: Sequence[str]) -> None:
        """End the process group, also on the servers at `urls`."""
        if self.sender is not None:
            self.servers.leave_group(self.sender.group_name, urls)
            self.sender.close()
            self.sender = None

    def _buckets(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[Bucket]:
        """Buckets of at most bucket_bytes (one tensor at least) and of one dtype, so that all tensors are aligned."""
        bucket = Bucket(self.device)
        for name, tensor in tensors:
            dtype = self.expected[name][1]
            fused = name.endswith(ONE_CALL) and bucket.names and bucket.names[-1].endswith(ONE_CALL)
            if (
                bucket.names
                and not fused
                and (bucket.dtype != dtype or bucket.num_bytes + tensor.numel() * dtype.itemsize > self.bucket_bytes)
            ):
                yield bucket
                bucket = Bucket(self.device)
            bucket.add(name, tensor, dtype)
        yield bucket

    def _broadcast(self, buckets: Iterator[Bucket]) -> tuple[int, int]:
        """Send by collective broadcasts while the servers receive; (bytes, buckets)."""
        if self.sender is None:
            self.sender = self._connect()
        session = self.servers.each(self.servers.begin_update)
        num_bytes = num_buckets = 0
        loading: list[Future[Any]] = []
        for bucket in buckets:
            self.servers.wait(loading)  # the servers load a bucket while the next one is gathered
            body = bucket.describe() | {
                "group_name": self.sender.group_name,
                "load_format": "flattened_bucket",
                "flush_cache": False,
            }
            loading = self.servers.start_post("/update_weights_from_distributed", body)
            try:
                self.sender.send(bucket, loading, self.servers.timeout)
            except BroadcastError as error:
                self.sender = None  # its connections are in an unknown state; the next push makes new ones
                ended, _ = wait_for_all(loading, SETTLE_SECONDS)
                self.servers.wait(ended)
                raise WeightPushError(f"{error} ({', '.join(self.servers.urls)})") from error
            num_bytes += bucket.num_bytes
            num_buckets += 1
        self.servers.wait(loading)
        if any(session):
            self.servers.post("/end_weight_update", {})
        return num_bytes, num_buckets

    def _connect(self) -> BucketSender:
        """One process group of this process (rank 0) and every tensor-parallel rank of every server."""
        sizes = self.servers.each(self.servers.num_ranks)
        offsets = [1 + sum(sizes[:i]) for i in range(len(sizes))]

        def join(body: dict[str, Any]) -> list[Future[Any]]:
            bodies = [body | {"rank_offset": offset} for offset in offsets]
            return self.servers.start_posts("/init_weights_update_group", bodies)

        try:
            return connect(
                self.servers.urls[0],
                world_size=1 + sum(sizes),
                device=self.device,
                timeout=self.servers.timeout,
                join=join,
            )
        except BroadcastError as error:
            raise WeightPushError(str(error)) from error

    def _write(self, buckets: Iterator[Bucket], version: int) -> tuple[int, int]:
        """Write a checkpoint, let the servers load it and remove the one before; (bytes, buckets)."""
        folder = self.disk_dir / f"weights_{version}"
        shutil.rmtree(folder, ignore_errors=True)  # left by a push that failed
        folder.mkdir(parents=True)
        num_bytes = num_buckets = 0
        for bucket in buckets:
            num_buckets += 1
            num_bytes += bucket.num_bytes
            save_file(bucket.tensors(), folder / f"model-{num_buckets:05d}.safetensors", metadata={"format": "pt"})
        shutil.copy(self.checkpoint / "config.json", folder)
        self.servers.post("/update_weights_from_disk", {"model_path": str(folder.absolute()), "flush_cache": False})
        if self.last_dir is not None and self.last_dir != folder:
            shutil.rmtree(self.last_dir)
        self.last_dir = folder
        return num_bytes, num_buckets


class Servers:
    """The control endpoints of all servers, called on all of them at the same time, each call with a deadline."""

    def __init__(self, urls: Sequence[str], headers: dict[str, str], timeout_seconds: float) -> None:
        if not urls:
            raise ValueError("WeightPusher needs at least one server URL")
        self.urls = [url.rstrip("/") for url in urls]
        self.headers = headers
        self.timeout = timeout_seconds
        deadlines = httpx.Timeout(timeout_seconds, connect=CONNECT_TIMEOUT_SECONDS)
        self.http = httpx.Client(headers=headers, timeout=deadlines, trust_env=False)
        self.threads = ThreadPoolExecutor(len(self.urls), thread_name_prefix="push")

    def post(self, path: str, body: dict[str, Any]) -> None:
        self.wait(self.start_post(path, body))

    def start_post(self, path: str, body: dict[str, Any]) -> list[Future[Any]]:
        return self.start_posts(path, [body] * len(self.urls))

    def start_posts(self, path: str, bodies: Sequence[dict[str, Any]]) -> list[Future[Any]]:
        """One body per server."""
        return [
            self.threads.submit(self.call, "POST", url, path, body) for url, body in zip(self.urls, bodies, strict=True)
        ]

    def each(self, function: Callable[[str], Any]) -> list[Any]:
        """function(url) for every server, in parallel; results in the order of `urls`."""
        return self.wait([self.threads.submit(function, url) for url in self.urls])

    def wait(self, futures: Iterable[Future[Any]]) -> list[Any]:
        """Their results, once all have ended: after an error no call of ours is under way any more."""
        futures = list(futures)
        wait_for_all(futures)
        return [future.result() for future in futures]

    def call(self, method: str, url: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The JSON object (or {}) of one call.  Raises WeightPushError unless its status is 200."""
        response = self.request(method, url, path, body)
        if response.status_code != 200:
            raise WeightPushError(f"server {url}{path} answered {response.status_code}: {response.text[:500]}")
        try:
            answer = response.json()
        except ValueError:
            return {}
        return answer if isinstance(answer, dict) else {}

    def request(self, method: str, url: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            return self.http.request(method, url + path, json=body)
        except httpx.TimeoutException as error:
            raise WeightPushError(f"server {url}{path} did not answer within {self.timeout:g} s") from error
        except httpx.TransportError as error:
            raise WeightPushError(f"server {url}{path} cannot be reached: {error!r}") from error

    def flush_until_accepted(self, url: str) -> int:
        """Empty the prefix cache; how often that was refused before."""
        deadline = time.monotonic() + self.timeout
        refused = 0
        while (response := self.request("POST", url, "/flush_cache")).status_code != 200:
            if response.status_code != 400 or time.monotonic() > deadline:
                tries = f"{response.status_code} ({refused + 1} times)"
                raise WeightPushError(f"server {url}/flush_cache answered {tries}: {response.text[:500]}")
            refused += 1
            time.sleep(FLUSH_RETRY_SECONDS)
        return refused

    def begin_update(self, url: str) -> bool:
        """Open a weight-update session, after closing one that a failed push left open; False where there are none."""
        response = self.request("POST", url, "/begin_weight_update", {"selector": "all"})
        if response.status_code == 404:  # before 0.5.21
            return False
        if response.status_code == 400 and "already open" in response.text:
            self.call("POST", url, "/end_weight_update", {})
            self.call("POST", url, "/begin_weight_update", {"selector": "all"})
        elif response.status_code != 200:
            raise WeightPushError(
                f"server {url}/begin_weight_update answered {response.status_code}: {response.text[:500]}"
            )
        return True

    def set_version(self, version: str) -> None:
        """Set the weight version of every server; all have confirmed it on return."""
        self.post("/update_weight_version", {"new_version": version, "abort_all_requests": False})
        self.each(lambda url: self.confirm_version(url, version))

    def confirm_version(self, url: str, version: str) -> None:
        reported = self.call("GET", url, "/model_info").get("weight_version")
        if reported != version:
            raise WeightPushError(f"server {url} reports weight version {reported!r} after it was set to {version!r}")

    def num_ranks(self, url: str) -> int:
        """Ranks of the server that join the broadcast."""
        info = self.call("GET", url, "/server_info")
        if info.get("pp_size", 1) != 1 or (info.get("dp_size", 1) != 1 and not info.get("enable_dp_attention")):
            raise WeightPushError(
                f"server {url} runs with pp_size = {info.get('pp_size')}, dp_size = {info.get('dp_size')}: it takes "
                "broadcast weights only with both 1 (or DP attention); set rollout.push = disk, or use more servers"
            )
        return int(info["tp_size"])

    def leave_group(self, group_name: str, urls: Sequence[str]) -> None:
        """Let the servers free the group's memory; a server that cannot any more is only worth a warning."""
        for url in urls:
            try:
                body = {"group_name": group_name}
                self.http.post(f"{url}/destroy_weights_update_group", json=body, timeout=CONNECT_TIMEOUT_SECONDS)
            except httpx.TransportError as error:
                logger.warning("server %s did not leave the weight-update group: %r", url, error)

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.http.close()


def expected_tensors(checkpoint: Path, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """HF name -> (shape, dtype to send) for every tensor of the checkpoint.

    Most tensors are stored in the model's dtype and are sent in the servers' `dtype`; the few that are stored in
    another one (say a float32 router bias of a bfloat16 model) are sent as stored.
    """
    stored: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    has = outline(checkpoint)
    for file in sorted(set(tensor_files(checkpoint).values())):
        with safe_open(file, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118 - not a mapping
                if is_left_out(name, has):
                    continue  # the servers keep what they have of it
                piece = reader.get_slice(name)
                if piece.get_dtype() not in SAFETENSORS_DTYPES:
                    raise WeightPushError(
                        f"{file}: {name} has dtype {piece.get_dtype()}, known: {', '.join(SAFETENSORS_DTYPES)}; "
                        "pushing quantised weights is not supported"
                    )
                stored[name] = (tuple(piece.get_shape()), SAFETENSORS_DTYPES[piece.get_dtype()])
    model_dtype = Counter(each for _, each in stored.values()).most_common(1)[0][0]
    return {name: (shape, dtype if each == model_dtype else each) for name, (shape, each) in stored.items()}


def checked(
    tensors: Iterable[tuple[str, torch.Tensor | None]],
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]],
    checkpoint: Path,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass the stream on; WeightPushError for a name or shape that is not the checkpoint's, twice there, or missing."""
    seen: set[str] = set()
    for name, tensor in tensors:
        if name not in expected or name in seen:
            raise WeightPushError(
                f"exported tensor {name!r} {'comes twice' if name in seen else f'is not in {checkpoint}'}"
            )
        if tensor is None or tuple(tensor.shape) != expected[name][0]:
            have = "nothing (push on global rank 0)" if tensor is None else tuple(tensor.shape)
            raise WeightPushError(f"exported tensor {name!r} has shape {have}, {checkpoint} has {expected[name][0]}")
        seen.add(name)
        yield name, tensor
    missing = sorted(set(expected) - seen)
    if missing:
        raise WeightPushError(f"{len(missing)} tensors of {checkpoint} were not exported, first {missing[0]!r}")
