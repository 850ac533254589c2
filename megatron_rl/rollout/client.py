"""Sample groups of responses from SGLang servers: G responses of one prompt are one request for a batch of G copies.

Every request has connect, idle and total deadlines and a bounded body; what cannot be used is counted, and asked for again
(from another server where there is one) until the group is whole or its retries are spent.  A sample is identified by
(group, index, attempt), which the server repeats in its answer: the answer to another attempt is never used.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt, wait_exponential_jitter

from megatron_rl.config import RolloutConfig
from megatron_rl.records import Prompt, Rollout, RolloutGroup
from megatron_rl.rollout.balance import Balancer, ServerState
from megatron_rl.rollout.counters import CallStats, RolloutCounters
from megatron_rl.rollout.request import (
    ABORT_SECONDS,
    RolloutError,
    Sampling,
    Unusable,
    abort,
    connections,
    request_samples,
    sample_ids,
)
from megatron_rl.rollout.routed_experts import ModelSpec
from megatron_rl.rollout.samples import SampleDropped, parse_sample

__all__ = ["RolloutClient", "RolloutCounters", "RolloutError"]


class Unwanted(Exception):
    """Enough other groups are complete: this one is given up."""


@dataclass
class Call:
    """One generate() call in progress.  in_flight: request id -> (server, number of samples) that still may answer."""

    http: httpx.AsyncClient
    sampling: Sampling
    stats: CallStats
    enough: bool = False
    in_flight: dict[str, tuple[ServerState, int]] = field(default_factory=dict)
    aborts: set[asyncio.Task[None]] = field(default_factory=set)


@dataclass
class PartialGroup:
    """What is known of one prompt's group: samples by index, what went wrong, which servers failed it, requests so far."""

    prompt: Prompt
    size: int
    number: int
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)
    failed_urls: set[str] = field(default_factory=set)
    attempts: int = 0

    @property
    def missing(self) -> list[int]:
        return [index for index in range(self.size) if index not in self.rollouts]


class RolloutClient:
    """Sample from the servers at `urls`, which all serve the model of `spec`.

    drop_gaps: a sample with a row that holds no route is unusable, and asked for again (replay.on_gap = drop_sample).
    `counters` and the servers' circuits live as long as the client.
    """

    def __init__(
        self, urls: Sequence[str], cfg: RolloutConfig, *, spec: ModelSpec, want_routes: bool, drop_gaps: bool = False
    ) -> None:
        self.cfg = cfg
        self.spec = spec
        self.want_routes = want_routes
        self.drop_gaps = drop_gaps
        self.counters = RolloutCounters()
        self._stats = CallStats()
        self.balancer = Balancer(urls)
        self._name = uuid.uuid4().hex[:12]  # request ids are unique on a server that several replicas use
        self._num_groups = 0

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
        on_progress: Callable[[RolloutGroup], None] | None = None,
    ) -> list[RolloutGroup]:
        """Return one group of `group_size` rollouts per prompt, in the order of `prompts`.

        temperature 0 is greedy.  Rollout k of a prompt gets the id f"{id_prefix}{prompt.id}/{k}".  `on_progress` is
        called with every finished group, in order of completion.  Every token is from weights `policy_version`.
        keep: return the first so many groups to be complete, abort the others on their servers and count them.

        Raises RolloutError when a server refuses a request (4xx) or a group is not whole after 1 + cfg.max_retries
        requests, ValueError for a prompt outside the vocabulary (such an id kills an SGLang server).
        """
        for prompt in prompts:
            self._check_prompt(prompt)
        keep = len(prompts) if keep is None else keep
        if not 0 <= keep <= len(prompts):
            raise ValueError(f"keep = {keep} of {len(prompts)} groups: rule is 0 <= keep <= number of prompts")
        sampling = Sampling(temperature, max_tokens, tuple(stop_token_ids), policy_version, id_prefix)
        if keep == 0:
            return []
        started = time.monotonic()
        try:
            return asyncio.run(self._generate(prompts, group_size, sampling, keep, on_progress))
        finally:
            self._stats.seconds += time.monotonic() - started

    def take_stats(self) -> CallStats:
        """What generate() did since this was called last."""
        stats, self._stats = self._stats, CallStats()
        return stats

    def set_urls(self, urls: Sequence[str]) -> None:
        """Sample from these servers from now on; those that stay keep their circuits."""
        self.balancer.set_urls(urls)

    def _check_prompt(self, prompt: Prompt) -> None:
        ids, vocab_size = prompt.token_ids, self.spec.vocab_size
        if not ids:
            raise ValueError(f"prompt {prompt.id!r} has no tokens")
        if not 0 <= min(ids) <= max(ids) < vocab_size:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise ValueError(
                f"prompt {prompt.id!r} has token id {wrong}, the model's vocabulary has {vocab_size}: "
                "the tokenizer does not belong to this model"
            )

    async def _generate(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        keep: int,
        on_progress: Callable[[RolloutGroup], None] | None,
    ) -> list[RolloutGroup]:
        slots = asyncio.Semaphore(self.cfg.max_concurrency)
        async with connections(self.cfg) as http:
            call = Call(http, sampling, self._stats)

            async def one(prompt: Prompt) -> RolloutGroup:
                async with slots:
                    return await self._sample_group(call, prompt, group_size)

            def note(group: RolloutGroup) -> None:
                call.stats.tokens += sum(rollout.response_length for rollout in group.rollouts)
                if on_progress is not None:
                    on_progress(group)

            tasks = [asyncio.create_task(one(prompt)) for prompt in prompts]
            try:
                done = await first_to_finish(tasks, keep, note)
                await self._give_up(call, [task for task in tasks if task not in done])
            finally:  # the first failure, or an interrupt, ends the others
                for task in [*tasks, *call.aborts]:
                    task.cancel()
                await asyncio.gather(*tasks, *call.aborts, return_exceptions=True)
        return [task.result() for task in tasks if task in done]

    async def _give_up(self, call: Call, tasks: Sequence[asyncio.Task[RolloutGroup]]) -> None:
        """Abort what nobody waits for any more, and let servers say how much of it they had sampled."""
        call.enough = True
        self.counters.unwanted_groups += len(tasks)
        for rid, (server, num_samples) in list(call.in_flight.items()):
            self._abort(call, server, rid, num_samples)
        if unfinished := {*tasks, *call.aborts}:
            await asyncio.wait(unfinished, timeout=ABORT_SECONDS)

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

    async def _sample_group(self, call: Call, prompt: Prompt, group_size: int) -> RolloutGroup:
        """Ask until all G samples are there.  Raises RolloutError when the retries are spent, Unwanted."""
        self._num_groups += 1
        group = PartialGroup(prompt, group_size, self._num_groups)

        def note(state: RetryCallState) -> None:
            self.counters.retries += 1

        retrying = AsyncRetrying(
            stop=stop_after_attempt(1 + self.cfg.max_retries),
            wait=wait_exponential_jitter(initial=0.1, max=10.0, jitter=0.1),
            retry=retry_if_exception_type(Unusable),
            before_sleep=note,
            reraise=True,
        )
        try:
            async for attempt in retrying:
                with attempt:
                    await self._fill(call, group)
        except Unusable as error:
            tries = f"{1 + self.cfg.max_retries} requests (rollout.max_retries = {self.cfg.max_retries})"
            raise RolloutError(
                f"prompt {prompt.id!r}: {len(group.rollouts)} of {group_size} samples after {tries}: "
                f"{'; '.join(group.troubles)}"
            ) from error
        return RolloutGroup(prompt=prompt, rollouts=tuple(group.rollouts[k] for k in range(group_size)))

    async def _fill(self, call: Call, group: PartialGroup) -> None:
        """One request for the missing samples; usable ones go into the group.  Raises Unusable if any is not."""
        if call.enough:
            raise Unwanted
        missing, server = group.missing, self.balancer.pick(group.failed_urls)
        group.attempts += 1
        rid = f"{self._name}.{group.number}.{group.attempts}"
        try:
            samples = await self._request(call, server, rid, group.prompt, len(missing))
        except Unusable as error:
            if error.reason == "timeout":  # the server may still be at it
                self._abort(call, server, rid, len(missing))
            self.counters.failures[error.reason] += 1
            self._blame(group, server, str(error), is_servers=True)
            raise
        if call.enough:
            self.counters.count_unwanted(samples)
            raise Unwanted
        dropped: list[SampleDropped] = []
        for k, sample, name in zip(missing, samples, sample_ids(rid, len(missing)), strict=True):
            try:  # in a thread: decoding the routes of a long response takes tens of milliseconds
                group.rollouts[k] = await asyncio.to_thread(self._parse, sample, group.prompt, k, name, call.sampling)
            except SampleDropped as error:
                self.counters.dropped[error.reason] += 1
                dropped.append(error)
        self.counters.samples += len(missing) - len(dropped)
        if len(dropped) < len(missing):
            self.balancer.succeeded(server)
        if dropped:
            why = f"{len(dropped)} of {len(missing)} samples dropped, {dropped[0]}"
            self._blame(group, server, why, is_servers=len(dropped) == len(missing))
            raise Unusable("dropped", str(dropped[0]))

    async def _request(
        self, call: Call, server: ServerState, rid: str, prompt: Prompt, num_samples: int
    ) -> list[Any]:
        tokens = num_samples * (len(prompt.token_ids) + call.sampling.max_tokens)
        server.tokens += tokens
        server.requests += 1
        call.in_flight[rid] = server, num_samples
        self.counters.requests += 1
        started = time.monotonic()
        try:
            samples = await request_samples(
                call.http,
                server.url,
                rid,
                prompt,
                num_samples,
                call.sampling,
                cfg=self.cfg,
                spec=self.spec,
                want_routes=self.want_routes,
            )
        finally:
            server.tokens -= tokens
            server.requests -= 1
            del call.in_flight[rid]
        call.stats.request_seconds.append(time.monotonic() - started)
        return samples

    def _parse(self, sample: Any, prompt: Prompt, k: int, sample_id: str, sampling: Sampling) -> Rollout:
        return parse_sample(
            sample,
            prompt,
            f"{sampling.id_prefix}{prompt.id}/{k}",
            spec=self.spec,
            want_routes=self.want_routes,
            policy_version=sampling.policy_version,
            max_tokens=sampling.max_tokens,
            drop_gaps=self.drop_gaps,
            sample_id=sample_id,
        )

    def _blame(self, group: PartialGroup, server: ServerState, why: str, *, is_servers: bool) -> None:
        """Remember what went wrong; `is_servers`: nothing of the answer was usable, which counts against the server."""
        group.troubles.append(f"{server.url}: {why}")
        group.failed_urls.add(server.url)
        if is_servers and self.balancer.failed(server, why):
            self.counters.circuits_opened += 1


async def first_to_finish(
    tasks: Sequence[asyncio.Task[RolloutGroup]], keep: int, note: Callable[[RolloutGroup], None]
) -> set[asyncio.Task[RolloutGroup]]:
    """The first `keep` tasks to be done.  Raises what one of them raised."""
    finished: set[asyncio.Task[RolloutGroup]] = set()
    waiting = set(tasks)
    while len(finished) < keep:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in [task for task in tasks if task in done][: keep - len(finished)]:
            group = task.result()
            finished.add(task)
            note(group)
    return finished
