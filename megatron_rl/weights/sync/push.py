"""Push new weights to the SGLang servers: pause, flush, send, set the version, confirm it everywhere, continue.

Runs on the trainer's global rank 0; it never imports SGLang.  This order never serves stale or half-updated weights:

    pause_generation(abort) -> flush_cache until it is accepted -> version "updating to N" -> send [-> checksums]
    -> version N -> confirm -> continue

A server refuses a flush while a finished request still counts as running.  Without the flush, key-values and expert ids of the
OLD weights would stay for every cached prefix; letting the update flush (flush_cache = true) kills servers up to 0.5.21.
After a failure the servers stay paused, under a version that no sample may have: no process trains on half-updated weights.
The next push repairs them: it sends every tensor.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from megatron_rl.config.server_settings import Values
from megatron_rl.weights.hf.files import DTYPES, is_left_out, outline, read_headers
from megatron_rl.weights.hf.fp8 import rounded_to_fp8
from megatron_rl.weights.sync.buckets import Bucket
from megatron_rl.weights.sync.checksums import ExportDigests, Verifier, hashed
from megatron_rl.weights.sync.colocated import Colocated, Places
from megatron_rl.weights.sync.servers import MEMORY_TAGS, Json, Servers, WeightPushError, check_unchanged, start_of
from megatron_rl.weights.sync.transports import Disk, Distributed, Transport

__all__ = ["PushReport", "WeightPushError", "WeightPusher"]

logger = logging.getLogger(__name__)

ONE_CALL = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")
"""SGLang fuses these two, and drops them without an error unless one call to load weights has both: they share a bucket."""
Expected = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""HF name -> (shape, dtype to send)."""


@dataclass(frozen=True)
class PushReport:
    """seconds: from pause to continue; num_bytes: of one copy, not per server; refused_flushes: see the module docstring;
    verified: tensors whose checksums were compared, over all servers, None if this push was not verified."""

    seconds: float
    num_bytes: int
    num_buckets: int
    refused_flushes: int
    verified: int | None = None


class WeightPusher:
    """Sends streams of HF tensors to the servers at `urls`.

    checkpoint  HF directory the servers were started on: names, shapes and stored dtypes every push must match
                (SGLang skips an unknown name, and keeps an old tensor, without an error)
    dtype       what the servers run in; tensors that the checkpoint stores in another dtype than most keep theirs
    transport   "distributed": one broadcast per bucket; "disk": safetensors in `disk_dir`, which the servers can read;
                "colocated": memory that servers on this machine map
    device      where buckets are built: cpu broadcasts over gloo and shares host memory, cuda over nccl and CUDA-IPC handles
    places      of "colocated": URL -> the GPU of each of that server's ranks; by default `device` for all
    settings    URL -> the server's settings when it was checked, which must not have changed at a later push; None: not compared
    verify_every  n: the first push to a set of servers, every n-th one, and the first one after a server was started again
                compare checksums (checksums.py); 0: none does
    fp8_keep    None: weights are not rounded; else rounded to FP8 and back, except names that match these patterns
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        checkpoint: Path,
        dtype: torch.dtype,
        transport: Literal["distributed", "disk", "colocated"],
        bucket_mb: int,
        device: torch.device,
        timeout_seconds: float,
        disk_dir: Path,
        headers: dict[str, str] | None = None,
        settings: Mapping[str, Values] | None = None,
        verify_every: int = 0,
        fp8_keep: Sequence[str] | None = None,
        places: Places | None = None,
    ) -> None:
        self.servers = Servers(urls, headers or {}, timeout_seconds)
        self.checkpoint = checkpoint
        self.expected = expected_tensors(checkpoint, dtype)
        self.bucket_bytes = bucket_mb * 2**20
        self.device = device
        self.disk_dir = disk_dir
        self.fp8_keep = fp8_keep
        self.verify_every = verify_every
        self.unverified = 0  # pushes since the last one that was verified, 0: the next one is
        self.verifier = Verifier()
        self.settings = None if settings is None else {url.rstrip("/"): each for url, each in settings.items()}
        self.starts: dict[str, Json] = {}
        """URL -> what tells a start of this server from others, at the last push."""
        makers: dict[str, Callable[[], Transport]] = {
            "distributed": lambda: Distributed(device),
            "disk": lambda: Disk(checkpoint, disk_dir),
            "colocated": lambda: Colocated(device, places),
        }
        self.transport = makers[transport]()
        self.released: dict[str, set[str]] = {tag: set() for tag in MEMORY_TAGS}

    def push(
        self, tensors: Iterable[tuple[str, torch.Tensor | None]], version: int, *, serve: bool = True
    ) -> PushReport:
        """Replace every weight of every server by `tensors` (HF name, full tensor, any order, dtype or layout).

        On return every server is running again and reports weight version `version`; with serve = False not before `serve`.
        Raises WeightPushError; the stream is then not exhausted, which hangs the other ranks of a collective export: exhaust
        it, or stop the run.
        """
        start = time.monotonic()
        refused = self._pause()
        self._check_servers()
        self._resume_memory("weights")  # before the weights arrive; the cache only after them, to keep the peak low
        self.servers.set_version(f"updating to {version}")  # no sample can have it, should the push fail
        stream = checked(tensors, self.expected, self.checkpoint)
        sent: list[int] = []
        if self.fp8_keep is not None:
            stream = rounded_to_fp8(stream, self.fp8_keep)
        is_due = bool(self.verify_every) and self.unverified == 0
        digests = ExportDigests(self.expected) if is_due and self.verifier.any_on_cpu(self.servers) else None
        if digests is not None:
            stream = hashed(stream, self.expected, digests)
        self.transport.send(self.servers, counted(self._buckets(stream), sent), version)
        # before any sample can have the version
        verified = self.verifier.verify(self.servers, digests, version) if is_due else None
        self.unverified = (self.unverified + 1) % max(1, self.verify_every)
        if serve:
            self.serve(version)
        return PushReport(time.monotonic() - start, sum(sent), len(sent), refused, verified)

    def serve(self, version: int) -> None:
        """After a push: the servers get memory for their caches, report `version` and continue.  Raises WeightPushError."""
        self._resume_memory("kv_cache")
        self.servers.set_version(str(version))
        self.servers.post("/continue_generation", {})

    def release_memory(self) -> None:
        """Let the servers free their GPU memory until the next push, which resumes it; meanwhile they serve nothing.

        They need --enable-memory-saver.
        """
        self._pause()
        self.servers.post("/release_memory_occupation", {"tags": list(MEMORY_TAGS)})
        self.released = {tag: set(self.servers.urls) for tag in MEMORY_TAGS}

    def set_urls(self, urls: Sequence[str]) -> None:
        """Push to these servers from now on.  If they are not the same as before, the next push makes new connections."""
        urls = [url.rstrip("/") for url in urls]
        if urls == self.servers.urls:
            return
        # servers that are no longer listed have died: a call would only time out
        self.transport.leave(self.servers, [url for url in self.servers.urls if url in urls])
        self.unverified = 0
        self.servers.close()
        self.servers = Servers(urls, self.servers.headers, self.servers.timeout)

    def close(self) -> None:
        """Leave the servers, which keep what they have, and remove the last weights on disk."""
        self.transport.leave(self.servers, self.servers.urls)
        self.servers.close()
        self.transport.close()

    def _check_servers(self) -> None:
        """Raise WeightPushError for a server whose settings changed.

        One that was started again at the same address is no longer in the transport's group, and is to be verified.
        """
        infos = dict(zip(self.servers.urls, self.servers.each(self.servers.info), strict=True))
        if self.settings is not None:
            for url, info in infos.items():
                check_unchanged(url, info, self.settings)
        starts = {url: start_of(info) for url, info in infos.items()}
        if restarted := {url for url, start in starts.items() if start != self.starts.get(url, start)}:
            logger.warning("started again since the last weight sync: %s", ", ".join(sorted(restarted)))
            self.transport.leave(self.servers, [url for url in self.servers.urls if url not in restarted])
            self.unverified = 0
        self.starts = starts

    def _pause(self) -> int:
        """Abort all requests and empty the caches; returns how often a flush was refused."""
        self.servers.post("/pause_generation", {"mode": "abort"})
        return sum(self.servers.each(self.servers.flush_until_accepted))

    def _resume_memory(self, tag: str) -> None:
        """On the servers that released it and are still in use: a server that was started since then never did."""
        urls = [url for url in self.servers.urls if url in self.released[tag]]
        self.released[tag].clear()
        self.servers.resume_memory(tag, urls)

    def _buckets(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[Bucket]:
        """Buckets of at most bucket_bytes (but at least one tensor) and of one dtype, so that all tensors are aligned."""
        bucket = Bucket(self.device)
        for name, tensor in tensors:
            dtype = self.expected[name][1]
            is_fused = name.endswith(ONE_CALL) and bucket.names and bucket.names[-1].endswith(ONE_CALL)
            is_full = bucket.dtype != dtype or bucket.num_bytes + tensor.numel() * dtype.itemsize > self.bucket_bytes
            if bucket.names and is_full and not is_fused:
                yield bucket
                bucket = Bucket(self.device)
            bucket.add(name, tensor, dtype)
        yield bucket


def counted(buckets: Iterable[Bucket], sizes: list[int]) -> Iterator[Bucket]:
    """The same buckets; `sizes` gets the bytes of each."""
    for bucket in buckets:
        sizes.append(bucket.num_bytes)
        yield bucket


def expected_tensors(checkpoint: Path, dtype: torch.dtype) -> Expected:
    """Every tensor of the checkpoint that is pushed.

    Most tensors are stored in the model's dtype and are sent in the servers' `dtype`; the few that are stored in
    another one (such as a float32 router bias of a bfloat16 model) are sent as stored.
    """
    has = outline(checkpoint)
    stored = {name: each for name, each in read_headers(checkpoint).items() if not is_left_out(name, has)}
    for name, header in stored.items():
        if header.dtype not in DTYPES:
            raise WeightPushError(
                f"{header.file}: {name} has dtype {header.dtype}, must be one of {', '.join(DTYPES)}; "
                "pushing quantised weights is not supported"
            )
    most = Counter(header.dtype for header in stored.values()).most_common(1)[0][0]
    return {
        name: (header.shape, dtype if header.dtype == most else DTYPES[header.dtype]) for name, header in stored.items()
    }


def checked(
    tensors: Iterable[tuple[str, torch.Tensor | None]], expected: Expected, checkpoint: Path
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same stream; WeightPushError for a name or shape that is not the checkpoint's, occurs twice, or is missing."""
    seen: set[str] = set()
    for name, tensor in tensors:
        if name not in expected or name in seen:
            problem = "occurs twice" if name in seen else f"is not in {checkpoint}"
            raise WeightPushError(f"exported tensor {name!r} {problem}")
        if tensor is None or tuple(tensor.shape) != expected[name][0]:
            shape = "nothing (push on global rank 0)" if tensor is None else tuple(tensor.shape)
            raise WeightPushError(f"exported tensor {name!r} has shape {shape}, {checkpoint} has {expected[name][0]}")
        seen.add(name)
        yield name, tensor
    if missing := sorted(set(expected) - seen):
        raise WeightPushError(f"{len(missing)} tensors of {checkpoint} were not exported, first {missing[0]!r}")
