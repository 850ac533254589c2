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

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from megatron_rl.weights.hf.files import is_left_out, outline, tensor_files
from megatron_rl.weights.hf.fp8 import rounded_to_fp8
from megatron_rl.weights.sync.buckets import Bucket
from megatron_rl.weights.sync.servers import MEMORY_TAGS, Servers, WeightPushError
from megatron_rl.weights.sync.transports import TransportName, make_transport

__all__ = ["PushReport", "WeightPushError", "WeightPusher"]

ONE_CALL = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")
"""SGLang fuses these two, and drops them without a word where one call to load weights has not both: they share a bucket."""
SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


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
    transport   "distributed": one broadcast per bucket; "disk": safetensors in `disk_dir`, which the servers can read;
                "colocated": memory that servers on this machine map
    device      where buckets are built: cpu broadcasts over gloo and shares host memory, cuda over nccl and CUDA-IPC handles
    fp8_keep    None: weights as they are; else rounded to FP8 and back, but for names that match these patterns
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        checkpoint: Path,
        dtype: torch.dtype,
        transport: TransportName,
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
        self.bucket_bytes = bucket_mb * 2**20
        self.device = device
        self.disk_dir = disk_dir
        self.fp8_keep = fp8_keep
        self.transport = make_transport(transport, checkpoint=checkpoint, device=device, disk_dir=disk_dir)
        self.released: dict[str, set[str]] = {tag: set() for tag in MEMORY_TAGS}

    def push(self, tensors: Iterable[tuple[str, torch.Tensor | None]], version: int) -> PushReport:
        """Replace every weight of every server by `tensors` (HF name, full tensor, any order, dtype or layout).

        On return every server is running again and reports weight version `version`.  Raises WeightPushError; the
        stream may then be left undrained, which hangs other ranks that drive it: drain it, or stop the run.
        """
        start = time.monotonic()
        refused = self._pause()
        self._resume_memory("weights")
        self.servers.set_version(f"updating to {version}")
        stream = checked(tensors, self.expected, self.checkpoint)
        buckets = self._buckets(stream if self.fp8_keep is None else rounded_to_fp8(stream, self.fp8_keep))
        num_bytes, num_buckets = self.transport.send(self.servers, buckets, version)
        self._resume_memory("kv_cache")
        self.servers.set_version(str(version))
        self.servers.post("/continue_generation", {})
        return PushReport(time.monotonic() - start, num_bytes, num_buckets, refused)

    def release_memory(self) -> None:
        """Let the servers give their GPU memory back until the next push, which takes it again; they serve nothing meanwhile."""
        self._pause()
        self.servers.release_memory()
        self.released = {tag: set(self.servers.urls) for tag in MEMORY_TAGS}

    def set_urls(self, urls: Sequence[str]) -> None:
        """Push to these servers from now on.  What binds the transport to them is made anew when they are others than before."""
        urls = [url.rstrip("/") for url in urls]
        if urls == self.servers.urls:
            return
        self.transport.leave(self.servers, [url for url in self.servers.urls if url in urls])  # the others are gone
        self.servers.close()
        self.servers = Servers(urls, self.servers.headers, self.servers.timeout)

    def close(self) -> None:
        """Leave the servers, which keep what they have, and remove the last weights on disk."""
        self.transport.leave(self.servers, self.servers.urls)
        self.servers.close()
        self.transport.close()

    def _pause(self) -> int:
        """Nothing runs on the servers and nothing is cached; how often a flush was refused before."""
        self.servers.post("/pause_generation", {"mode": "abort"})
        return sum(self.servers.each(self.servers.flush_until_accepted))

    def _resume_memory(self, tag: str) -> None:
        """Of the servers that released it and are still there: one that was started since never did."""
        urls = [url for url in self.servers.urls if url in self.released[tag]]
        self.released[tag].clear()
        self.servers.resume_memory(tag, urls)

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
