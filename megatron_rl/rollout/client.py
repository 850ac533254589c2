"""Sample groups of responses from SGLang servers: G responses of one prompt are one /generate request with n = G.

One request a group shares the prompt's prefill and still carries routes, log-probs and finish reason per sample.
Every request has a connect and a total deadline and a bounded body; what cannot be used is counted, and asked for again
(from another server where there is one) until the group is whole or its retries are spent.

Sampling is not seeded per request: SGLang honours sampling_seed only with --enable-deterministic-inference and would
then give all n samples of a request the same seed.  The server's --random-seed is the seed.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt, wait_exponential_jitter

from megatron_rl.config import RolloutConfig
from megatron_rl.records import Prompt, Rollout, RolloutGroup
from megatron_rl.rollout.handshake import auth_headers
from megatron_rl.rollout.routed_experts import ModelSpec
from megatron_rl.rollout.samples import SampleDropped, parse_sample
from megatron_rl.rollout.sampling import WHOLE_SOFTMAX

CONNECT_TIMEOUT_SECONDS = 10.0
COOLDOWN_SECONDS = 10.0  # a server that failed is the last choice for this long
RETRY_STATUS = (408, 425, 429)  # and every 5xx; the other 4xx will not get better
BODY_SLACK_BYTES = 1 << 20
BODY_BYTES_PER_TOKEN = 128  # id, [log-prob, id, text] and separators are about 50


class RolloutError(RuntimeError):
    """Rollouts cannot be had; the message names server, prompt, reason and counts."""


class Unusable(Exception):
    """A request that failed or came back incomplete and may be tried again; `reason` is a short code for counting."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass
class RolloutCounters:
    """What happened since the client was made.  `failures`: requests, by reason; `dropped`: samples, by reason."""

    requests: int = 0
    samples: int = 0
    retries: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)


@dataclass
class ServerState:
    url: str
    in_flight: int = 0  # samples
    avoid_until: float = 0.0  # time.monotonic()


@dataclass(frozen=True)
class Sampling:
    """One generate() call: what every request of it shares."""

    temperature: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    policy_version: int
    id_prefix: str


class RolloutClient:
    """Sample from the servers at `urls`, which all serve the model of `spec`.

    drop_gaps: a sample with a row that holds no route is unusable, and asked for again (replay.on_gap = drop_sample).
    """

    def __init__(
        self, urls: Sequence[str], cfg: RolloutConfig, *, spec: ModelSpec, want_routes: bool, drop_gaps: bool = False
    ) -> None:
        if not urls:
            raise ValueError("RolloutClient needs at least one server URL (rollout.urls, or a server of its own)")
        self.cfg = cfg
        self.spec = spec
        self.want_routes = want_routes
        self.drop_gaps = drop_gaps
        self.counters = RolloutCounters()
        self.servers = [ServerState(url.rstrip("/")) for url in urls]

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
        on_progress: Callable[[RolloutGroup], None] | None = None,
    ) -> list[RolloutGroup]:
        """Return one group of `group_size` rollouts per prompt, in the order of `prompts`.

        temperature 0 is greedy.  Rollout k of a prompt gets the id f"{id_prefix}{prompt.id}/{k}".  `on_progress` is
        called with every finished group, in order of completion.  Every token is from weights `policy_version`.

        Raises RolloutError when a server refuses a request (4xx) or a group is not whole after 1 + cfg.max_retries
        requests, ValueError for a prompt outside the vocabulary (such an id kills an SGLang server).
        """
        for prompt in prompts:
            self._check_prompt(prompt)
        sampling = Sampling(temperature, max_tokens, tuple(stop_token_ids), policy_version, id_prefix)
        return asyncio.run(self._generate(prompts, group_size, sampling, on_progress))

    def set_urls(self, urls: Sequence[str]) -> None:
        """Sample from these servers from now on."""
        known = {server.url: server for server in self.servers}
        self.servers = [known.get(url) or ServerState(url) for url in (url.rstrip("/") for url in urls)]

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
        on_progress: Callable[[RolloutGroup], None] | None,
    ) -> list[RolloutGroup]:
        slots = asyncio.Semaphore(self.cfg.max_concurrency)
        headers = {"Accept-Encoding": "identity"} | auth_headers(self.cfg)
        timeout = httpx.Timeout(self.cfg.request_timeout_seconds, connect=CONNECT_TIMEOUT_SECONDS, pool=None)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self.cfg.max_concurrency)

        async def one(prompt: Prompt) -> RolloutGroup:
            async with slots:
                group = await self._sample_group(http, prompt, group_size, sampling)
            if on_progress is not None:
                on_progress(group)
            return group

        async with httpx.AsyncClient(headers=headers, timeout=timeout, limits=limits, trust_env=False) as http:
            try:
                async with asyncio.TaskGroup() as tasks:
                    jobs = [tasks.create_task(one(prompt)) for prompt in prompts]
            except BaseExceptionGroup as errors:  # the first failure cancelled the others
                raise errors.exceptions[0] from None
        return [job.result() for job in jobs]

    async def _sample_group(
        self, http: httpx.AsyncClient, prompt: Prompt, group_size: int, sampling: Sampling
    ) -> RolloutGroup:
        """Ask until all G samples are there.  Raises RolloutError when the retries are spent."""
        rollouts: dict[int, Rollout] = {}
        troubles: list[str] = []

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
                    missing = [k for k in range(group_size) if k not in rollouts]
                    await self._fill(http, prompt, missing, rollouts, sampling, troubles)
        except Unusable as error:
            tries = f"{1 + self.cfg.max_retries} requests (rollout.max_retries = {self.cfg.max_retries})"
            raise RolloutError(
                f"prompt {prompt.id!r}: {len(rollouts)} of {group_size} samples after {tries}: {'; '.join(troubles)}"
            ) from error
        return RolloutGroup(prompt=prompt, rollouts=tuple(rollouts[k] for k in range(group_size)))

    async def _fill(
        self,
        http: httpx.AsyncClient,
        prompt: Prompt,
        missing: list[int],
        rollouts: dict[int, Rollout],
        sampling: Sampling,
        troubles: list[str],
    ) -> None:
        """One request for the samples in `missing`; usable ones go into `rollouts`.  Raises Unusable if any is not."""
        server = self._pick()
        server.in_flight += len(missing)
        try:
            samples = await self._request(http, server, prompt, len(missing), sampling)
        except Unusable as error:
            self._avoid(server)
            self.counters.failures[error.reason] += 1
            troubles.append(f"{server.url}: {error}")
            raise
        finally:
            server.in_flight -= len(missing)
        dropped: list[SampleDropped] = []
        for k, sample in zip(missing, samples, strict=True):
            try:  # in a thread: decoding the routes of a long response takes tens of milliseconds
                rollouts[k] = await asyncio.to_thread(self._parse, sample, prompt, k, sampling)
            except SampleDropped as error:
                self.counters.dropped[error.reason] += 1
                dropped.append(error)
        self.counters.samples += len(missing) - len(dropped)
        if dropped:
            self._avoid(server)
            troubles.append(f"{server.url}: {len(dropped)} of {len(missing)} samples dropped, {dropped[0]}")
            raise Unusable("dropped", str(dropped[0]))

    def _parse(self, sample: Any, prompt: Prompt, k: int, sampling: Sampling) -> Rollout:
        return parse_sample(
            sample,
            prompt,
            f"{sampling.id_prefix}{prompt.id}/{k}",
            spec=self.spec,
            want_routes=self.want_routes,
            policy_version=sampling.policy_version,
            max_tokens=sampling.max_tokens,
            drop_gaps=self.drop_gaps,
        )

    def _avoid(self, server: ServerState) -> None:
        server.avoid_until = time.monotonic() + COOLDOWN_SECONDS

    def _pick(self) -> ServerState:
        """The least loaded server, those that failed just now last."""
        now = time.monotonic()
        return min(self.servers, key=lambda server: (max(0.0, server.avoid_until - now), server.in_flight))

    async def _request(
        self, http: httpx.AsyncClient, server: ServerState, prompt: Prompt, num_samples: int, sampling: Sampling
    ) -> list[Any]:
        """One /generate call: the list of its `num_samples` samples.  Raises Unusable or RolloutError."""
        body = request_body(prompt, num_samples, sampling, self.want_routes)
        max_bytes = self._max_body_bytes(prompt, num_samples, sampling)
        self.counters.requests += 1
        try:
            async with asyncio.timeout(self.cfg.request_timeout_seconds):
                status, content = await post(http, server.url, body, max_bytes)
        except TimeoutError as error:
            raise Unusable("timeout", f"no answer within {self.cfg.request_timeout_seconds:g} s") from error
        except httpx.TimeoutException as error:
            raise Unusable("timeout", repr(error)) from error
        except httpx.TransportError as error:
            raise Unusable("connection", repr(error)) from error
        text = content[:500].decode(errors="replace")
        if status in RETRY_STATUS or status >= 500:
            raise Unusable(f"http_{status}", text)
        if status != 200:
            hint = "; check rollout.api_key_env" if status in (401, 403) else ""
            raise RolloutError(f"server {server.url} refused prompt {prompt.id!r} with status {status}: {text}{hint}")
        try:
            answer = await asyncio.to_thread(json.loads, content)
        except ValueError as error:
            raise Unusable("bad_body", f"not JSON ({error}): {text[:80]!r}") from error
        samples = answer if isinstance(answer, list) else [answer]
        if len(samples) != num_samples:
            raise Unusable("bad_body", f"{len(samples)} samples for n = {num_samples}")
        return samples

    def _max_body_bytes(self, prompt: Prompt, num_samples: int, sampling: Sampling) -> int:
        """An upper bound of an honest answer; more than this is not read."""
        tokens = len(prompt.token_ids) + sampling.max_tokens
        route_bytes = self.spec.num_layers * self.spec.top_k * 4 * 4 // 3 + 4 if self.want_routes else 0
        return BODY_SLACK_BYTES + num_samples * tokens * (route_bytes + BODY_BYTES_PER_TOKEN)


def request_body(prompt: Prompt, num_samples: int, sampling: Sampling, want_routes: bool) -> dict[str, Any]:
    """The /generate request.  Everything that shapes the distribution is stated: a server may have other defaults."""
    params = {
        "n": num_samples,
        "temperature": sampling.temperature,
        "max_new_tokens": sampling.max_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        **WHOLE_SOFTMAX,
    }
    return {
        "input_ids": list(prompt.token_ids),
        "sampling_params": params,
        "return_logprob": True,
        "return_routed_experts": want_routes,
    }


async def post(http: httpx.AsyncClient, url: str, body: dict[str, Any], max_bytes: int) -> tuple[int, bytes]:
    """POST to /generate; (status, content).  Raises Unusable for a body above `max_bytes`, httpx.TransportError."""
    content = bytearray()
    async with http.stream("POST", f"{url}/generate", json=body) as response:
        async for chunk in response.aiter_raw():
            content += chunk
            if len(content) > max_bytes:
                raise Unusable("bad_body", f"more than {max_bytes} bytes")
    return response.status_code, bytes(content)
