"""Kimi's format has the name of a called function in the call's id alone: the model reads the ids
that it wrote, and clients get ids that differ in the whole episode.
"""

import zlib
from dataclasses import replace

import numpy as np
import pytest
from openai import AsyncOpenAI

from megatron_rl.config import AgentConfig, RolloutConfig
from megatron_rl.rollout.agents.call_ids import with_written_ids
from megatron_rl.rollout.agents.chat import Chat
from megatron_rl.rollout.agents.runner import EpisodeRunner
from megatron_rl.rollout.client.client import RolloutClient
from megatron_rl.rollout.client.sampling import SampleRules
from tests.conversations.model import universal_tokenizer
from tests.fake_server import SPEC, VERSION, FakeServer
from tests.faults.samples import make_sample, random_routes
from tests.unit.rollout.test_endpoint import PROMPT, USER

FORMATS = ("kimi-k2", "kimi-k2.5")
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "", "parameters": {"type": "object"}},
    }
    for name in ("search", "run")
]


def calls_text(*calls):
    """Calls (id, arguments) as the model writes them."""
    texts = [
        f"<|tool_call_begin|>{name}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        for name, arguments in calls
    ]
    return f"<|tool_calls_section_begin|>{''.join(texts)}<|tool_calls_section_end|><|im_end|>"


TURN = calls_text(("functions.search:3", '{"q": "a"}'), ("functions.run:4", "{}"))


@pytest.fixture(scope="module")
def tokenizer():
    return universal_tokenizer(FORMATS)


@pytest.fixture(scope="module", params=FORMATS)
def chat(request, tokenizer):
    return Chat(request.param, tokenizer)


def results(calls):
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": f"result {number}"}
        for number, call in enumerate(calls)
    ]


def test_results_name_the_calls_as_the_model_wrote_them(chat, tokenizer):
    prompt = chat.render([USER], TOOLS)
    turn = tokenizer.encode(TURN, add_special_tokens=False)
    message = chat.parse(prompt, turn, TOOLS, "ab12").message
    calls = message["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["search", "run"]
    other = chat.parse(prompt, turn, TOOLS, "cd34").message["tool_calls"]
    assert len({call["id"] for call in [*calls, *other]}) == 4
    continued = tokenizer.decode(chat.continuation(prompt, turn, results(calls), TOOLS))
    again = tokenizer.decode(chat.render([USER, message, *results(calls)], TOOLS))
    for text in (continued, again):
        assert "## Return of functions.search:3\nresult 0" in text
        assert "## Return of functions.run:4\nresult 1" in text and "call_ab12" not in text
    assert TURN.removesuffix("<|im_end|>") in again


def test_calls_of_another_history_are_numbered(chat, tokenizer):
    """A client may have renamed them, and few-shot examples were never sampled here."""
    call = {"type": "function", "function": {"name": "run", "arguments": "{}"}}
    messages = [USER]
    for name in ("call_abc", "toolu_1"):
        calls = [{**call, "id": name}]
        messages += [{"role": "assistant", "content": "", "tool_calls": calls}, *results(calls)]
    text = tokenizer.decode(chat.render(messages, TOOLS))
    for number in range(2):
        name = f"functions.run:{number}"
        assert calls_text((name, "{}")) in text and f"## Return of {name}\n" in text
    assert "call_abc" not in text and "toolu_1" not in text


def test_what_is_no_call_stays():
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [5, {"id": "x"}]},
        {"role": "tool", "tool_call_id": "unknown", "content": ""},
        {"role": "user", "content": "", "tool_calls": 7},
    ]
    assert with_written_ids(messages) == messages


def kimi_sample(tokenizer, body, prompt, sample_id):
    is_answered = "## Return of" in tokenizer.decode(prompt)
    text = "done<|im_end|>" if is_answered else TURN
    tokens = np.array(tokenizer.encode(text, add_special_tokens=False))
    rng = np.random.default_rng(zlib.crc32(sample_id.encode()))
    routes = random_routes(rng, len(prompt) + len(tokens) - 1)
    sample = make_sample(body, sample_id, len(prompt), tokens, -rng.random(len(tokens)), routes)
    sample["meta_info"]["finish_reason"] = {"type": "stop", "matched": int(tokens[-1])}
    return sample


async def answers_calls(session, prompt):
    """In three ways: with the client's ids, with ids that it changed, and after an edit."""
    endpoint = await session.open_endpoint()
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:

        async def ask(messages):
            completion = await client.chat.completions.create(
                model="any", messages=messages, tools=TOOLS
            )
            return completion.choices[0].message.model_dump(exclude_none=True)

        first, second = await ask([USER]), await ask([USER])
        await ask([USER, first, *results(first["tool_calls"])])
        renamed = [
            {**call, "id": f"tool_{number}"} for number, call in enumerate(second["tool_calls"])
        ]
        await ask([USER, {**second, "tool_calls": renamed}, *results(renamed)])
        edited = {**USER, "content": "edited"}
        await ask([edited, first, *results(first["tool_calls"])])
    return session.finish(1.0)


def test_a_client_answers_the_calls_that_the_model_wrote(tokenizer):
    agent = AgentConfig(renderer="kimi-k2", function=f"{__name__}:answers_calls")
    cfg = RolloutConfig(max_retries=0, idle_timeout_seconds=20.0)
    runner = EpisodeRunner(agent, tokenizer, len(tokenizer), 0, (2000, "the test"))
    rules = SampleRules(replace(SPEC, vocab_size=len(tokenizer)), want_routes=True)

    def source(body, prompt, sample_id):
        return kimi_sample(tokenizer, body, prompt, sample_id)

    with FakeServer("ok", source=source) as server:
        client = RolloutClient([server.url], cfg, rules, episodes=runner)
        prompt = replace(PROMPT, token_ids=tuple(tokenizer.encode("x")))
        groups = client.generate(
            [prompt], 1, policy_version=VERSION, temperature=1.0, max_tokens=600, stop_token_ids=()
        )
    sequences = groups[0].rollouts[0].sequences
    texts = [tokenizer.decode(sequence.tokens) for sequence in sequences]
    by_client, renamed, edited = texts
    for text in (by_client, edited):
        assert "## Return of functions.search:3\nresult 0" in text
        assert "<|tool_call_begin|>functions.search:3" in text
    # only numbers are known of a call that the client renamed
    assert "<|tool_call_begin|>functions.search:3" in renamed
    assert "## Return of functions.search:0\nresult 0" in renamed
