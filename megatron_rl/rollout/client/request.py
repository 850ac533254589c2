"""One /generate request to one server: its body, deadlines and answer, and its abort.

A request is a batch of n copies of one prompt, each perhaps with the start of a response.  It has
an id of its own, RID; SGLang then calls the samples RID_0 .. RID_{n-1} and repeats that in each.
(With sampling_params.n it would give them random ids: no abort, and no way to recognise a late or
foreign answer.)  Where copies would cost much, the prompt is prefilled once before, so that all
copies find it in the prefix cache.

Sampling is not seeded per request: SGLang honours sampling_seed only with
--enable-deterministic-inference and would then give all samples of a request the same seed.  The
server's --random-seed is the seed.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import aiohttp
import numpy as np
import orjson
from aiohttp.abc import AbstractStreamWriter

from megatron_rl.config import RolloutConfig
from megatron_rl.config.sglang_settings import KEEPALIVE_SECONDS
from megatron_rl.models.spec import ModelSizes
from megatron_rl.records import Prompt
from megatron_rl.rollout.client.clock import Clock
from megatron_rl.rollout.client.request_trace import UNTRACED, RequestTrace
from megatron_rl.rollout.client.response_json import PIECE_BYTES, Received, parse_body
from megatron_rl.rollout.client.sampling import Sampling
from megatron_rl.rollout.server.sampling_defaults import FULL_SOFTMAX
from megatron_rl.rollout.server.server_info import auth_headers
from megatron_rl.weights.version import version_name

RETRY_STATUS = (408, 425, 429)  # and every 5xx; the other 4xx are permanent
NO_ADAPTER = "LoRA adapter that has never been loaded"
"""Part of SGLang's refusal of a request whose adapter the server does not have."""
BODY_SLACK_BYTES = 1 << 20
BODY_BYTES_PER_TOKEN = 128  # id, [log-prob, id, text] and separators are about 50
BODY_BYTES_PER_KEPT = 12  # an id of a kept set, up to 2**31, and separators
ABORT_SECONDS = 0.9
"""Time for a server to confirm an abort; closing the connection makes SGLang abort by itself, only
later."""
RETURN_SECONDS = 30.0
"""Time for servers to return what an abort cut short, where that is resumed: up to a step's
routes."""
STOP_SECONDS = 5.0
"""RETURN_SECONDS where a signal stops the run, which has checkpoint.grace_seconds in all."""
LATE_FRAC = 0.1
"""Time to return what the abort at a request's deadline cut short, as a share of
rollout.request_timeout_seconds; at most RETURN_SECONDS."""
SHARED_PREFILL_TOKENS = 1024
"""The prompt is prefilled once, before its copies, where that saves at least this many prompt
tokens of computation."""

RETRY_SECONDS, MAX_RETRY_SECONDS = 0.1, 10.0
"""Pause between a request and the next one for the same group or text: doubled with each retry up
to the maximum, and lengthened by up to RETRY_SECONDS at random."""


class RolloutError(RuntimeError):
    """Sampling failed; the message names server, prompt, reason and counts."""


class RetryableError(Exception):
    """A request that failed or came back incomplete and may be tried again; `reason` is a short
    code for counting.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


def retry_pause(retry: int) -> float:
    """Return the seconds before a retry, which counts from 1."""
    # no larger power is needed, and one of a thousand is no float
    doubled = RETRY_SECONDS * 2 ** min(retry - 1, 10)
    # not from the run's own generator, whose state is saved
    return min(doubled, MAX_RETRY_SECONDS) + random.SystemRandom().uniform(0, RETRY_SECONDS)


@asynccontextmanager
async def connections(
    cfg: RolloutConfig, tls: ssl.SSLContext
) -> AsyncIterator[aiohttp.ClientSession]:
    """Open a pool of connections to all servers.  Reading has no deadline here: see `post`."""
    # no limit of connections: an abort must not wait for the requests that it ends
    pool = aiohttp.TCPConnector(limit=0, ssl=tls, keepalive_timeout=KEEPALIVE_SECONDS)
    async with aiohttp.ClientSession(
        connector=pool,
        # no compression: a body is limited and cut as it arrives
        headers={"Accept-Encoding": "identity", "Content-Type": "application/json"}
        | auth_headers(cfg),
        timeout=aiohttp.ClientTimeout(sock_connect=cfg.connect_timeout_seconds),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
    ) as http:
        yield http


class Body(aiohttp.BytesPayload):
    """The JSON of a request.

    Raises SocketTimeoutError if the server does not read it within `seconds`.
    """

    # aiohttp has deadlines for connecting and reading, and none for sending
    def __init__(self, body: dict[str, object], seconds: float) -> None:
        super().__init__(orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY))
        self._seconds = seconds

    async def write_with_length(
        self, writer: AbstractStreamWriter, content_length: int | None
    ) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await super().write_with_length(writer, content_length)
        except TimeoutError as error:
            raise aiohttp.SocketTimeoutError(
                f"request not read within {self._seconds:g} s"
            ) from error


@dataclass(frozen=True)
class GenerateRequest:
    """The content of one /generate request."""

    rid: str
    prompt: Prompt
    prefixes: Sequence[Sequence[int]]
    """Response tokens that each sample continues; () for a new response."""
    sampling: Sampling
    want_routes: bool
    in_place: bool
    """Weights change without a flush of the prefix cache (rollout.weight_update).  The request then
    matches only cache entries of requests with the same version, so that no key or value is older
    than that."""
    by_adapter: bool = False
    """The adapter of the request's version samples the tokens (SampleRules.by_adapter)."""

    @property
    def num_samples(self) -> int:
        return len(self.prefixes)

    def body(self) -> dict[str, object]:
        """Return the JSON body.

        It states everything that shapes the distribution: a server may have other defaults.
        """
        sampling, prompt_ids = self.sampling, self.prompt.token_ids
        params: dict[str, object] = {
            "n": 1,
            "temperature": sampling.temperature,
            "max_new_tokens": sampling.max_tokens,
            "stop_token_ids": list(sampling.stop_token_ids),
            **FULL_SOFTMAX,
        }
        body: dict[str, object] = {
            "rid": self.rid,
            "input_ids": [joined(prompt_ids, prefix) for prefix in self.prefixes],
            "sampling_params": params,
            "return_logprob": True,
            "return_routed_experts": self.want_routes,
        }
        if sampling.truncation is not None:
            params |= sampling.truncation._asdict()
        if sampling.wants_sets:
            body["return_sampling_mask"] = True  # and log-probs over the kept sets
        if any(self.prefixes):  # each sample has its own limit of new tokens
            limits = [sampling.max_tokens - len(prefix) for prefix in self.prefixes]
            body["sampling_params"] = [params | {"max_new_tokens": limit} for limit in limits]
        name = version_name(sampling.policy_version, sampling.run)
        if self.in_place:
            body["extra_key"] = name
        if self.by_adapter:
            body["lora_path"] = name  # the adapter's name; entries of the prefix cache belong to it
        if self.want_routes and sampling.first_row:
            body["routed_experts_start_len"] = sampling.first_row
        return body

    def prefill_body(self) -> dict[str, object] | None:
        """Return the body of the request that computes the prompt before its copies, or None where
        that would save less than SHARED_PREFILL_TOKENS.
        """
        if (self.num_samples - 1) * len(self.prompt.token_ids) < SHARED_PREFILL_TOKENS:
            return None
        # no routes of known rows either: the prompt alone may be shorter than what is known
        # max_tokens 0: the server computes the prompt, keeps it in its cache and samples nothing
        nothing = replace(self.sampling, max_tokens=0, first_row=0, truncation=None)
        prompt_alone = replace(self, rid=f"{self.rid}.prefill", prefixes=[()], sampling=nothing)
        return prompt_alone.body() | {"return_logprob": False}

    def max_body_bytes(self, spec: ModelSizes) -> int:
        """Return an upper bound of the size of a correct answer; more than this is not read."""
        tokens = len(self.prompt.token_ids) + self.sampling.max_tokens
        token_bytes, truncation = BODY_BYTES_PER_TOKEN, self.sampling.truncation
        if self.want_routes:
            token_bytes += spec.num_layers * spec.top_k * 4 * 4 // 3 + 4  # base64 of int32
        if truncation is not None and self.sampling.return_sets:
            token_bytes += truncation.top_k * BODY_BYTES_PER_KEPT
        return BODY_SLACK_BYTES + self.num_samples * tokens * token_bytes


def joined(prompt: Sequence[int], prefix: Sequence[int]) -> list[int] | np.ndarray:
    """Return the tokens of an input: an array of a turn's prompt, which may be long, is written as
    JSON without an object for each token.
    """
    if isinstance(prompt, array):
        return np.concatenate([np.asarray(prompt), np.asarray(prefix, np.int64)])
    return [*prompt, *prefix]


async def request_samples(
    http: aiohttp.ClientSession,
    url: str,
    request: GenerateRequest,
    *,
    cfg: RolloutConfig,
    spec: ModelSizes,
    clock: Clock,
    spans: RequestTrace = UNTRACED,
) -> list[object]:
    """Send a request and return its samples, undecoded, one for each of its prefixes.

    At cfg.request_timeout_seconds the caller aborts the request; this function gives up when no
    answer to the abort came either.  Raises RetryableError, or RolloutError where the server
    refuses.
    """
    max_bytes, idle_seconds = request.max_body_bytes(spec), cfg.idle_timeout_seconds

    async def send(body: dict[str, object]) -> memoryview:
        payload = Body(body, idle_seconds)
        status, content = await post(http, url, payload, max_bytes, idle_seconds, spans)
        check_status(url, request.prompt, status, content)
        return content

    try:
        async with clock.timeout(cfg.request_timeout_seconds + late_seconds(cfg)):
            if (prefill := request.prefill_body()) is not None:
                await send(prefill)
            content = await send(request.body())
    except aiohttp.ServerTimeoutError as error:  # to connect or to send, also a TimeoutError
        raise RetryableError("timeout", repr(error)) from error
    except TimeoutError as error:
        raise RetryableError(
            "timeout", f"no answer within {cfg.request_timeout_seconds:g} s"
        ) from error
    except aiohttp.ClientError as error:
        raise RetryableError("connection", repr(error)) from error
    return await read_samples(content, request.num_samples, spans)


async def read_samples(content: memoryview, num_samples: int, spans: RequestTrace) -> list[object]:
    """Return the samples in an answer.

    Raises RetryableError where it is not a JSON list of `num_samples`.
    """
    try:
        with spans.span("parse", bytes=len(content)):
            if len(content) <= PIECE_BYTES:
                samples = parse_body(content)
            else:  # up to tens of MB: a thread parses it while other answers are read
                samples = await asyncio.to_thread(parse_body, content)
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise RetryableError(
            "bad_body", f"not JSON ({error}): {bytes(content[:80]).decode(errors='replace')!r}"
        ) from error
    if not isinstance(samples, list):
        answer = f"a {type(samples).__name__}"
    elif len(samples) != num_samples:
        answer = f"{len(samples)} samples"
    else:
        return samples
    raise RetryableError("bad_body", f"{answer} for {num_samples} copies of a prompt")


def late_seconds(cfg: RolloutConfig) -> float:
    """Return how long an answer may take after the abort at the request's deadline."""
    return min(RETURN_SECONDS, LATE_FRAC * cfg.request_timeout_seconds)


def check_prompt(prompt: Prompt, vocab_size: int) -> None:
    """Raise ValueError for a prompt without tokens or with a token id outside the vocabulary, which
    kills an SGLang server.
    """
    ids = prompt.token_ids
    if not ids:
        raise ValueError(f"prompt {prompt.id!r} has no tokens")
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise ValueError(
            f"prompt {prompt.id!r} has token id {wrong}, the model's vocabulary has {vocab_size}: "
            "the tokenizer does not belong to this model"
        )


def sample_ids(rid: str, num_samples: int) -> list[str]:
    """Return the names that the server gives to the samples of request `rid`."""
    return [f"{rid}_{index}" for index in range(num_samples)]


async def post(
    http: aiohttp.ClientSession,
    url: str,
    body: Body,
    max_bytes: int,
    idle_seconds: float,
    spans: RequestTrace = UNTRACED,
) -> tuple[int, memoryview]:
    """POST to /generate and return (status, content).

    The caller limits the total time; this function limits the pauses within the answer.  Raises
    RetryableError for a body above `max_bytes` or a pause above `idle_seconds`, and
    aiohttp.ClientError.
    """
    # no redirects: the answer must come from the server whose weights are known
    with spans.span("until first byte"):
        response = await http.post(f"{url}/generate", data=body, allow_redirects=False)
    with spans.span("answer"):
        return await read(response, max_bytes, idle_seconds)


async def read(
    response: aiohttp.ClientResponse, max_bytes: int, idle_seconds: float
) -> tuple[int, memoryview]:
    """Return (status, content) of an answer; see `post`."""
    async with response:
        content = Received(response.headers.get("Content-Length"), max_bytes)
        while not response.content.at_eof():
            try:
                async with asyncio.timeout(idle_seconds):
                    content += await response.content.readany()
            except TimeoutError as error:  # the caller's own deadline comes as a cancellation
                raise RetryableError(
                    "timeout", f"no byte for {idle_seconds:g} s after {len(content)}"
                ) from error
            if len(content) > max_bytes:  # a broken server must not fill the host's memory
                raise RetryableError("bad_body", f"more than {max_bytes} bytes")
        return response.status, content.content()


def check_status(url: str, prompt: Prompt, status: int, content: memoryview) -> None:
    """Raise RetryableError for a status that another try may change, RolloutError for a refusal."""
    text = bytes(content[:500]).decode(errors="replace")
    if status in RETRY_STATUS or status >= 500:
        raise RetryableError(f"http_{status}", text)
    if status == 400 and NO_ADAPTER in text:  # it was started again: the next weight sync loads it
        raise RetryableError("no_adapter", text)
    if status != 200:
        hint = "; check rollout.api_key_env" if status in (401, 403) else ""
        raise RolloutError(
            f"server {url} refused prompt {prompt.id!r} with status {status}: {text}{hint}"
        )


async def abort(http: aiohttp.ClientSession, url: str, rid: str, num_samples: int) -> bool:
    """Abort the samples of `rid` on the server; True if it confirmed all of them within
    ABORT_SECONDS.
    """

    async def confirmed(name: str) -> bool:
        body = Body({"rid": name}, ABORT_SECONDS)
        async with http.post(f"{url}/abort_request", data=body, allow_redirects=False) as response:
            return response.status == 200

    try:
        async with asyncio.timeout(ABORT_SECONDS):
            return all(
                await asyncio.gather(*(confirmed(name) for name in sample_ids(rid, num_samples)))
            )
    except (TimeoutError, aiohttp.ClientError):
        return False
