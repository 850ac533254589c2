"""The servers as the job uses them: sample from them, push to them, and go on when one of them dies.

Every call is collective: all ranks call it at the same place.  Leaders sample, rank 0 pushes and owns the servers.

Sampling runs on a thread of each leader: `start` begins it and `wait` ends it, and what lies between (training) goes on
meanwhile.  Weights are never pushed before `wait` has returned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from threading import Thread

import torch.distributed as dist
from torch import Tensor

from megatron_rl.batch.collectives import all_reduce_ints
from megatron_rl.distributed import from_rank_0
from megatron_rl.records import Prompt, RolloutGroup
from megatron_rl.rollout.client.client import RolloutClient, RolloutError
from megatron_rl.rollout.client.request import Sampling
from megatron_rl.rollout.partial import PartialGroup
from megatron_rl.rollout.server.server_pool import ServerPool
from megatron_rl.weights.sync.push import WeightPusher, WeightPushError


class SamplingStopped(RuntimeError):
    """RolloutClient.stop ended the sampling of some replica; every rank hears of it at the same place."""


@dataclass
class GenerationTask:
    """One call of RolloutClient.fill on a thread; filled: what it returned, or None."""

    groups: Sequence[PartialGroup]
    sampling: Sampling
    keep: int | None
    filled: list[PartialGroup] | None = None
    error: BaseException | None = None
    thread: Thread | None = None
    events: SimpleQueue[PartialGroup | None] = field(
        default_factory=SimpleQueue
    )  # groups as they become whole; None ends

    def start(self, client: RolloutClient) -> None:
        """Begin, or go on after an error with what is still missing."""
        self.error = None
        self.thread = Thread(target=self._run, args=(client,), name="sampling", daemon=True)
        self.thread.start()

    def _run(self, client: RolloutClient) -> None:
        try:
            self.filled = client.fill(self.groups, self.sampling, keep=self.keep, on_progress=self.events.put)
        except asyncio.CancelledError:
            self.error = RolloutError("sampling was stopped")
        except BaseException as error:  # handed to the thread that waits
            self.error = error
        finally:
            self.events.put(None)

    def wait(self, on_progress: Callable[[], None]) -> RolloutError | None:
        """Until it ends; the RolloutError that ended it, if any.  Raises every other error."""
        if self.thread is None:  # it has ended before, or there is nothing to sample here
            return None
        while self.events.get() is not None:
            on_progress()
        self.join()
        self.thread = None
        if self.error is not None and not isinstance(self.error, RolloutError):
            raise self.error
        return self.error

    def join(self) -> None:
        if self.thread is not None:
            self.thread.join()


@dataclass
class Inference:
    """export: (HF name, full tensor) of the current weights, collective.  client: on leaders of replicas; pusher: on
    rank 0; fleet: the servers this run started, on rank 0, not with rollout.urls.

    `urls` are the servers that hold weights `version`: nobody samples from another one.  dtype: the precision that they say they
    compute in, "auto" where it is not known.
    """

    export: Callable[[], Iterator[tuple[str, Tensor | None]]]
    client: RolloutClient | None
    pusher: WeightPusher | None
    server_pool: ServerPool | None
    urls: Sequence[str]
    log: Callable[[str], None]
    dtype: str = "auto"
    version: int = 0
    pending: GenerationTask | None = None

    @property
    def restarts(self) -> int:
        """Servers replaced since the run started; 0 off rank 0."""
        return 0 if self.server_pool is None else self.server_pool.restarts

    def push(self, version: int) -> None:
        """Give the servers the current weights as `version`; on return all that are sampled from have confirmed it.

        Of the servers this run started these are the ones that answer now.  When one dies during the push, the others get
        the weights once more.
        """
        assert self.pending is None, "weights are pushed while rollouts are sampled from the old ones"
        while not self._push_once(version):
            pass
        self.version = version
        if self.client is not None:
            self.client.set_urls(self.urls)

    def start(
        self,
        groups: Sequence[PartialGroup],
        *,
        temperature: float,
        max_tokens: int,
        stop_token_ids: Sequence[int],
        id_prefix: str = "",
        keep: int | None = None,
    ) -> None:
        """Begin to fill this replica's `groups` from the weights pushed last; [] on ranks that do not lead one."""
        assert self.pending is None, "one thing is sampled at a time"
        sampling = Sampling(temperature, max_tokens, tuple(stop_token_ids), self.version, id_prefix)
        self.pending = GenerationTask(groups, sampling, keep)
        if self.client is not None and groups:
            self.pending.start(self.client)

    def wait(self, version: int, on_progress: Callable[[], None] = lambda: None) -> list[PartialGroup]:
        """What RolloutClient.fill returns for the groups of `start`; [] on ranks that do not lead a replica.

        version: of the weights that the trainer has now.  When servers of ours died, so that a replica could not be served,
        these weights are pushed to the servers that are there, and what is missing is sampled from them.  Raises RolloutError
        when that cannot help, and SamplingStopped.
        """
        assert self.pending is not None, "nothing was started"
        while True:
            failure = self.pending.wait(on_progress)
            # also the barrier: waiting for the slowest replica is time spent on rollouts
            is_stopped = failure is not None and self.client is not None and self.client.is_stopped
            failed, stopped = all_reduce_ints(
                [int(failure is not None), int(is_stopped)], dist.ReduceOp.MAX, dist.group.WORLD
            )
            filling, self.pending = self.pending, None
            if stopped:
                raise SamplingStopped("sampling was stopped")
            if not failed:
                return filling.filled or []
            self._heal(failure, version)
            self.pending = filling
            if failure is not None and self.client is not None:
                filling.sampling = replace(filling.sampling, policy_version=self.version)
                filling.start(self.client)

    def generate(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        *,
        temperature: float,
        max_tokens: int,
        stop_token_ids: Sequence[int],
        id_prefix: str = "",
        on_progress: Callable[[], None] = lambda: None,
    ) -> list[RolloutGroup]:
        """Whole groups for this replica's `prompts`, from the weights pushed last: `start` and `wait` in one."""
        groups = [] if self.client is None else [PartialGroup(prompt, group_size) for prompt in prompts]
        self.start(
            groups, temperature=temperature, max_tokens=max_tokens, stop_token_ids=stop_token_ids, id_prefix=id_prefix
        )
        return [group.closed() for group in self.wait(self.version, on_progress)]

    def stop(self) -> None:
        """End what is being sampled, for good.  Not collective: a run that ends in an error stops each leader by itself."""
        if self.client is not None:
            self.client.stop()
        if self.pending is not None:
            self.pending.join()

    def waiting_for(self) -> str:
        """Servers that owe this rank an answer; "" for none.  From any thread."""
        asked = "" if self.client is None else self.client.balancer.waiting_for()
        pushed = [] if self.pusher is None else sorted(self.pusher.servers.unanswered.copy())
        started = [] if self.server_pool is None else self.server_pool.not_ready()
        return ", ".join(filter(None, [asked, *pushed, *(f"{url} to start" for url in started)]))

    def _heal(self, failure: RolloutError | None, version: int) -> None:
        """After some replica's sampling failed: go on if servers of ours died, else raise."""
        gone = from_rank_0(lambda: [] if self.server_pool is None else self.server_pool.lost())
        if not gone:
            raise failure or RuntimeError("sampling failed on another replica")
        self.log(f"sampling goes on without {', '.join(gone)}: pushing version {version}")
        self.push(version)

    def _push_once(self, version: int) -> bool:
        """Whether `urls` all hold the weights now; False when one of ours died meanwhile.  Nobody samples before this returns."""
        self.urls = from_rank_0(lambda: list(self.urls) if self.server_pool is None else self.server_pool.take())
        tensors = iter(self.export())

        def send() -> bool:
            pusher = self._rank_0_pusher()
            pusher.set_urls(self.urls)
            try:
                pusher.push(tensors, version)
            except WeightPushError as error:
                drain(tensors)
                if self.server_pool is None or not (gone := self.server_pool.lost()):
                    raise
                self.log(f"push of version {version}: {', '.join(gone)} died ({error}); pushing to the others again")
                return False
            return True

        if self.pusher is None:
            drain(tensors)  # every rank takes part in the export
        return from_rank_0(send)

    def _rank_0_pusher(self) -> WeightPusher:
        assert self.pusher is not None, "only rank 0 sends weights"
        return self.pusher

    def release_memory(self) -> None:
        """Until the next push the servers have no GPU memory and serve nothing."""

        def release() -> None:
            pusher = self._rank_0_pusher()
            try:
                pusher.release_memory()
            except WeightPushError:
                if self.server_pool is None or not (gone := self.server_pool.lost()):
                    raise
                pusher.set_urls([url for url in self.urls if url not in gone])  # the next push heals what replaces them
                pusher.release_memory()

        from_rank_0(release)


def drain(tensors: Iterator[object]) -> None:
    for _ in tensors:
        pass
