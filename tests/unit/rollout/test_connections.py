"""Connections to the servers: as many as requests are in flight at the same time, used again, and
none is lost to a failure.
"""

import asyncio
import contextlib
import socket
import threading

import aiohttp
import httpx
import pytest

from megatron_rl.config import RolloutConfig
from megatron_rl.rollout.client import request as request_module
from megatron_rl.rollout.client.request import Body, RetryableError, abort, connections, post
from tests.fake_server import FakeServer, send

TLS = httpx.create_ssl_context(trust_env=False)
REQUEST = {"rid": "r", "input_ids": [[3, 4]], "return_routed_experts": False}


async def ask(http, url, body=REQUEST, idle_seconds=5.0, max_bytes=1 << 20):
    status, content = await post(http, url, Body(body, idle_seconds), max_bytes, idle_seconds)
    return status, bytes(content)


def test_connections_are_used_again_after_answers_failures_and_cancellations():
    opened = []

    async def requests():
        async with connections(RolloutConfig(), TLS) as http:
            for _ in range(3):
                answers = await asyncio.gather(*(ask(http, fake.url) for _ in range(4)))
                assert all(
                    status == 200 and content.startswith(b"[{") for status, content in answers
                )
            assert len(opened) == 4
            fake.script[:] = ["reset@before_headers"] * 4 + ["hang@before_headers"]
            for _ in range(4):
                with contextlib.suppress(aiohttp.ClientError):
                    await ask(http, fake.url)
            left = asyncio.create_task(ask(http, fake.url, idle_seconds=600.0))
            while len(opened) < 4 + 1:
                await asyncio.sleep(0.01)
            left.cancel()
            await asyncio.wait([left])
            fake.script[:] = ["ok"]
            for _ in range(3):
                await asyncio.gather(*(ask(http, fake.url) for _ in range(4)))
        assert len(opened) == 4 + 5  # a connection that failed or was left is not used again

    with FakeServer("ok") as fake:
        accept = fake.http.get_request
        fake.http.get_request = lambda: opened.append(accept()) or opened[-1]
        asyncio.run(requests())


def test_a_server_that_does_not_read_a_request_is_left_after_the_idle_timeout():
    async def request():
        async with connections(RolloutConfig(), TLS) as http:
            with pytest.raises(aiohttp.ServerTimeoutError, match=r"request not read within 0\.2 s"):
                await ask(
                    http, url, REQUEST | {"input_ids": [list(range(2_000_000))]}, idle_seconds=0.2
                )

    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        held = []
        threading.Thread(target=lambda: held.append(listening.accept()), daemon=True).start()
        asyncio.run(request())
        held[0][0].close()


def test_an_answer_is_read_up_to_its_largest_size():
    async def request():
        async with connections(RolloutConfig(), TLS) as http:
            size = len((await ask(http, server.url))[1])
            assert await ask(http, server.url, max_bytes=size) == (200, b"A" * 100_000)
            with pytest.raises(RetryableError, match=f"bad_body: more than {size - 1} bytes"):
                await ask(http, server.url, max_bytes=size - 1)

    with FakeServer("ok") as server:
        server.behave = lambda handler, behaviour, body: send(handler, 200, b"A" * 100_000)
        asyncio.run(request())


def test_a_redirect_is_not_followed():
    """It would send the servers' key to another host."""

    async def request():
        async with connections(RolloutConfig(), TLS) as http:
            return (await ask(http, url))[0], await abort(http, url, "r", 1)

    async def redirect(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        status = b"200 OK" if b"/elsewhere" in head else b"302 Found"
        writer.write(
            b"HTTP/1.1 "
            + status
            + b"\r\nLocation: /elsewhere\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        )
        await writer.drain()
        writer.close()  # from Python 3.12 on the end of the server waits for its connections

    async def both():
        nonlocal url
        server = await asyncio.start_server(redirect, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            return await request()

    url = ""
    assert asyncio.run(both()) == (302, False)


def test_an_abort_that_no_server_answers_is_not_confirmed(monkeypatch):
    monkeypatch.setattr(request_module, "ABORT_SECONDS", 0.05)

    async def aborts():
        async with connections(RolloutConfig(), TLS) as http:
            return [await abort(http, url, "r", 2) for url in urls]

    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        socket.create_server(("127.0.0.1", 0)) as closed,
    ):
        urls = [f"http://127.0.0.1:{each.getsockname()[1]}" for each in (silent, closed)]
        closed.close()
        assert asyncio.run(aborts()) == [False, False]
