"""Wrong requests to the endpoint: each is answered in the form of its protocol or closed, nothing
of it is learned from, and another episode is served in the meantime.
"""

import asyncio
import json
import resource
import socket
from dataclasses import replace
from urllib.parse import urlsplit

import httpx
import pytest
from aiohttp import web

from megatron_rl.rollout.agents import endpoint
from tests.conversations.fuzz import Fuzz
from tests.fake_server import VERSION, FakeServer
from tests.unit.rollout.test_endpoint import (
    PROMPT,
    TOKENIZER,
    USER,
    chat_sample,
    check_every_token_once,
    client_of,
    sample,
)

CHAT = {"model": "m", "messages": [USER]}
NUM_CONNECTIONS, NUM_FILES = 1000, 2500
asked = {}
"""Arguments of the test for its agent function."""


def test_a_fuzz_of_every_protocol_is_refused_in_its_form_and_not_learned_from():
    fuzz = Fuzz(questions=20)
    fuzz.run(200, seed=0, formats=("qwen3",))
    assert not fuzz.wrong, fuzz.wrong[:3]
    assert fuzz.counts["answers with 400"] > 400 and fuzz.counts["answers with 200"] > 50
    assert fuzz.counts["answers of neighbours"] > 20


def client_for(access):
    headers = {"Authorization": f"Bearer {access.api_key}"}
    return httpx.AsyncClient(base_url=access.root_url, headers=headers, timeout=60)


async def posts(session, prompt):
    async with client_for(await session.open_endpoint()) as http:
        for path, body, headers in asked["requests"]:
            content = body if isinstance(body, bytes) else json.dumps(body)
            answer = await http.post(path, content=content, headers=headers)
            asked["answers"].append((answer.status_code, answer.json()))
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
    return session.finish()


def answers_to(*requests):
    """Return status and JSON of the answers, and the number of requests that the server got."""

    def source(body, prompt, sample_id):
        return chat_sample(body, prompt, sample_id, lambda _: "<think>\nhm\n</think>\n\nOK")

    asked.update(requests=requests, answers=[])
    with FakeServer("ok", source=source) as server:
        rollout, counters = sample(server, posts)
        check_every_token_once(server, rollout)
        assert counters.unread_turns == 0
        return asked["answers"], len(server.requests) - 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize(
    "name, value, status", [("Content-Encoding", "br", 415), ("Expect", "200-ok", 417)]
)
def test_a_head_that_is_not_served_is_refused_in_the_form_of_the_protocol(
    path, name, value, status
):
    body = CHAT | {"max_tokens": 9}
    ((refused, error),), num = answers_to((path, body, {name: value}))
    assert (refused, num) == (status, 0)
    assert error["error"]["message"].startswith(f"{name} = '{value}': ")
    assert error["error"]["type"] == "invalid_request_error"
    assert (error.get("type") == "error") == (path == "/v1/messages")


def test_a_client_may_wait_for_the_endpoint_before_it_sends_its_body():
    ((status, answer),), _ = answers_to(("/v1/chat/completions", CHAT, {"Expect": "100-Continue"}))
    assert status == 200 and answer["choices"][0]["message"]["content"] == "OK"


def test_half_a_surrogate_pair_is_a_stop_text_that_no_answer_has():
    (chat, raw), num = answers_to(
        ("/v1/chat/completions", {**CHAT, "stop": ["\ud800", "?"]}, {}),
        ("/v1/completions", {"prompt": "u", "stop": "\ud83d", "max_tokens": 100}, {}),
    )
    assert (chat[0], raw[0], num) == (200, 200, 2)
    assert chat[1]["choices"][0]["message"]["content"] == "OK"


def test_a_request_with_one_wrong_prompt_samples_none():
    """The first one is right: it opens a connection to the server, on which no request waits."""
    wrong = (
        [[5], [len(TOKENIZER)]], [[5], [-1]], [[5], [2**64]], ["a", ""], ["a", "x" * 40_000],
        ["a"] * 129,
    )  # fmt: skip
    bodies = [{"prompt": prompts} for prompts in (["a"], *wrong)]
    answers, num = answers_to(*(("/v1/completions", body, {}) for body in bodies))
    assert [status for status, _ in answers] == [200, *[400] * len(wrong)] and num == 1
    assert all(error["error"]["param"] == "prompt" for _, error in answers[1:])


# Raw connections ----------------------------------------------------------------------------------


def request_bytes(key, path="/v1/chat/completions", body=b"", method="POST", more=b""):
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
    return head.encode() + more + f"Content-Length: {len(body)}\r\n\r\n".encode() + body


async def connection(access):
    url = urlsplit(access.root_url)
    return await asyncio.open_connection(url.hostname, url.port)


async def answer_of(reader):
    """Return status and body of the next answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.split("content-length: ")[1].split("\r\n")[0])
    return int(head.split()[1]), json.loads(await reader.readexactly(length))


async def sends_a_long_header(access):
    reader, writer = await connection(access)
    writer.write(request_bytes(access.api_key, more=b"X-Long: " + b"x" * 2**20 + b"\r\n"))
    read = b""
    try:
        read = await reader.read(200)
    except ConnectionError:  # closed with what it had not read yet
        return writer.close
    assert read == b"" or read.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), read
    return writer.close


async def pipelines(access):
    """Several requests before the first answer: answered in turn."""
    reader, writer = await connection(access)
    body = json.dumps(CHAT).encode()
    key = access.api_key
    writer.write(
        request_bytes(key, "/v1/models", method="GET")
        + request_bytes(key, body=body)
        + request_bytes(key, body=b"{")
        + request_bytes("wrong", body=body)
        + request_bytes(key, body=body)
    )
    answers = [await answer_of(reader) for _ in range(5)]
    assert [status for status, _ in answers] == [200, 200, 400, 401, 200]
    assert answers[0][1]["object"] == "list" and answers[4][1]["choices"][0]["message"]
    return writer.close


async def reads_slowly(access):
    """An answer of which the client reads nothing."""
    url, client = urlsplit(access.root_url), socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, (url.hostname, url.port))
    body = json.dumps({**CHAT, "n": 3, "logprobs": True}).encode()
    await loop.sock_sendall(client, request_bytes(access.api_key, body=body))
    await asyncio.sleep(0.3)
    return client.close


async def opens_many(access):
    """Connections that send nothing, or the start of a request."""
    writers = []
    for number in range(NUM_CONNECTIONS):
        _, writer = await connection(access)
        writer.write(request_bytes(access.api_key, body=b"x" * 100)[: 60 * (number % 3)])
        writers.append(writer)
    return lambda: [writer.close() for writer in writers]


async def misbehaves(session, prompt):
    """The first episode misbehaves; the other one is served while it does, and afterwards."""
    access = await session.open_endpoint()
    if prompt.id == PROMPT.id:
        asked["close"] = await asked["act"](access)
        asked["acted"].set()
        await asked["served"].wait()
        asked["close"]()
        await asyncio.sleep(0.05)  # the endpoint has noticed
    else:
        await asked["acted"].wait()
    async with client_for(access) as http:
        answer = (await http.post("/v1/chat/completions", json=CHAT)).json()
        assert answer["choices"][0]["message"]["content"].strip()
    asked["served"].set()
    return session.finish()


class SmallBuffers(web.TCPSite):
    """Connections of which the kernel holds little: what a client has not read is not written."""

    async def start(self):
        await super().start()
        for listening in self._server.sockets:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)


@pytest.fixture
def many_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < NUM_FILES:
        pytest.skip(f"a process may open {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, NUM_FILES), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
@pytest.mark.parametrize(
    "act, num_turns", [(sends_a_long_header, 1), (pipelines, 3), (reads_slowly, 1), (opens_many, 1)]
)
def test_another_episode_is_served_while_a_connection_misbehaves(act, num_turns, monkeypatch):
    asked.update(act=act, acted=asyncio.Event(), served=asyncio.Event())
    monkeypatch.setattr(endpoint.web, "TCPSite", SmallBuffers)

    def source(body, prompt, sample_id):
        return chat_sample(body, prompt, sample_id, lambda _: "a long text " * 60)

    with FakeServer("ok", source=source) as server:
        client = client_of(server, function=f"{__name__}:misbehaves", episode_timeout_seconds=60.0)
        first, other = client.generate(
            [PROMPT, replace(PROMPT, id="other")], 1, policy_version=VERSION, temperature=1.0,
            max_tokens=1500, stop_token_ids=(),
        )  # fmt: skip
        # each request that was read is a turn, and only those
        assert len(first.rollouts[0].sequences) == num_turns
        assert len(other.rollouts[0].sequences) == 1
        assert client.counters.unread_turns == 3 * (act is reads_slowly)
        assert len(server.requests) == num_turns + 1 + client.counters.unread_turns
