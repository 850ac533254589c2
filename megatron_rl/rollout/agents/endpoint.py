"""An OpenAI-compatible HTTP endpoint in front of sessions: any program that uses an OpenAI client
can be trained on.

    POST /v1/chat/completions, GET /v1/models; Authorization: Bearer KEY

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
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from aiohttp import web

from megatron_rl.config.sections.rollout import Truncation
from megatron_rl.rollout.agents.completions import (
    ApiError,
    CompletionRequest,
    Json,
    chunks,
    completion,
    models,
    read_request,
)
from megatron_rl.rollout.agents.episode import (
    Access,
    ContextFull,
    EpisodeError,
    EpisodeStopped,
    Turn,
)
from megatron_rl.rollout.agents.session import Session
from megatron_rl.rollout.agents.tools import Tools

MAX_BODY_BYTES = 64 << 20
KEY_BYTES = 32
CLOSE_SECONDS = 1.0
"""Limit for open connections to end with the server."""
POLL_SECONDS = 1e-6
"""Above 0, so that the event loop reads from its connections: the client may hang up while its
answer is built."""

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
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        # handler_cancellation: where a client hangs up, or sends its request again, the first
        # request must end
        runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=CLOSE_SECONDS
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
        if scheme.lower() != "bearer" or key.strip() not in self._episodes:
            raise ApiError(401, "the API key is that of no running episode", code="invalid_api_key")
        return self._episodes[key.strip()]

    async def _models(self, request: web.Request) -> web.Response:
        self._episode(request)
        return web.json_response(models())

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        episode = self._episode(request)
        try:
            content = json.loads(await request.read())
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"body: not JSON: {error}") from error
        asked = read_request(content, episode.temperature, episode.truncation)
        task = asyncio.current_task()
        assert task is not None
        episode.tasks.add(task)
        try:
            async with answers(episode.session, asked) as turns:
                tokens = [
                    sampled_logprobs(episode.session, turn) if asked.logprobs else []
                    for turn in turns
                ]
                return await write_answer(request, asked, turns, tokens)
        finally:
            episode.tasks.discard(task)


@contextlib.asynccontextmanager
async def answers(session: Session, asked: CompletionRequest) -> AsyncIterator[list[Turn]]:
    """Sample `asked.n` turns side by side and yield them; they are part of the episode where the
    block, which writes them, ends without an error.  Raises ApiError.
    """
    try:
        tools = Tools(() if asked.tool_choice == "none" else asked.tools, asked.must_call)
        stops = [stop_token(session, stop) for stop in asked.stops]
        sample, reading = session.conversations.sample, session.conversations.reading
        with reading() as read:
            tasks = [
                asyncio.create_task(
                    sample(
                        read, asked.messages, tools, max_tokens=asked.limit, stop_token_ids=stops
                    )
                )
                for _ in range(asked.n)
            ]
            try:
                turns = await asyncio.gather(*tasks)
            finally:
                # where one failed, the others must not sample on
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            yield turns
    except ContextFull as error:
        raise ApiError(400, str(error), code="context_length_exceeded", param="messages") from error
    except EpisodeStopped as error:  # 410: clients do not try again
        raise ApiError(
            410, "sampling has ended, and with it this episode", code="episode_ended"
        ) from error
    except (ValueError, EpisodeError) as error:
        raise ApiError(
            400, str(error), param="tools" if str(error).startswith("tools") else "messages"
        ) from error


async def write_answer(
    request: web.Request,
    asked: CompletionRequest,
    turns: Sequence[Turn],
    tokens: Sequence[list[Json]],
) -> web.StreamResponse:
    """Write the answer; return when all of it is written.

    Raises ConnectionResetError where the client hung up before.
    """
    if asked.stream:
        events = [*map(json.dumps, chunks(asked, turns, tokens)), "[DONE]"]
        text = "".join(f"data: {event}\n\n" for event in events)
        response = web.Response(
            text=text, content_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
    else:
        response = web.json_response(completion(asked, turns, tokens))
    await asyncio.sleep(POLL_SECONDS)
    if request.transport is not None:
        # write_eof waits until nothing is left in its buffer
        request.transport.set_write_buffer_limits(high=0)
    await response.prepare(request)
    await response.write_eof()
    if request.transport is None or request.transport.is_closing():
        raise ConnectionResetError("the client hung up before its answer was written")
    return response


def stop_token(session: Session, stop: str) -> int:
    ids = session.tokenizer.encode(stop, add_special_tokens=False)
    if len(ids) != 1:
        raise ApiError(
            400,
            f"stop = {stop!r}: is {len(ids)} tokens, must be one: a turn ends at a token; use the"
            " end of a line, a special token, or max_tokens",
            param="stop",
        )
    return int(ids[0])


def sampled_logprobs(session: Session, turn: Turn) -> list[Json]:
    """Return the log-probs with which the tokens were sampled, in OpenAI's format."""
    texts: Sequence[str] = session.tokenizer.convert_ids_to_tokens(list(turn.token_ids))
    return [
        {"token": text, "logprob": value, "bytes": None, "top_logprobs": []}
        for text, value in zip(texts, turn.logprobs, strict=True)
    ]


@web.middleware
async def errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        return web.json_response(error.body, status=error.status)
    except ConnectionResetError:  # it is counted, and no client reads an answer
        # nginx's status for a client that hung up
        return web.Response(status=499)
    except web.HTTPException as error:  # unknown path or method, a body that is too large
        refused = ApiError(error.status, f"{request.method} {request.path}: {error.reason}")
        return web.json_response(refused.body, status=error.status)
