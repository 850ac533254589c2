"""Requests that no client library sends: each is refused in the form of its protocol or closed, and
an episode beside it is served in the meantime.
"""

import asyncio
import json
import time

import httpx
import pytest

from tests.conversations.fuzz import PATHS, fuzz
from tests.fake_server import FakeServer
from tests.unit.rollout.test_endpoint import (
    USER,
    chat_sample,
    check_every_token_once,
    sample,
    spans,
)

LONGEST_WAIT = 2.0
"""Seconds that a request beside these may take; it takes milliseconds."""


def test_broken_requests_are_refused_in_form_and_nothing_of_them_is_learned_from():
    counts, wrong = fuzz(100, seed=0)
    assert not wrong, wrong[:5]
    for protocol in PATHS:
        assert counts[f"{protocol}: 200"] >= 5 and counts[f"{protocol}: 400"] >= 30


async def stops_at_half_a_character(session, prompt):
    access = await session.open_endpoint()
    headers = {"Authorization": f"Bearer {access.api_key}", "Content-Type": "application/json"}
    bodies = {
        "chat/completions": {"messages": [USER], "stop": "\ud800"},
        "completions": {"prompt": "a", "stop": ["a", "\udc00"]},
        "messages": {"messages": [USER], "max_tokens": 9, "stop_sequences": ["\ud800"]},
    }
    async with httpx.AsyncClient(headers=headers) as http:
        for path, body in bodies.items():
            content = json.dumps({"model": "m", **body})
            answer = await http.post(f"{access.base_url}/{path}", content=content)
            assert answer.status_code == 400, answer.text
            assert "must be a text of whole characters" in answer.json()["error"]["message"]
        content = json.dumps({"model": "m", "messages": [USER], "stop": "\U0001f600"})
        assert (await http.post(f"{access.base_url}/chat/completions", content=content)).is_success
    return session.finish(1.0)


def test_half_a_character_is_no_stop_text():
    with FakeServer("ok", source=chat_sample) as server:
        check_every_token_once(server, sample(server, stops_at_half_a_character)[0])


class Raw:
    """A connection to the endpoint of an episode, byte by byte."""

    def __init__(self, access) -> None:
        url = httpx.URL(access.root_url)
        self.address, self.key = (url.host, url.port), access.api_key

    async def open(self, limit=2**16):
        self.reader, self.writer = await asyncio.open_connection(*self.address, limit=limit)
        return self

    def request(self, body: dict, more: str = "") -> bytes:
        content = json.dumps(body).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {self.key}\r\n"
            f"{more}Content-Length: {len(content)}\r\n\r\n"
        )
        return head.encode() + content

    async def status(self) -> int:
        """The status of the next answer, whose body is read; 0 where the connection was closed."""
        line = await self.reader.readline()
        if not line:
            return 0
        length = 0
        while (header := await self.reader.readline()).strip():
            name, _, value = header.decode().partition(":")
            length = int(value) if name.lower() == "content-length" else length
        await self.reader.readexactly(length)
        return int(line.split()[1])


async def served(access) -> float:
    """Seconds of a valid request on a connection of its own."""
    start = time.monotonic()
    raw = await Raw(access).open()
    raw.writer.write(raw.request({"model": "m", "messages": [USER]}))
    assert await raw.status() == 200
    raw.writer.close()
    return time.monotonic() - start


async def sends_a_header_of_a_megabyte(session, prompt):
    access = await session.open_endpoint()
    raw = await Raw(access).open()
    raw.writer.write(raw.request({"model": "m", "messages": [USER]}, f"X: {'x' * 2**20}\r\n"))
    assert await raw.status() in (0, 400, 431)
    assert await served(access) < LONGEST_WAIT
    return session.finish(1.0)


async def sends_requests_without_waiting(session, prompt):
    """HTTP pipelining: the answers come in the order of the requests."""
    access = await session.open_endpoint()
    raw = await Raw(access).open()
    good, bad = {"model": "m", "messages": [USER]}, {"model": "m", "messages": 3}
    raw.writer.write(b"".join(map(raw.request, (good, bad, good))))
    assert [await raw.status() for _ in range(3)] == [200, 400, 200]
    return session.finish(1.0)


async def reads_slowly(session, prompt):
    """Nine answers of eight megabytes that nobody reads do not stop the others."""
    access = await session.open_endpoint()
    raws = [await Raw(access).open(limit=2**10) for _ in range(9)]
    name = "m" * 2**23  # the answer has it, too
    for raw in raws:
        raw.writer.write(raw.request({"model": name, "messages": [USER]}))
        assert await raw.reader.readline() == b"HTTP/1.1 200 OK\r\n"
    assert await served(access) < LONGEST_WAIT
    for raw in raws:
        raw.writer.close()
    return session.finish(1.0)


async def opens_a_thousand_connections(session, prompt):
    """Half of them have sent a part of a request."""
    access = await session.open_endpoint()
    raws = [await Raw(access).open() for _ in range(1000)]
    for raw in raws[::2]:
        raw.writer.write(raw.request({"model": "m", "messages": [USER]})[:-5])
    assert await served(access) < LONGEST_WAIT
    for raw in raws:
        raw.writer.close()
    assert await served(access) < LONGEST_WAIT
    return session.finish(1.0)


@pytest.mark.parametrize(
    "agent",
    [
        sends_a_header_of_a_megabyte,
        sends_requests_without_waiting,
        opens_a_thousand_connections,
    ],
)
def test_no_client_stops_the_others(agent):
    with FakeServer("ok", source=chat_sample) as server:
        check_every_token_once(server, sample(server, agent)[0])


def test_what_a_slow_reader_has_not_read_is_not_learned_from():
    with FakeServer("ok", source=chat_sample) as server:
        rollout, _ = sample(server, reads_slowly)
        assert len(server.served) == 10
        assert sum(len(list(spans(sequence))) for sequence in rollout.sequences) == 1
