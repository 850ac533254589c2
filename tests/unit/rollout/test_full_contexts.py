"""A full context in any sequence truncates an episode, unless a later turn was sampled."""

import sys
from functools import partial

import pytest

from megatron_rl.rollout.agents.episode import ContextFull
from megatron_rl.rollout.client.client import RolloutError
from tests.fake_server import FakeServer
from tests.unit.rollout.test_endpoint import chat_sample, run_command, sample

ASK = """
import json, os, urllib.request
from urllib.error import HTTPError
def ask(*messages):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
def user(text):
    return {"role": "user", "content": text}
def ask_refused(*messages):
    try:
        ask(*messages)
    except HTTPError as error:
        assert json.load(error)["error"]["code"] == "context_length_exceeded"
history = [user("3*2?")]
history.append(ask(*history))
"""
CRASH = "raise ZeroDivisionError('a bug')"


@pytest.mark.parametrize(
    "code",
    [
        "ask(*history, user('x ' * 2000))",
        "ask(user('of a sub-agent')); ask(*history, user('x ' * 2000))",
        "ask(user('of a sub-agent')); ask(*history, user('x ' * 400))",
        f"ask_refused(user('x ' * 3000)); {CRASH}",
        f"ask_refused(*history, user('x ' * 400)); {CRASH}",
    ],
)
def test_a_program_that_ends_at_a_full_context_is_truncated(code):
    rollout = run_command(sys.executable, "-c", ASK + code, max_tokens=100)
    assert rollout.finish_reason == "length"


@pytest.mark.parametrize("text", ["x ' * 3000", "x ' * 400"])
def test_a_program_that_fails_after_another_turn_fails(text):
    code = f"ask_refused(*history, user('{text})); ask(*history, user('more')); {CRASH}"
    with pytest.raises(RolloutError, match="ZeroDivisionError: a bug"):
        run_command(sys.executable, "-c", ASK + code)
    code = code.removesuffix(CRASH)
    assert run_command(sys.executable, "-c", ASK + code).finish_reason == "stop"


async def fills_an_earlier_sequence(session, prompt):
    await session.generate()
    await session.branch([9]).generate(max_tokens=5)
    session.observe([9] * 600)
    with pytest.raises(ContextFull):
        await session.generate()
    return session.finish(1.0)


def test_a_full_context_of_an_earlier_sequence_truncates():
    with FakeServer("ok", source=partial(chat_sample, reply=lambda _: "OK")) as server:
        assert sample(server, fills_an_earlier_sequence)[0].finish_reason == "length"
