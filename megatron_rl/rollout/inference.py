"""The servers as the job uses them: sample from them, push weights to them, and continue when one of them dies.

Every call is collective: all ranks call it at the same place.  Leaders sample, rank 0 owns the servers, all push.

Sampling runs on a thread of each leader: `start` starts it, training continues meanwhile, `wait` joins it.  Weights are
never pushed before `wait` has returned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from threading import Thread
from typing import Protocol, Unpack

import torch.distributed as dist

from megatron_rl.batch.collectives import all_reduce_ints
from megatron_rl.distributed import from_rank_0
from megatron_rl.records import Prompt, RolloutGroup
from megatron_rl.rollout.client.client import RolloutClient, RolloutError
from megatron_rl.rollout.client.request import Sampling, SamplingSettings
from megatron_rl.rollout.partial import PartialGroup
from megatron_rl.rollout.server.server_pool import ServerPool
from megatron_rl.weights.hf.export import HFStream
from megatron_rl.weights.sync.push import WeightPusher, WeightPushError


class SamplingStopped(RuntimeError):
    """RolloutClient.stop ended the sampling of some replica; raised on every rank at the same place."""


@dataclass
class GenerationTask:
    """One call of RolloutClient.fill on a thread; filled: what it returned."""

    groups: Sequence[PartialGroup]
    sampling: Sampling
    keep: int | None
    filled: list[PartialGroup] = field(default_factory=list)
    error: BaseException | None = None
    thread: Thread | None = None
    events: SimpleQueue[bool] = field(default_factory=SimpleQueue)  # True for a complete group, False at the end

    def start(self, client: RolloutClient) -> None:
        """Start, or continue after an error with what is still missing."""
        self.error = None
        self.thread = Thread(target=self._run, args=(client,), name="sampling", daemon=True)
        self.thread.start()

    def _run(self, client: RolloutClient) -> None:
        try:
            with client.trace.span("sampling", "sampling", groups=len(self.groups)):
                self.filled = client.fill(
                    self.groups, self.sampling, keep=self.keep, on_progress=lambda group: self.events.put(True)
                )
        except asyncio.CancelledError:
            self.error = RolloutError("sampling was stopped")
        except BaseException as error:  # raised in the thread that waits
            self.error = error
        finally:
            self.events.put(False)

    def wait(self, on_progress: Callable[[], None]) -> RolloutError | None:
        """Wait for the end; returns the RolloutError that ended it, if any.  Raises every other error."""
        if self.thread is None:  # it ended before, or there is nothing to sample here
            return None
        while self.events.get():  # not join(): an interrupt must reach the main thread
            on_progress()
        self.join()
        self.thread = None
        if self.error is not None and not isinstance(self.error, RolloutError):
            raise self.error
        return self.error

    def join(self) -> None:
        if self.thread is not None:
            self.thread.join()


class TrainerMemory(Protocol):
    """This rank's memory on its GPU (engine/offload.py)."""

    def free_training(self) -> int:
        """Gradients and optimizer state: what a weight sync does not read."""
        ...

    def free_weights(self) -> int: ...

    def restore(self) -> None: ...


@dataclass
class Inference:
    """export: the current weights as HF tensors, each on one rank, collective.  client: on leaders of replicas; pusher: on every
    rank; server_pool: the servers this run started, on rank 0, None with rollout.urls.

    `urls` are the servers that hold weights `version`: only these are sampled from.  dtype: the precision that they report,
    "auto" where it is not known.  group: all ranks, over gloo (Parallel.host_group), None for the default group.

    memory: with rollout.release_memory, where servers and trainer have the GPUs in alternation; is_serving: the servers have
    them.  A side allocates only after every rank, or server, of the other has freed its own.
    """

    export: Callable[[], HFStream]
    client: RolloutClient | None
    pusher: WeightPusher | None
    server_pool: ServerPool | None
    urls: Sequence[str]
    log: Callable[[str], None]
    dtype: str = "auto"
    group: dist.ProcessGroup | None = None
    version: int = 0
    pending: GenerationTask | None = None
    memory: TrainerMemory | None = None
    is_serving: bool = True

    @property
    def restarts(self) -> int:
        """Servers replaced since the run started; 0 off rank 0."""
        return 0 if self.server_pool is None else self.server_pool.restarts

    def push(self, version: int) -> None:
        """Send the current weights as `version`; on return all servers that are sampled from have confirmed it.

        Of the servers this run started these are the ones that answer now.  When one dies during the push, the others get
        the weights again.
        """
        assert self.pending is None, "weights are pushed while rollouts are sampled from the old ones"
        if self.memory is not None:
            self.release_memory()  # the weights have to be in the trainer's memory
            self.memory.free_training()
            dist.barrier(self.group)
        while not self._try_push(version):  # ends: every failure costs one of max_server_restarts
            pass
        if self.memory is not None:
            self.memory.free_weights()
            dist.barrier(self.group)
            from_rank_0(lambda: self._own_pusher().serve(version), self.group)
        self.is_serving = True
        self.version = version
        if self.client is not None:
            self.client.set_urls(self.urls)

    def start(
        self, groups: Sequence[PartialGroup], *, keep: int | None = None, **settings: Unpack[SamplingSettings]
    ) -> None:
        """Start to fill this replica's `groups` from the weights pushed last; [] on ranks that do not lead one."""
        assert self.pending is None, "only one task is sampled at a time"
        self.pending = GenerationTask(groups, Sampling(policy_version=self.version, **settings), keep)
        if self.client is not None and groups:
            self.pending.start(self.client)

    def wait(self, version: int, on_progress: Callable[[], None] = lambda: None) -> list[PartialGroup]:
        """What RolloutClient.fill returns for the groups of `start`; [] on ranks that do not lead a replica.

        version: of the weights that the trainer has now.  When servers of ours died, so that a replica could not be served,
        these weights are pushed to the servers that are left, and what is missing is sampled from them.  Raises RolloutError
        when that cannot help, and SamplingStopped.
        """
        task = self.pending
        if task is None:
            raise RuntimeError("nothing was started")
        while True:
            failure = task.wait(on_progress)
            # also the barrier: waiting for the slowest replica is time spent on rollouts.  On the host: NCCL would keep GPUs busy
            is_stopped = failure is not None and self.client is not None and self.client.is_stopped
            failed, stopped = all_reduce_ints(
                [int(failure is not None), int(is_stopped)], dist.ReduceOp.MAX, self.group or dist.group.WORLD
            )
            self.pending = None  # not before: `stop` joins what is interrupted here
            if stopped:
                raise SamplingStopped("sampling was stopped")
            if not failed:
                return task.filled
            self._heal(failure, version)
            self.pending = task
            if failure is not None and self.client is not None:
                task.sampling = replace(task.sampling, policy_version=self.version)
                task.start(self.client)

    def generate(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        *,
        on_progress: Callable[[], None] = lambda: None,
        **settings: Unpack[SamplingSettings],
    ) -> list[RolloutGroup]:
        """Complete groups for this replica's `prompts`, from the weights pushed last: `start` and `wait` in one."""
        self.start([] if self.client is None else [PartialGroup(prompt, group_size) for prompt in prompts], **settings)
        return [group.closed() for group in self.wait(self.version, on_progress)]

    def stop(self) -> None:
        """End sampling permanently.  Not collective: a run that ends in an error stops each leader by itself."""
        if self.client is not None:
            self.client.stop()
        if self.pending is not None:
            self.pending.join()

    def waiting_for(self) -> str:
        """Servers that have not answered this rank yet; "" for none.  From any thread."""
        requested = "" if self.client is None else self.client.balancer.waiting_for()
        pushed = [] if self.pusher is None else sorted(self.pusher.servers.unanswered.copy())
        started = [] if self.server_pool is None else self.server_pool.not_ready()
        return ", ".join(filter(None, [requested, *pushed, *(f"{url} to start" for url in started)]))

    def _lost(self) -> list[str]:
        """On rank 0: servers of ours that died."""
        return [] if self.server_pool is None else self.server_pool.lost()

    def _heal(self, failure: RolloutError | None, version: int) -> None:
        """After some replica's sampling failed: push to the servers that are left if servers of ours died, else raise."""
        gone = from_rank_0(self._lost, self.group)
        if not gone:
            raise failure or RuntimeError("sampling failed on another replica")
        self.log(f"sampling continues without {', '.join(gone)}: pushing version {version}")
        self.push(version)

    def _try_push(self, version: int) -> bool:
        """Whether `urls` all hold the weights now; False when one of ours died meanwhile.  Nothing is sampled before."""
        self.urls = from_rank_0(
            lambda: list(self.urls) if self.server_pool is None else self.server_pool.take(), self.group
        )
        pusher = self._own_pusher()
        pusher.set_urls(self.urls)
        try:
            if self.memory is None:
                pusher.push(self.export, version)
            else:
                pusher.push(self.export, version, serve=False)  # when all ranks have freed their weights
        except WeightPushError as error:  # on every rank
            if not (gone := from_rank_0(self._lost, self.group)):
                raise
            self.log(f"push of version {version}: {', '.join(gone)} died ({error}); pushing to the others again")
            return False
        return True

    def _own_pusher(self) -> WeightPusher:
        if self.pusher is None:
            raise RuntimeError("no weights are sent without a pusher on every rank")
        return self.pusher

    def release_memory(self) -> None:
        """Until the next push the servers have no GPU memory and serve nothing; on return the trainer has its own again.

        No effect where the GPUs are not shared in alternation, or the trainer has them.
        """
        if self.memory is None or not self.is_serving:
            return
        from_rank_0(lambda: self._own_pusher().release_memory(), self.group)
        self.memory.restore()
        self.is_serving = False
