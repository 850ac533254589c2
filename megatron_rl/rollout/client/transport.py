"""Connections for a thousand requests at a time.

httpcore's pool looks at every connection for every request and for every answer, so its time grows with the square of their
number: with 1,024 requests in flight it is most of the client's.  Here a request has a pool of its own while it is in flight, and
the next one takes over that pool with its open connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import cast

import httpx


class PoolPerRequest(httpx.AsyncBaseTransport):
    """Transports of `make`, as many as there were requests at the same time; the one used last is used first."""

    def __init__(self, make: Callable[[], httpx.AsyncBaseTransport]) -> None:
        self._make = make
        self._all: list[httpx.AsyncBaseTransport] = []
        self._idle: list[httpx.AsyncBaseTransport] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if not self._idle:
            self._idle.append(self._make())
            self._all.append(self._idle[-1])
        transport = self._idle.pop()
        try:
            response = await transport.handle_async_request(request)
        except BaseException:
            self._idle.append(transport)
            raise
        stream = cast("httpx.AsyncByteStream", response.stream)
        response.stream = Answer(stream, lambda: self._idle.append(transport))
        return response

    async def aclose(self) -> None:
        await asyncio.gather(*(transport.aclose() for transport in self._all))  # other tasks run between them


class Answer(httpx.AsyncByteStream):
    """`stream`, with a call of `closed` when it ends."""

    def __init__(self, stream: httpx.AsyncByteStream, closed: Callable[[], None]) -> None:
        self._stream, self._closed = stream, closed
        self._is_open = True

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            yield part

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        finally:
            if self._is_open:
                self._is_open = False
                self._closed()
