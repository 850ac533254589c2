"""The endpoint for Anthropic's clients, with the real anthropic package: blocks, tools, streams,
errors, and every sampled token learned from once.
"""

import json
import sys
from functools import partial
from types import SimpleNamespace

import httpx
import pytest
from anthropic import AsyncAnthropic, AuthenticationError, BadRequestError, NotFoundError

from megatron_rl.rollout.agents.messages import blocks_of, opened, parsed, unparsed
from tests.fake_server import FakeServer
from tests.unit.rollout.test_endpoint import (
    CALL,
    MULTIPLY,
    TOKENIZER,
    chat_sample,
    check_every_token_once,
    sample,
)

FUNCTION = MULTIPLY["function"]
TOOL = {"name": "multiply", "input_schema": FUNCTION["parameters"], "description": ""}
USER = {"role": "user", "content": "3*2?"}
ASKED = {"model": "any", "max_tokens": 200}


async def connected(session):
    endpoint = await session.open_endpoint()
    return AsyncAnthropic(base_url=endpoint.root_url, api_key=endpoint.api_key, max_retries=0)


async def uses_a_tool(session, prompt):
    async with await connected(session) as client:
        settings = ASKED | {"tools": [TOOL], "system": [{"type": "text", "text": "be brief"}]}
        counted = await client.messages.count_tokens(
            model="any", messages=[USER], tools=[TOOL], system="be brief"
        )
        first = await client.messages.create(messages=[USER], **settings)
        (call,) = first.content
        assert (first.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "multiply")
        assert call.input == {"a": 3, "b": 2} and first.model == "any"
        assert first.usage.input_tokens == counted.input_tokens > 20
        # as clients may: what a block has besides, and another order of the arguments
        sent_back = call.model_dump() | {"input": {"b": 2, "a": 3}}
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "6.0"}
        cached = result | {"cache_control": {"type": "ephemeral"}}
        history = [
            USER,
            {"role": "assistant", "content": [sent_back]},
            {"role": "user", "content": [cached]},
        ]
        kinds, text = [], ""
        async with client.messages.stream(messages=history, **settings) as stream:
            async for event in stream:
                kinds.append(event.type)
            text = await stream.get_final_text()
            last = await stream.get_final_message()
        assert text == "It is 6.0" and last.stop_reason == "end_turn"
        assert last.usage.output_tokens == len(TOKENIZER.encode("It is 6.0<|im_end|>"))
        assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    return session.finish(1.0)


def test_a_tool_call_and_its_result_are_one_sequence():
    with FakeServer("ok", source=chat_sample) as server:
        rollout, counters = sample(server, uses_a_tool)
        check_every_token_once(server, rollout)
    assert len(rollout.sequences) == 1 and rollout.num_spans == 2
    text = TOKENIZER.decode(rollout.tokens)
    # the prompt is that of chat completions
    assert text.startswith("<|im_start|>system\nbe brief") and json.dumps(MULTIPLY) in text
    ((start, end),) = rollout.environment
    assert TOKENIZER.decode(rollout.tokens[start:end]) == (
        "\n<|im_start|>user\n<tool_response>\n6.0\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert (counters.tool_calls, counters.tool_errors, counters.unread_turns) == (1, 0, 0)
    assert server.requests[1]["input_ids"][0] == rollout.tokens[:end].tolist()


FLOATS = '{"a": 3.0, "b": [2e1, {"c": -0.0, "d": 0.5}]}'


def as_javascript(text):
    """JSON.stringify(JSON.parse(text))"""
    return text.replace("3.0", "3").replace("2e1", "20").replace("-0.0", "0")


async def sends_calls_back(session, prompt):
    async with await connected(session) as client:
        first = await client.messages.create(messages=[USER], tools=[TOOL], **ASKED)
        (call,) = first.content
        sent_back = call.model_dump() | {"input": json.loads(as_javascript(FLOATS))}
        assert json.dumps(sent_back["input"]) != json.dumps(call.input), "3 and 3.0"
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "6.0"}
        said = {"role": "assistant", "content": [sent_back]}
        history = [USER, said, {"role": "user", "content": [result]}]
        await client.messages.create(messages=history, tools=[TOOL], **ASKED)
    return session.finish(1.0)


def test_a_whole_float_of_a_call_may_come_back_as_javascript_writes_it():
    def reply(conversation):
        is_answered = "<tool_response>" in conversation.split("<|im_start|>")[-2]
        return "6" if is_answered else CALL.replace('{"a": 3, "b": 2}', FLOATS)

    def source(body, prompt, sample_id):
        return chat_sample(body, prompt, sample_id, reply)

    with FakeServer("ok", source=source) as server:
        rollout, _ = sample(server, sends_calls_back)
        check_every_token_once(server, rollout)
    assert len(rollout.sequences) == 1 and rollout.num_spans == 2
    assert FLOATS in TOKENIZER.decode(rollout.tokens), "the tokens stay as they were sampled"


async def sends_what_is_no_object_back(session, prompt):
    async with await connected(session) as client:
        asked = ASKED | {"tools": [TOOL]}
        first = await client.messages.create(messages=[USER], **asked)
        async with client.messages.stream(messages=[USER], **asked) as stream:
            streamed = await stream.get_final_message()
        calls = [*first.content, *streamed.content]
        assert [list(call.input) for call in calls] == [["unparsed"]] * 2
        for call in calls:
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "no object"}
            said = {"role": "assistant", "content": [call.model_dump(exclude_none=True)]}
            history = [USER, said, {"role": "user", "content": [result]}]
            await client.messages.create(messages=history, **asked)
    return session.finish(1.0)


@pytest.mark.parametrize("arguments", ["[3, 2]", '"x"', '{"a": NaN}', '{"a": [1e999, -1e999]}'])
def test_arguments_that_are_no_json_object_come_back_as_the_model_wrote_them(arguments):
    def reply(conversation):
        is_answered = "<tool_response>" in conversation.split("<|im_start|>")[-2]
        return "hm" if is_answered else CALL.replace('{"a": 3, "b": 2}', arguments)

    with FakeServer("ok", source=partial(chat_sample, reply=reply)) as server:
        rollout, _ = sample(server, sends_what_is_no_object_back)
        check_every_token_once(server, rollout)
    assert [sequence.num_spans for sequence in rollout.sequences] == [2, 2]


@pytest.mark.parametrize(
    "arguments", [{}, {"unparsed": 5}, {"unparsed": '{"a": 1}'}, {"unparsed": "[1]", "b": 2}]
)
def test_an_argument_named_unparsed_stays(arguments):
    assert json.loads(unparsed(arguments)) == arguments


def test_unparsed_brackets_by_the_thousand_are_a_text():
    assert unparsed(parsed("[" * 100_000)) == "[" * 100_000


async def thinks(session, prompt):
    async with await connected(session) as client:
        first = await client.messages.create(messages=[USER], **ASKED)
        thinking, text = first.content
        assert (thinking.type, thinking.thinking, text.text) == ("thinking", "hm", "OK")
        more = {"role": "user", "content": [{"type": "text", "text": "more"}]}
        history = [USER, {"role": "assistant", "content": first.content}, more]
        await client.messages.create(messages=history, **ASKED)  # continues the sequence
        plain = [USER, {"role": "assistant", "content": "OK"}, more]
        required = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "multiply"}}
        await client.messages.create(messages=plain, **ASKED | required)
        short = await client.messages.create(messages=[USER], **ASKED | {"max_tokens": 3})
        assert short.stop_reason == "max_tokens" and short.usage.output_tokens == 3
        stopped = await client.messages.create(
            messages=[USER], **ASKED | {"stop_sequences": ["<|im_end|>"]}
        )
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "<|im_end|>")
    return session.finish(1.0)


def test_thinking_goes_back_and_forth_and_every_token_is_learned_from_once():
    with FakeServer("ok", source=chat_sample) as server:
        rollout, counters = sample(server, thinks)
        check_every_token_once(server, rollout)
    assert len(server.requests) == 5
    two_turns = [each for each in rollout.sequences if each.num_spans == 2]
    assert len(two_turns) == 1 and counters.missing_tool_calls == 0


REFUSED = {
    "temperature = 0.5: must be the run's, 1": {"temperature": 0.5},
    "top_p = 0.9: must be 1 in training": {"top_p": 0.9},
    "top_k = 3: must be -1 in training": {"top_k": 3},
    "a block of type 'image' is no text": {
        "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]
    },
    "a block of type 'document' is no text": {
        "messages": [{"role": "assistant", "content": [{"type": "document"}]}, USER]
    },
    "role = 'robot', must be user or assistant": {"messages": [{"role": "robot", "content": "x"}]},
    "content = 3: must be text or blocks": {"messages": [{"role": "user", "content": 3}]},
    "tools.0.type = 'web_search_20250305'": {
        "tools": [{"type": "web_search_20250305", "name": "web_search", "input_schema": {}}]
    },
    "tool_choice = 'pay', and there are: multiply": {
        "tools": [TOOL], "tool_choice": {"type": "tool", "name": "pay"}
    },
    "disable_parallel_tool_use = True": {
        "tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}
    },
    "max_tokens = 0": {"max_tokens": 0},
    "inference_geo = 'eu': the model is where the run is; remove it": {
        "extra_body": {"inference_geo": "eu"}
    },
    "beam_width = 2: is not known here": {"extra_body": {"beam_width": 2}},
}  # fmt: skip


async def asks_for_what_is_refused(session, prompt):
    async with await connected(session) as client:
        for why, wrong in REFUSED.items():
            with pytest.raises(BadRequestError, match=why) as refusal:
                await client.messages.create(**ASKED | {"messages": [USER]} | wrong)
            assert refusal.value.body["error"]["type"] == "invalid_request_error"
        with pytest.raises(NotFoundError) as missing:
            await client.messages.batches.create(requests=[])
        assert missing.value.body["error"]["type"] == "not_found_error"
        other = client.with_options(api_key="wrong")
        with pytest.raises(AuthenticationError, match="that of no running episode") as unknown:
            await other.messages.create(messages=[USER], **ASKED)
        assert unknown.value.body["error"]["type"] == "authentication_error"
        async with httpx.AsyncClient(headers={"x-api-key": client.api_key}) as http:
            broken = await http.post(
                f"{str(client.base_url).rstrip(chr(47))}/v1/messages", content=b"{"
            )
            assert broken.status_code == 400 and broken.json()["type"] == "error"
        nothing = {"metadata": {"user_id": "me"}, "temperature": 1, "top_p": 1}
        thinking = {"thinking": {"type": "disabled"}}
        await client.messages.create(messages=[USER], **ASKED | nothing | thinking)
    return session.finish(1.0)


def test_what_would_change_the_distribution_is_refused_in_anthropics_form():
    with FakeServer("ok", source=chat_sample) as server:
        rollout, _ = sample(server, asks_for_what_is_refused)
    assert len(server.requests) == 1 and rollout.episode.reward == 1.0


async def fills_the_context(session, prompt):
    async with await connected(session) as client:
        history = [USER]
        while True:
            answer = await client.messages.create(messages=history, **ASKED)
            history += [{"role": "assistant", "content": answer.content}, USER]


def test_a_full_context_ends_the_episode_as_truncated():
    with FakeServer("ok", source=chat_sample) as server:
        rollout, _ = sample(server, fills_the_context, max_tokens=60)
        check_every_token_once(server, rollout)
    assert rollout.finish_reason == "length" and rollout.num_spans > 1


PROGRAM = """
import json, sys
from anthropic import Anthropic

question = json.loads(sys.stdin.readline())
messages = [{"role": "user", "content": question["text"]}]
answer = Anthropic().messages.create(model="m", max_tokens=50, messages=messages)
print(json.dumps({"reward": float(answer.content[-1].text == "OK")}))
"""


def test_a_program_finds_the_endpoint_by_its_environment():
    with FakeServer("ok", source=chat_sample) as server:
        rollout, _ = sample(server, command=[sys.executable, "-c", PROGRAM])
        check_every_token_once(server, rollout)
    assert rollout.episode.reward == 1.0


def test_arguments_that_are_no_object_stay_text_in_a_stream_too():
    assert parsed('{"a": 1}') == {"a": 1}
    assert parsed("[1]") == {"unparsed": "[1]"} and parsed("{") == {"unparsed": "{"}
    call = {"id": "t", "type": "function", "function": {"name": "f", "arguments": "{"}}
    (block,) = blocks_of(SimpleNamespace(message={"content": "", "tool_calls": [call]}))
    empty, (delta,) = opened(block)
    assert empty["input"] == {} and json.loads(delta["partial_json"]) == {"unparsed": "{"}


async def counts_long_texts(session, prompt):
    async with await connected(session) as client:

        async def count(*texts):
            messages = [{"role": "user", "content": text} for text in texts]
            return (await client.messages.count_tokens(model="any", messages=messages)).input_tokens

        long = "1 " * 20_000  # no sequence can hold it
        size = len(TOKENIZER.encode(long)) - 1
        assert await count(long) == await count("1") + size > 20_000
        assert await count(long, long) == await count("1", "1") + 2 * size
        await client.messages.create(messages=[USER], **ASKED)
    return session.finish(1.0)


def test_the_count_of_a_text_that_no_sequence_can_hold_is_its_own():
    with FakeServer("ok", source=chat_sample) as server:
        sample(server, counts_long_texts)
