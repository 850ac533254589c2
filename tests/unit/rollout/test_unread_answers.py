"""Answers that no client read to their end are not part of the episode: neither learned from nor
rewarded.
"""

import asyncio
import itertools
import json
import socket
import struct
import threading
import zlib
from contextlib import asynccontextmanager
from dataclasses import replace
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from openai import APITimeoutError, AsyncOpenAI, BadRequestError

from megatron_rl.rollout.agents import endpoint
from megatron_rl.rollout.client import client as client_module
from megatron_rl.rollout.group import Group
from megatron_rl.rollout.group_files import copied, find_groups, read_groups, write_groups
from tests.fake_server import FakeServer, wait_for
from tests.unit.rollout.test_endpoint import PROMPT, TOKENIZER, USER, chat_sample, sample, spans
from tests.unit.rollout.test_unfinished_chats import SAMPLING
from tests.unit.rollout.test_unfinished_chats import client_of as resuming_client

MORE = {"role": "user", "content": "more"}
OTHER = {"role": "user", "content": "another question"}
asked = {}
"""Arguments of the test for its agent function."""


def differently(body, prompt, sample_id):
    """Every response is another one."""
    return chat_sample(
        body,
        prompt,
        sample_id,
        lambda _: f"<think>\n{zlib.crc32(sample_id.encode())}\n</think>\n\nOK",
    )


def learned_from(rollout):
    """The sampled tokens of every turn, sequence after sequence: the last one is of the response
    that is rewarded.
    """
    return [
        [tuple(seq.tokens[start:end].tolist()) for start, end, _ in spans(seq)]
        for seq in rollout.sequences
    ]


def served(server, number):
    """The tokens that the server returned to its request `number`."""
    return tuple(server.served[f"{server.requests[number]['rid']}_0"]["output_ids"])


def check_others_are_counted(server, rollout, counters, num_turns):
    """What was sampled and is not learned from: `num_turns`, each counted with its tokens."""
    sampled = sum(len(response["output_ids"]) for response in server.served.values())
    assert (counters.unread_turns, counters.unread_tokens) == (
        num_turns,
        sampled - rollout.episode_length,
    )


@asynccontextmanager
async def connected(session):
    access = await session.open_endpoint()
    async with AsyncOpenAI(
        base_url=access.base_url, api_key=access.api_key, max_retries=0
    ) as client:

        async def ask(*messages, timeout=60.0, **settings):
            completions = client.with_options(timeout=timeout).chat.completions
            answer = await completions.create(model="m", messages=list(messages), **settings)
            return [choice.message for choice in answer.choices]

        yield ask


async def until(condition):
    assert await asyncio.to_thread(wait_for, condition, 60)


async def hang_up(session, ask, *messages, sampled, **settings):
    """Ask, and hang up when `sampled` responses of the episode are complete."""
    request = asyncio.create_task(ask(*messages, **settings))
    await until(lambda: session.counters.samples == sampled)
    await asyncio.sleep(0.05)  # the endpoint has them
    request.cancel()
    await asyncio.wait([request])
    await asyncio.sleep(0.05)  # the endpoint has noticed


async def asks_something_else(session, prompt):
    async with connected(session) as ask:
        if asked["ends"] == "time-out":
            with pytest.raises(APITimeoutError):
                await ask(USER, n=asked["n"], stream=asked["stream"], timeout=2.0)
            assert session.counters.samples == asked["n"] - 1
        else:
            await hang_up(
                session, ask, USER, n=asked["n"], stream=asked["stream"], sampled=asked["n"] - 1
            )
        await ask(OTHER)
    return session.finish()


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(
    "ends, stream", [("time-out", False), ("hang-up", False), ("hang-up", True)]
)
def test_of_a_request_that_its_client_gives_up_no_choice_is_learned_from(ends, n, stream):
    asked.update(ends=ends, n=n, stream=stream)
    with FakeServer(*["ok"] * (n - 1), "hang", "ok", source=differently) as server:
        rollout, counters = sample(server, asks_something_else)
        assert len(server.requests) == n + 1 and len(server.served) == n
        assert learned_from(rollout) == [[served(server, n)]]
        check_others_are_counted(server, rollout, counters, n - 1)


async def asks_beside(session, prompt):
    """The choice that is not read is complete only after the answer that is read."""
    async with connected(session) as ask:
        request = asyncio.create_task(hang_up(session, ask, USER, n=2, sampled=2))
        await until(lambda: asked["waits"].is_set())
        await ask(OTHER)
        asked["continues"].set()
        await request
    return session.finish()


def test_a_choice_that_is_not_read_is_not_the_response_although_it_ends_last():
    def source(body, prompt, sample_id):
        number = int(body["rid"].rpartition(".")[2])
        if number < 3:
            asked["waits"].set()
            asked["continues" if number == 1 else "ends"].wait(60)
        return differently(body, prompt, sample_id)

    asked.update(waits=threading.Event(), continues=threading.Event(), ends=threading.Event())
    with FakeServer("ok", source=source) as server:
        rollout, counters = sample(server, asks_beside)
        asked["ends"].set()
        assert learned_from(rollout) == [[served(server, 2)]]
        assert counters.unread_turns == 1


async def asks_again(session, prompt):
    """A turn is read; the request that continues it is not, and is sent again."""
    async with connected(session) as ask:
        (first,) = await ask(USER)
        await hang_up(session, ask, USER, first, MORE, n=2, sampled=2)
        (second,) = await ask(USER, first, MORE)
        await ask(USER, first, MORE, second, MORE)
    return session.finish()


def test_the_request_that_is_sent_again_counts_and_is_continued():
    """All answers have the same text: the one that was read continues, not the one that was not."""
    with FakeServer("ok", "ok", "hang", "ok", source=chat_sample) as server:
        rollout, counters = sample(server, asks_again)
        asked_for = [body["input_ids"][0] for body in server.requests]
        assert len(asked_for) == 5 and asked_for[1] == asked_for[2] == asked_for[3]
        assert sorted(itertools.chain(*learned_from(rollout))) == sorted(
            served(server, number) for number in (0, 3, 4)
        )
        assert asked_for[4] == rollout.tokens[: -len(served(server, 4))].tolist(), (
            "continued as it was sampled"
        )
        check_others_are_counted(server, rollout, counters, 1)


async def reads_all(session, prompt):
    async with connected(session) as ask:
        asked["read"] = await ask(USER, n=3)
    return session.finish()


def test_choices_that_are_read_are_learned_from_and_the_last_one_is_the_response():
    """In the order of the answer, not in that in which they were sampled: longer ones end later."""

    def source(body, prompt, sample_id):
        if body["rid"].endswith(".1"):
            event.wait(60)
        elif body["rid"].endswith(".3"):
            event.set()
        return differently(body, prompt, sample_id)

    event = threading.Event()
    with FakeServer("ok", source=source) as server:
        rollout, counters = sample(server, reads_all)
        texts = [TOKENIZER.decode(turn) for (turn,) in learned_from(rollout)]
        assert [message.reasoning_content for message in asked["read"]] == [
            text.split("\n")[1] for text in texts
        ]
        assert len(server.served) == 3 and counters.unread_turns == counters.unread_tokens == 0


async def fills_its_context(session, prompt):
    """One of the choices would continue a sequence without room; the others start sequences of
    their own.
    """
    async with connected(session) as ask:
        (first,) = await ask(USER)
        with pytest.raises(BadRequestError) as refusal:
            await ask(USER, first, MORE, n=asked["n"])
        assert refusal.value.code == "context_length_exceeded"
        await ask(OTHER)
    return session.finish()


@pytest.mark.parametrize("n", [2, 3])
def test_of_a_request_that_fills_the_context_no_choice_is_learned_from(n):
    asked.update(n=n)
    size = len(TOKENIZER.encode("<think>\nhm\n</think>\n\nOK<|im_end|>"))
    with FakeServer("ok", source=chat_sample) as server:
        rollout, _ = sample(server, fills_its_context, max_tokens=size)
        assert learned_from(rollout) == [
            [served(server, 0)],
            [served(server, len(server.requests) - 1)],
        ]
        assert rollout.finish_reason == "stop"


async def gets_an_error(session, prompt):
    parse, numbers = session.chat.parse, itertools.count(1)

    def fails_at_the_last(*args):
        if next(numbers) == asked["n"]:
            raise ValueError("not readable")
        return parse(*args)

    session.chat.parse = fails_at_the_last
    async with connected(session) as ask:
        with pytest.raises(BadRequestError, match="not readable"):
            await ask(USER, n=asked["n"])
        await ask(OTHER)
    return session.finish()


@pytest.mark.parametrize("n", [1, 2, 3])
def test_of_a_request_that_is_refused_for_one_choice_none_is_learned_from(n):
    asked.update(n=n)
    with FakeServer("ok", source=differently) as server:
        rollout, counters = sample(server, gets_an_error)
        assert learned_from(rollout) == [[served(server, n)]]
        check_others_are_counted(server, rollout, counters, n)


class SmallBuffers(web.TCPSite):
    """Connections of which the kernel holds little: what a client has not read is not written."""

    async def start(self):
        await super().start()
        for listening in self._server.sockets:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)


async def plain_client(session, *, n, stream=False, resets=True):
    """A connection with a request.  resets: it ends with an RST instead of a FIN."""
    access = await session.open_endpoint()
    body = json.dumps({"messages": [USER], "n": n, "stream": stream, "logprobs": True}).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer"
        f" {access.api_key}\r\n"
    )
    url, loop = urlsplit(access.base_url), asyncio.get_running_loop()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    if resets:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.setblocking(False)
    await loop.sock_connect(client, (url.hostname, url.port))
    await loop.sock_sendall(
        client, head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
    )
    return client


async def cuts_the_answer(session, prompt):
    client, start = await plain_client(session, n=asked["n"], stream=asked["stream"]), b""
    while len(start) < 500:
        start += await asyncio.get_running_loop().sock_recv(client, 500 - len(start))
    assert start.startswith(b"HTTP/1.1 200") and (b"data: {" in start) == asked["stream"]
    client.close()
    await asyncio.sleep(0.05)  # the endpoint has noticed
    async with connected(session) as ask:
        await ask(USER)
    return session.finish()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_an_answer_that_is_cut_while_it_is_written_is_not_learned_from(n, stream, monkeypatch):
    def source(body, prompt, sample_id):
        return chat_sample(
            body, prompt, sample_id, lambda _: f"{zlib.crc32(sample_id.encode())} " * 40
        )

    asked.update(n=n, stream=stream)
    monkeypatch.setattr(endpoint.web, "TCPSite", SmallBuffers)
    with FakeServer("ok", source=source) as server:
        rollout, counters = sample(server, cuts_the_answer, max_tokens=1500)
        assert len(server.served) == n + 1
        assert learned_from(rollout) == [[served(server, n)]]
        check_others_are_counted(server, rollout, counters, n)


async def hangs_up_before_the_answer(session, prompt):
    """While the endpoint reads what was sampled: all choices are complete, and nothing is
    written.
    """
    client, parse = (
        await plain_client(session, n=asked["n"], resets=asked["resets"]),
        session.chat.parse,
    )

    def hangs_up(*args):
        client.close()
        return parse(*args)

    session.chat.parse = hangs_up
    await until(lambda: client.fileno() < 0)
    async with connected(session) as ask:
        await ask(OTHER)
    return session.finish()


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_an_answer_whose_client_hung_up_before_it_was_written_is_not_learned_from(
    n, resets, monkeypatch, caplog
):
    asked.update(n=n, resets=resets)
    if resets:  # after the endpoint has looked for it
        monkeypatch.setattr(endpoint, "POLL_SECONDS", 0)
    with FakeServer("ok", source=differently) as server:
        rollout, counters = sample(server, hangs_up_before_the_answer)
        assert learned_from(rollout) == [[served(server, n)]]
        check_others_are_counted(server, rollout, counters, n)
    (warning,) = caplog.messages
    assert f"{n} turns of {counters.unread_tokens} tokens are not learned from" in warning


async def is_interrupted(session, prompt):
    """A request that is cut short; the first time, one that its client gives up comes before."""
    async with connected(session) as ask:
        if prompt.id == "waits":
            await ask(OTHER)
            return session.finish(1.0)
        await until(asked["waits"].is_set)
        if asked["gives_up"]:
            asked["gives_up"] = False
            await hang_up(session, ask, USER, n=2, sampled=1)
        (first,) = await ask(USER)
        await ask(USER, first, MORE, n=3)
    return session.finish(1.0)


@pytest.mark.parametrize("gives_up, last", [(False, "slow"), (True, "slow"), (False, "hang")])
def test_an_interrupted_request_continues_with_the_choices_that_it_had(
    gives_up, last, tmp_path, monkeypatch
):
    """Its client could not read them yet.  A choice of a request that the client gave up does not
    return.

    The last choice is cut short, or its server does not return it, as that of another episode.
    """

    def source(body, prompt, sample_id):
        if "another" in TOKENIZER.decode(prompt):
            asked["waits"].set()
            asked["continues"].wait(60)
        return differently(body, prompt, sample_id)

    asked.update(gives_up=gives_up, waits=threading.Event(), continues=threading.Event())
    monkeypatch.setattr(client_module, "STOP_SECONDS", 1.0)
    prompts, sampling = [PROMPT, replace(PROMPT, id="waits")], replace(SAMPLING, truncation=None)
    # all choices together have more tokens than this, each by itself has fewer
    agent = {"function": f"{__name__}:is_interrupted", "max_episode_tokens": 60}
    groups = [Group(prompt, 1) for prompt in prompts]
    before = ["ok", "ok", "hang"] if gives_up else ["ok"]
    with FakeServer(*before, "ok", "ok", "ok", last, source=source) as server:
        first = resuming_client(server, **agent)

        def stop():
            num_sampled = 4 if gives_up else 3
            wait_for(
                lambda: (
                    first.counters.samples == num_sampled
                    and len(server.requests) == len(before) + 4
                ),
                60,
            )
            first.stop(keep_parts=True)

        stopping = threading.Thread(target=stop)
        stopping.start()
        with pytest.raises(asyncio.CancelledError):
            first.fill(groups, sampling)
        stopping.join()
        assert first.counters.unread_turns == gives_up and first.counters.cut_samples == (
            last == "slow"
        )
        write_groups(tmp_path / "rollouts_00000.safetensors", copied(groups), [0, 1])
        groups = read_groups(find_groups(tmp_path), prompts, [0, 1], slice(None))
        asked["continues"].set()
        server.script, sent = ["ok"], len(server.requests)
        client = resuming_client(server, **agent)
        client.fill(groups, sampling)
        assert len(server.requests) == sent + 2, "a choice that was complete was sampled again"
        assert client.counters.diverged_tokens == client.counters.unread_turns == 0
    (rollout,) = groups[0].rollout_group().rollouts
    assert (
        sorted(sequence.num_spans for sequence in rollout.sequences) == [1, 1, 2]
        and rollout.episode.reward == 1.0
    )
