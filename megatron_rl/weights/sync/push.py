"""Push new weights to the SGLang servers: what the settings call a weight sync.

Every rank takes part.  Rank 0 calls the servers.  The sources are the training ranks that send
(weights/hf/export.py): each sends the tensors that it has, so none is gathered on rank 0.  SGLang
is never imported.  Rank 0 keeps this order, in which no server ever serves stale or half-updated
weights:

    1. pause_generation (abort), and flush_cache until every server accepts it
    2. set the version "updating to N"
    3. every source sends its tensors, in buckets
    4. check that every server still reports "updating to N"; end the weight-update session
       (weight_sync = disk: let the servers load the files); compare checksums if that is due
    5. check "updating to N" again, set version N, confirm it on every server, continue_generation
       (`serve`; with rollout.release_memory only after the trainer has freed its weights)

Where requests are kept (rollout.weight_update = in_place), step 1 pauses with mode in_place and
flushes nothing.  The client's requests then name the version whose entries of the prefix cache they
may use (rollout/client/request.py).

With adapters the base never changes: after one complete push, only the tensors that have an adapter
are sent, for as long as the same servers keep the others.

A server refuses a flush while a finished request still counts as running.  Without the flush,
key-values and expert ids of the OLD weights would stay for every cached prefix; letting the update
flush (flush_cache = true) kills servers up to 0.5.21.  After a failure the servers stay paused,
under a version that no sample may have: no process trains on half-updated weights.  The next push
repairs them, because it sends every tensor then.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_all
from contextlib import suppress
from uuid import uuid4

import torch

from megatron_rl.distributed.ranks import Ranks
from megatron_rl.weights.hf.export import Batch, HFTensor, batches, on_rank_0
from megatron_rl.weights.hf.fp8 import round_to_fp8
from megatron_rl.weights.hf.write import drain
from megatron_rl.weights.sync.bucket_order import BucketOrder
from megatron_rl.weights.sync.buckets import Bucket
from megatron_rl.weights.sync.checksums import ExportDigests, Verifier
from megatron_rl.weights.sync.colocated import Colocated
from megatron_rl.weights.sync.push_records import Opened, PushReport, Sent
from megatron_rl.weights.sync.pushed_weights import (
    PushedWeights,
    changing_part,
    checked_stream,
    expected_tensors,
)
from megatron_rl.weights.sync.servers import (
    TO_LOAD,
    TO_SERVE,
    Json,
    ServerAccess,
    Servers,
    WeightPushError,
    check_unchanged,
    keeps_unsent,
    start_of,
)
from megatron_rl.weights.sync.transports import Disk, Distributed, Transport, TransportSettings
from megatron_rl.weights.version import updating, version_name

__all__ = ["PushReport", "WeightPushError", "WeightPusher"]

logger = logging.getLogger(__name__)

PATIENCE = 3
"""A source waits for its turn at most this many times the time limit of one call: the source before
it may join its group, broadcast its bucket and wait for the loading, one limit each.
"""


class WeightPusher:
    """Sends streams of HF tensors to the servers: one object on every rank.

    Each method says which ranks call it.
    """

    def __init__(
        self,
        access: ServerAccess,
        weights: PushedWeights,
        sending: TransportSettings,
        *,
        verify_every: int = 0,
        ranks: Ranks | None = None,
        run: str = "",
    ) -> None:
        """Read which tensors to push; nothing is sent yet.

        With `verify_every` = n > 0, four kinds of pushes compare checksums (checksums.py): the
        first one to a set of servers, the first one that sends a part, every n-th one, and the
        first one after a server was started again.  Without, every push sends every tensor.
        `ranks` are those of the job, by default one.  `run` is the name of the run in the versions
        that servers report (weights/version.py).
        """
        self.ranks, self.run = ranks or Ranks(), run
        self.servers = Servers(access.urls, dict(access.headers), access.timeout_seconds)
        self.weights = weights
        self.expected = expected_tensors(weights.checkpoint, weights.dtype)
        self.bucket_bytes = sending.bucket_mb * 2**20
        self.device = sending.device
        self.verify_every = verify_every
        self.pushes_since_check = 0
        """Pushes from the last verified one on, that one included; back to 0 after `verify_every`
        of them.  0: the next push is verified."""
        self.verifier = Verifier()
        self.is_whole = False
        """The servers have every tensor of the last push, so that a part is enough for the next.
        On rank 0."""
        self.sent_part = False
        self.settings = (
            None
            if access.settings is None
            else {url.rstrip("/"): values for url, values in access.settings.items()}
        )
        self.server_starts: dict[str, Json] = {}
        """URL -> what tells one start of this server from another, at the last push."""
        self.transport = make_transport(sending, weights, self.ranks)
        self.released: dict[tuple[str, ...], set[str]] = {TO_LOAD: set(), TO_SERVE: set()}
        """Kinds of memory -> URLs of the servers that have released them."""

    def push(
        self,
        export: Callable[[], Iterable[HFTensor]],
        version: int,
        *,
        serve: bool = True,
        keep_requests: bool = False,
    ) -> PushReport:
        """Replace the weights of every server by the tensors of export().  Collective.

        The tensors may come in any order, dtype and layout; each source sends its own.  On return
        every server has all of them, runs again and reports weight version `version`; with serve =
        False only after `serve`.  With `keep_requests`, requests in progress continue with the new
        weights over keys and values of the old ones, and prefix caches keep theirs.  Raises
        WeightPushError on every rank; export() is exhausted even then, because it is collective.
        """
        start = time.monotonic()
        opened = self.ranks.on_rank_0(lambda: self._open(version, keep_requests), WeightPushError)
        if opened.restarted:
            others = [url for url in self.servers.urls if url not in opened.restarted]
            self.transport.leave(self.servers, others)
        self.transport.join(opened.targets)
        order = BucketOrder(self.ranks.store, opened.name, PATIENCE * self.servers.timeout)
        sent = Sent(opened.is_part)
        sent_bytes = self.ranks.together(
            lambda: self._send(export, version, order, sent), WeightPushError
        )
        if self.ranks.rank == 0:
            order.close()
        digests = self._digests(export) if opened.hash_export else None

        def finish() -> int | None:
            self._check_alone(version)
            self.transport.finish(self.servers, version, sent.numbers, sent.num_bytes)
            verified = None
            if opened.is_due:  # before any sample can have the version
                verified = self.verifier.verify(self.servers, digests, f"version {version}")
            # after the check: a push that fails it leaves the next one due
            self.pushes_since_check = (self.pushes_since_check + 1) % max(1, self.verify_every)
            self.is_whole, self.sent_part = True, opened.is_part
            if serve:
                self.serve(version)
            return verified

        verified = self.ranks.on_rank_0(finish, WeightPushError)
        seconds = time.monotonic() - start
        return PushReport(
            seconds, sent.num_bytes, sent.num_buckets, opened.refused, tuple(sent_bytes), verified
        )

    def serve(self, version: int) -> None:
        """Let the servers serve the new weights, after a push.  Called on rank 0.

        They allocate caches and graphs, report `version` and continue.  Raises WeightPushError.
        """
        self._check_alone(version)
        # only after the weights, to keep the peak of memory low
        self._resume_memory(TO_SERVE)
        self.servers.set_version(version_name(version, self.run))
        self.servers.continue_serving()

    def release_memory(self) -> None:
        """Let the servers free their GPU memory until the next push.  Called on rank 0.

        Meanwhile they serve nothing.
        """
        self.is_whole = False  # they free their weights, too
        self.servers.release_memory()
        self.released = {tags: set(self.servers.urls) for tags in self.released}

    def set_urls(self, urls: Sequence[str]) -> None:
        """Push to these servers from now on.

        If they are not the same as before, the next push makes new connections.
        """
        urls = [url.rstrip("/") for url in urls]
        if urls == self.servers.urls:
            return
        # servers that are no longer listed have died: a call would only time out
        self.transport.leave(self.servers, [url for url in self.servers.urls if url in urls])
        self.pushes_since_check, self.is_whole = 0, False
        self.servers.close()
        self.servers = Servers(urls, self.servers.headers, self.servers.timeout)

    def close(self) -> None:
        """Leave the servers, which keep their weights, and remove the last weights on disk."""
        self.transport.leave(self.servers, self.servers.urls)
        self.servers.close()
        self.transport.close()

    def _check_servers(self) -> frozenset[str]:
        """Return the servers that were started again; raise WeightPushError where settings changed.

        A server that was started again at its old address is no longer in the transport's groups,
        and must be verified.
        """
        infos = dict(zip(self.servers.urls, self.servers.each(self.servers.info), strict=True))
        if self.settings is not None:
            for url, info in infos.items():
                check_unchanged(url, info, self.settings)
        starts = {url: start_of(info) for url, info in infos.items()}
        restarted = {
            url for url, start in starts.items() if start != self.server_starts.get(url, start)
        }
        if restarted:
            names = ", ".join(sorted(restarted))
            logger.warning("started again since the last weight sync: %s", names)
            self.pushes_since_check, self.is_whole = 0, False
        self.is_whole &= self.transport.keeps_tensors and all(map(keeps_unsent, infos.values()))
        self.server_starts = starts
        return frozenset(restarted)

    def _open(self, version: int, keep_requests: bool) -> Opened:
        """Pause, flush and check the servers on rank 0, and let them take weights."""
        if keep_requests:
            self.servers.post("/pause_generation", {"mode": "in_place"})
        refused = 0 if keep_requests else self.servers.pause()
        restarted = self._check_servers()
        # before the weights arrive; the cache only after them, to keep the peak low
        self._resume_memory(TO_LOAD)
        # no token may carry the old or the new version from here on
        self.servers.set_version(updating(version_name(version, self.run)))
        is_part = self.is_whole and bool(self.weights.changing and self.verify_every)
        if is_part and not self.sent_part:
            self.pushes_since_check = 0
        # a push that fails leaves servers with a mixture: the next one sends everything
        self.is_whole = self.sent_part = False
        # hashing costs a second export, so not every push is verified
        is_due = bool(self.verify_every) and self.pushes_since_check == 0
        hashes = is_due and self.verifier.any_on_cpu(self.servers)
        targets = self.transport.open(self.servers, version)
        name = f"weight_sync_{uuid4()}"
        return Opened(name, refused, restarted, is_due, hashes, is_part, targets)

    def _check_alone(self, version: int) -> None:
        """Raise WeightPushError where another run pushes to a server, too.

        That server has tensors of both runs.  It gets a version that is neither's, so that the
        other run notices it here, or in its samples.
        """
        name = version_name(version, self.run)
        try:
            self.servers.confirm_version(updating(name))
        except WeightPushError:
            with suppress(WeightPushError):
                self.servers.set_version(f"mixed with {name}")
            raise

    def _send(
        self, export: Callable[[], Iterable[HFTensor]], version: int, order: BucketOrder, sent: Sent
    ) -> int:
        """Send this rank's buckets and return their bytes.

        `sent` counts the buckets of all sources.
        """
        stream, expected = iter(export()), self.expected
        if sent.is_part:
            stream, expected = changing_part(stream, expected, self.weights)
        loading: Future[None] | None = None
        num_bytes = 0
        try:
            tensors = checked_stream(stream, expected, self.weights.checkpoint)
            # every rank sees the batches of all sources, and so numbers them in the same way
            for number, batch in enumerate(batches(tensors, self.bucket_bytes, of_one_dtype=True)):
                sent.add(number, batch)
                if batch.source != self.ranks.rank:
                    continue
                if loading is not None:
                    loading.result()  # the servers read one bucket of a source at a time
                loading = self._send_bucket(self._bucket(number, batch), version, order)
                num_bytes += batch.num_bytes
            if loading is not None:
                loading.result()
        except Exception:
            # raised again, when no server reads from this source and the export is at its end
            order.fail()
            if loading is not None:
                # the servers read the bucket's memory, which release_bucket below may free
                wait_for_all([loading])
            drain(stream)
            raise
        finally:
            self.transport.release_bucket()
        return num_bytes

    def _send_bucket(self, bucket: Bucket, version: int, order: BucketOrder) -> Future[None]:
        """Send the bucket when it is its turn.

        The future ends, and the turn with it, when the servers have loaded the bucket.
        """
        calls = self.transport.send(
            self.servers, bucket, version, lambda: order.wait(bucket.number)
        )

        # on a thread: this rank gathers its next bucket meanwhile
        def wait() -> None:
            try:
                self.servers.wait(calls)
            except WeightPushError:
                order.fail()
                raise
            order.done()

        return self.servers.threads.submit(wait)

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
        keep = self.weights.fp8_keep
        return tensor if keep is None else round_to_fp8(name, tensor, keep)

    def _digests(self, export: Callable[[], Iterable[HFTensor]]) -> ExportDigests | None:
        """Hash the tensors of a second export() on rank 0, to which all of them are moved.

        Servers fuse tensors that several sources send, and hash the fused ones.
        """
        digests = ExportDigests(self.expected) if self.ranks.rank == 0 else None

        def add_all() -> None:
            stream = on_rank_0(export(), self.ranks.rank, self.device)
            try:
                for name, tensor in stream:
                    if digests is not None and tensor is not None:
                        dtype = self.expected[name][1]
                        digests.add(name, self._rounded(name, tensor.detach()).to(dtype))
            finally:
                drain(stream)  # the export is collective

        self.ranks.together(add_all, WeightPushError)
        return digests

    def _resume_memory(self, tags: tuple[str, ...]) -> None:
        """Resume memory on the servers that released it and are still in use.

        A server that was started since then never released any.
        """
        urls = [url for url in self.servers.urls if url in self.released[tags]]
        self.released[tags].clear()
        self.servers.resume_memory(tags, urls)


def make_transport(sending: TransportSettings, weights: PushedWeights, ranks: Ranks) -> Transport:
    match sending.transport:
        case "distributed":
            return Distributed(sending.device, ranks)
        case "disk":
            return Disk(weights.checkpoint, sending.disk_dir)
        case "colocated":
            return Colocated(sending.device, sending.places)
