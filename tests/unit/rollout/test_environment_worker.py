"""What the process of agent.isolation = process answers; here in a thread, which forks for every
episode as that process does.
"""

import asyncio
import json
import os
import re
import socket
import sys
import threading
from contextlib import contextmanager
from dataclasses import asdict

import numpy as np
import pytest

from megatron_rl.records import Prompt
from megatron_rl.rollout.agents import Step, Turn
from megatron_rl.rollout.agents import environment_worker as worker
from megatron_rl.rollout.agents.environment_process import LOADER
from megatron_rl.rollout.agents.reply import Reply, ToolCall
from megatron_rl.rollout.agents.threads import in_thread
from megatron_rl.workers import protocol, serving
from megatron_rl.workers.protocol import call_line
from tests.fake_server import wait_for

REPLY = Reply("w1", "hm", (ToolCall("id", "add", {"a": 1}, "{}"),))
TURN = Turn("w1", (1, 2), "length", num_prompt_tokens=3, read=lambda: REPLY, logprobs=(-0.5, -0.25))
PROMPT = Prompt("q", "text", (3, 4), "")


class Talks:
    """Answers what it got."""

    def reset(self, prompt):
        return f"{type(prompt.token_ids).__name__} {prompt.token_ids}"

    async def step(self, turn):
        return Step(turn.text, float(len(turn.token_ids)), metrics={"pid": os.getpid()})


class Answers:
    def __init__(self, answer):
        self.answer = answer

    def step(self, turn):
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


def reply(environment, turn=TURN):
    message = json.loads(call_line(5, "step", worker.fields_of_turn(turn)))
    connection = serving.Connection(None, worker.__file__)
    with asyncio.Runner() as runner:
        line = connection.reply(worker.EnvironmentService(environment), message, runner)
    answer = json.loads(line)
    assert answer.pop("number") == 5
    return answer


@pytest.mark.parametrize("turn", [TURN, Turn("w1", (1,), "stop")])
def test_a_turn_arrives_as_it_was_sampled(turn):
    found = worker.turn_of(json.loads(json.dumps(worker.fields_of_turn(turn))))
    assert found == turn and found.logprobs == turn.logprobs
    assert (found.read and found.reply) == (turn.read and turn.reply)


@pytest.mark.parametrize(
    "value, answer",
    [
        (None, None),
        ("text", "text"),
        (True, True),
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.array([1, 2]) > 1, [False, True]),
        (np.arange(2), [0, 1]),
        ((1, (2.5,)), [1, [2.5]]),
        ([{"role": "tool", "content": "4"}], [{"role": "tool", "content": "4"}]),
        (Step(), {"step": {"observation": "", "reward": 0.0, "done": False, "metrics": {}}}),
        (Step([np.int64(8)], np.float32(1.5), np.bool_(True), {"n": np.int32(2)}),
         {"step": {"observation": [8], "reward": 1.5, "done": True, "metrics": {"n": 2}}}),
    ],
)  # fmt: skip
def test_an_answer_arrives_as_json(value, answer):
    message = reply(Answers(value))
    # as text: an integer must not become a fraction, which is no token id
    assert message == {"answer": answer} and repr(message["answer"]) == repr(answer)


@pytest.mark.parametrize(
    "answer, why",
    [
        (b"bytes", "TypeError: answered bytes: must be text, numbers, lists, mappings or a Step"),
        (object(), "TypeError: answered object: must be"),
        (float("nan"), "ValueError"),
        (KeyError("calculator"), "KeyError: 'calculator'"),
        (SystemExit(3), "SystemExit: 3"),
        ("x" * 99, "answered 127 bytes: must be at most 99"),
    ],
)
def test_what_fails_is_answered_with_the_reason(answer, why, monkeypatch):
    monkeypatch.setattr(
        protocol, "ANSWER_BYTES", 99 if isinstance(answer, str) else protocol.ANSWER_BYTES
    )
    found = reply(Answers(answer))
    assert set(found) == {"failed", "where"} and why in found["failed"]
    assert any("test_environment_worker" in frame for frame in found["where"]) == (
        isinstance(answer, BaseException)
    )


@contextmanager
def running(monkeypatch, name):
    """`main` of a worker of `name`: this side of its connection."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    monkeypatch.setattr(serving, "open_channel", lambda: theirs)
    monkeypatch.setattr(sys, "argv", ["worker", "forks", LOADER, json.dumps([name]), "0"])
    main = threading.Thread(target=serving.main, daemon=True)
    main.start()
    try:
        with ours:
            yield ours, json.loads(ours.recv(2**16))
            ours.shutdown(socket.SHUT_RDWR)
        main.join(60)
        assert not main.is_alive()
    finally:
        theirs.close()


class Client:
    """An episode that the worker has started."""

    def __init__(self, channel, number):
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(60)
        with theirs:
            socket.send_fds(channel, [call_line(number, "fork", None)], [theirs.fileno()])
        self.lines = self.socket.makefile("rb")
        assert json.loads(self.lines.readline()) == {"number": 0, "answer": None}

    def ask(self, call, argument):
        self.socket.sendall(call_line(3, call, argument))
        return json.loads(self.lines.readline())["answer"]


def test_every_episode_has_a_process_that_ends_with_it(monkeypatch):
    with running(monkeypatch, f"{__name__}:Talks") as (channel, ready):
        assert ready == {"number": 0, "answer": None}
        episodes = [Client(channel, number) for number in (7, 8)]
        pids = []
        for episode in episodes:
            assert episode.ask("reset", asdict(PROMPT)) == "tuple (3, 4)"
            step = episode.ask("step", worker.fields_of_turn(TURN))["step"]
            pids.append(step["metrics"].pop("pid"))
            assert step == {"observation": "w1", "reward": 2.0, "done": False, "metrics": {}}
        assert len({*pids, os.getpid()}) == 3
        channel.sendall(call_line(7, "end", None))
        assert episodes[0].lines.readline() == b"" and wait_for(
            lambda: not os.path.exists(f"/proc/{pids[0]}"), 60
        )
        assert episodes[1].ask("reset", asdict(PROMPT)) == "tuple (3, 4)"
    assert wait_for(lambda: not os.path.exists(f"/proc/{pids[1]}"), 60)


def test_a_class_that_cannot_be_imported_is_answered(monkeypatch):
    with running(monkeypatch, f"{__name__}:Nothing") as (_, ready):
        assert "AttributeError" in ready["failed"]
        assert set(ready) == {"number", "failed", "where"}


def test_blocking_calls_do_not_keep_the_process():
    assert asyncio.run(in_thread(lambda: threading.current_thread().daemon))


@pytest.mark.parametrize(
    "raised, expected",
    [(KeyError("a"), KeyError), (SystemExit(3), RuntimeError), (StopIteration(), RuntimeError)],
)
def test_what_a_thread_raises_is_raised_where_it_is_awaited(raised, expected):
    """asyncio ends the loop for SystemExit, and cannot raise StopIteration."""

    def fails():
        raise raised

    async def call():
        with pytest.raises(
            expected, match=re.escape(repr(raised)) if expected is RuntimeError else "a"
        ):
            await asyncio.wait_for(in_thread(fails), 60)

    asyncio.run(call())


def test_a_thread_that_ends_after_its_time_disturbs_nothing(new_threads):
    async def call():
        problems, ends = [], threading.Event()
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: problems.append(context)
        )
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(in_thread(ends.wait, 60), 0.1)
        (thread,) = (thread for thread in new_threads() if thread.name == "in_thread")
        assert thread.daemon
        ends.set()
        assert await asyncio.to_thread(wait_for, lambda: not thread.is_alive(), 60)
        await asyncio.sleep(0.05)
        return problems

    assert not asyncio.run(call())
