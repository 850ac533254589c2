"""An HTTP endpoint in front of sessions: any program that uses a client of OpenAI or Anthropic can
be trained on.

    POST /v1/chat/completions, /v1/completions, /v1/responses   Authorization: Bearer KEY
    GET  /v1/models                                             Authorization: Bearer KEY
    POST /v1/messages, /v1/messages/count_tokens                x-api-key: KEY

The key is the episode: unguessable, made when the episode asks for it, and unknown as soon as it
ends.  One server per call of the rollout client, in its event loop, on agent.endpoint_host and a
free port.  It executes nothing: tool calls are returned to the program, which makes them itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import HttpVersion11, web

from megatron_rl.config.sections.rollout import Truncation
from megatron_rl.rollout.agents import completions, messages, responses, text_completions
from megatron_rl.rollout.agents.episode import Access, EpisodeError, Turn
from megatron_rl.rollout.agents.fields import checked
from megatron_rl.rollout.agents.question import ApiError, DoorRequest, Json, answers, num_tokens
from megatron_rl.rollout.agents.session import Session
from megatron_rl.rollout.agents.threads import in_thread

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MESSAGES = "/v1/messages"
MAX_BODY_BYTES = 16 << 20
"""The text of millions of tokens.  Larger bodies of many small values would hold the event loop for
seconds while they are parsed."""
KEY_BYTES = 32
CLOSE_SECONDS = 1.0
"""Limit for open connections to end with the server."""
POLL_SECONDS = 1e-6
"""Above 0, so that the event loop reads from its connections: the client may hang up while its
answer is built."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Open:
    """An episode with a key."""

    session: Session
    temperature: float
    truncation: Truncation | None
    key: str = field(default_factory=lambda: secrets.token_urlsafe(KEY_BYTES), repr=False)
    tasks: set[asyncio.Task[object]] = field(default_factory=set)
    """Its requests that are answered now."""
    answered: responses.Answered = field(default_factory=dict)
    """Its answers that previous_response_id may name."""


class Endpoint:
    """A server that starts with the first episode that opens it; `close` ends it."""

    def __init__(self, host: str) -> None:
        self.host = host
        self._episodes: dict[str, Open] = {}
        self._start: asyncio.Task[tuple[web.AppRunner, str]] | None = None

    async def open(
        self, session: Session, temperature: float, truncation: Truncation | None = None
    ) -> Access:
        """Return the address and a key for `session`, the same for every call."""
        if self._start is None:
            self._start = asyncio.create_task(self._listen())
        # an episode that is cancelled here must not stop the server of the others
        _, url = await asyncio.shield(self._start)
        same = (entry for entry in self._episodes.values() if entry.session is session)
        episode = next(same, None) or Open(session, temperature, truncation)
        self._episodes[episode.key] = episode
        return Access(url, episode.key)

    def end(self, session: Session) -> None:
        """Forget the key of `session`, and cancel its requests."""
        for key, episode in list(self._episodes.items()):
            if episode.session is session:
                del self._episodes[key]
                for task in episode.tasks:
                    task.cancel()

    async def close(self) -> None:
        start, self._start = self._start, None
        if start is not None:
            # where it did not start, the episode that opened it has raised the error
            with contextlib.suppress(EpisodeError):
                runner, _ = await start
                await runner.cleanup()

    async def _listen(self) -> tuple[web.AppRunner, str]:
        app = web.Application(middlewares=[errors_as_json], client_max_size=MAX_BODY_BYTES)
        routes: dict[str, Handler] = {
            "/v1/chat/completions": partial(self._answer, completions.CompletionRequest),
            "/v1/completions": partial(self._answer, text_completions.TextCompletionRequest),
            "/v1/responses": self._respond,
            MESSAGES: partial(self._answer, messages.MessagesRequest),
            f"{MESSAGES}/count_tokens": self._count,
        }
        for path, handler in routes.items():
            app.router.add_post(path, handler, expect_handler=meet_expectation)
        app.router.add_get("/v1/models", self._models)
        # handler_cancellation: where a client hangs up, or sends its request again, the first
        # request must end
        # auto_decompress: aiohttp refuses a wrong encoding before the middleware, in no protocol's
        # form
        runner = web.AppRunner(
            app,
            access_log=None,
            auto_decompress=False,
            handler_cancellation=True,
            shutdown_timeout=CLOSE_SECONDS,
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, self.host, 0).start()
        except OSError as error:
            await runner.cleanup()
            raise EpisodeError(
                f"agent.endpoint_host = {self.host!r}: {error}; must be an address of this machine"
            ) from error
        port = runner.addresses[0][1]
        host = f"[{self.host}]" if ":" in self.host else self.host
        url = f"http://{host}:{port}/v1"
        logger.info("OpenAI-compatible endpoint of the episodes: %s", url)
        return runner, url

    def _episode(self, request: web.Request) -> Open:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = request.headers.get("x-api-key", "")  # of Anthropic's clients
        if key.strip() not in self._episodes:
            raise ApiError(401, "the API key is that of no running episode", code="invalid_api_key")
        return self._episodes[key.strip()]

    async def _models(self, request: web.Request) -> web.Response:
        self._episode(request)
        return web.json_response(completions.models())

    async def _answer(
        self,
        kind: type[
            completions.CompletionRequest
            | text_completions.TextCompletionRequest
            | messages.MessagesRequest
        ],
        request: web.Request,
    ) -> web.StreamResponse:
        """Answer a request of one protocol."""
        episode = self._episode(request)
        asked = checked(kind, await body_of(request), episode.temperature, episode.truncation)
        response, _ = await self._write(episode, asked, request)
        return response

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        """Answer a request of Responses, and keep the answer when the client has read it."""
        episode = self._episode(request)
        kind = responses.ResponsesRequest
        asked = checked(kind, await body_of(request), episode.temperature, episode.truncation)
        asked.continue_from(episode.answered)
        response, turns = await self._write(episode, asked, request)
        asked.keep(episode.answered, turns)
        return response

    async def _write(
        self, episode: Open, asked: DoorRequest, request: web.Request
    ) -> tuple[web.StreamResponse, Sequence[Turn]]:
        """Sample the turns that are asked for, and write them."""
        task = asyncio.current_task()
        assert task is not None
        episode.tasks.add(task)
        try:
            async with answers(episode.session, asked.question) as turns:
                written = await write_answer(request, asked, turns, episode.session.tokenizer)
            return written, turns
        finally:
            episode.tasks.discard(task)

    async def _count(self, request: web.Request) -> web.Response:
        episode = self._episode(request)
        asked = checked(messages.CountRequest, await body_of(request))
        # in a thread: to encode megabytes takes seconds
        number = await in_thread(num_tokens, episode.session, asked.question)
        return web.json_response({"input_tokens": number})


async def body_of(request: web.Request) -> object:
    """Return the JSON of a request.  Raises ApiError where it is none, or compressed."""
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise ApiError(415, f"Content-Encoding = {encoding!r:.40}: send the body as it is")
    try:
        return json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"body: not JSON: {error}") from error


async def write_answer(
    request: web.Request,
    asked: DoorRequest,
    turns: Sequence[Turn],
    tokenizer: PreTrainedTokenizerBase,
) -> web.StreamResponse:
    """Write the answer; return when all of it is written.

    Raises ConnectionResetError where the client hung up before.
    """
    if asked.stream:
        text = "".join(asked.events(turns, tokenizer))
        response = web.Response(
            text=text, content_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
    else:
        response = web.json_response(asked.answer(turns, tokenizer))
    await asyncio.sleep(POLL_SECONDS)
    if request.transport is not None:
        # write_eof waits until nothing is left in its buffer
        request.transport.set_write_buffer_limits(high=0)
    await response.prepare(request)
    await response.write_eof()
    if request.transport is None or request.transport.is_closing():
        raise ConnectionResetError("the client hung up before its answer was written")
    return response


async def meet_expectation(request: web.Request) -> web.Response | None:
    """Ask for the body under `Expect: 100-continue`; refuse other expectations."""
    if request.version < HttpVersion11:
        return None
    value = request.headers["Expect"]
    if value.lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # the answer itself is counted from here
        request.writer.output_size = 0
        return None
    error = ApiError(417, f"Expect = {value!r:.40}: must be 100-continue; remove it")
    return web.json_response(error_form(request)(error), status=error.status)


def error_form(request: web.Request) -> Callable[[ApiError], Json]:
    """Return what writes an error in the form of the request's protocol."""
    return messages.error_body if request.path.startswith(MESSAGES) else completions.error_body


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    in_form = error_form(request)
    try:
        return await handler(request)
    except ApiError as error:
        return web.json_response(in_form(error), status=error.status)
    except ConnectionResetError:  # it is counted, and no client reads an answer
        # nginx's status for a client that hung up
        return web.Response(status=499)
    except web.HTTPException as error:  # unknown path or method, a body that is too large
        refused = ApiError(error.status, f"{request.method} {request.path}: {error.reason}")
        return web.json_response(in_form(refused), status=error.status)
