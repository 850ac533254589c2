"""One /generate request to one server: its body, deadlines and answer; and the abort of one that is
not needed any more.

A request is a batch of n copies of one prompt, each perhaps with the start of a response, with an
id of its own, RID; SGLang then calls the samples RID_0 .. RID_{n-1} and repeats that in each.
(With sampling_params.n it would give them random
ids: no abort, and no way to recognise a late or foreign answer.)  Where copies would cost much, the
prompt is prefilled once before, so that all copies find it in the prefix cache.

Sampling is not seeded per request: SGLang honours sampling_seed only with
--enable-deterministic-inference and would then give all samples of a request the same seed.  The
server's --random-seed is the seed.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import NotRequired, TypedDict

import aiohttp
import orjson
from aiohttp.abc import AbstractStreamWriter

from megatron_rl.config import RolloutConfig
from megatron_rl.config.sections.rollout import Truncation
from megatron_rl.models.spec import ModelSizes
from megatron_rl.records import Prompt
from megatron_rl.rollout.client.clock import Clock
from megatron_rl.rollout.client.request_trace import UNTRACED, RequestTrace
from megatron_rl.rollout.client.response_json import PIECE_BYTES, Received, parse_body
from megatron_rl.rollout.server.sampling_defaults import FULL_SOFTMAX
from megatron_rl.rollout.server.server_info import auth_headers
from megatron_rl.weights.version import version_name

RETRY_STATUS = (408, 425, 429)  # and every 5xx; the other 4xx are permanent
BODY_SLACK_BYTES = 1 << 20
BODY_BYTES_PER_TOKEN = 128  # id, [log-prob, id, text] and separators are about 50
BODY_BYTES_PER_KEPT = 12  # an id of a kept set, up to 2**31, and separators
ABORT_SECONDS = 0.9
"""How long a server may take to confirm an abort; closing the connection makes SGLang abort by
itself, only later.
"""
RETURN_SECONDS = 30.0
"""How long servers may take to return what an abort cut short, where that is resumed: up to a
step's routes.
"""
STOP_SECONDS = 5.0
"""The same where a signal stops the run, which has checkpoint.grace_seconds in all."""
LATE_FRAC = 0.1
"""The same after rollout.request_timeout_seconds, as a share of it, where that is less than
RETURN_SECONDS.
"""
SHARED_PREFILL_TOKENS = 1024
"""From this many prompt tokens that copies would compute again, the prompt is prefilled once
before.
"""


class RolloutError(RuntimeError):
    """Sampling failed; the message names server, prompt, reason and counts."""


class RetryableError(Exception):
    """A request that failed or came back incomplete and may be tried again; `reason` is a short
    code for counting.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class SamplingSettings(TypedDict):
    """The fields of Sampling beside the weights' version.  temperature 0 is greedy."""

    temperature: float
    max_tokens: int
    stop_token_ids: Sequence[int]
    id_prefix: NotRequired[str]
    single_turn: NotRequired[bool]
    truncation: NotRequired[Truncation | None]


@dataclass(frozen=True)
class Sampling:
    """What all requests of one call share.

    policy_version: of the weights that the servers have; they sample every token, unless newer ones
    come meanwhile.
    run: that pushed them (weights/version.py).
    single_turn: without agent.function.  first_row: routes of the rows before it are known, and not
    requested (0: all are).
    truncation: sample from kept sets, and return them (for training; parity check and evaluation do
    not).
    """

    temperature: float
    max_tokens: int
    stop_token_ids: Sequence[int]
    policy_version: int
    run: str = ""
    id_prefix: str = ""
    single_turn: bool = False
    first_row: int = 0
    truncation: Truncation | None = None


KEEPALIVE_SECONDS = 4.0
"""For how long a connection without a request stays open; SGLang closes its end after 5 s, perhaps
as a request arrives.
"""


@asynccontextmanager
async def connections(
    cfg: RolloutConfig, tls: ssl.SSLContext
) -> AsyncIterator[aiohttp.ClientSession]:
    """A pool of connections to all servers.  Reading has no deadline here: see `post`."""
    # no limit of connections: an abort must not wait for the requests that it ends
    pool = aiohttp.TCPConnector(limit=0, ssl=tls, keepalive_timeout=KEEPALIVE_SECONDS)
    async with aiohttp.ClientSession(
        connector=pool,
        headers={"Accept-Encoding": "identity", "Content-Type": "application/json"}
        | auth_headers(cfg),
        timeout=aiohttp.ClientTimeout(sock_connect=cfg.connect_timeout_seconds),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
    ) as http:
        yield http


class Body(aiohttp.BytesPayload):
    """The JSON of a request.

    Raises SocketTimeoutError where the server does not read it in `seconds`.
    """

    def __init__(self, body: dict[str, object], seconds: float) -> None:
        super().__init__(orjson.dumps(body))
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


async def request_samples(
    http: aiohttp.ClientSession,
    url: str,
    rid: str,
    prompt: Prompt,
    prefixes: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    cfg: RolloutConfig,
    spec: ModelSizes,
    want_routes: bool,
    clock: Clock,
    spans: RequestTrace = UNTRACED,
) -> list[object]:
    """One sample, undecoded, for each of `prefixes`: the response tokens that it continues, none
    for a new response.

    At cfg.request_timeout_seconds the caller aborts the request; here it ends when no answer to
    that came either. Raises RetryableError, or RolloutError where the server refuses.
    """
    num_samples, in_place = len(prefixes), cfg.weight_update == "in_place"
    body = Body(
        request_body(rid, prompt, prefixes, sampling, want_routes, in_place),
        cfg.idle_timeout_seconds,
    )
    max_bytes = max_body_bytes(prompt, num_samples, sampling, spec, want_routes)
    try:
        async with clock.timeout(cfg.request_timeout_seconds + late_seconds(cfg)):
            if (num_samples - 1) * len(prompt.token_ids) >= SHARED_PREFILL_TOKENS:
                nothing = replace(sampling, max_tokens=0, first_row=0, truncation=None)
                prefill = request_body(
                    f"{rid}.prefill", prompt, [()], nothing, want_routes, in_place
                )
                prefill["return_logprob"] = False
                start = Body(prefill, cfg.idle_timeout_seconds)
                answer = await post(http, url, start, max_bytes, cfg.idle_timeout_seconds, spans)
                check_status(url, prompt, *answer)
            status, content = await post(
                http, url, body, max_bytes, cfg.idle_timeout_seconds, spans
            )
    except aiohttp.ServerTimeoutError as error:  # to connect or to send, also a TimeoutError
        raise RetryableError("timeout", repr(error)) from error
    except TimeoutError as error:
        raise RetryableError(
            "timeout", f"no answer within {cfg.request_timeout_seconds:g} s"
        ) from error
    except aiohttp.ClientError as error:
        raise RetryableError("connection", repr(error)) from error
    check_status(url, prompt, status, content)
    try:
        with spans.span("parse", bytes=len(content)):
            if len(content) <= PIECE_BYTES:
                samples = parse_body(content)
            else:  # up to tens of MB: other answers are read meanwhile
                samples = await asyncio.to_thread(parse_body, content)
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise RetryableError(
            "bad_body", f"not JSON ({error}): {bytes(content[:80]).decode(errors='replace')!r}"
        ) from error
    if not isinstance(samples, list) or len(samples) != num_samples:
        found = (
            f"{len(samples)} samples"
            if isinstance(samples, list)
            else f"a {type(samples).__name__}"
        )
        raise RetryableError("bad_body", f"{found} for {num_samples} copies of a prompt")
    return samples


def late_seconds(cfg: RolloutConfig) -> float:
    """How long an answer may take after the abort at the request's deadline."""
    return min(RETURN_SECONDS, LATE_FRAC * cfg.request_timeout_seconds)


def check_prompt(prompt: Prompt, vocab_size: int) -> None:
    """Raise ValueError for a prompt without tokens or with one outside the vocabulary: such an id
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


def request_body(
    rid: str,
    prompt: Prompt,
    prefixes: Sequence[Sequence[int]],
    sampling: Sampling,
    want_routes: bool,
    in_place: bool,
) -> dict[str, object]:
    """The /generate request.  Everything that shapes the distribution is stated: a server may have
    other defaults.

    in_place: weights change without a flush of the prefix cache (rollout.weight_update); of its
    entries the request finds those of requests with the same version, so that no key or value is
    older than that.
    """
    params: dict[str, object] = {
        "n": 1,
        "temperature": sampling.temperature,
        "max_new_tokens": sampling.max_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        **FULL_SOFTMAX,
    }
    if sampling.truncation is not None:
        params |= sampling.truncation._asdict()
    limits = [sampling.max_tokens - len(prefix) for prefix in prefixes]  # of what is still to come
    return {
        "rid": rid,
        "input_ids": [[*prompt.token_ids, *prefix] for prefix in prefixes],
        "sampling_params": params
        if not any(prefixes)
        else [params | {"max_new_tokens": limit} for limit in limits],
        "return_logprob": True,
        "return_routed_experts": want_routes,
        **(
            {"extra_key": version_name(sampling.policy_version, sampling.run)} if in_place else {}
        ),  # else caches are flushed
        **(
            {"routed_experts_start_len": sampling.first_row}
            if want_routes and sampling.first_row
            else {}
        ),
        # with log-probs over the kept sets
        **({} if sampling.truncation is None else {"return_sampling_mask": True}),
    }


def sample_ids(rid: str, num_samples: int) -> list[str]:
    """What the server calls the samples of request `rid`."""
    return [f"{rid}_{index}" for index in range(num_samples)]


async def post(
    http: aiohttp.ClientSession,
    url: str,
    body: Body,
    max_bytes: int,
    idle_seconds: float,
    spans: RequestTrace = UNTRACED,
) -> tuple[int, memoryview]:
    """POST to /generate; (status, content).  The caller bounds the total time; here, the pauses
    within the answer.

    Raises RetryableError for a body above `max_bytes` or a pause above `idle_seconds`,
    aiohttp.ClientError.
    """
    with spans.span("until first byte"):
        response = await http.post(f"{url}/generate", data=body, allow_redirects=False)
    with spans.span("answer"):
        return await read(response, max_bytes, idle_seconds)


async def read(
    response: aiohttp.ClientResponse, max_bytes: int, idle_seconds: float
) -> tuple[int, memoryview]:
    """(status, content): see `post`."""
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
    if status != 200:
        hint = "; check rollout.api_key_env" if status in (401, 403) else ""
        raise RolloutError(
            f"server {url} refused prompt {prompt.id!r} with status {status}: {text}{hint}"
        )


def max_body_bytes(
    prompt: Prompt, num_samples: int, sampling: Sampling, spec: ModelSizes, want_routes: bool
) -> int:
    """An upper bound of a correct answer; more than this is not read."""
    tokens = len(prompt.token_ids) + sampling.max_tokens
    route_bytes = spec.num_layers * spec.top_k * 4 * 4 // 3 + 4 if want_routes else 0
    mask_bytes = (
        0 if sampling.truncation is None else sampling.truncation.top_k * BODY_BYTES_PER_KEPT
    )
    return BODY_SLACK_BYTES + num_samples * tokens * (
        route_bytes + mask_bytes + BODY_BYTES_PER_TOKEN
    )


async def abort(http: aiohttp.ClientSession, url: str, rid: str, num_samples: int) -> bool:
    """Abort the samples of `rid` on the server; whether it confirmed all of them in ABORT_SECONDS."""

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
