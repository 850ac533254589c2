"""The servers as the job uses them: sample from them, push weights to them, and continue when one
of them dies.

Every method is collective unless it says otherwise: all ranks call it at the same place.  Leaders
sample, rank 0 owns the servers, all ranks push.

Sampling runs on a thread of each leader: `start` starts it, and training may continue meanwhile.  A
closed task ends when its groups are complete, and `wait` waits for that; an open one takes further
groups (`add`) until `end`.  Weights are pushed while a task is in progress only if the servers keep
its requests (rollout.weight_update = in_place); `renew` follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Protocol, Unpack

import torch.distributed as dist

from megatron_rl.batch.collectives import all_reduce_ints
from megatron_rl.distributed import from_rank_0
from megatron_rl.records import Prompt, RolloutGroup
from megatron_rl.rollout.client.call import Ending
from megatron_rl.rollout.client.client import RolloutClient, RolloutError
from megatron_rl.rollout.client.sampling import Sampling, SamplingSettings
from megatron_rl.rollout.generation_task import GenerationTask
from megatron_rl.rollout.group import Group
from megatron_rl.rollout.server.server_pool import ServerPool
from megatron_rl.rollout.time_shared_teachers import TimeSharedTeachers
from megatron_rl.weights.hf.export import HFStream, HFTensor
from megatron_rl.weights.sync.push_records import PushReport
from megatron_rl.weights.sync.servers import Servers, WeightPushError


class SamplingStopped(RuntimeError):
    """RolloutClient.stop ended the sampling of some replica; raised on every rank at the same
    place.
    """


class TrainerMemory(Protocol):
    """The trainer's memory on this rank's GPU (engine/offload.py)."""

    def free_training(self) -> int:
        """Free gradients and optimizer state, which a weight sync does not read; return bytes."""
        ...

    def free_weights(self) -> int:
        """Free the weights; return bytes."""
        ...

    def restore(self) -> None:
        """Allocate everything again, with the values from before."""
        ...


class Pusher(Protocol):
    """Sends weights to the servers, on every rank (weights/sync/push.py, adapter_push.py)."""

    servers: Servers

    def push(
        self,
        export: Callable[[], Iterable[HFTensor]],
        version: int,
        *,
        serve: bool = True,
        keep_requests: bool = False,
    ) -> PushReport:
        """Send the tensors of export() as `version`.  Collective."""
        ...

    def serve(self, version: int) -> None:
        """Let the servers serve `version`, after a push with serve = False.  On rank 0."""
        ...

    def release_memory(self) -> None:
        """Let the servers free their GPU memory until the next push.  On rank 0."""
        ...

    def set_urls(self, urls: Sequence[str]) -> None:
        """Push to these servers from now on."""
        ...

    def close(self) -> None:
        """Leave the servers."""
        ...


@dataclass
class Inference:
    """The servers of a run, as one rank uses them."""

    export: Callable[[], HFStream]
    """Yields the current weights as HF tensors, each on one rank.  Collective."""
    client: RolloutClient | None
    """Samples; on the leaders of replicas."""
    pusher: Pusher | None
    """Sends weights; on every rank."""
    server_pool: ServerPool | None
    """The servers that this run started, on rank 0; None with rollout.urls."""
    urls: Sequence[str]
    """Servers that hold the weights `version`: only these are sampled from."""
    log: Callable[[str], None]
    dtype: str = "auto"
    """Precision that the servers report; "auto" where it is unknown."""
    group: dist.ProcessGroup | None = None
    """All ranks, over gloo (Parallel.host_group); None: the default group."""
    version: int = 0
    """Version of the weights that were pushed last."""
    pending: GenerationTask | None = None
    """The task in progress."""
    memory: TrainerMemory | None = None
    """With rollout.release_memory, where servers and trainer have the GPUs in alternation.  A side
    allocates only after every rank, or server, of the other side has freed its memory."""
    time_shared_teachers: TimeSharedTeachers | None = None
    """The teachers that have GPU memory only while they score."""
    servers_have_memory: bool = True
    """The servers have their GPU memory."""
    trainer_has_memory: bool = False
    """With rollout.release_memory, the trainer has its GPU memory."""
    pushed_to: tuple[list[str], int] | None = None
    """The URLs of the last push, and how many servers had been replaced before it."""
    last_push: PushReport | None = None
    """Measures of the last push that all servers confirmed."""

    @property
    def restarts(self) -> int:
        """Number of servers that were replaced since the run started; 0 on all ranks but 0."""
        return 0 if self.server_pool is None else self.server_pool.restarts

    def push(self, version: int, *, keep_requests: bool = False) -> None:
        """Send the current weights as `version`; on return all servers in `urls` have confirmed it.

        `urls` are those of the servers started by this run that answer now.  When one dies during
        the push, the others get the weights again.
        keep_requests: an open task continues, unless the servers have changed; then it is ended
        with "abort".
        """
        assert self.pending is None or keep_requests, (
            "weights are pushed while rollouts are sampled from the old ones"
        )
        before = self.pushed_to
        # a request that continues (keep_requests) may get tokens of these weights
        if self.client is not None:
            self.client.newest_version = version
        if self.memory is not None:
            self.give_memory_to_trainer()  # the weights must be in the trainer's memory
            self.memory.free_training()
            self.trainer_has_memory = False
            dist.barrier(self.group)
        # requests are paused during the push: stop the clock of their deadlines
        with nullcontext() if self.client is None else self.client.clock.paused():
            # the loop ends: every failure costs one of rollout.max_server_restarts
            while not self._try_push(version):
                pass
        if self.memory is not None:
            self.memory.free_weights()
            # all ranks first: they free the memory in which the servers allocate their caches
            dist.barrier(self.group)
            from_rank_0(lambda: self._own_pusher().serve(version), self.group)
        self.servers_have_memory = True
        self.version = version
        if self.client is not None:
            # with rollout.port a replacement has the URL of the server that died
            self.client.set_urls(self.urls, replaced=self.pushed_to != before)
        # A server that was replaced has lost the requests of the open task: end the task on every
        # leader.  An error of `end` is expected, as that server does not answer, and is ignored;
        # _failed_somewhere is called because it waits for all ranks and handles a stop.
        if self.pending is not None and self.pushed_to != before:
            with suppress(SamplingStopped):
                self._failed_somewhere(self.pending.end("abort"))
            self.pending = None

    def renew(self, groups: Sequence[Group], oldest: int) -> None:
        """Drop responses with a token older than `oldest` from now on.  Not collective.

        After a push that kept the requests of the open task, sample `groups`, all groups of the
        queue, from the new weights.
        """
        if self.client is not None:
            self.client.oldest_version = oldest  # read by requests that start later
        if self.pending is not None and self.pending.sampling.policy_version != self.version:
            self.pending.renew(groups, self.version, oldest, self.client)

    def start(
        self,
        groups: Sequence[Group],
        *,
        keep: int | None = None,
        is_open: bool = False,
        **settings: Unpack[SamplingSettings],
    ) -> None:
        """Start to sample this replica's `groups` from the weights pushed last.

        groups: [] on ranks that do not lead a replica.  keep: the task ends when this many are
        complete (default: all).  is_open: the task ends at `end`.
        """
        assert self.pending is None, "only one task is sampled at a time"
        self.pending = GenerationTask(
            groups, Sampling(policy_version=self.version, **settings), keep, is_open
        )
        if self.client is not None and groups:
            self.pending.start(self.client)

    def add(self, groups: Sequence[Group]) -> None:
        """Sample these groups in the open task, too.  Not collective."""
        if self.pending is not None and groups:
            self.pending.add(groups)

    def wait(
        self,
        version: int,
        on_progress: Callable[[], None] = lambda: None,
        is_enough: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait until the task has ended, or for an open one until `is_enough` on every leader.

        version: that of the weights that the trainer has now.  When servers started by this run
        died, so that a replica could not be served, these weights are pushed to the servers that
        are left, and what is missing is sampled from them.  Raises RolloutError when that cannot
        help, and SamplingStopped.
        """
        task = self.pending
        if task is None:
            raise RuntimeError("nothing was started")
        while self._failed_somewhere(failure := task.wait(on_progress, is_enough)):
            self._check_lost(failure)
            # this leader's call failed, or still runs: end it, and start it again after the push
            if starts_again := failure is not None or task.thread is not None:
                task.end("abort")
            self.pending = None  # `push` asserts that nothing is sampled meanwhile
            self.log(f"sampling continues without the servers that died: pushing version {version}")
            self.push(version)
            self.pending = task
            if starts_again and self.client is not None:
                task.sampling = replace(task.sampling, policy_version=self.version)
                task.start(self.client)
        if not task.is_open:
            self.pending = None

    def end(self, how: Ending) -> None:
        """End the open task; on return nothing is in flight.

        how: drain completes the groups in progress and starts no others; abort aborts every
        request, and keeps the sampled part of its responses.
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
        """Return True if any leader's task failed.

        If one was stopped, stop all and raise SamplingStopped on every rank.
        """
        # This is also the barrier after sampling: waiting for the slowest replica counts as time of
        # rollouts.  It is on the host, as NCCL would keep GPUs busy.
        is_stopped = failure is not None and self.client is not None and self.client.is_stopped
        failed, stopped = all_reduce_ints(
            [int(failure is not None), int(is_stopped)],
            dist.ReduceOp.MAX,
            self.group or dist.group.WORLD,
        )
        if stopped:
            self.stop(keep_parts=True)
            self.pending = None  # only now: `stop` waits for the thread of `pending`
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
        """Return complete groups for this replica's `prompts`, sampled from the weights pushed
        last: `start` and `wait` in one.
        """
        groups = [] if self.client is None else [Group(prompt, group_size) for prompt in prompts]
        self.start(groups, **settings)
        self.wait(self.version, on_progress)
        return [group.rollout_group() for group in groups]

    def stop(self, *, keep_parts: bool = False) -> None:
        """End sampling permanently: the client refuses new calls.

        keep_parts: groups keep what is sampled of their unfinished responses, for which the servers
        get STOP_SECONDS (RolloutClient.stop); a checkpoint saves it.
        Not collective: a run that ends in an error stops each leader by itself.
        """
        if self.client is not None:
            # a second stop would end the collection of partial responses
            is_collecting = keep_parts and self.client.is_stopped
            if not is_collecting:
                self.client.stop(keep_parts=keep_parts)
        if self.pending is not None:
            self.pending.join()

    def waiting_for(self) -> str:
        """Return the servers that have not answered this rank yet, "" for none.

        Any thread may call it.
        """
        requested = "" if self.client is None else self.client.waiting_for()
        pushed = [] if self.pusher is None else sorted(self.pusher.servers.unanswered.copy())
        started = [] if self.server_pool is None else self.server_pool.not_ready()
        return ", ".join(
            filter(None, [requested, *pushed, *(f"{url} to start" for url in started)])
        )

    def _lost(self) -> list[str]:
        """Return, on rank 0, the servers started by this run that died."""
        return [] if self.server_pool is None else self.server_pool.lost()

    def _check_lost(self, failure: RolloutError | None) -> None:
        """Raise, after some replica's sampling failed, unless servers started by this run died."""
        if not (gone := from_rank_0(self._lost, self.group)):
            raise failure or RuntimeError("sampling failed on another replica")
        self.log(f"sampling failed: {', '.join(gone)} died")

    def _try_push(self, version: int) -> bool:
        """Return True if all of `urls` hold the weights now, False when a server started by this
        run died meanwhile.
        """
        self.pushed_to = from_rank_0(
            lambda: (
                list(self.urls) if self.server_pool is None else self.server_pool.take(),
                self.restarts,
            ),
            self.group,
        )
        self.urls, _ = self.pushed_to
        pusher = self._own_pusher()
        pusher.set_urls(self.urls)
        try:
            # with rollout.release_memory `push` lets them serve once all ranks have freed weights
            self.last_push = pusher.push(
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

    def _own_pusher(self) -> Pusher:
        if self.pusher is None:
            raise RuntimeError("no weights are sent without a pusher on every rank")
        return self.pusher

    def release_servers(self) -> None:
        """Let the servers free their GPU memory until the next push.

        It has no effect without rollout.release_memory, or where they have none.
        """
        if self.memory is not None and self.servers_have_memory:
            from_rank_0(lambda: self._own_pusher().release_memory(), self.group)
            self.servers_have_memory = False

    def give_memory_to_trainer(self) -> None:
        """Let servers and teachers free their GPU memory, and restore the trainer's.

        It has no effect without release_memory, or where the trainer has the memory.
        """
        self.release_servers()
        if self.time_shared_teachers is not None:
            self.time_shared_teachers.release()
        if self.memory is not None and not self.trainer_has_memory:
            self.memory.restore()
            self.trainer_has_memory = True

    def teacher_seconds(self) -> dict[str, float]:
        """Return metric -> seconds of the step that time-shared teachers took."""
        return {} if self.time_shared_teachers is None else self.time_shared_teachers.take_seconds()
