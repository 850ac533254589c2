"""Push low-rank adapters alone to SGLang servers, which keep the base (rollout.weight_sync =
adapter).

A version's adapter has the version's name (weights/version.py), and requests name the adapter of
their version (rollout/client/request.py).  So a server holds the adapters of several versions,
nothing is paused, and a request has one adapter from its first token to its last.  Rank 0 calls the
servers, in this order:

    1. compare the base of servers that are new, or were started again, with the checkpoint
    2. every server loads A and B under the name of version N
    3. every server reports version N
    4. every server unloads the adapters that no request can name any more

After a failure no server has half-updated weights: the next push loads what is missing.  SGLang
(source of 0.5.21) scales by lora_alpha / r, whatever use_rslora says, compares no shapes, and dies
of a tensor whose checksum is not the expected one.  It takes a pickle of the tensors for each of
its ranks; we write pickles and read none.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import pickle
import time
from collections.abc import Callable, Iterable, Sequence

import httpx
import torch

from megatron_rl.config.rules.adapter_rules import SLOT_MODULES
from megatron_rl.config.sections import LoraConfig
from megatron_rl.distributed.ranks import Ranks
from megatron_rl.weights.hf.export import HFTensor, on_rank_0
from megatron_rl.weights.hf.files import HFFiles
from megatron_rl.weights.hf.write import drain
from megatron_rl.weights.sync.checksums import ExportDigests, Verifier
from megatron_rl.weights.sync.push_records import PushReport
from megatron_rl.weights.sync.pushed_weights import PushedWeights, expected_tensors
from megatron_rl.weights.sync.servers import (
    CONNECT_TIMEOUT_SECONDS,
    Json,
    ServerAccess,
    Servers,
    WeightPushError,
    check_unchanged,
    start_of,
)
from megatron_rl.weights.version import version_name

logger = logging.getLogger(__name__)

LOAD, UNLOAD = "/load_lora_adapter_from_tensors", "/unload_lora_adapter"
Tensors = dict[str, torch.Tensor]


class AdapterPusher:
    """Sends adapters to the servers: one object on every rank, used as a WeightPusher."""

    def __init__(
        self,
        access: ServerAccess,
        base: PushedWeights,
        lora: LoraConfig,
        *,
        device: torch.device,
        max_age: int,
        verifies: bool,
        ranks: Ranks | None = None,
        run: str = "",
    ) -> None:
        """Prepare pushes; nothing is sent yet.

        base: what the servers were started on.  device: that of the exported tensors.  max_age: a
        request in flight may name an adapter that is so many weight syncs old.  verifies: servers
        compare the sha256 of every tensor, and their base must have the checkpoint's checksums.
        `ranks` and `run` are those of a WeightPusher.
        """
        self.ranks, self.run, self.device = ranks or Ranks(), run, device
        self.servers = Servers(access.urls, dict(access.headers), access.timeout_seconds)
        self.base, self.lora = base, lora
        self.max_age, self.verifies = max_age, verifies
        self.verifier = Verifier()
        self.settings = (
            None
            if access.settings is None
            else {url.rstrip("/"): values for url, values in access.settings.items()}
        )
        self.server_starts: dict[str, Json] = {}
        """URL -> what tells one start of a server from another, once its base was verified."""
        self.loaded: dict[str, list[int]] = {}
        """URL -> versions whose adapters this run has loaded there."""

    def push(
        self,
        export: Callable[[], Iterable[HFTensor]],
        version: int,
        *,
        serve: bool = True,
        keep_requests: bool = False,
    ) -> PushReport:
        """Load the tensors of export(), A and B under PEFT's names, as `version`.  Collective.

        Requests are kept in any case.  Raises WeightPushError on every rank.
        """
        start = time.monotonic()
        tensors: Tensors = {}
        self.ranks.together(lambda: self._collect(export, tensors), WeightPushError)

        def load() -> int | None:
            verified = self._check_servers()
            body = self._body(tensors, version)
            self.servers.each(lambda url: self._load(url, body, version))
            if serve:
                self.serve(version)
            return verified + len(tensors) * len(self.servers.urls) if self.verifies else None

        verified = self.ranks.on_rank_0(load, WeightPushError)
        sizes = [sum(tensor.nbytes for tensor in tensors.values())]
        sizes = self.ranks.together(lambda: sizes[0], WeightPushError)
        return PushReport(time.monotonic() - start, sizes[0], 1, 0, tuple(sizes), verified)

    def serve(self, version: int) -> None:
        """Let the servers report `version`, and unload what is too old.  Called on rank 0."""
        self.servers.set_version(version_name(version, self.run))
        oldest = version - self.max_age

        def unload(url: str) -> None:
            for old in [old for old in self.loaded[url] if old < oldest]:
                self._unload(url, old)

        self.servers.each(unload)

    def release_memory(self) -> None:
        raise RuntimeError("rollout.release_memory needs rollout.weight_sync = colocated")

    def set_urls(self, urls: Sequence[str]) -> None:
        """Push to these servers from now on."""
        urls = [url.rstrip("/") for url in urls]
        if urls != self.servers.urls:
            self.servers.close()
            self.servers = Servers(urls, self.servers.headers, self.servers.timeout)

    def close(self) -> None:
        """Unload this run's adapters: servers of rollout.urls serve other runs afterwards."""
        for url in self.servers.urls:
            try:
                for version in self.loaded.pop(url, ()):
                    self.servers.http.post(
                        url + UNLOAD,
                        json={"lora_name": version_name(version, self.run)},
                        timeout=CONNECT_TIMEOUT_SECONDS,
                    )
            except httpx.TransportError as error:
                logger.warning("server %s did not unload this run's adapters: %r", url, error)
        self.servers.close()

    def _collect(self, export: Callable[[], Iterable[HFTensor]], tensors: Tensors) -> None:
        """Move the tensors of the export to `tensors` on rank 0, in the servers' dtype."""
        stream = on_rank_0(export(), self.ranks.rank, self.device)
        try:
            for name, tensor in stream:
                if tensor is not None:  # to the host: they travel inside of an HTTP request
                    tensors[name] = tensor.detach().to("cpu", self.base.dtype).contiguous()
        finally:
            drain(stream)  # the export is collective

    def _check_servers(self) -> int:
        """Return the number of tensors of the base that were compared with the checkpoint's.

        Only servers that are new, or were started again, cause a comparison.  Raises
        WeightPushError for another base, and where a server's settings have changed.
        """
        starts: dict[str, Json] = {}
        for url, info in zip(self.servers.urls, self.servers.each(self.servers.info), strict=True):
            if self.settings is not None:
                check_unchanged(url, info, self.settings)
            starts[url] = start_of(info)
        fresh = [url for url, start in starts.items() if self.server_starts.get(url) != start]
        for url in fresh:
            self.loaded[url] = []
        verified = 0
        if fresh and self.verifies:
            base, is_hashed = self.base, self.verifier.any_on_cpu(self.servers)
            digests = checkpoint_digests(base) if is_hashed else None
            what = f"model.path = {base.checkpoint}, the base of this run's adapters"
            verified = self.verifier.verify(self.servers, digests, what)
        self.server_starts |= starts
        return verified

    def _body(self, tensors: Tensors, version: int) -> Json:
        """Return the call that loads the adapter, for a server with one rank."""
        body: Json = {
            "lora_name": version_name(version, self.run),
            "config_dict": {
                "peft_type": "LORA",
                "r": self.lora.rank,
                "lora_alpha": self.lora.scale * self.lora.rank,
                "target_modules": list(SLOT_MODULES),
                "lora_dropout": 0.0,
                "bias": "none",
            },
            "serialized_named_tensors": [base64.b64encode(pickle.dumps(tensors)).decode()],
        }
        if self.verifies:
            body["expected_checksums"] = {
                name: hashlib.sha256(tensor.view(torch.uint8).numpy().data).hexdigest()
                for name, tensor in tensors.items()
            }
        return body

    def _load(self, url: str, body: Json, version: int) -> None:
        """Load the adapter on one server, which must hold none of another run."""
        if version in self.loaded[url]:  # an attempt that failed on another server
            self._unload(url, version)
        payloads = body["serialized_named_tensors"] * self.servers.num_ranks(url)
        answer = self.servers.call("POST", url, LOAD, body | {"serialized_named_tensors": payloads})
        self.loaded[url].append(version)
        names = {version_name(version, self.run) for version in self.loaded[url]}
        if others := sorted(set(answer.get("loaded_adapters") or ()) - names):
            raise WeightPushError(
                f"server {url} holds adapters that this run has not loaded: {', '.join(others)};"
                " another run uses it, or one was killed: give each run its own rollout.urls, or"
                f' restart the server, or POST {{"lora_name": "{others[0]}"}} to {url}{UNLOAD}'
            )

    def _unload(self, url: str, version: int) -> None:
        self.servers.call("POST", url, UNLOAD, {"lora_name": version_name(version, self.run)})
        self.loaded[url].remove(version)


def checkpoint_digests(base: PushedWeights) -> ExportDigests:
    """Return the checksums of a server that was started on the checkpoint."""
    expected = expected_tensors(base.checkpoint, base.dtype)
    digests = ExportDigests(expected)
    with HFFiles(base.checkpoint) as files:
        for name, (_, dtype) in expected.items():
            digests.add(name, files.read(name).to(dtype))
    return digests
