"""The servers as the job uses them: sample from them, push weights to them, and continue when one
of them dies.

Every call is collective: all ranks call it at the same place.  Leaders sample, rank 0 owns the
servers, all push.

Sampling runs on a thread of each leader: `start` starts it, and training may continue meanwhile.  A
closed task ends when its groups are complete, and `wait` waits for that; an open one takes further
groups (`add`) until `end`.  Weights are pushed while a task is in progress only if the servers keep
its requests (rollout.weight_update = in_place); `renew` follows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from threading import Thread
from typing import Literal, Protocol, Unpack

import torch.distributed as dist

from megatron_rl.batch.collectives import all_reduce_ints
from megatron_rl.distributed import from_rank_0
from megatron_rl.records import Prompt, RolloutGroup
from megatron_rl.rollout.client.call import Commands, Ending, NewWeights
from megatron_rl.rollout.client.client import RolloutClient, RolloutError
from megatron_rl.rollout.client.counters import drop_older
from megatron_rl.rollout.client.sampling import Sampling, SamplingSettings
from megatron_rl.rollout.partial import PartialGroup
from megatron_rl.rollout.server.server_pool import ServerPool
from megatron_rl.weights.hf.export import HFStream
from megatron_rl.weights.sync.push import WeightPusher, WeightPushError


class SamplingStopped(RuntimeError):
    """RolloutClient.stop ended the sampling of some replica; raised on every rank at the same
    place.
    """


@dataclass
class GenerationTask:
    """One call of RolloutClient.fill on a thread.

    keep: see there; is_open: it runs until `end`.
    """

    groups: Sequence[PartialGroup]
    sampling: Sampling
    keep: int | None = None
    is_open: bool = False
    error: BaseException | None = None
    thread: Thread | None = None
    events: SimpleQueue[Literal["complete", "renewed", "end"]] = field(default_factory=SimpleQueue)
    commands: Commands = field(default_factory=SimpleQueue)

    def start(self, client: RolloutClient) -> None:
        """Start, or continue after an error with what is still missing."""
        self.error, self.events, self.commands = None, SimpleQueue(), SimpleQueue()
        self.thread = Thread(target=self._run, args=(client,), name="sampling", daemon=True)
        self.thread.start()

    def _run(self, client: RolloutClient) -> None:
        try:
            with client.trace.span("sampling", "sampling", groups=len(self.groups)):
                client.fill(
                    self.groups,
                    self.sampling,
                    keep=None if self.is_open else self.keep,
                    on_progress=lambda group: self.events.put("complete"),
                    commands=self.commands if self.is_open else None,
                )
        except asyncio.CancelledError:
            self.error = RolloutError("sampling was stopped")
        # asyncio raises it through its loop: it would end this rank, without an error
        except SystemExit as error:
            self.error = RuntimeError(
                f"a task that agent.function started called sys.exit({error.code})"
            )
        except BaseException as error:  # raised in the thread that waits
            self.error = error
        finally:
            self.events.put("end")

    def add(self, groups: Sequence[PartialGroup]) -> None:
        """Sample these, too; only while it is open."""
        self.groups = [
            *(group for group in self.groups if not group.is_complete),
            *groups,
        ]  # complete ones are released
        self.commands.put(groups)

    def wait(
        self,
        on_progress: Callable[[], None] = lambda: None,
        is_enough: Callable[[], bool] = lambda: False,
    ) -> RolloutError | None:
        """Wait for the end, or until `is_enough`; returns the RolloutError that ended it, if any.
        Raises every other error.

        is_enough: called at first and after each complete group.
        """
        while not (self.is_open and is_enough()):
            if self.thread is None:  # it ended before, or there is nothing to sample here
                break
            if self.events.get() == "end":  # not join(): an interrupt must reach the main thread
                self.join()
                self.thread = None
            else:
                on_progress()
        else:
            return None
        if self.error is not None and not isinstance(self.error, RolloutError):
            raise self.error
        return self.error

    def renew(
        self,
        groups: Sequence[PartialGroup],
        version: int,
        oldest: int,
        client: RolloutClient | None,
    ) -> None:
        """The servers have the weights `version` since.  On return no response of `groups`, all
        that there are, has a token older than `oldest`, except those whose requests are being
        aborted for it; all are sampled."""
        self.sampling, self.groups = replace(self.sampling, policy_version=version), list(groups)
        if self.thread is not None:
            self.commands.put(
                NewWeights(version, oldest, groups, lambda: self.events.put("renewed"))
            )
            while (event := self.events.get()) == "complete":
                pass
            if event == "renewed":
                return
            self.join()
            self.thread = None
        if client is not None:  # its sampling failed: see `wait`
            drop_older(groups, oldest, client.counters)

    def end(self, how: Ending) -> RolloutError | None:
        """End an open task, and wait for that; see `wait`."""
        self.commands.put(how)
        return self.wait()

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
    """export: the current weights as HF tensors, each on one rank, collective.  client: on leaders
    of replicas; pusher: on every rank; server_pool: the servers this run started, on rank 0, None
    with rollout.urls.

    `urls` are the servers that hold weights `version`: only these are sampled from.  taken: those
    of the last push, and how many servers had been replaced before it.  dtype: the precision that
    they report, "auto" where it is not known.  group: all ranks, over gloo (Parallel.host_group),
    None for the default group.

    memory: with rollout.release_memory, where servers and trainer have the GPUs in alternation;
    is_serving: the servers have them.  A side allocates only after every rank, or server, of the
    other has freed its own.
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
    taken: tuple[list[str], int] | None = None

    @property
    def restarts(self) -> int:
        """Servers replaced since the run started; 0 off rank 0."""
        return 0 if self.server_pool is None else self.server_pool.restarts

    def push(self, version: int, *, keep_requests: bool = False) -> None:
        """Send the current weights as `version`; on return all servers that are sampled from have
        confirmed it.

        Of the servers this run started these are the ones that answer now.  When one dies during
        the push, the others get the weights again.
        keep_requests: an open task continues, unless its servers are others now; then it is ended
        with "abort".
        """
        assert self.pending is None or keep_requests, (
            "weights are pushed while rollouts are sampled from the old ones"
        )
        before = self.taken
        if self.client is not None:
            self.client.newest_version = version
        if self.memory is not None:
            self.release_memory()  # the weights have to be in the trainer's memory
            self.memory.free_training()
            dist.barrier(self.group)
        with nullcontext() if self.client is None else self.client.clock.paused():
            # ends: every failure costs one of max_server_restarts
            while not self._try_push(version):
                pass
        if self.memory is not None:
            self.memory.free_weights()
            dist.barrier(self.group)
            from_rank_0(lambda: self._own_pusher().serve(version), self.group)
        self.is_serving = True
        self.version = version
        if self.client is not None:
            self.client.set_urls(self.urls)
        if self.pending is not None and self.taken != before:
            with suppress(SamplingStopped):
                # as it may: a server that it asked is gone
                self._failed_somewhere(self.pending.end("abort"))
            self.pending = None

    def renew(self, groups: Sequence[PartialGroup], oldest: int) -> None:
        """From now on responses with a token older than `oldest` are dropped.  After a push that
        kept the requests of the open
        task: sample `groups`, all that there are, from the new weights.  Not collective."""
        if self.client is not None:
            self.client.oldest_version = oldest
        if self.pending is not None and self.pending.sampling.policy_version != self.version:
            self.pending.renew(groups, self.version, oldest, self.client)

    def start(
        self,
        groups: Sequence[PartialGroup],
        *,
        keep: int | None = None,
        is_open: bool = False,
        **settings: Unpack[SamplingSettings],
    ) -> None:
        """Start to fill this replica's `groups` from the weights pushed last; [] on ranks that do
        not lead one.

        keep: the task ends when as many of them are complete (default: all).  is_open: it ends at
        `end`.
        """
        assert self.pending is None, "only one task is sampled at a time"
        self.pending = GenerationTask(
            groups, Sampling(policy_version=self.version, **settings), keep, is_open
        )
        if self.client is not None and groups:
            self.pending.start(self.client)

    def add(self, groups: Sequence[PartialGroup]) -> None:
        """Sample these in the open task, too.  Not collective."""
        if self.pending is not None and groups:
            self.pending.add(groups)

    def wait(
        self,
        version: int,
        on_progress: Callable[[], None] = lambda: None,
        is_enough: Callable[[], bool] = lambda: False,
    ) -> None:
        """Until the task has ended, or for an open one until `is_enough` on every leader.

        version: of the weights that the trainer has now.  When servers of ours died, so that a
        replica could not be served, these weights are pushed to the servers that are left, and what
        is missing is sampled from them.  Raises RolloutError when that cannot help, and
        SamplingStopped.
        """
        task = self.pending
        if task is None:
            raise RuntimeError("nothing was started")
        while self._failed_somewhere(failure := task.wait(on_progress, is_enough)):
            self._check_lost(failure)
            if restarts := failure is not None or task.thread is not None:
                task.end("abort")  # where it has not failed
            self.pending = None
            self.log(f"sampling continues without the servers that died: pushing version {version}")
            self.push(version)
            self.pending = task
            if restarts and self.client is not None:
                task.sampling = replace(task.sampling, policy_version=self.version)
                task.start(self.client)
        if not task.is_open:
            self.pending = None

    def end(self, how: Ending) -> None:
        """End the open task; on return nothing is in flight.

        Groups whose servers died are left incomplete: the next push finds other servers.  Raises as
        `wait` does.
        """
        if self.pending is None:
            return
        failure = self.pending.end(how)
        if self._failed_somewhere(failure):
            self._check_lost(failure)
        self.pending = None

    def _failed_somewhere(self, failure: RolloutError | None) -> bool:
        """Whether any leader's task failed.

        Raises SamplingStopped on every rank if one was stopped, when all are.
        """
        # also the barrier: waiting for the slowest replica is time spent on rollouts. On the host:
        # NCCL would keep GPUs busy
        is_stopped = failure is not None and self.client is not None and self.client.is_stopped
        failed, stopped = all_reduce_ints(
            [int(failure is not None), int(is_stopped)],
            dist.ReduceOp.MAX,
            self.group or dist.group.WORLD,
        )
        if stopped:
            self.stop(keep_parts=True)
            self.pending = None  # not before: `stop` joins what is interrupted here
            raise SamplingStopped("sampling was stopped")
        return bool(failed)

    def generate(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        *,
        on_progress: Callable[[], None] = lambda: None,
        **settings: Unpack[SamplingSettings],
    ) -> list[RolloutGroup]:
        """Complete groups for this replica's `prompts`, from the weights pushed last: `start` and
        `wait` in one.
        """
        groups = (
            [] if self.client is None else [PartialGroup(prompt, group_size) for prompt in prompts]
        )
        self.start(groups, **settings)
        self.wait(self.version, on_progress)
        return [group.closed() for group in groups]

    def stop(self, *, keep_parts: bool = False) -> None:
        """End sampling permanently, see RolloutClient.stop.  Not collective: a run that ends in an
        error stops each leader by itself."""
        if self.client is not None and not (
            keep_parts and self.client.is_stopped
        ):  # again, it would end the collecting
            self.client.stop(keep_parts=keep_parts)
        if self.pending is not None:
            self.pending.join()

    def waiting_for(self) -> str:
        """Servers that have not answered this rank yet; "" for none.  From any thread."""
        requested = "" if self.client is None else self.client.balancer.waiting_for()
        pushed = [] if self.pusher is None else sorted(self.pusher.servers.unanswered.copy())
        started = [] if self.server_pool is None else self.server_pool.not_ready()
        return ", ".join(
            filter(None, [requested, *pushed, *(f"{url} to start" for url in started)])
        )

    def _lost(self) -> list[str]:
        """On rank 0: servers of ours that died."""
        return [] if self.server_pool is None else self.server_pool.lost()

    def _check_lost(self, failure: RolloutError | None) -> None:
        """After some replica's sampling failed: raise unless servers of ours died."""
        if not (gone := from_rank_0(self._lost, self.group)):
            raise failure or RuntimeError("sampling failed on another replica")
        self.log(f"sampling failed: {', '.join(gone)} died")

    def _try_push(self, version: int) -> bool:
        """Whether `urls` all hold the weights now; False when one of ours died meanwhile.

        Nothing is sampled before.
        """
        self.taken = from_rank_0(
            lambda: (
                list(self.urls) if self.server_pool is None else self.server_pool.take(),
                self.restarts,
            ),
            self.group,
        )
        self.urls, _ = self.taken
        pusher = self._own_pusher()
        pusher.set_urls(self.urls)
        try:
            # serve: with less memory when all ranks have freed their weights
            pusher.push(
                self.export,
                version,
                serve=self.memory is None,
                keep_requests=self.pending is not None,
            )
        except WeightPushError as error:  # on every rank
            if not (gone := from_rank_0(self._lost, self.group)):
                raise
            self.log(
                f"push of version {version}: {', '.join(gone)} died ({error}); pushing to the"
                " others again"
            )
            return False
        return True

    def _own_pusher(self) -> WeightPusher:
        if self.pusher is None:
            raise RuntimeError("no weights are sent without a pusher on every rank")
        return self.pusher

    def release_memory(self) -> None:
        """Until the next push the servers have no GPU memory and serve nothing; on return the
        trainer has its own again.

        No effect where the GPUs are not shared in alternation, or the trainer has them.
        """
        if self.memory is None or not self.is_serving:
            return
        from_rank_0(lambda: self._own_pusher().release_memory(), self.group)
        self.memory.restore()
        self.is_serving = False
