"""Push new weights to the SGLang servers: pause, flush, send, set the version, confirm it
everywhere, continue.

Every rank takes part: rank 0 calls the servers, and each source sends the tensors that it has
(weights/hf/export.py), so none is gathered on rank 0.  SGLang is never imported.  This order never
serves stale or half-updated weights:

    pause_generation(abort) -> flush_cache until it is accepted -> version "updating to N" -> every source sends
    -> all have, still "updating to N" [-> checksums] -> still so -> version N -> confirm -> continue

Where requests are kept (rollout.weight_update = in_place), it pauses with mode in_place and flushes
nothing: the client's requests then name the version whose entries of the prefix cache they may find
(rollout/client/request.py).

A server refuses a flush while a finished request still counts as running.  Without the flush,
key-values and expert ids of the OLD weights would stay for every cached prefix; letting the update
flush (flush_cache = true) kills servers up to 0.5.21. After a failure the servers stay paused,
under a version that no sample may have: no process trains on half-updated weights. The next push
repairs them: it sends every tensor.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_all
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from uuid import uuid4

import torch

from megatron_rl.config.sglang_settings import Values
from megatron_rl.distributed.ranks import Ranks
from megatron_rl.weights.hf.export import Batch, HFTensor, batches, on_rank_0
from megatron_rl.weights.hf.files import DTYPES, is_left_out, outline, read_headers
from megatron_rl.weights.hf.fp8 import round_to_fp8
from megatron_rl.weights.hf.write import drain
from megatron_rl.weights.sync.buckets import Bucket
from megatron_rl.weights.sync.checksums import ExportDigests, Verifier
from megatron_rl.weights.sync.colocated import Colocated, Places
from megatron_rl.weights.sync.servers import (
    MEMORY_TAGS,
    Json,
    Servers,
    WeightPushError,
    check_unchanged,
    start_of,
)
from megatron_rl.weights.sync.transports import Disk, Distributed, Targets, Transport
from megatron_rl.weights.sync.turns import Turns
from megatron_rl.weights.version import updating, version_name

__all__ = ["PushReport", "WeightPushError", "WeightPusher"]

logger = logging.getLogger(__name__)

PATIENCE = 3
"""Times the limit of one call: joining a group, a broadcast and its loading are three."""
Expected = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""HF name -> (shape, dtype to send)."""


@dataclass(frozen=True)
class PushReport:
    """seconds: from pause to continue; num_bytes: of one copy, not per server; refused_flushes: see
    the module docstring;
    sent_bytes: of num_bytes, by each rank; verified: tensors whose checksums were compared, over
    all servers, None if this push was not verified."""

    seconds: float
    num_bytes: int
    num_buckets: int
    refused_flushes: int
    sent_bytes: tuple[int, ...]
    verified: int | None = None


class WeightPusher:
    """Sends streams of HF tensors to the servers at `urls`: one object on every rank, see each
    method for who calls it.

    checkpoint  HF directory the servers were started on: names, shapes and stored dtypes every push
                must match (SGLang skips an unknown name, and keeps an old tensor, without an error)
    dtype       what the servers run in; tensors that the checkpoint stores in another dtype than
                most keep theirs
    transport   "distributed": one broadcast per bucket; "disk": safetensors in `disk_dir`, which
                the servers can read; "colocated": memory that servers on this machine map
    ranks       of the job; by default one
    run         name of the run in the versions that servers report (weights/version.py)
    device      where buckets are built: cpu broadcasts over gloo and shares host memory, cuda over
                nccl and CUDA-IPC handles
    places      of "colocated", on rank 0: URL -> the GPU of each of that server's ranks; by default
                `device` for all
    settings    URL -> the server's settings when it was checked, which must not have changed at a
                later push; None: not compared
    verify_every  n: the first push to a set of servers, every n-th one, and the first one after a
                  server was started again
                compare checksums (checksums.py); 0: none does
    fp8_keep    None: weights are not rounded; else rounded to FP8 and back, except names that match
                these patterns
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
        ranks: Ranks | None = None,
        run: str = "",
    ) -> None:
        self.ranks, self.run = ranks or Ranks(), run
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
        self.settings = (
            None if settings is None else {url.rstrip("/"): each for url, each in settings.items()}
        )
        self.starts: dict[str, Json] = {}
        """URL -> what tells a start of this server from others, at the last push."""
        makers: dict[str, Callable[[], Transport]] = {
            "distributed": lambda: Distributed(device, self.ranks),
            "disk": lambda: Disk(checkpoint, disk_dir),
            "colocated": lambda: Colocated(device, places),
        }
        self.transport = makers[transport]()
        self.released: dict[str, set[str]] = {tag: set() for tag in MEMORY_TAGS}

    def push(
        self,
        export: Callable[[], Iterable[HFTensor]],
        version: int,
        *,
        serve: bool = True,
        keep_requests: bool = False,
    ) -> PushReport:
        """Replace every weight of every server by the tensors of export() (any order, dtype or
        layout).  Collective.

        Each source sends its own.  On return all of them have, every server is running again and
        reports weight version `version`; with serve = False not before `serve`.  Raises
        WeightPushError on every rank; export() is exhausted even then, as a collective one must be.
        keep_requests: requests in progress continue with the new weights, over keys and values of
        the old ones; prefix caches keep theirs, too.
        """
        start = time.monotonic()
        opened = self.ranks.on_rank_0(lambda: self._open(version, keep_requests), WeightPushError)
        if opened.restarted:
            self.transport.leave(
                self.servers, [url for url in self.servers.urls if url not in opened.restarted]
            )
        self.transport.join(opened.targets)
        turns = Turns(self.ranks.store, opened.name, PATIENCE * self.servers.timeout)
        sent = Sent()
        sent_bytes = self.ranks.together(
            lambda: self._send(export, version, turns, sent), WeightPushError
        )
        if self.ranks.rank == 0:
            turns.close()
        digests = self._digests(export) if opened.hashes else None

        def finish() -> int | None:
            self._check_alone(version)
            self.transport.finish(self.servers, version, sent.numbers, sent.num_bytes)
            # before any sample can have the version
            verified = (
                self.verifier.verify(self.servers, digests, version) if opened.is_due else None
            )
            self.unverified = (self.unverified + 1) % max(1, self.verify_every)
            if serve:
                self.serve(version)
            return verified

        verified = self.ranks.on_rank_0(finish, WeightPushError)
        seconds = time.monotonic() - start
        return PushReport(
            seconds, sent.num_bytes, sent.num_buckets, opened.refused, tuple(sent_bytes), verified
        )

    def serve(self, version: int) -> None:
        """After a push, on rank 0: the servers get memory for caches, report `version`, continue.

        Raises WeightPushError.
        """
        self._check_alone(version)
        self._resume_memory("kv_cache")
        self.servers.set_version(version_name(version, self.run))
        self.servers.post("/continue_generation", {})

    def release_memory(self) -> None:
        """On rank 0: let the servers free their GPU memory until the next push, which resumes it;
        meanwhile they serve nothing.

        They need --enable-memory-saver.
        """
        self._pause()
        self.servers.post("/release_memory_occupation", {"tags": list(MEMORY_TAGS)})
        self.released = {tag: set(self.servers.urls) for tag in MEMORY_TAGS}

    def set_urls(self, urls: Sequence[str]) -> None:
        """Push to these servers from now on.

        If they are not the same as before, the next push makes new connections.
        """
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

    def _check_servers(self) -> frozenset[str]:
        """Raise WeightPushError for a server whose settings changed; returns those that were
        started again.

        One at the same address as before is no longer in the transport's groups, and is to be
        verified.
        """
        infos = dict(zip(self.servers.urls, self.servers.each(self.servers.info), strict=True))
        if self.settings is not None:
            for url, info in infos.items():
                check_unchanged(url, info, self.settings)
        starts = {url: start_of(info) for url, info in infos.items()}
        if restarted := {
            url for url, start in starts.items() if start != self.starts.get(url, start)
        }:
            logger.warning(
                "started again since the last weight sync: %s", ", ".join(sorted(restarted))
            )
            self.unverified = 0
        self.starts = starts
        return frozenset(restarted)

    def _open(self, version: int, keep_requests: bool) -> Opened:
        """On rank 0: pause, flush, check the servers, and let them take weights."""
        if keep_requests:
            self.servers.post("/pause_generation", {"mode": "in_place"})
        refused = 0 if keep_requests else self._pause()
        restarted = self._check_servers()
        # before the weights arrive; the cache only after them, to keep the peak low
        self._resume_memory("weights")
        self.servers.set_version(updating(version_name(version, self.run)))
        is_due = bool(self.verify_every) and self.unverified == 0
        hashes = is_due and self.verifier.any_on_cpu(self.servers)
        targets = self.transport.open(self.servers, version)
        return Opened(f"weight_sync_{uuid4()}", refused, restarted, is_due, hashes, targets)

    def _check_alone(self, version: int) -> None:
        """Raise WeightPushError where another run pushes to a server, too.

        Then it has tensors of both, so it gets a version that is neither's: the other run finds
        that here, or in its samples.
        """
        name = version_name(version, self.run)
        try:
            self.servers.confirm_version(updating(name))
        except WeightPushError:
            with suppress(WeightPushError):
                self.servers.set_version(f"mixed with {name}")
            raise

    def _send(
        self, export: Callable[[], Iterable[HFTensor]], version: int, turns: Turns, sent: Sent
    ) -> int:
        """Send this rank's buckets; returns their bytes.  `sent` gets what all sources send."""
        stream = iter(export())
        loading: Future[None] | None = None
        num_bytes = 0
        try:
            tensors = checked_stream(stream, self.expected, self.checkpoint)
            for number, batch in enumerate(batches(tensors, self.bucket_bytes, of_one_dtype=True)):
                sent.add(number, batch)
                if batch.source != self.ranks.rank:
                    continue
                if loading is not None:
                    loading.result()
                loading = self._start(self._bucket(number, batch), version, turns)
                num_bytes += batch.num_bytes
            if loading is not None:
                loading.result()
        # raised again, when no server reads from this source and the export is at its end
        except Exception:
            turns.fail()
            if loading is not None:
                wait_for_all([loading])  # the servers read its memory, which sent() may free
            drain(stream)
            raise
        finally:
            self.transport.sent()
        return num_bytes

    def _start(self, bucket: Bucket, version: int, turns: Turns) -> Future[None]:
        """Send the bucket when it is its turn; the future ends when the servers have loaded it, as
        does the turn.
        """
        calls = self.transport.send(
            self.servers, bucket, version, lambda: turns.wait(bucket.number)
        )

        def wait() -> None:
            try:
                self.servers.wait(calls)
            except WeightPushError:
                turns.fail()
                raise
            turns.done()

        return self.servers.threads.submit(wait)  # the next bucket is gathered meanwhile

    def _bucket(self, number: int, batch: Batch) -> Bucket:
        bucket = Bucket(self.device, number)
        for name, _, dtype, _, tensor in batch.tensors:
            if tensor is None:
                raise WeightPushError(
                    f"exported tensor {name!r} has no values on its source, rank {self.ranks.rank}"
                )
            bucket.add(name, self._rounded(name, tensor), dtype)
        return bucket

    def _rounded(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.fp8_keep is None else round_to_fp8(name, tensor, self.fp8_keep)

    def _digests(self, export: Callable[[], Iterable[HFTensor]]) -> ExportDigests | None:
        """On rank 0, where the tensors of a second export() are moved: servers hash tensors that
        several sources send.
        """
        digests = ExportDigests(self.expected) if self.ranks.rank == 0 else None

        def add_all() -> None:
            stream = on_rank_0(export(), self.ranks.rank, self.device)
            try:
                for name, tensor in stream:
                    if digests is not None and tensor is not None:
                        digests.add(
                            name, self._rounded(name, tensor.detach()).to(self.expected[name][1])
                        )
            finally:
                drain(stream)  # the export is collective

        self.ranks.together(add_all, WeightPushError)
        return digests

    def _pause(self) -> int:
        """Abort all requests and empty the caches; returns how often a flush was refused."""
        self.servers.post("/pause_generation", {"mode": "abort"})
        return sum(self.servers.each(self.servers.flush_until_accepted))

    def _resume_memory(self, tag: str) -> None:
        """On the servers that released it and are still in use: a server that was started since
        then never did.
        """
        urls = [url for url in self.servers.urls if url in self.released[tag]]
        self.released[tag].clear()
        self.servers.resume_memory(tag, urls)


@dataclass(frozen=True)
class Opened:
    """What every rank knows of a push that rank 0 has opened.

    name: unique; restarted: URLs of servers that were started again; is_due: whether it is
    verified, and hashes: on rank 0 too;
    targets: of the transport.
    """

    name: str
    refused: int
    restarted: frozenset[str]
    is_due: bool
    hashes: bool
    targets: Targets


@dataclass
class Sent:
    """The buckets of all sources.  numbers: HF name -> that of its bucket."""

    num_bytes: int = 0
    num_buckets: int = 0
    numbers: dict[str, int] = field(default_factory=dict)

    def add(self, number: int, batch: Batch) -> None:
        self.num_buckets += 1
        self.num_bytes += batch.num_bytes
        self.numbers.update((each.name, number) for each in batch.tensors)


def expected_tensors(checkpoint: Path, dtype: torch.dtype) -> Expected:
    """Every tensor of the checkpoint that is pushed.

    Most tensors are stored in the model's dtype and are sent in the servers' `dtype`; the few that
    are stored in another one (such as a float32 router bias of a bfloat16 model) are sent as
    stored.
    """
    has = outline(checkpoint)
    stored = {
        name: each for name, each in read_headers(checkpoint).items() if not is_left_out(name, has)
    }
    for name, header in stored.items():
        if header.dtype not in DTYPES:
            raise WeightPushError(
                f"{header.file}: {name} has dtype {header.dtype}, must be one of"
                f" {', '.join(DTYPES)}; pushing quantised weights is not supported"
            )
    most = Counter(header.dtype for header in stored.values()).most_common(1)[0][0]
    return {
        name: (header.shape, dtype if header.dtype == most else DTYPES[header.dtype])
        for name, header in stored.items()
    }


def checked_stream(
    tensors: Iterable[HFTensor], expected: Expected, checkpoint: Path
) -> Iterator[HFTensor]:
    """The same stream, in the dtypes to send; WeightPushError for a name or shape that is not the
    checkpoint's, occurs twice, or is missing."""
    seen: set[str] = set()
    for each in tensors:
        if each.name not in expected or each.name in seen:
            problem = "occurs twice" if each.name in seen else f"is not in {checkpoint}"
            raise WeightPushError(f"exported tensor {each.name!r} {problem}")
        shape, dtype = expected[each.name]
        if each.shape != shape:
            raise WeightPushError(
                f"exported tensor {each.name!r} has shape {each.shape}, {checkpoint} has {shape}"
            )
        seen.add(each.name)
        yield HFTensor(each.name, shape, dtype, each.source, each.tensor)
    if missing := sorted(set(expected) - seen):
        raise WeightPushError(
            f"{len(missing)} tensors of {checkpoint} were not exported, first {missing[0]!r}"
        )
