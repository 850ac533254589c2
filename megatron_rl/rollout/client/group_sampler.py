"""Sample the responses that a group lacks: requests, retries, and what is used of the answers.

A sample is identified by (request, index), which the server repeats in its answer: the answer to
another request is never used.  What cannot be used is counted and requested again, from another
server where there is one, until the group is complete or its retries are spent.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import Sequence

from megatron_rl.config import RolloutConfig
from megatron_rl.launch.trace import OFF
from megatron_rl.records import Rollout
from megatron_rl.rollout.client.call import Call, GroupCancelled, Request, among
from megatron_rl.rollout.client.clock import Clock
from megatron_rl.rollout.client.counters import RolloutCounters, drop_older
from megatron_rl.rollout.client.load_balancer import LoadBalancer, ServerState
from megatron_rl.rollout.client.request import (
    GenerateRequest,
    RetryableError,
    RolloutError,
    request_samples,
    retry_pause,
    sample_ids,
)
from megatron_rl.rollout.client.request_trace import RequestTrace
from megatron_rl.rollout.client.response import (
    ROUTES_MISSING_ROWS,
    ExpectedSample,
    ended,
    is_small,
    parse_sample,
    sends_all_rows,
)
from megatron_rl.rollout.client.sample_fields import SampleDropped
from megatron_rl.rollout.client.sampling import SampleRules, Sampling
from megatron_rl.rollout.group import Group


class GroupSampler:
    """Sampling of single groups from the servers at `urls`; RolloutClient runs it in calls.

    run: the run whose weights the servers have; a token from the weights of another is never used.

    `counters` and the servers' circuits live as long as the object.
    """

    def __init__(
        self, urls: Sequence[str], cfg: RolloutConfig, rules: SampleRules, run: str
    ) -> None:
        self.cfg, self.rules, self.run = cfg, rules, run
        self.balancer, self.counters = LoadBalancer(urls), RolloutCounters()
        self.clock, self.trace = Clock(), OFF
        # newest: the latest weights that a token may have, beside those of its request;
        # oldest: responses with a token of older weights are dropped
        self.newest_version = self.oldest_version = 0
        # request ids are unique on a server that several replicas use
        self._name, self._request_numbers = uuid.uuid4().hex[:12], itertools.count(1)
        self._ends: set[int] = set()  # tokens at which responses were seen to end

    async def _sample_group(self, call: Call, group: Group) -> None:
        """Send requests until the group is complete.

        Raises RolloutError when the retries are spent, and GroupCancelled.
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
                group.request_version = None
            self.counters.retries += 1
            await asyncio.sleep(retry_pause(attempt))

    async def _fill(self, call: Call, group: Group) -> None:
        """Send one request for the missing samples and put the usable ones into the group.

        Raises RetryableError if one is not usable.
        """
        if call.enough:
            raise GroupCancelled
        # responses may have become too old while the group waited for its slot or its retry
        drop_older([group], self.oldest_version, self.counters)
        missing = group.missing
        server = self.balancer.pick([url for url, _ in group.troubles], group.server)
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
            self._blame(group, server, str(error), counts_against_server=True)
            raise
        # an answer after the abort of all requests: it may be incomplete, and no retry follows
        is_cut = call.enough
        if is_cut and not call.keeps_parts:
            self.counters.count_cancelled(samples)
            raise GroupCancelled
        may_be_cut = is_cut or bool(request.cut_by)
        dropped, num_empty = await self._take(call, request, samples, may_be_cut=may_be_cut)
        if is_cut:
            raise GroupCancelled
        self._judge(request, dropped, num_empty)
        if not group.is_sampled:  # some were too old: sampled again, from the present weights
            await self._fill(call, group)

    def _judge(self, request: Request, dropped: Sequence[SampleDropped], num_empty: int) -> None:
        """Record the success or failure of an answered request.

        num_empty: samples that were cut before their first token.

        Raises RetryableError where another request has to complete the group.
        """
        group, server, seconds = request.group, request.server, self.cfg.request_timeout_seconds
        is_useless = len(dropped) + num_empty == request.num_samples
        # the next request continues what there is
        if request.cut_by == "deadline" and not group.is_sampled:
            late = RetryableError("timeout", f"not complete after {seconds:g} s")
            self.counters.failures[late.reason] += 1
            self._blame(group, server, str(late), counts_against_server=is_useless)
            raise late
        if not is_useless:
            self.balancer.succeeded(server)
        if dropped:
            why = f"{len(dropped)} of {request.num_samples} samples dropped, {dropped[0]}"
            self._blame(group, server, why, counts_against_server=is_useless)
            raise RetryableError("dropped", str(dropped[0]))

    def _blame(
        self, group: Group, server: ServerState, why: str, *, counts_against_server: bool
    ) -> None:
        """Record what failed.

        counts_against_server: nothing in the answer was usable.
        """
        group.troubles.append((server.url, why))
        if counts_against_server and self.balancer.failed(server, why):
            self.counters.circuits_opened += 1

    async def _take(
        self, call: Call, request: Request, samples: Sequence[object], *, may_be_cut: bool
    ) -> tuple[list[SampleDropped], int]:
        """Put the usable samples into the group; count the others and return why they are not, and
        the number of those that were cut before their first token.
        """
        dropped: list[SampleDropped] = []
        num_empty = 0
        group, sampling = request.group, request.sampling
        names = sample_ids(request.rid, request.num_samples)
        for k, sample, name in zip(request.indexes, samples, names, strict=True):
            is_empty = isinstance(sample, dict) and sample.get("output_ids") == []
            # aborted before its first token: the group keeps what it had
            if may_be_cut and is_empty:
                num_empty += 1
                continue
            is_continuation = k in group.prefixes
            try:
                if is_small(sample, len(group.prompt.token_ids) - group.start):
                    rollout = self._parse(sample, group, k, name, sampling, may_be_cut)
                else:  # decoding the routes of a long response takes tens of milliseconds
                    rollout = await asyncio.to_thread(
                        self._parse, sample, group, k, name, sampling, may_be_cut
                    )
            except SampleDropped as error:
                self.counters.count_dropped(error.reason, sample)
                call.stats.dropped_without_route += error.reason == ROUTES_MISSING_ROWS
                dropped.append(error)
                continue
            # checked before it is in the group, which the step may be taking
            if rollout.oldest_version < self.oldest_version:
                group.prefixes.pop(k, None)
                self.counters.count_stale(rollout.episode_length)
                continue
            group.put(k, rollout)
            self.counters.count_retracted(sample)
            length = group.start + len(rollout.tokens)
            if sampling.first_row and sends_all_rows(sample, length, self.rules.spec):
                self.counters.count_resent(group.server)
            self.counters.resumed_samples += is_continuation
            self.counters.samples += rollout.finish_reason != "abort"
            self.counters.cut_samples += rollout.finish_reason == "abort"
        return dropped, num_empty

    async def _request(self, call: Call, request: Request) -> list[object]:
        group, server, sampling = request.group, request.server, request.sampling
        content = GenerateRequest(
            request.rid,
            group.prompt,
            [group.prefix_tokens(index) for index in request.indexes],
            sampling,
            want_routes=self.rules.want_routes,
            in_place=self.cfg.weight_update == "in_place",
            by_adapter=self.rules.by_adapter,
        )
        # an upper bound of the load: responses may end earlier
        tokens = request.num_samples * (len(group.prompt.token_ids) + sampling.max_tokens)
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
                    content,
                    cfg=self.cfg,
                    spec=self.rules.spec,
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
        group: Group,
        k: int,
        sample_id: str,
        sampling: Sampling,
        may_be_cut: bool,
    ) -> Rollout:
        expected = ExpectedSample(
            group.prompt,
            rollout_id=f"{sampling.id_prefix}{group.prompt.id}/{k}",
            sample_id=sample_id,
            prefix=group.prefixes.get(k),
            start=group.start,
        )
        rollout = parse_sample(
            sample,
            expected,
            sampling,
            self.rules,
            newest_version=self.newest_version,
            may_be_cut=may_be_cut,
        )
        last = int(rollout.tokens[-1])
        if rollout.finish_reason == "stop" and last not in group.stop_token_ids:
            self._ends.add(last)  # servers also stop at the checkpoint's own end tokens
        return ended(rollout, self._ends.union(sampling.stop_token_ids), sampling.max_tokens)
