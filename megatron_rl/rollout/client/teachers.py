"""Scoring by teachers: SGLang servers that return the log-probs of tokens that the model sampled.

A sequence is one request, which asks for nothing new: the server computes the sequence once and
returns the log-prob of every token after the prompt, at temperature 1 whatever the request says.
The answer repeats request id and token ids, and both are compared: the answer to another request or
text is never used.  Deadlines, limits of bodies and circuits are those of sampling ([rollout]).
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import aiohttp
import httpx
import numpy as np

from megatron_rl.config import RolloutConfig
from megatron_rl.config.sections import Teacher
from megatron_rl.records import Rollout
from megatron_rl.rollout.client.counters import TeacherCounters, meta_info
from megatron_rl.rollout.client.group_sampler import MAX_RETRY_SECONDS, RETRY_SECONDS
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
)
from megatron_rl.rollout.client.response_json import PIECE_BYTES, parse_body
from megatron_rl.rollout.group import Group

ROUNDING = 1e-3
"""A log-prob may be above 0 by the rounding of a server, and no further."""


@dataclass(frozen=True)
class ScoreRequest:
    """The request for the log-probs of one sequence's tokens after its prompt."""

    rid: str
    tokens: Sequence[int]
    prompt_length: int
    vocab_size: int

    def body(self) -> dict[str, object]:
        """Return the JSON body."""
        return {
            "rid": self.rid,
            "input_ids": list(self.tokens),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            # the first entry, of the last token of the prompt, has no log-prob
            "logprob_start_len": self.prompt_length - 1,
        }

    def logprobs(self, answer: object) -> np.ndarray:
        """Return the log-probs of the tokens after the prompt, float32 [S - prompt], from an
        answer.

        Raises RetryableError for an answer to another request or text, with another number of
        tokens, or with a value that is no log-prob.
        """
        meta = meta_info(answer)
        if meta.get("id") != self.rid:
            raise RetryableError("bad_body", f"the answer to {meta.get('id')!r}, not {self.rid!r}")
        entries, expected = meta.get("input_token_logprobs"), self.tokens[self.prompt_length - 1 :]
        if not isinstance(entries, list) or not all(is_entry(entry) for entry in entries):
            raise RetryableError("bad_body", "input_token_logprobs is no list of [log-prob, id]")
        if len(entries) != len(expected):
            raise RetryableError(
                "wrong_count", f"log-probs of {len(entries)} tokens for {len(expected)}"
            )
        # SGLang 0.5.21 names the last id of the vocabulary 0, as it does placeholders of images
        # (logprob_result_processor.py); the log-prob is that of the token
        for place, (entry, token) in enumerate(zip(entries, expected, strict=True)):
            if entry[1] != token and not (entry[1] == 0 and token >= self.vocab_size - 1):
                raise RetryableError(
                    "other_text", f"token {place} after the prompt is {entry[1]}, not {token}"
                )
        # None, as JSON has no NaN, becomes NaN; the first entry has no log-prob
        values = np.array([entry[0] for entry in entries[1:]], np.float32)
        wrong = np.flatnonzero(~(np.isfinite(values) & (values <= ROUNDING)))
        if len(wrong):
            value = entries[wrong[0] + 1][0]
            raise RetryableError(
                "not_logprob", f"the log-prob of token {wrong[0] + 1} after the prompt is {value}"
            )
        return values


def is_entry(entry: object) -> bool:
    """Return True for [log-prob or None, token id, ...]."""
    return (
        isinstance(entry, list)
        and len(entry) >= 2
        and (entry[0] is None or type(entry[0]) in (int, float))
        and type(entry[1]) is int
    )


class TeacherClient:
    """The servers of one teacher.

    `counters` and the servers' circuits live as long as the object.
    """

    def __init__(
        self, name: str, teacher: Teacher, rollout: RolloutConfig, vocab_size: int
    ) -> None:
        self.name, self.vocab_size = name, vocab_size
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
        """Return the episode with the teacher's log-probs of all its sequences.

        Raises RolloutError when a server refuses a request (4xx), or when a sequence has no
        log-probs after 1 + rollout.max_retries requests.
        """
        logprobs = [await self._score_sequence(sequence) for sequence in rollout.sequences]
        return rollout.with_teacher(logprobs)

    async def _score_sequence(self, sequence: Rollout) -> np.ndarray:
        """Return the log-probs of the sampled tokens, float32 [R]."""
        troubles: list[tuple[str, str]] = []
        tries = 1 + self.cfg.max_retries
        async with self._slots:
            for attempt in range(tries):
                if attempt:
                    self.counters.retries += 1
                    pause = min(RETRY_SECONDS * 2 ** (attempt - 1), MAX_RETRY_SECONDS)
                    await asyncio.sleep(pause + random.SystemRandom().uniform(0, RETRY_SECONDS))
                server = self.balancer.pick([url for url, _ in troubles])
                try:
                    logprobs = await self._request(server, sequence)
                except RetryableError as error:
                    troubles.append((server.url, str(error)))
                    self.counters.failures[error.reason] += 1
                    opened = self.balancer.failed(server, str(error))
                    self.counters.circuits_opened += opened
                    continue
                self.balancer.succeeded(server)
                return logprobs[sequence.sampled - sequence.prompt_length]
        raise RolloutError(
            f"teacher {self.name} did not score rollout {sequence.id} in {tries} requests"
            f" (rollout.max_retries = {self.cfg.max_retries}), and no token is trained on without"
            f" its teacher: {'; '.join(f'{url}: {what}' for url, what in troubles)}"
        )

    async def _request(self, server: ServerState, sequence: Rollout) -> np.ndarray:
        """Return the log-probs of all tokens after the prompt.  Raises RetryableError, and
        RolloutError where the server refuses.
        """
        rid = f"{self._name}.{next(self._numbers)}"
        request = ScoreRequest(
            rid, sequence.tokens.tolist(), sequence.prompt_length, self.vocab_size
        )
        num_tokens, idle = len(request.tokens), self.cfg.idle_timeout_seconds
        most_bytes = BODY_SLACK_BYTES + num_tokens * BODY_BYTES_PER_TOKEN
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
            return request.logprobs(parsed(content))
        # a long sequence takes milliseconds, in which other answers are read
        return await asyncio.to_thread(lambda: request.logprobs(parsed(content)))


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
        self, teachers: Mapping[str, Teacher], rollout: RolloutConfig, vocab_size: int
    ) -> None:
        self.clients = {
            name: TeacherClient(name, teacher, rollout, vocab_size)
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
