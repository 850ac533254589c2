"""Scoring by teachers: SGLang servers that return the log-probs of tokens that the model sampled.

A sequence is one request (score_request.py).  Deadlines, limits of bodies and circuits are those of
sampling ([rollout]).
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import httpx

from megatron_rl.config import RolloutConfig
from megatron_rl.config.sections import Teacher
from megatron_rl.records import Rollout
from megatron_rl.records.teacher_scores import TeacherScores
from megatron_rl.rollout.client.counters import TeacherCounters
from megatron_rl.rollout.client.load_balancer import LoadBalancer, ServerState
from megatron_rl.rollout.client.request import (
    BODY_BYTES_PER_TOKEN,
    BODY_SLACK_BYTES,
    RETRY_STATUS,
    Body,
    RetryableError,
    RolloutError,
    connections,
    post,
    retry_pause,
)
from megatron_rl.rollout.client.response_json import PIECE_BYTES, parse_body
from megatron_rl.rollout.client.score_request import TOP_BYTES, ScoreRequest
from megatron_rl.rollout.group import Group


class TeacherClient:
    """The servers of one teacher.

    `counters` and the servers' circuits live as long as the object.
    """

    def __init__(
        self,
        name: str,
        teacher: Teacher,
        rollout: RolloutConfig,
        vocab_size: int,
        top_k: int = 0,
    ) -> None:
        """top_k: loss.teacher_top_k."""
        self.name, self.vocab_size, self.top_k = name, vocab_size, top_k
        self.cfg = rollout.model_copy(
            update={"urls": teacher.urls, "api_key_env": teacher.api_key_env}
        )
        self.balancer, self.counters = LoadBalancer(teacher.urls), TeacherCounters()
        self._tls = httpx.create_ssl_context(trust_env=False)
        self._name, self._numbers = uuid.uuid4().hex[:12], itertools.count(1)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Keep connections open inside the context."""
        async with connections(self.cfg, self._tls) as self._http:
            self._slots = asyncio.Semaphore(self.cfg.max_concurrency)
            yield

    async def score(self, rollout: Rollout) -> Rollout:
        """Return the episode with the teacher's numbers of all its sequences.

        Raises RolloutError when a server refuses a request (4xx), or when a sequence has no
        log-probs after 1 + rollout.max_retries requests.
        """
        scores = [await self._score_sequence(sequence) for sequence in rollout.sequences]
        return rollout.with_teacher(scores)

    async def _score_sequence(self, sequence: Rollout) -> TeacherScores:
        troubles: list[tuple[str, str]] = []
        tries = 1 + self.cfg.max_retries
        async with self._slots:
            for attempt in range(tries):
                if attempt:
                    self.counters.retries += 1
                    await asyncio.sleep(retry_pause(attempt))
                server = self.balancer.pick([url for url, _ in troubles])
                try:
                    scores = await self._request(server, sequence)
                except RetryableError as error:
                    troubles.append((server.url, str(error)))
                    self.counters.failures[error.reason] += 1
                    opened = self.balancer.failed(server, str(error))
                    self.counters.circuits_opened += opened
                    continue
                self.balancer.succeeded(server)
                return scores
        raise RolloutError(
            f"teacher {self.name} did not score rollout {sequence.id} in {tries} requests"
            f" (rollout.max_retries = {self.cfg.max_retries}), and no token is trained on without"
            f" its teacher: {'; '.join(f'{url}: {what}' for url, what in troubles)}"
        )

    async def _request(self, server: ServerState, sequence: Rollout) -> TeacherScores:
        """Return the numbers of the sampled tokens.  Raises RetryableError, and RolloutError where
        the server refuses.
        """
        rid = f"{self._name}.{next(self._numbers)}"
        request = ScoreRequest(
            rid, sequence.tokens.tolist(), sequence.prompt_length, self.vocab_size, self.top_k
        )
        sampled = sequence.sampled - sequence.prompt_length
        num_tokens, idle = len(request.tokens), self.cfg.idle_timeout_seconds
        token_bytes = BODY_BYTES_PER_TOKEN + self.top_k * TOP_BYTES
        most_bytes = BODY_SLACK_BYTES + num_tokens * token_bytes
        server.tokens += num_tokens
        server.requests += 1
        self.counters.requests += 1
        started = time.monotonic()
        try:
            async with asyncio.timeout(self.cfg.request_timeout_seconds):
                body = Body(request.body(), idle)
                status, content = await post(self._http, server.url, body, most_bytes, idle)
        except TimeoutError as error:  # also to connect or to send; SGLang aborts the request
            raise RetryableError(
                "timeout", f"no answer within {self.cfg.request_timeout_seconds:g} s ({error!r})"
            ) from error
        except aiohttp.ClientError as error:
            raise RetryableError("connection", repr(error)) from error
        finally:
            server.tokens -= num_tokens
            server.requests -= 1
        check_teacher_status(self.name, server.url, status, content)
        self.counters.seconds.append(time.monotonic() - started)
        if len(content) <= PIECE_BYTES:
            return request.scores(parsed(content), sampled)
        # a long sequence takes milliseconds, in which other answers are read
        return await asyncio.to_thread(lambda: request.scores(parsed(content), sampled))


def parsed(content: memoryview) -> object:
    """Return the JSON of an answer.  Raises RetryableError where it is none."""
    try:
        return parse_body(content)
    except (ValueError, RecursionError) as error:
        text = bytes(content[:80]).decode(errors="replace")
        raise RetryableError("bad_body", f"not JSON ({error}): {text!r}") from error


def check_teacher_status(name: str, url: str, status: int, content: memoryview) -> None:
    """Raise RetryableError for a status that another try may change, RolloutError for a refusal."""
    text = bytes(content[:500]).decode(errors="replace")
    if status in RETRY_STATUS or status >= 500:
        raise RetryableError(f"http_{status}", text)
    if status != 200:
        hint = f"; check teachers.{name}.api_key_env" if status in (401, 403) else ""
        raise RolloutError(f"teacher {name}: {url} refused with status {status}: {text}{hint}")


class Teachers:
    """The teachers of a run, as the client of one replica uses them."""

    def __init__(
        self,
        teachers: Mapping[str, Teacher],
        rollout: RolloutConfig,
        vocab_size: int,
        top_k: int = 0,
    ) -> None:
        """top_k: loss.teacher_top_k."""
        self.clients = {
            name: TeacherClient(name, teacher, rollout, vocab_size, top_k)
            for name, teacher in teachers.items()
        }

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Keep connections to all servers open inside the context."""
        async with AsyncExitStack() as stack:
            for client in self.clients.values():
                await stack.enter_async_context(client.serving())
            yield

    async def score(self, group: Group) -> None:
        """Score the responses of a sampled group that its teacher has not scored, in place.

        A response that was dropped meanwhile, as it became too old, is not put back.  Raises what
        TeacherClient.score raises.
        """
        client = self.clients[group.teacher]

        async def score(index: int, rollout: Rollout) -> None:
            taught = await client.score(rollout)
            if group.rollouts.get(index) is rollout:
                group.rollouts[index] = taught

        waiting = [item for item in group.rollouts.items() if not item[1].is_taught]
        tasks = [asyncio.create_task(score(*item)) for item in waiting]
        try:
            await asyncio.gather(*tasks)
        finally:  # the first failure, or the end of the call, ends the other requests
            for task in tasks:
                task.cancel()

    def totals(self) -> dict[str, float]:
        """Return metric -> count since the start, over all teachers."""
        counters = (client.counters for client in self.clients.values())
        return sum(counters, TeacherCounters()).totals()

    def take_seconds(self) -> list[float]:
        """Return the durations of the requests that were answered since the last call."""
        taken = (client.counters.take_seconds() for client in self.clients.values())
        return [seconds for part in taken for seconds in part]

    def waiting_for(self) -> str:
        """Return the servers that have not answered yet, "" for none."""
        texts = [client.balancer.waiting_for() for client in self.clients.values()]
        return ", ".join(filter(None, texts))
