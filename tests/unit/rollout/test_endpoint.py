"""The OpenAI-compatible endpoint, with the real openai package: what is recorded of an agent that
knows nothing of training.
"""

import asyncio
import json
import os
import re
import sys
import tempfile
import time
import zlib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from openai import (
    APIConnectionError,
    APIStatusError,
    AsyncOpenAI,
    AuthenticationError,
    BadRequestError,
)

from megatron_rl.config import AgentConfig, RolloutConfig
from megatron_rl.config.sections.rollout import Truncation
from megatron_rl.records import Prompt
from megatron_rl.rollout.agents import ToolError, Turn, command
from megatron_rl.rollout.agents.command import Program, run_program
from megatron_rl.rollout.agents.completions import CompletionRequest, chunks
from megatron_rl.rollout.agents.episode import ContextFull
from megatron_rl.rollout.agents.fields import checked
from megatron_rl.rollout.agents.question import ApiError
from megatron_rl.rollout.agents.reply import Reply
from megatron_rl.rollout.agents.rollout_function import load_function, user_processes
from megatron_rl.rollout.agents.runner import EpisodeRunner
from megatron_rl.rollout.client.client import RolloutClient, RolloutError
from megatron_rl.rollout.client.sampling import SampleRules, Sampling
from megatron_rl.rollout.group import Group
from tests.fake_server import SPEC, VERSION, FakeServer, wait_for
from tests.faults.samples import make_sample, random_routes
from tests.words import qwen_tokenizer

TOKENIZER = qwen_tokenizer()
CHAT_SPEC = replace(SPEC, vocab_size=len(TOKENIZER))
PROMPT = Prompt(id="q", text="3*2?", token_ids=tuple(TOKENIZER.encode("3*2?")), label="6.0")
CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 3, "b": 2}}\n</tool_call>'
MULTIPLY = {
    "type": "function",
    "function": {"name": "multiply", "description": "", "parameters": {"type": "object"}},
}
USER = {"role": "user", "content": "3*2?"}


def answer(conversation):
    """What the fake model says: a tool call, then the tool's answer; else a text of its own."""
    last = conversation.split("<|im_start|>")[-2]
    if "<tool_response>" in last:
        return "It is " + last.split("<tool_response>\n")[1].split("\n")[0]
    if "calculate" in conversation:  # examples/agents/openai_agent.py
        return CALL.replace("multiply", "calculate").replace('"b"', '"operator": "*", "b"')
    return CALL if "multiply" in conversation else "<think>\nhm\n</think>\n\nOK"


def chat_sample(body, prompt, sample_id, reply=answer):
    tokens = np.array(TOKENIZER.encode(reply(TOKENIZER.decode(prompt)) + "<|im_end|>"))
    params = body["sampling_params"]
    limit = (params if isinstance(params, dict) else params[0])["max_new_tokens"]
    tokens = tokens[:limit]
    rng = np.random.default_rng(zlib.crc32(sample_id.encode()))
    sample = make_sample(
        body,
        sample_id,
        len(prompt),
        tokens,
        -rng.random(len(tokens)),
        random_routes(rng, len(prompt) + len(tokens) - 1),
    )
    if tokens[-1] == TOKENIZER.eos_token_id:
        sample["meta_info"]["finish_reason"] = {"type": "stop", "matched": int(tokens[-1])}
    return sample


def client_of(server, longest=2000, **settings):
    cfg = RolloutConfig(max_retries=1, idle_timeout_seconds=20.0)
    agent = AgentConfig(renderer="qwen3", **settings)
    runner = EpisodeRunner(
        agent,
        TOKENIZER,
        CHAT_SPEC.vocab_size,
        cfg.max_retries,
        (longest, "the test"),
        user_processes(agent, ["SERVERS"]),
        hidden_env=["SERVERS"],
    )
    return RolloutClient(
        [server.url], cfg, SampleRules(CHAT_SPEC, want_routes=True), episodes=runner
    )


def sample(server, function=None, max_tokens=600, longest=2000, **settings):
    given = {"function": f"{function.__module__}:{function.__name__}"} if function else {}
    client = client_of(server, longest, **given, **settings)
    try:
        groups = client.generate(
            [PROMPT],
            1,
            policy_version=VERSION,
            temperature=1.0,
            max_tokens=max_tokens,
            stop_token_ids=(),
        )
    finally:
        if client.episodes.processes is not None:
            client.episodes.processes.close()
    return groups[0].rollouts[0], client.counters


def check_every_token_once(server, rollout):
    """Every token that the server sampled is learned from in exactly one sequence, with the
    log-prob that it had.
    """
    learned = sorted(
        (tuple(rollout_.tokens[start:end]), tuple(np.round(logprobs, 6)))
        for rollout_ in rollout.sequences
        for start, end, logprobs in spans(rollout_)
    )
    served = sorted(
        (
            tuple(each["output_ids"]),
            tuple(np.round([p for p, *_ in each["meta_info"]["output_token_logprobs"]], 6)),
        )
        for each in server.served.values()
    )
    assert [tokens for tokens, _ in learned] == [tokens for tokens, _ in served]
    for (_, found), (_, expected) in zip(learned, served, strict=True):
        assert np.allclose(found, expected, atol=1e-5)


def spans(rollout):
    """(start, end, log-probs) of every turn."""
    starts = [rollout.prompt_length, *(end for _, end in rollout.environment)]
    ends = [*(start for start, _ in rollout.environment), len(rollout.tokens)]
    done = 0
    for start, end in zip(starts, ends, strict=True):
        yield start, end, rollout.rollout_logprobs[done : done + end - start]
        done += end - start


async def connected(session):
    endpoint = await session.open_endpoint()
    assert endpoint == await session.open_endpoint() and endpoint.base_url.startswith(
        "http://127.0.0.1:"
    )
    assert endpoint.api_key not in repr(endpoint)
    return AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)


logprobs = []


async def uses_a_tool(session, prompt):
    async with await connected(session) as client:
        asked = {
            "model": "any",
            "messages": [USER],
            "tools": [MULTIPLY],
            "temperature": 1.0,
            "logprobs": True,
        }
        first = await client.chat.completions.create(**asked)
        (choice,) = first.choices
        (call,) = choice.message.tool_calls
        assert (
            choice.finish_reason == "tool_calls"
            and choice.message.content is None
            and first.model == "any"
        )
        assert call.function.name == "multiply" and json.loads(call.function.arguments) == {
            "a": 3,
            "b": 2,
        }
        logprobs[:] = [each.logprob for each in choice.logprobs.content]
        assert first.usage.completion_tokens == len(choice.logprobs.content)
        assert choice.logprobs.model_fields_set == {"content", "refusal"}
        message = choice.message.model_dump(exclude_none=True)
        # as clients may
        message["tool_calls"][0]["function"]["arguments"] = json.dumps({"b": 2, "a": 3}, indent=1)
        history = [USER, message, {"role": "tool", "tool_call_id": call.id, "content": "6.0"}]
        settings = {
            "tools": [MULTIPLY],
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": True,
        }
        stream = await client.chat.completions.create(model="any", messages=history, **settings)
        text, reasons, usage, streamed = "", [], None, []
        async for chunk in stream:
            usage = chunk.usage or usage
            for each in chunk.choices:
                text += each.delta.content or ""
                reasons += [each.finish_reason] if each.finish_reason else []
                streamed += each.logprobs.content if each.logprobs else []
        logprobs.extend(each.logprob for each in streamed)
        assert (text, reasons) == ("It is 6.0", ["stop"]) and usage.total_tokens > 100
        assert [model.id async for model in client.models.list()] == ["policy"]
    return session.finish(1.0)


def test_a_tool_call_and_its_answer_are_one_sequence():
    with FakeServer("ok", source=chat_sample) as server:
        rollout, counters = sample(server, uses_a_tool)
        check_every_token_once(server, rollout)
    assert len(rollout.sequences) == 1 and rollout.num_spans == 2 and rollout.episode.reward == 1.0
    text = TOKENIZER.decode(rollout.tokens)
    assert text.startswith("<|im_start|>system\n# Tools") and json.dumps(MULTIPLY) in text
    ((start, end),) = rollout.environment
    assert TOKENIZER.decode(rollout.tokens[start:end]) == (
        "\n<|im_start|>user\n<tool_response>\n6.0\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert logprobs == rollout.rollout_logprobs.tolist()
    assert (counters.tool_calls, counters.tool_errors) == (1, 0)
    # tokens in, tokens out
    assert server.requests[1]["input_ids"][0] == rollout.tokens[:end].tolist()


async def requires_calls(session, prompt):
    divide = json.loads(json.dumps(MULTIPLY).replace("multiply", "divide"))
    named = {"type": "function", "function": {"name": "divide"}}
    history = [{"role": "developer", "content": "be brief"}, USER]
    async with await connected(session) as client:

        async def ask(messages, choice):
            answers = await client.chat.completions.create(
                model="m", messages=messages, tools=[MULTIPLY, divide], tool_choice=choice, seed=3
            )
            return answers.choices[0].message

        calls = await ask(history, "required")
        assert calls.tool_calls[0].function.name == "multiply"
        result = {"role": "tool", "tool_call_id": calls.tool_calls[0].id, "content": "6.0"}
        assert (await ask([*history, calls, result], "required")).content == "It is 6.0"
        assert (await ask([{"role": "user", "content": "again"}], named)).tool_calls
    return session.finish(1.0)


def test_a_required_call_is_sampled_freely_and_counted_where_it_is_missing():
    with FakeServer("ok", source=chat_sample) as server:
        rollout, counters = sample(server, requires_calls)
        check_every_token_once(server, rollout)
    assert len(server.requests) == 3
    params = [request["sampling_params"] for request in server.requests]
    assert not any("json_schema" in str(each) or "seed" in str(each) for each in params)
    # a text, and a call of another tool than the named one
    assert (counters.tool_calls, counters.tool_errors, counters.missing_tool_calls) == (2, 0, 2)
    text = TOKENIZER.decode(server.requests[0]["input_ids"][0])
    assert text.startswith("<|im_start|>system\nbe brief") and "developer" not in text


async def edits_its_history(session, prompt):
    async with await connected(session) as client:

        async def ask(*messages, **settings):
            found = await client.chat.completions.create(
                model="m", messages=list(messages), **settings
            )
            return [choice.message for choice in found.choices]

        one, two = await ask(USER, n=2)
        assert one.content == two.content == "OK" and one.reasoning_content == "hm"
        more = {"role": "user", "content": "more"}
        (third,) = await ask(USER, one, more)  # continues a sequence; thinking may be left out
        plain = {"role": "assistant", "content": "OK"}
        # side by side
        await asyncio.gather(
            ask(USER, plain, more, third, more), ask(USER, plain, more, third, more)
        )
        await ask({"role": "user", "content": "All so far: OK."}, more)  # compaction
        await ask(USER, {"role": "assistant", "content": "edited"}, more)
        await ask(USER, {**plain, "reasoning_content": "other"}, more)
    return session.finish(0.5)


def test_an_edited_history_becomes_several_sequences():
    with FakeServer("ok", source=chat_sample) as server:
        rollout, _ = sample(server, edits_its_history)
        check_every_token_once(server, rollout)
    turns = sorted(sequence.num_spans for sequence in rollout.sequences)
    # n = 2: two; one is continued twice; the request beside the last starts from its tokens;
    # compaction; two edited ones
    assert turns == [1, 1, 1, 1, 1, 3] and rollout.episode.reward == 0.5
    longest = max(rollout.sequences, key=lambda each: each.num_spans)
    beside = max(
        (each for each in rollout.sequences if each is not longest),
        key=lambda each: each.prompt_length,
    )
    assert np.array_equal(
        longest.tokens[: beside.prompt_length], beside.tokens[: beside.prompt_length]
    )


async def continues_the_second(session, prompt):
    """Two answers with the same text and other thinking: each continues with its own, as its client
    says.
    """
    async with await connected(session) as client:

        async def ask(*messages, n=1):
            found = await client.chat.completions.create(model="m", messages=list(messages), n=n)
            return [choice.message for choice in found.choices]

        one, two = await ask(USER, n=2)
        assert one.content == two.content and one.reasoning_content != two.reasoning_content
        (third,) = await ask(USER, two, USER)
        (fourth,) = await ask(USER, one, USER)
        (fifth,) = await ask(USER, one, USER, fourth, USER)
        (sixth,) = await ask(USER, two, USER, third, USER)
        asked[:] = [[one, fourth, fifth], [two, third, sixth]]
    return session.finish()


asked = []


def test_thinking_says_which_of_two_equal_answers_continues():
    def source(body, prompt, sample_id):
        thought = zlib.crc32(sample_id.encode())
        return chat_sample(body, prompt, sample_id, lambda _: f"<think>\n{thought}\n</think>\n\nOK")

    with FakeServer("ok", source=source) as server:
        rollout, _ = sample(server, continues_the_second)
        check_every_token_once(server, rollout)
    thoughts = [
        re.findall(r"<think>\n(\d+)\n", TOKENIZER.decode(each.tokens)) for each in rollout.sequences
    ]
    assert sorted(thoughts) == sorted(
        [message.reasoning_content for message in messages] for messages in asked
    )


async def thinks_twice(session, prompt):
    first = await session.generate([USER])
    assert (first.reply.reasoning, first.reply.content) == ("hm", "OK")
    await session.generate([USER, first.message, USER])
    return session.finish()


@pytest.mark.parametrize("history, num_sequences, thoughts", [("keep", 1, 2), ("split", 2, 1)])
def test_earlier_thinking_is_kept_as_sampled_or_splits_the_episode(
    history, num_sequences, thoughts
):
    with FakeServer("ok", source=chat_sample) as server:
        rollout, _ = sample(server, thinks_twice, history=history)
        check_every_token_once(server, rollout)
        assert len(rollout.sequences) == num_sequences
        assert TOKENIZER.decode(rollout.tokens).count("hm") == thoughts


async def leaves_thinking_out_once(session, prompt):
    first = await session.generate([USER])
    second = await session.generate([USER, {"role": "assistant", "content": "OK"}, USER])
    await session.generate([USER, first.message, USER, second.message, USER])
    return session.finish()


def test_thinking_that_a_request_left_out_is_still_known():
    with FakeServer("ok", source=chat_sample) as server:
        rollout, _ = sample(server, leaves_thinking_out_once)
    assert len(rollout.sequences) == 1 and rollout.num_spans == 3


def refuses(a: float, b: float) -> float:
    """Refuse.

    Args:
        a: a number
        b: a number

    Returns:
        nothing
    """
    raise ToolError("not today")


refuses.__name__ = "multiply"


async def calls_what_refuses(session, prompt):
    turn = await session.generate([USER], tools=[refuses])
    (answer,) = await session.call_tools(turn)
    assert (
        answer["content"] == "error: not today"
        and "return" not in turn.tools.schemas[0]["function"]
    )
    return session.finish()


def test_a_tool_that_refuses_is_answered_and_counted():
    with FakeServer("ok", source=chat_sample) as server:
        _, counters = sample(server, calls_what_refuses)
    assert (counters.tool_calls, counters.tool_errors) == (1, 1)


def multiply(a: float, b: float) -> float:
    """Multiply.

    Args:
        a: a number
        b: a number
    """
    return a * b


async def calls_functions(session, prompt):
    messages = [USER]
    while True:
        turn = await session.generate(messages, tools=[multiply])
        answers = await session.call_tools(turn)
        if not answers:
            return session.finish(float(turn.reply.content == "It is 6.0"))
        messages += [turn.message, *answers]


BROKEN = {
    '{"name": "multiply", "arguments": {"a": 3': (
        "error: this tool call could not be read: invalid json"
    ),
    '{"name": "divide", "arguments": {"a": 3, "b": 2}}': (
        "error: there is no tool 'divide'; there are: multiply"
    ),
    '{"name": "multiply", "arguments": {"a": "x", "c": 2}}': (
        "error: arguments of multiply: a: Input should be a valid number"
    ),
    '{"name": "multiply", "arguments": [3]}': (
        "error: arguments of multiply must be an object, got [3]"
    ),
    '{"name": "__import__", "arguments": {"name": "os"}}': "error: there is no tool '__import__'",
}


@pytest.mark.parametrize("call", [None, *BROKEN])
def test_tools_are_python_functions_and_what_cannot_be_called_is_answered_and_counted(call):
    def reply(conversation):
        return (
            f"<tool_call>\n{call}\n</tool_call>"
            if call and "error" not in conversation
            else answer(conversation)
        )

    def source(body, prompt, sample_id):
        return chat_sample(body, prompt, sample_id, reply)

    with FakeServer("ok", source=source) as server:
        rollout, counters = sample(server, calls_functions)
    text = TOKENIZER.decode(rollout.tokens)
    if call is None:
        assert rollout.episode.reward == 1.0 and (counters.tool_calls, counters.tool_errors) == (
            1,
            0,
        )
        assert (
            counters.totals()["rollout/tool_calls_total"] == 1
            and "rollout/tool_errors_total" in counters.totals()
        )
    else:
        assert f"<tool_response>\n{BROKEN[call]}" in text and (
            counters.tool_calls,
            counters.tool_errors,
        ) == (1, 1)


async def has_no_hints(session, prompt):
    await session.generate([USER], tools=[lambda x: x])


async def has_no_docstring(session, prompt):
    def tool(x: int) -> int:
        return x

    await session.generate([USER], tools=[tool])


async def has_no_messages(session, prompt):
    await session.generate(tools=[multiply])


async def is_no_role(session, prompt):
    await session.generate([{"role": "robot", "content": "x"}])


async def is_no_mapping(session, prompt):
    await session.generate([USER, "x"])


async def ends_with_an_answer(session, prompt):
    await session.generate([USER, {"role": "assistant", "content": "x"}])


@pytest.mark.parametrize(
    "function, why",
    [
        (
            has_no_hints,
            "tools: <lambda> cannot be described to the model.*a type hint for every argument",
        ),
        (
            has_no_docstring,
            "tools: tool cannot be described.*no docstring.*docstring with a line for each",
        ),
        (has_no_messages, "tools: must come with messages"),
        (is_no_role, "messages: role = 'robot', must be one of system"),
        (is_no_mapping, "messages: 'x' must be a mapping"),
        (ends_with_an_answer, "messages: must end with a message that is not the assistant's"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_sampling(function, why):
    with FakeServer("ok", source=chat_sample) as server:
        with pytest.raises(RolloutError, match=why):
            sample(server, function)
        assert not server.requests


REFUSED = {
    "temperature = 0.5: must be the run's, 1 .rollout.temperature.": {"temperature": 0.5},
    "top_p = 0.9: must be 1 in training": {"top_p": 0.9},
    "top_logprobs = 2: must be 0 in training": {"logprobs": True, "top_logprobs": 2},
    "presence_penalty = 1: must be 0 in training": {"presence_penalty": 1},
    "best_of = 1: is not known here": {"extra_body": {"best_of": 1}},
    "tool_choice = 'often': .*'auto', 'none' or 'required'": {"tool_choice": "often"},
    "tools: tool_choice = 'required', and there are: none; add": {"tool_choice": "required"},
    "tools: tool_choice = 'pay', and there are: multiply; add": {
        "tools": [MULTIPLY],
        "tool_choice": {"type": "function", "function": {"name": "pay"}},
    },
    "response_format = ": {"response_format": {"type": "json_object"}},
    "tools: .* must be": {"tools": [{"type": "web_search"}]},
    "n = 0": {"n": 0},
    "role = 'robot'": {"messages": [{"role": "robot", "content": "x"}]},
    "content = .*text parts": {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
        ]
    },
    "tool call .* must have a function": {
        "messages": [{"role": "assistant", "tool_calls": [{}]}, USER]
    },
}


NEUTRAL = {
    "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {},
    "response_format": {"type": "text"},
    "top_logprobs": 0, "parallel_tool_calls": True, "temperature": 1, "user": "me", "store": False,
    "extra_body": {"top_k": -1, "min_p": 0, "repetition_penalty": 1},
}  # fmt: skip
"""Settings that change nothing."""


async def asks_for_what_is_refused(session, prompt):
    async with await connected(session) as client:
        for why, wrong in REFUSED.items():
            with pytest.raises(BadRequestError, match=why) as refusal:
                await client.chat.completions.create(**{"model": "m", "messages": [USER], **wrong})
            assert refusal.value.type == "invalid_request_error" and refusal.value.param
        with pytest.raises(APIStatusError) as missing:
            await client.embeddings.create(model="m", input="x")
        assert missing.value.status_code == 404 and missing.value.body["message"].startswith(
            "POST /v1/embeddings"
        )
        for key in ("", "wrong"):
            with pytest.raises(AuthenticationError, match="that of no running episode"):
                await client.with_options(api_key=key or "x").models.list()
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"{client.base_url}models")).status_code == 401
            headers = {"Authorization": f"Bearer {client.api_key}"}
            broken = await http.post(
                f"{client.base_url}chat/completions", content=b"{", headers=headers
            )
            assert broken.status_code == 400 and "not JSON" in broken.json()["error"]["message"]
        stopped = await client.chat.completions.create(
            model="m", messages=[USER], stop="<|im_start|>", max_completion_tokens=3, **NEUTRAL
        )
        assert stopped.choices[0].finish_reason == "length" and stopped.usage.completion_tokens == 3
        left_over.append(client.with_options(max_retries=0))
    return session.finish()


left_over = []


def test_what_would_change_the_sampling_is_refused_by_name():
    with FakeServer("ok", source=chat_sample) as server:
        rollout, _ = sample(server, asks_for_what_is_refused)
        assert len(server.requests) == 1 and rollout.response_length == 3
        stops = server.requests[0]["sampling_params"]["stop_token_ids"]
        assert {*TOKENIZER.encode("<|im_start|>"), TOKENIZER.eos_token_id} <= {*stops}
    base_url = left_over.pop().base_url
    with pytest.raises(httpx.ConnectError):  # nothing listens after the episodes
        httpx.get(f"{base_url}models")


def test_a_truncated_run_takes_its_own_truncation_only():
    """rollout.top_p, top_k and min_p: log-probs are those of the truncated distribution."""
    of_run, body = Truncation(0.9, 20, 0.05), {"messages": [USER]}
    assert checked(CompletionRequest, {**body, **of_run._asdict()}, 1.0, of_run).messages == [USER]
    for name, value in (("top_p", 1), ("top_k", -1), ("min_p", 0)):
        with pytest.raises(
            ApiError, match=f"{name} = {value}: must be {of_run._asdict()[name]} in training"
        ):
            checked(CompletionRequest, {**body, name: value}, 1.0, of_run)


async def leaves_a_request(session, prompt):
    """The first episode ends while a request is answered; the second one waits until that request
    has ended.
    """
    if prompt.id == "waits":
        await asyncio.to_thread(wait_for, lambda: bool(waited_for), 60)
        await asyncio.wait_for(asyncio.gather(*waited_for, return_exceptions=True), 20)
    client = (await connected(session)).with_options(max_retries=0)
    await client.chat.completions.create(model="m", messages=[USER])
    if prompt.id != "waits":
        waited_for.append(
            asyncio.create_task(client.chat.completions.create(model="m", messages=[USER]))
        )
        await asyncio.to_thread(wait_for, lambda: session.counters.requests == 2, 60)
    return session.finish()


waited_for = []


def test_the_requests_of_an_episode_end_with_it():
    waited_for.clear()
    with FakeServer("ok", "hang", "ok", source=chat_sample) as server:
        client = client_of(server, function=f"{__name__}:leaves_a_request")
        settings = {
            "policy_version": VERSION,
            "temperature": 1.0,
            "max_tokens": 600,
            "stop_token_ids": (),
        }
        client.generate([PROMPT, replace(PROMPT, id="waits")], 1, **settings)
        assert len(server.requests) == 3 and isinstance(
            waited_for[0].exception(), APIConnectionError
        )


async def fills_its_context(session, prompt):
    async with await connected(session) as client:
        await client.chat.completions.create(model="m", messages=[USER])
        await client.chat.completions.create(
            model="m", messages=[USER, {"role": "user", "content": "x" * 3000}]
        )


async def shortens_its_history(session, prompt):
    async with await connected(session) as client:
        try:
            await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "x" * 3000}]
            )
        except BadRequestError as error:
            assert error.code == "context_length_exceeded" and error.param == "messages"
            await client.chat.completions.create(model="m", messages=[USER])
    return session.finish()


def test_a_full_context_is_named_and_truncates_only_where_nothing_follows():
    with FakeServer("ok", source=chat_sample) as server:
        rollout, counters = sample(server, fills_its_context)
        assert (rollout.finish_reason, counters.unread_turns, counters.unread_tokens) == (
            "length",
            0,
            0,
        )
        assert sample(server, shortens_its_history)[0].finish_reason == "stop"


LONG, SHORT = ({"role": "user", "content": "x" * length} for length in (100, 5))


async def shortens_what_follows(session, prompt):
    async with await connected(session) as client:
        answer = await client.chat.completions.create(model="m", messages=[USER])
        history = [USER, answer.choices[0].message.model_dump(exclude_none=True)]
        for _ in range(2):
            with pytest.raises(BadRequestError, match="have no room"):
                await client.chat.completions.create(model="m", messages=[*history, LONG])
        await client.chat.completions.create(model="m", messages=[*history, SHORT])
    return session.finish(1.0)


async def shortens_token_ids(session, prompt):
    await session.generate()
    for _ in range(2):
        with pytest.raises(ContextFull):
            await session.generate([*session.token_ids, *[9] * 100])
    await session.generate([*session.token_ids, *[9] * 5])
    return session.finish(1.0)


@pytest.mark.parametrize("function", [shortens_what_follows, shortens_token_ids])
def test_an_input_that_has_no_room_is_no_part_of_the_episode(function):
    """It is refused each time, and a shorter one continues the sequence, with all that is left."""

    def source(body, prompt, sample_id):
        return chat_sample(body, prompt, sample_id, lambda _: "OK")

    with FakeServer("ok", source=source) as server:
        rollout, _ = sample(server, function, max_tokens=60, max_episode_tokens=60)
        assert len(rollout.sequences) == 1 and rollout.num_spans == 2
        assert rollout.finish_reason == "stop" and len(server.requests) == 2
        check_every_token_once(server, rollout)


async def asks_on(session, prompt):
    async with await connected(session) as client:
        while True:
            try:
                await client.chat.completions.create(model="m", messages=[USER])
            except APIStatusError as error:
                assert error.status_code == 410 and error.code == "episode_ended"
                raise


def test_a_refusing_server_stops_the_run_through_the_endpoint():
    with (
        FakeServer("ok", "http_400", source=chat_sample) as server,
        pytest.raises(RolloutError, match="refused prompt"),
    ):
        sample(server, asks_on)


async def hangs_up(session, prompt):
    async with await connected(session) as client:
        with pytest.raises(Exception, match="timed out"):
            await client.with_options(timeout=5.0, max_retries=0).chat.completions.create(
                model="m", messages=[USER]
            )
        await client.chat.completions.create(model="m", messages=[USER])
    return session.finish()


def test_a_turn_that_no_one_waits_for_is_not_learned_from():
    with FakeServer("hang", "ok", source=chat_sample) as server:
        rollout, _ = sample(server, hangs_up)
        assert len(server.requests) == 2 and len(rollout.sequences) == 1
        check_every_token_once(server, rollout)


def run_command(*command, **settings):
    with FakeServer("ok", source=chat_sample) as server, tempfile.TemporaryDirectory() as folder:
        if settings.get("preload") and "-c" in command:  # a fork runs a file
            python, _, code, *rest = command
            program = Path(folder) / "program.py"
            program.write_text(code)
            command = (python, str(program), *rest)
        rollout, _counters = sample(server, command=command, **settings)
        check_every_token_once(server, rollout)
    return rollout


FORKED = pytest.mark.parametrize("preload", [(), ("json",)], ids=["started", "forked"])
"""A program is started for each episode, or forked from a process that imported its modules."""


@FORKED
def test_an_unmodified_program_is_trained_on(monkeypatch, preload):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    rollout = run_command(sys.executable, "examples/agents/openai_agent.py", preload=preload)
    assert (rollout.episode.reward, rollout.episode.metrics, rollout.num_spans) == (
        1.0,
        {"calls": 1},
        2,
    )
    assert "It is 6.0" in TOKENIZER.decode(rollout.tokens)


CURL = """
import json, os, sys, urllib.request
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"messages": [{"role": "user", "content": json.loads(input())["text"]}]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
if "none" not in sys.argv:
    print(urllib.request.urlopen(request).status)
"""


@pytest.mark.parametrize(
    "name, given", [("no_proxy", "example.org"), ("NO_PROXY", "*"), ("NO_PROXY", "")]
)
def test_no_proxy_gets_a_programs_requests(monkeypatch, name, given):
    for proxy in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(proxy, "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setenv(name, given)
    code = (
        CURL
        + """
assert os.environ["no_proxy"] == os.environ["NO_PROXY"]  # programs read either
print(json.dumps({"metrics": {os.environ["no_proxy"].replace(".", "_"): 1}}))"""
    )
    direct = {"example.org": "example_org,127_0_0_1", "*": "*", "": "127_0_0_1"}[given]
    assert run_command(sys.executable, "-c", code).episode.metrics == {direct: 1}


@FORKED
def test_a_program_gets_no_secrets_and_may_leave_the_reward_to_the_run(monkeypatch, preload):
    for name in ("SERVERS", "MY_TOKEN", "MY_SECRET", "ALLOWED_KEY", "PLAIN"):
        monkeypatch.setenv(name, "x")
    code = (
        CURL + 'print(json.dumps({"metrics": {n: 1 for n in os.environ if os.environ[n] == "x"}}))'
    )
    passed = ("ALLOWED_KEY", "SERVERS")
    rollout = run_command(sys.executable, "-c", code, pass_env=passed, preload=preload)
    assert (
        rollout.episode.metrics == {"ALLOWED_KEY": 1, "PLAIN": 1} and rollout.episode.reward is None
    )


@FORKED
@pytest.mark.parametrize(
    "code, why",
    [
        ("sys.exit('no such tool')", "ended with status 1.*no such tool"),
        ("sys.exit(3)", "ended with status 3"),
        ("1 / 0", "ended with status 1.*ZeroDivisionError"),
        ("print('{')", "last line is no JSON object"),
        ('print(json.dumps({"reward": "high"}))', "reward = 'high': must be a finite number"),
        ('print(json.dumps({"score": 1}))', "must be .*reward"),
    ],
)
def test_a_program_that_fails_is_a_failed_episode(code, why, preload):
    with pytest.raises(RolloutError, match=f"(?s)agent.command = .*{why}"):
        run_command(sys.executable, "-c", CURL + code, preload=preload)


@FORKED
def test_a_program_that_fails_with_a_full_context_is_truncated(preload):
    code = (
        CURL + 'request.data = json.dumps({"messages": [{"role": "user", "content": "x" *'
        " 3000}]}).encode()"
    )
    code += "\nurllib.request.urlopen(request)"
    assert run_command(sys.executable, "-c", code, preload=preload).finish_reason == "length"


def test_the_end_of_a_programs_outputs_is_noted():
    """Else every program would be waited for in vain, for seconds."""
    program = Program()
    program.process_exited()
    assert program.has_exited.is_set() and not program.has_closed.is_set()
    program.connection_lost(None)
    assert program.has_closed.is_set()


@pytest.mark.parametrize("include_usage", [False, True])
def test_a_stream_tells_its_tokens_only_where_it_is_asked_to(include_usage):
    turn = Turn("OK", (5, 6), "stop", num_prompt_tokens=3, read=lambda: Reply("OK", None, ()))
    body = {"messages": [USER], "stream": True, "stream_options": {"include_usage": include_usage}}
    message, end, *usage = chunks(checked(CompletionRequest, body, 1.0), [turn], [[]])
    delta = {"role": "assistant", "content": "OK"}
    assert message["choices"] == [
        {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}
    ]
    assert end["choices"] == [{"index": 0, "delta": {}, "finish_reason": "stop", "logprobs": None}]
    numbers = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert [chunk["usage"] for chunk in usage] == [numbers] * include_usage


@pytest.mark.parametrize(
    "name",
    ["user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"],
)
def test_a_field_for_the_services_own_books_has_no_effect(name):
    assert checked(CompletionRequest, {"messages": [USER], name: "x"}, 1.0) == checked(
        CompletionRequest, {"messages": [USER]}, 1.0
    )


async def reads_the_protocol(session, prompt):
    endpoint = await session.open_endpoint()
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    async with httpx.AsyncClient(base_url=endpoint.base_url, headers=headers, timeout=60) as http:
        assert (await http.get("/models")).json() == {
            "object": "list",
            "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "megatron_rl"}],
        }
        answer = await http.post("/chat/completions", json={"messages": [USER], "stream": True})
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    assert answer.headers["Cache-Control"] == "no-cache"
    turn = await session.generate([USER], max_tokens=2)
    assert len(turn.token_ids) == 2 and turn.finish_reason == "length"
    return session.finish()


def test_answers_have_the_form_that_clients_other_than_openais_read():
    with FakeServer("ok", source=chat_sample) as server:
        assert sample(server, reads_the_protocol)[0].num_spans == 1


async def names_the_truncation(session, prompt):
    async with await connected(session) as client:
        wrong = [{"role": "robot", "content": "x"}]
        await client.chat.completions.create(
            model="m", messages=wrong, top_p=0.9, extra_body={"top_k": 20, "min_p": 0.05}
        )


def test_a_program_may_name_the_truncation_of_its_run():
    sampling = Sampling(1.0, 600, (), VERSION, truncation=Truncation(0.9, 20, 0.05))
    with FakeServer("ok", source=chat_sample) as server:
        client = client_of(server, function=f"{__name__}:names_the_truncation")
        with pytest.raises(RolloutError, match="role = 'robot'"):
            client.fill([Group(PROMPT, 1)], sampling)


async def run_python(code):
    return await run_program((sys.executable, "-c", code), os.environ, b"question\n")


def test_a_program_may_read_its_input_to_the_end():
    code = "import sys; print(len(sys.stdin.read())); sys.exit(3)"
    assert asyncio.run(asyncio.wait_for(run_python(code), 60)) == (3, "9\n", "")


def test_a_pipe_that_outlives_its_program_is_closed(monkeypatch):
    """A process in a session of its own holds it, and is not killed with the program."""
    monkeypatch.setattr(command, "END_SECONDS", 0.1)
    code = (
        "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid)"
    )

    async def main():
        _, output, _ = await run_python(code)
        daemon = psutil.Process(int(output))
        try:
            pipe = os.readlink(f"/proc/{daemon.pid}/fd/1")
            await asyncio.sleep(0.1)  # a transport closes its pipes in a later round of the loop
            return pipe, [file for file in map(link, os.listdir("/proc/self/fd")) if file]
        finally:
            daemon.kill()

    def link(number):
        with suppress(FileNotFoundError):  # that of the list itself
            return os.readlink(f"/proc/self/fd/{number}")

    pipe, files = asyncio.run(main())
    assert pipe.startswith("pipe:") and files and pipe not in files


def test_a_program_ends_with_all_that_it_started(tmp_path):
    pid = tmp_path / "pid"
    code = (
        f"{CURL}import subprocess, time; open({str(pid)!r},"
        " 'w').write(str(subprocess.Popen(['sleep', '600']).pid))"
    )
    started = time.monotonic()
    run_command(sys.executable, "-c", code)
    with pytest.raises(RolloutError, match="longer than agent.episode_timeout_seconds = 2"):
        run_command(sys.executable, "-c", code + "\ntime.sleep(600)", episode_timeout_seconds=2.0)
    assert time.monotonic() - started < 300
    assert wait_for(lambda: not is_running(int(pid.read_text())), 60)


def is_running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    "settings, why",
    [
        ({"command": ("x",)}, "command needs renderer"),
        ({"command": ("x",), "function": "a:b", "renderer": "qwen3"}, "must be one of them"),
        ({"function": "a:b", "pass_env": ("A",)}, "pass_env = .'A'. has no effect"),
        (
            {"function": "a:b", "history": "split"},
            "history = 'split' has no effect without renderer",
        ),
        (
            {"function": "a:b", "endpoint_host": "localhost"},
            "endpoint_host = 'localhost': must be an IP address",
        ),
    ],
)
def test_settings_that_cannot_be_together_are_refused(settings, why):
    with pytest.raises(ValueError, match=why):
        AgentConfig(**settings)


def test_a_command_must_be_a_program():
    with pytest.raises(
        ValueError, match="agent.command = 'no-such-program x': .* must be a program"
    ):
        load_function(AgentConfig(command=("no-such-program", "x"), renderer="qwen3"))


@pytest.mark.slow
@pytest.mark.skipif(
    not os.environ.get("VERIFIERS_PYTHON"),
    reason="VERIFIERS_PYTHON names no Python with verifiers and uv",
)
def test_an_environment_of_verifiers_is_trained_on(monkeypatch):
    """Its own chat program and tool server; verifiers 0.4.0 in an environment of its own."""
    python = os.environ["VERIFIERS_PYTHON"]
    monkeypatch.setenv("PATH", os.path.dirname(python), prepend=":")

    def source(body, prompt, sample_id):
        return chat_sample(
            body,
            prompt,
            sample_id,
            lambda text: answer(text).replace("multiply", "calculator_multiply"),
        )

    with FakeServer("ok", source=source) as server:
        rollout, counters = sample(server, command=(python, "examples/agents/verifiers_env.py"))
        check_every_token_once(server, rollout)
    assert (len(rollout.sequences), rollout.num_spans) == (1, 2)
    assert (rollout.episode.reward, rollout.episode.metrics) == (1.0, {"turns": 2.0})
    assert (counters.tool_calls, counters.tool_errors) == (1, 0)
