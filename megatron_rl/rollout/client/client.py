"""Sample groups of responses from SGLang servers: G responses of one prompt are one request for a
batch of G copies.

Every request has connect, idle and total deadlines and a bounded body.  Groups that are not needed
when enough others are complete are aborted on their servers.  They are either counted and dropped
(rollout.partial = drop), or kept as far as they were sampled, for a later call to continue
(resume; see response.py).  So are responses that a deadline or a signal cuts short: to sample them
again would favour short ones.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Unpack

import aiohttp
import httpx

from megatron_rl.config import RolloutConfig
from megatron_rl.records import Prompt, RolloutGroup
from megatron_rl.rollout.client.call import Call, Commands, Episodes, GroupCancelled, this_task
from megatron_rl.rollout.client.counters import CallStats, RolloutCounters
from megatron_rl.rollout.client.group_sampler import GroupSampler
from megatron_rl.rollout.client.request import (
    ABORT_SECONDS,
    RETURN_SECONDS,
    STOP_SECONDS,
    RolloutError,
    check_prompt,
    connections,
)
from megatron_rl.rollout.client.sampling import SampleRules, Sampling, SamplingSettings
from megatron_rl.rollout.client.teachers import Teachers
from megatron_rl.rollout.group import Group

__all__ = ["RolloutClient", "RolloutCounters", "RolloutError"]

OnProgress = Callable[[], object]
"""Called when a group becomes complete."""


class RolloutClient(GroupSampler):
    """Calls that sample many groups at once, each in the thread that makes it.

    All servers at `urls` serve the model of `rules.spec`.
    episodes: samples a response of several turns (agent.function); None: a response is one request.
    run: the run whose weights the servers have (weights/version.py).
    teachers: they score the groups that name one, each as soon as it is sampled.
    """

    def __init__(
        self,
        urls: Sequence[str],
        cfg: RolloutConfig,
        rules: SampleRules,
        *,
        episodes: Episodes | None = None,
        run: str = "",
        teachers: Teachers | None = None,
    ) -> None:
        super().__init__(urls, cfg, rules, run)
        self.episodes, self.teachers = episodes, teachers
        # made once, as reading certificates takes 20 ms, too long for the event loop
        self._tls = httpx.create_ssl_context(trust_env=False)
        self._lock = threading.Lock()  # guards the fields below
        self._stats = CallStats()
        # start of the part of the call in progress that is not in _stats.seconds
        self._started: float | None = None
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[None]] | None = None
        self.is_stopped = self._keeps_parts = False

    def generate(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        *,
        policy_version: int,
        keep: int | None = None,
        on_progress: OnProgress | None = None,
        **settings: Unpack[SamplingSettings],
    ) -> list[RolloutGroup]:
        """Return one group of `group_size` rollouts per prompt, in the order of `prompts`.

        Rollout k of a prompt gets the id f"{id_prefix}{prompt.id}/{k}".  Every token comes from
        weights `policy_version`.
        keep: return only the first `keep` groups to complete; abort the others on their servers and
        count them.

        Raises what `fill` raises.
        """
        groups = [Group(prompt, group_size) for prompt in prompts]
        sampling = Sampling(policy_version=policy_version, **settings)
        return [
            group.rollout_group()
            for group in self.fill(groups, sampling, keep=keep, on_progress=on_progress)
        ]

    def fill(
        self,
        groups: Sequence[Group],
        sampling: Sampling,
        *,
        keep: int | None = None,
        on_progress: OnProgress | None = None,
        commands: Commands | None = None,
    ) -> list[Group]:
        """Sample what `groups` lack, in place, until `keep` of them (default: all) and all that are
        due are complete.

        Returns `keep` complete groups, those that are due first, in the order of `groups`.  With
        rollout.partial = resume the others keep what was sampled of them, for a later call to
        complete; so does every group after an error.
        commands: queue of an open call, which samples further groups until a command ends it, and
        returns [].

        Raises RolloutError when a server refuses a request (4xx) or a group is not complete after 1
        + cfg.max_retries requests, ValueError for a prompt outside the vocabulary (such an id kills
        an SGLang server).
        """
        for group in groups:
            group.server = ""  # no preference: prefix caches were flushed since its last request
            # here, as many long prompts would hold the event loop
            check_prompt(group.prompt, self.rules.spec.vocab_size)
        keep = len(groups) if keep is None else keep
        if not 0 <= keep <= len(groups):
            raise ValueError(
                f"keep = {keep} of {len(groups)} groups: must be in 0..number of prompts"
            )
        if keep == 0 and commands is None:
            return []
        self._started, sampling = time.monotonic(), replace(sampling, run=self.run)
        try:
            return asyncio.run(self._generate(groups, sampling, keep, on_progress, commands))
        finally:
            with self._lock:
                self._running = None
                self._stats.seconds += time.monotonic() - self._started
                self._started = None

    def stop(self, *, keep_parts: bool = False) -> None:
        """End the call of `fill` in progress, if any, and refuse new ones, with RolloutError.  To
        be called from another thread.

        keep_parts: servers have STOP_SECONDS to return the unfinished responses, which their groups
        keep.
        """
        with self._lock:
            self.is_stopped, self._keeps_parts = True, keep_parts
            if self._running is not None:
                loop, task = self._running
                with suppress(RuntimeError):  # the call has just ended, and closed its loop
                    loop.call_soon_threadsafe(task.cancel)

    def take_stats(self) -> CallStats:
        """Return what generate() and fill() did since the last call of this method."""
        with self._lock:
            stats, self._stats = self._stats, CallStats()
            if self._started is not None:  # a call is in progress
                now = time.monotonic()
                stats.seconds, self._started = stats.seconds + now - self._started, now
        return stats

    def set_urls(self, urls: Sequence[str], *, replaced: bool = False) -> None:
        """Use these servers for all further requests; those that stay keep their circuits, unless
        some were `replaced`.
        """
        self.balancer.set_urls(urls, replaced=replaced)

    def waiting_for(self) -> str:
        """Return the servers, those of teachers too, that have not answered yet; "" for none."""
        taught = "" if self.teachers is None else self.teachers.waiting_for()
        return ", ".join(filter(None, [self.balancer.waiting_for(), taught]))

    def _begin_new(self, begin: Callable[[Sequence[Group]], None], groups: Sequence[Group]) -> None:
        """Begin groups of a command."""
        for group in groups:
            check_prompt(group.prompt, self.rules.spec.vocab_size)
        begin(groups)

    async def _generate(
        self,
        groups: Sequence[Group],
        sampling: Sampling,
        keep: int,
        on_progress: OnProgress | None,
        commands: Commands | None,
    ) -> list[Group]:
        self._set_running()
        runner = None if sampling.single_turn else self.episodes
        sampling = sampling if runner is None else runner.adapt(sampling)
        async with (
            connections(self.cfg, self._tls) as http,
            runner.serving() if runner else nullcontext(),
            self.teachers.serving() if self.teachers else nullcontext(),
        ):
            call = self._new_call(http, sampling)
            sample: Callable[[Group], Awaitable[None]] = partial(self._sample_group, call)
            episodes = None if runner is None else runner.call(sampling, sample, call)
            complete = partial(
                self._complete,
                call,
                asyncio.Semaphore(self.cfg.max_concurrency),
                sample if episodes is None else episodes.fill,
                on_progress,
            )

            def begin(groups: Sequence[Group]) -> None:
                for group in groups:
                    if not group.is_complete:
                        call.tasks[asyncio.create_task(complete(group))] = group

            kept: list[Group] = []
            try:
                begin(groups)
                if commands is None:
                    kept = await first_to_finish(call.tasks, groups, keep)
                    self.counters.cancelled_groups += 0 if call.keeps_parts else len(groups) - keep
                elif await call.follow(commands, partial(self._begin_new, begin)) == "drain":
                    await call.drain()
                else:
                    call.keeps_parts = True
                if episodes is not None:
                    episodes.check()
                # parts that are not kept are read to count their tokens
                await call.collect(RETURN_SECONDS if call.keeps_parts else ABORT_SECONDS)
            except (RolloutError, asyncio.CancelledError) as error:
                # a later call may continue the groups
                if self._keeps_parts or isinstance(error, RolloutError):
                    call.keeps_parts = True
                    await call.collect(STOP_SECONDS)
                raise
            finally:  # the first failure, or an interrupt, ends the other tasks
                if commands is not None:
                    commands.put("abort")  # ends the thread that may wait for a command
                await call.end()
        return kept

    def _new_call(self, http: aiohttp.ClientSession, sampling: Sampling) -> Call:
        return Call(
            http,
            sampling,
            get_stats=lambda: self._stats,
            counters=self.counters,
            keeps_parts=self.cfg.partial == "resume",
            trace=self.trace,
            clock=self.clock,
        )

    async def _complete(
        self,
        call: Call,
        slots: asyncio.Semaphore,
        fill: Callable[[Group], Awaitable[None]],
        on_progress: OnProgress | None,
        group: Group,
    ) -> None:
        """Complete one group as soon as a slot is free, and report it."""
        while not group.is_complete:  # a response may become too old while a teacher scores it
            if not group.is_sampled:
                # the slot is taken for all turns and retries of the group
                async with slots:
                    if call.drains:
                        raise GroupCancelled
                    await fill(group)
            if group.teacher:
                assert self.teachers is not None, f"no client of teacher {group.teacher}"
                await self.teachers.score(group)
        if not call.enough:  # a group that completes while it is aborted is not reported
            call.stats.tokens += sum(r.episode_length for r in group.rollouts.values())
            if on_progress is not None:
                on_progress()

    def _set_running(self) -> None:
        with self._lock:
            if self.is_stopped:
                raise RolloutError("the rollout client was stopped")
            self._running = asyncio.get_running_loop(), this_task()


async def first_to_finish(
    tasks: Mapping[asyncio.Task[None], Group], groups: Sequence[Group], keep: int
) -> list[Group]:
    """Wait until `keep` groups and all that are due are complete.

    Returns `keep` complete groups, those that are due before others, in the order of `groups`.
    Raises what a task raised.
    """
    complete = [group for group in groups if group.is_complete]
    waiting = set(tasks)
    while len(complete) < keep or not all(group.is_complete for group in groups if group.is_due):
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        # in the order of `tasks`, as a set has none: ties are repeatable
        for task in [task for task in tasks if task in done]:
            task.result()
            complete.append(tasks[task])
    complete = sorted(complete, key=lambda group: not group.is_due)[:keep]
    return [group for group in groups if group in complete]
