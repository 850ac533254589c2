"""Sample groups of responses from SGLang servers: G responses of one prompt are one request for a batch of G copies.

Every request has connect, idle and total deadlines and a bounded body; what cannot be used is counted, and asked for again
(from another server where there is one) until the group is whole or its retries are spent.  A sample is identified by
(group, index, attempt), which the server repeats in its answer: the answer to another attempt is never used.

Groups that are not needed when enough others are complete are aborted on their servers, and either counted and forgotten
(rollout.partial = drop) or kept as far as they got, for a later call to go on with (resume; see partial.py).  So are responses
that a deadline or a signal cuts short: to sample them again would favour short ones.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt, wait_exponential_jitter

from megatron_rl.config import RolloutConfig
from megatron_rl.models.spec import ModelSizes
from megatron_rl.records import Prompt, Rollout, RolloutGroup
from megatron_rl.rollout.client.call import Call, GroupCancelled, among, is_empty, this_task
from megatron_rl.rollout.client.counters import CallStats, RolloutCounters
from megatron_rl.rollout.client.load_balancer import LoadBalancer, ServerState
from megatron_rl.rollout.client.request import (
    ABORT_SECONDS,
    RETURN_SECONDS,
    STOP_SECONDS,
    RetryableError,
    RolloutError,
    Sampling,
    abort,
    check_prompt,
    connections,
    request_samples,
    sample_ids,
)
from megatron_rl.rollout.client.response import SampleDropped, parse_sample
from megatron_rl.rollout.partial import PartialGroup, ended, first_to_finish

__all__ = ["RolloutClient", "RolloutCounters", "RolloutError"]


class RolloutClient:
    """Sample from the servers at `urls`, which all serve the model of `spec`.

    drop_missing_routes: a sample with a row that holds no route is unusable, and asked for again
    (replay.on_missing_route = drop_sample).
    `counters` and the servers' circuits live as long as the client.
    """

    def __init__(
        self,
        urls: Sequence[str],
        cfg: RolloutConfig,
        *,
        spec: ModelSizes,
        want_routes: bool,
        drop_missing_routes: bool = False,
    ) -> None:
        self.cfg = cfg
        self.spec = spec
        self.want_routes = want_routes
        self.drop_missing_routes = drop_missing_routes
        self.counters = RolloutCounters()
        self._stats = CallStats()
        self._tls = httpx.create_ssl_context(trust_env=False)  # 20 ms of reading certificates: not in the event loop
        self.balancer = LoadBalancer(urls)
        self._name = uuid.uuid4().hex[:12]  # request ids are unique on a server that several replicas use
        self._num_groups = 0
        self._ends: set[int] = set()  # tokens at which responses were seen to end
        self._lock = threading.Lock()  # of the next two
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self._stopped = self._keeps_parts = False

    def generate(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        *,
        temperature: float,
        max_tokens: int,
        stop_token_ids: Sequence[int],
        policy_version: int,
        id_prefix: str = "",
        keep: int | None = None,
        on_progress: Callable[[PartialGroup], None] | None = None,
    ) -> list[RolloutGroup]:
        """Return one group of `group_size` rollouts per prompt, in the order of `prompts`.

        temperature 0 is greedy.  Rollout k of a prompt gets the id f"{id_prefix}{prompt.id}/{k}".  `on_progress` is
        called with every finished group, in order of completion.  Every token is from weights `policy_version`.
        keep: return the first so many groups to be complete, abort the others on their servers and count them.

        Raises what `fill` raises.
        """
        groups = [PartialGroup(prompt, group_size) for prompt in prompts]
        sampling = Sampling(temperature, max_tokens, tuple(stop_token_ids), policy_version, id_prefix)
        return [group.closed() for group in self.fill(groups, sampling, keep=keep, on_progress=on_progress)]

    def fill(
        self,
        groups: Sequence[PartialGroup],
        sampling: Sampling,
        *,
        keep: int | None = None,
        on_progress: Callable[[PartialGroup], None] | None = None,
    ) -> list[PartialGroup]:
        """Sample what `groups` lack, in place, until `keep` of them (default: all) and every one that must be are whole.

        Returns `keep` whole ones, those that must be first, in the order of `groups`.  With rollout.partial = resume the others
        hold what there is of them, to be filled by a later call; so does every group after an error.

        Raises RolloutError when a server refuses a request (4xx) or a group is not whole after 1 + cfg.max_retries
        requests, ValueError for a prompt outside the vocabulary (such an id kills an SGLang server).
        """
        for group in groups:
            check_prompt(group.prompt, self.spec.vocab_size)
        keep = len(groups) if keep is None else keep
        if not 0 <= keep <= len(groups):
            raise ValueError(f"keep = {keep} of {len(groups)} groups: rule is 0 <= keep <= number of prompts")
        if keep == 0:
            return []
        started = time.monotonic()
        try:
            return asyncio.run(self._generate(groups, sampling, keep, on_progress))
        finally:
            with self._lock:
                self._running = None
            self._stats.seconds += time.monotonic() - started

    @property
    def is_stopped(self) -> bool:
        return self._stopped

    def stop(self, *, keep_parts: bool = False) -> None:
        """From another thread: end the call of `fill` in progress, if any, and refuse new ones, with RolloutError.

        keep_parts: servers have STOP_SECONDS to return what there is of each response, which its group keeps.
        """
        with self._lock:
            self._stopped, self._keeps_parts = True, keep_parts
            if self._running is not None:
                loop, task = self._running
                loop.call_soon_threadsafe(task.cancel)

    def drop_older(self, groups: Sequence[PartialGroup], version: int) -> None:
        """Throw away, and count, responses of `groups` with a token of weights older than `version`: they are sampled anew."""
        for rollout in (rollout for group in groups for rollout in group.drop_older(version)):
            self.counters.stale_samples += 1
            self.counters.stale_tokens += rollout.response_length
            self.counters.redrawn_samples += 1

    def take_stats(self) -> CallStats:
        """What generate() did since this was called last."""
        stats, self._stats = self._stats, CallStats()
        return stats

    def set_urls(self, urls: Sequence[str]) -> None:
        """Sample from these servers from now on; those that stay keep their circuits."""
        self.balancer.set_urls(urls)

    async def _generate(
        self,
        groups: Sequence[PartialGroup],
        sampling: Sampling,
        keep: int,
        on_progress: Callable[[PartialGroup], None] | None,
    ) -> list[PartialGroup]:
        self._note_running()
        slots = asyncio.Semaphore(self.cfg.max_concurrency)
        async with connections(self.cfg, self._tls) as http:
            call = Call(http, sampling, self._stats, keeps_parts=self.cfg.partial == "resume")

            async def one(group: PartialGroup) -> None:
                async with slots:
                    await self._sample_group(call, group)
                if on_progress is not None and not call.enough:
                    on_progress(group)

            tasks = {asyncio.create_task(one(group)): group for group in groups if not group.is_complete}
            try:
                kept = await first_to_finish(groups, tasks, keep)
                await self._give_up(call, len(groups) - keep)
            except (RolloutError, asyncio.CancelledError) as error:
                if self._keeps_parts or isinstance(error, RolloutError):  # a later call may continue them
                    call.keeps_parts = True
                    await self._collect(call, STOP_SECONDS)
                raise
            finally:  # the first failure, or an interrupt, ends the others
                for task in [*tasks, *call.aborts]:
                    task.cancel()
                await asyncio.gather(*tasks, *call.aborts, return_exceptions=True)
        call.stats.tokens += sum(rollout.response_length for group in kept for rollout in group.rollouts.values())
        return kept

    def _note_running(self) -> None:
        task = this_task()
        with self._lock:
            if self._stopped:
                raise RolloutError("the rollout client was stopped")
            self._running = asyncio.get_running_loop(), task

    async def _give_up(self, call: Call, num_groups: int) -> None:
        """Abort what nobody waits for any more, and let servers hand over what they had sampled of it, or say how much."""
        self.counters.cancelled_groups += 0 if call.keeps_parts else num_groups
        await self._collect(call, RETURN_SECONDS if call.keeps_parts else ABORT_SECONDS)

    async def _collect(self, call: Call, seconds: float) -> None:
        """Abort every request in flight and take the answers that come within `seconds`."""
        call.enough = True
        deadline = time.monotonic() + seconds
        while (unfinished := {*call.busy, *call.aborts}) and time.monotonic() < deadline:
            for rid, (server, num_samples) in list(call.in_flight.items()):  # again: an abort may overtake its request
                self._abort(call, server, rid, num_samples)
            await asyncio.wait(unfinished | call.aborts, timeout=ABORT_SECONDS)
        if call.keeps_parts:
            lost = sum(num_samples for _, num_samples in call.in_flight.values())
            self.counters.lost_samples += lost
            self.counters.redrawn_samples += lost
            if taking := call.busy - call.asking:  # what has come is not thrown away
                await asyncio.wait(taking)

    def _abort(self, call: Call, server: ServerState, rid: str, num_samples: int) -> None:
        async def send() -> None:
            self.counters.aborts += 1
            confirmed = False
            try:
                confirmed = await abort(call.http, server.url, rid, num_samples)
            finally:
                self.counters.aborts_failed += not confirmed

        task = asyncio.create_task(send())
        call.aborts.add(task)
        task.add_done_callback(call.aborts.discard)

    async def _sample_group(self, call: Call, group: PartialGroup) -> None:
        """Ask until all G samples are there.  Raises RolloutError when the retries are spent, Unwanted."""
        self._num_groups += 1
        group.begin(self._num_groups)

        def note(state: RetryCallState) -> None:
            self.counters.retries += 1

        retrying = AsyncRetrying(
            stop=stop_after_attempt(1 + self.cfg.max_retries),
            wait=wait_exponential_jitter(initial=0.1, max=10.0, jitter=0.1),
            retry=retry_if_exception_type(RetryableError),
            before_sleep=note,
            reraise=True,
        )
        try:
            async for attempt in retrying:
                with attempt, among(call.busy):
                    await self._fill(call, group)
        except RetryableError as error:
            tries = f"{1 + self.cfg.max_retries} requests (rollout.max_retries = {self.cfg.max_retries})"
            raise RolloutError(
                f"prompt {group.prompt.id!r}: {len(group.rollouts)} of {group.size} samples after {tries}: "
                f"{'; '.join(group.troubles)}"
            ) from error

    async def _fill(self, call: Call, group: PartialGroup) -> None:
        """One request for the missing samples; usable ones go into the group.  Raises Unusable if any is not."""
        if call.enough:
            raise GroupCancelled
        missing, server = group.missing, self.balancer.pick(group.failed_urls)
        group.attempts += 1
        rid = f"{self._name}.{group.number}.{group.attempts}"
        try:
            samples = await self._request(call, server, rid, group)
        except RetryableError as error:
            if error.reason == "timeout" and rid not in call.late:  # the server may still be at it
                self._abort(call, server, rid, len(missing))
            self.counters.redrawn_samples += len(missing)
            self._failed(group, server, error, is_servers=True)
            raise
        is_late, is_cut = rid in call.late, call.enough
        if is_cut and not call.keeps_parts:
            self.counters.count_cancelled(samples)
            raise GroupCancelled
        dropped = await self._take(group, rid, samples, call.sampling, may_be_cut=is_cut or is_late)
        if is_cut:
            raise GroupCancelled
        if is_late and not group.is_complete:  # the next request continues what there is
            late = RetryableError("timeout", f"not complete after {self.cfg.request_timeout_seconds:g} s")
            self._failed(group, server, late, is_servers=len(dropped) == len(missing))
            raise late
        if len(dropped) < len(missing):
            self.balancer.succeeded(server)
        if dropped:
            why = f"{len(dropped)} of {len(missing)} samples dropped, {dropped[0]}"
            self._blame(group, server, why, is_servers=len(dropped) == len(missing))
            raise RetryableError("dropped", str(dropped[0]))

    def _failed(self, group: PartialGroup, server: ServerState, error: RetryableError, *, is_servers: bool) -> None:
        self.counters.failures[error.reason] += 1
        self._blame(group, server, str(error), is_servers=is_servers)

    async def _take(
        self, group: PartialGroup, rid: str, samples: Sequence[Any], sampling: Sampling, *, may_be_cut: bool
    ) -> list[SampleDropped]:
        """Put the usable ones of the samples asked for into the group; why others are not, counted."""
        dropped: list[SampleDropped] = []
        missing = group.missing
        for k, sample, name in zip(missing, samples, sample_ids(rid, len(missing)), strict=True):
            if may_be_cut and is_empty(sample):  # aborted before its first token: what there was before is still there
                continue
            resumed = k in group.prefixes
            try:  # in a thread: decoding the routes of a long response takes tens of milliseconds
                rollout = await asyncio.to_thread(self._parse, sample, group, k, name, sampling, may_be_cut)
            except SampleDropped as error:
                self.counters.count_dropped(error.reason, sample)
                dropped.append(error)
                continue
            group.put(k, rollout)
            self.counters.count_retracted(sample)
            self.counters.resumed_samples += resumed
            self.counters.samples += rollout.finish_reason != "abort"
            self.counters.cut_samples += rollout.finish_reason == "abort"
        return dropped

    async def _request(self, call: Call, server: ServerState, rid: str, group: PartialGroup) -> list[Any]:
        prompt, prefixes = group.prompt, [group.prefix_of(index) for index in group.missing]
        num_samples = len(prefixes)
        tokens = num_samples * (len(prompt.token_ids) + call.sampling.max_tokens)
        server.tokens += tokens
        server.requests += 1
        call.in_flight[rid] = server, num_samples
        self.counters.requests += 1
        started = time.monotonic()

        async def ask_for_parts() -> None:
            await asyncio.sleep(self.cfg.request_timeout_seconds)
            call.late.add(rid)
            while True:  # an abort may be lost
                self._abort(call, server, rid, num_samples)
                await asyncio.sleep(ABORT_SECONDS)

        deadline = asyncio.create_task(ask_for_parts())
        try:
            with among(call.asking):
                samples = await request_samples(
                    call.http,
                    server.url,
                    rid,
                    prompt,
                    prefixes,
                    call.sampling,
                    cfg=self.cfg,
                    spec=self.spec,
                    want_routes=self.want_routes,
                )
        finally:
            deadline.cancel()
            server.tokens -= tokens
            server.requests -= 1
            del call.in_flight[rid]
        call.stats.answered(time.monotonic() - started, samples)
        return samples

    def _parse(
        self, sample: Any, group: PartialGroup, k: int, sample_id: str, sampling: Sampling, may_be_cut: bool
    ) -> Rollout:
        rollout = parse_sample(
            sample,
            group.prompt,
            f"{sampling.id_prefix}{group.prompt.id}/{k}",
            spec=self.spec,
            want_routes=self.want_routes,
            policy_version=sampling.policy_version,
            max_tokens=sampling.max_tokens,
            drop_missing_routes=self.drop_missing_routes,
            sample_id=sample_id,
            prefix=group.prefixes.get(k),
            may_be_cut=may_be_cut,
        )
        if rollout.finish_reason == "stop":
            self._ends.add(int(rollout.tokens[-1]))  # servers also stop at the checkpoint's own end tokens
        return ended(rollout, self._ends.union(sampling.stop_token_ids), sampling.max_tokens)

    def _blame(self, group: PartialGroup, server: ServerState, why: str, *, is_servers: bool) -> None:
        """Remember what went wrong; `is_servers`: nothing of the answer was usable, which counts against the server."""
        group.troubles.append(f"{server.url}: {why}")
        group.failed_urls.add(server.url)
        if is_servers and self.balancer.failed(server, why):
            self.counters.circuits_opened += 1
