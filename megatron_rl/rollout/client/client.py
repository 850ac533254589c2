"""Sample groups of responses from SGLang servers: G responses of one prompt are one request for a
batch of G copies.

Every request has connect, idle and total deadlines and a bounded body; what cannot be used is
counted, and requested again (from another server where there is one) until the group is complete or
its retries are spent.  A sample is identified by (request, index), which the server repeats in its
answer: the answer to another request is never used.

Groups that are not needed when enough others are complete are aborted on their servers, and either
counted and dropped (rollout.partial = drop) or kept as far as they were sampled, for a later call
to continue (resume; see response.py).  So are responses that a deadline or a signal cuts short: to
sample them again would favour short ones.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Unpack

import httpx

from megatron_rl.config import RolloutConfig
from megatron_rl.launch.trace import OFF
from megatron_rl.models.spec import ModelSizes
from megatron_rl.records import Prompt, Rollout, RolloutGroup
from megatron_rl.rollout.client.call import (
    Call,
    Commands,
    Episodes,
    GroupCancelled,
    Request,
    among,
    this_task,
)
from megatron_rl.rollout.client.clock import Clock
from megatron_rl.rollout.client.counters import CallStats, RolloutCounters, drop_older
from megatron_rl.rollout.client.load_balancer import LoadBalancer, ServerState
from megatron_rl.rollout.client.request import (
    ABORT_SECONDS,
    RETURN_SECONDS,
    STOP_SECONDS,
    RetryableError,
    RolloutError,
    Sampling,
    SamplingSettings,
    check_prompt,
    connections,
    request_samples,
    sample_ids,
)
from megatron_rl.rollout.client.request_trace import RequestTrace
from megatron_rl.rollout.client.response import (
    ROUTES_MISSING_ROWS,
    SampleDropped,
    ended,
    is_small,
    parse_sample,
    sends_all_rows,
)
from megatron_rl.rollout.partial import PartialGroup

__all__ = ["RolloutClient", "RolloutCounters", "RolloutError"]

RETRY_SECONDS, MAX_RETRY_SECONDS = 0.1, 10.0
"""Between a request and the next one for the same group: doubled with each, and up to RETRY_SECONDS
more.
"""
OnProgress = Callable[[PartialGroup], object]
"""Called with every group as it becomes complete."""


class RolloutClient:
    """Sample from the servers at `urls`, which all serve the model of `spec`.

    drop_missing_routes: a sample with a row that holds no route is requested again
    (replay.on_missing_route = drop_sample).
    episodes: samples a response of several turns (agent.function); None: a response is one request.
    run: whose weights the servers have (weights/version.py); a token of others' is never taken.
    `counters` and the servers' circuits live as long as the client.
    newest_version: that a token may have beside its request's own; oldest_version: responses with
    an older token are dropped.
    """

    def __init__(
        self,
        urls: Sequence[str],
        cfg: RolloutConfig,
        *,
        spec: ModelSizes,
        want_routes: bool,
        drop_missing_routes: bool = False,
        episodes: Episodes | None = None,
        run: str = "",
    ) -> None:
        self.cfg, self.spec, self.episodes, self.run = cfg, spec, episodes, run
        self.want_routes, self.drop_missing_routes = want_routes, drop_missing_routes
        self.clock, self.trace, self.counters, self._stats = (
            Clock(),
            OFF,
            RolloutCounters(),
            CallStats(),
        )
        # since when the call in progress is not in _stats.seconds
        self._started: float | None = None
        # 20 ms of reading certificates: not in the event loop
        self._tls = httpx.create_ssl_context(trust_env=False)
        self.balancer = LoadBalancer(urls)
        self.newest_version = self.oldest_version = 0
        # request ids are unique on a server that several replicas use
        self._name, self._request_numbers = uuid.uuid4().hex[:12], itertools.count(1)
        self._ends: set[int] = set()  # tokens at which responses were seen to end
        self._lock = threading.Lock()  # of the next three, and of _started
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

        Rollout k of a prompt gets the id f"{id_prefix}{prompt.id}/{k}".  Every token is from
        weights `policy_version`.
        keep: return the first `keep` groups to complete only; abort the others on their servers and
        count them.  Raises what `fill` raises.
        """
        groups = [PartialGroup(prompt, group_size) for prompt in prompts]
        sampling = Sampling(policy_version=policy_version, **settings)
        return [
            group.closed()
            for group in self.fill(groups, sampling, keep=keep, on_progress=on_progress)
        ]

    def fill(
        self,
        groups: Sequence[PartialGroup],
        sampling: Sampling,
        *,
        keep: int | None = None,
        on_progress: OnProgress | None = None,
        commands: Commands | None = None,
    ) -> list[PartialGroup]:
        """Sample what `groups` lack, in place, until `keep` of them (default: all) and all that are
        due are complete.

        Returns `keep` complete ones, those that are due first, in the order of `groups`.  With
        rollout.partial = resume the others hold what was sampled of them, to be filled by a later
        call; so does every group after an error.
        commands: of an open call, which samples further groups until one ends it, and returns [].

        Raises RolloutError when a server refuses a request (4xx) or a group is not complete after 1
        + cfg.max_retries requests, ValueError for a prompt outside the vocabulary (such an id kills
        an SGLang server).
        """
        for group in groups:
            group.server = ""  # prefix caches were flushed since
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
                self._stats.seconds, self._started = (
                    self._stats.seconds + time.monotonic() - self._started,
                    None,
                )

    def stop(self, *, keep_parts: bool = False) -> None:
        """From another thread: end the call of `fill` in progress, if any, and refuse new ones,
        with RolloutError.  keep_parts: servers have STOP_SECONDS to return the unfinished
        responses, which their groups keep."""
        with self._lock:
            self.is_stopped, self._keeps_parts = True, keep_parts
            if self._running is not None:
                loop, task = self._running
                with suppress(RuntimeError):  # the call has just ended, and closed its loop
                    loop.call_soon_threadsafe(task.cancel)

    def take_stats(self) -> CallStats:
        """What generate() and fill() did since the last call of this."""
        with self._lock:
            stats, self._stats = self._stats, CallStats()
            if self._started is not None:  # a call is in progress
                stats.seconds, self._started = (
                    stats.seconds + time.monotonic() - self._started,
                    time.monotonic(),
                )
        return stats

    def set_urls(self, urls: Sequence[str]) -> None:
        """Sample from these servers from now on; those that stay keep their circuits."""
        self.balancer.set_urls(urls)

    async def _generate(
        self,
        groups: Sequence[PartialGroup],
        sampling: Sampling,
        keep: int,
        on_progress: OnProgress | None,
        commands: Commands | None,
    ) -> list[PartialGroup]:
        self._set_running()
        runner = None if sampling.single_turn else self.episodes
        sampling = sampling if runner is None else runner.adapt(sampling)
        slots = asyncio.Semaphore(self.cfg.max_concurrency)
        async with (
            connections(self.cfg, self._tls) as http,
            runner.serving() if runner else nullcontext(),
        ):
            keeps_parts = self.cfg.partial == "resume"
            call = Call(
                http,
                sampling,
                lambda: self._stats,
                self.counters,
                keeps_parts,
                self.trace,
                self.clock,
            )
            sample: Callable[[PartialGroup], Awaitable[None]] = partial(self._sample_group, call)
            episodes = None if runner is None else runner.call(sampling, sample, call)
            fill = sample if episodes is None else episodes.fill

            async def one(group: PartialGroup) -> None:
                async with slots:
                    if call.drains:
                        raise GroupCancelled
                    await fill(group)
                if not call.enough:
                    call.stats.tokens += sum(
                        rollout.episode_length for rollout in group.rollouts.values()
                    )
                    if on_progress is not None:
                        on_progress(group)

            def begin(groups: Sequence[PartialGroup]) -> None:
                for group in groups:
                    check_prompt(group.prompt, self.spec.vocab_size)
                    if not group.is_complete:
                        call.tasks[asyncio.create_task(one(group))] = group

            kept: list[PartialGroup] = []
            try:
                begin(groups)
                if commands is None:
                    kept = await call.first_to_finish(groups, keep)
                    self.counters.cancelled_groups += 0 if call.keeps_parts else len(groups) - keep
                elif await call.follow(commands, begin) == "drain":
                    await call.drain()
                else:
                    call.keeps_parts = True
                if episodes is not None:
                    episodes.check()
                # else to count their tokens
                await call.collect(RETURN_SECONDS if call.keeps_parts else ABORT_SECONDS)
            except (RolloutError, asyncio.CancelledError) as error:
                # a later call may continue them
                if self._keeps_parts or isinstance(error, RolloutError):
                    call.keeps_parts = True
                    await call.collect(STOP_SECONDS)
                raise
            finally:  # the first failure, or an interrupt, ends the others
                if commands is not None:
                    commands.put("abort")  # ends the thread that may wait for one
                await call.end()
        return kept

    def _set_running(self) -> None:
        with self._lock:
            if self.is_stopped:
                raise RolloutError("the rollout client was stopped")
            self._running = asyncio.get_running_loop(), this_task()

    async def _sample_group(self, call: Call, group: PartialGroup) -> None:
        """Send requests until all samples are there.

        Raises RolloutError when the retries are spent, GroupCancelled.
        """
        group.troubles, tries = [], 1 + self.cfg.max_retries
        for attempt in itertools.count(1):
            try:
                with among(call.busy):
                    return await self._fill(call, group)
            except RetryableError as error:
                if attempt == tries:
                    raise RolloutError(
                        f"prompt {group.prompt.id!r}: {len(group.rollouts)} of {group.size} samples"
                        f" after {tries} requests (rollout.max_retries = {self.cfg.max_retries}):"
                        f" {'; '.join(f'{url}: {what}' for url, what in group.troubles)}"
                    ) from error
            finally:
                group.sent_to = None
            self.counters.retries += 1
            # the run's own generator is saved
            pause = random.SystemRandom().uniform(0, RETRY_SECONDS)
            await asyncio.sleep(min(RETRY_SECONDS * 2 ** (attempt - 1), MAX_RETRY_SECONDS) + pause)

    async def _fill(self, call: Call, group: PartialGroup) -> None:
        """One request for the missing samples; usable ones go into the group.

        Raises RetryableError if any is not.
        """
        if call.enough:
            raise GroupCancelled
        drop_older([group], self.oldest_version, self.counters)
        missing, server = (
            group.missing,
            self.balancer.pick([url for url, _ in group.troubles], group.server),
        )
        group.server = server.url
        rid = f"{self._name}.{next(self._request_numbers)}"
        request = Request(rid, server, group, call.sampling_of(group), missing)
        try:
            samples = await self._request(call, request)
        except RetryableError as error:
            # the server may still be computing it
            if error.reason == "timeout" and not request.cut_by:
                call.abort(request)
            self.counters.redrawn_samples += len(missing)
            self.counters.failures[error.reason] += 1
            self._blame(group, server, str(error), is_servers=True)
            raise
        is_cut = call.enough
        if is_cut and not call.keeps_parts:
            self.counters.count_cancelled(samples)
            raise GroupCancelled
        dropped = await self._take(
            call, request, samples, may_be_cut=is_cut or bool(request.cut_by)
        )
        if is_cut:
            raise GroupCancelled
        is_useless = len(dropped) == len(missing)
        # the next request continues what there is
        if request.cut_by == "deadline" and not group.is_complete:
            late = RetryableError(
                "timeout", f"not complete after {self.cfg.request_timeout_seconds:g} s"
            )
            self.counters.failures[late.reason] += 1
            self._blame(group, server, str(late), is_servers=is_useless)
            raise late
        if not is_useless:
            self.balancer.succeeded(server)
        if dropped:
            why = f"{len(dropped)} of {len(missing)} samples dropped, {dropped[0]}"
            self._blame(group, server, why, is_servers=is_useless)
            raise RetryableError("dropped", str(dropped[0]))
        if not group.is_complete:  # some were too old: from the weights of now
            await self._fill(call, group)

    def _blame(
        self, group: PartialGroup, server: ServerState, why: str, *, is_servers: bool
    ) -> None:
        """Record what went wrong; `is_servers`: nothing of the answer was usable, which counts
        against the server.
        """
        group.troubles.append((server.url, why))
        if is_servers and self.balancer.failed(server, why):
            self.counters.circuits_opened += 1

    async def _take(
        self, call: Call, request: Request, samples: Sequence[object], *, may_be_cut: bool
    ) -> list[SampleDropped]:
        """Put the usable samples into the group; why others are not usable, counted."""
        dropped: list[SampleDropped] = []
        group, sampling, names = (
            request.group,
            request.sampling,
            sample_ids(request.rid, request.num_samples),
        )
        for k, sample, name in zip(request.indexes, samples, names, strict=True):
            is_empty = isinstance(sample, dict) and sample.get("output_ids") == []
            # aborted before its first token: the group keeps what it had
            if may_be_cut and is_empty:
                continue
            resumed = k in group.prefixes
            try:
                if is_small(sample, group.prompt, self.spec, self.want_routes):
                    rollout = self._parse(sample, group, k, name, sampling, may_be_cut)
                # in a thread: decoding the routes of a long response takes tens of milliseconds
                else:
                    rollout = await asyncio.to_thread(
                        self._parse, sample, group, k, name, sampling, may_be_cut
                    )
            except SampleDropped as error:
                self.counters.count_dropped(error.reason, sample)
                call.stats.dropped_without_route += error.reason == ROUTES_MISSING_ROWS
                dropped.append(error)
                continue
            # never in the group: the step may be taking it
            if rollout.oldest_version < self.oldest_version:
                group.prefixes.pop(k, None)
                self.counters.count_stale(rollout.episode_length)
                continue
            group.put(k, rollout)
            self.counters.count_retracted(sample)
            if sampling.first_row and sends_all_rows(sample, rollout, self.spec):
                self.counters.count_resent(group.server)
            self.counters.resumed_samples += resumed
            self.counters.samples += rollout.finish_reason != "abort"
            self.counters.cut_samples += rollout.finish_reason == "abort"
        return dropped

    async def _request(self, call: Call, request: Request) -> list[object]:
        group, server, sampling = request.group, request.server, request.sampling
        prompt, prefixes = group.prompt, [group.prefix_tokens(index) for index in request.indexes]
        tokens = len(prefixes) * (len(prompt.token_ids) + sampling.max_tokens)
        spans = RequestTrace(self.trace, server.url, request.rid)
        server.tokens += tokens
        server.requests += 1
        self.counters.requests += 1
        started, seconds = time.monotonic(), self.cfg.request_timeout_seconds
        try:
            with call.sending(request, seconds), among(call.asking), spans.request(group) as values:
                samples = await request_samples(
                    call.http,
                    server.url,
                    request.rid,
                    prompt,
                    prefixes,
                    sampling,
                    cfg=self.cfg,
                    spec=self.spec,
                    want_routes=self.want_routes,
                    clock=self.clock,
                    spans=spans,
                )
                spans.answered(values, samples)
        finally:
            server.tokens -= tokens
            server.requests -= 1
        call.stats.answered(time.monotonic() - started, samples)
        return samples

    def _parse(
        self,
        sample: object,
        group: PartialGroup,
        k: int,
        sample_id: str,
        sampling: Sampling,
        may_be_cut: bool,
    ) -> Rollout:
        rollout = parse_sample(
            sample,
            group.prompt,
            f"{sampling.id_prefix}{group.prompt.id}/{k}",
            spec=self.spec,
            want_routes=self.want_routes,
            policy_version=sampling.policy_version,
            run=sampling.run,
            newest_version=self.newest_version,
            max_tokens=sampling.max_tokens,
            drop_missing_routes=self.drop_missing_routes,
            sample_id=sample_id,
            prefix=group.prefixes.get(k),
            known=group.known_of(k),
            first_row=sampling.first_row,
            may_be_cut=may_be_cut,
            want_mask=sampling.truncation is not None,
        )
        if (
            rollout.finish_reason == "stop"
            and (last := int(rollout.tokens[-1])) not in group.stop_token_ids
        ):
            self._ends.add(last)  # servers also stop at the checkpoint's own end tokens
        return ended(rollout, self._ends.union(sampling.stop_token_ids), sampling.max_tokens)
