"""The endpoint for OpenAI's Responses, with the real openai package: items, tools, streams, answers
that are continued by their id, and every sampled token learned from once.
"""

import asyncio
import gc
import json
from dataclasses import replace

import pytest
from openai import APIStatusError, AsyncOpenAI, BadRequestError, NotFoundError

from megatron_rl.rollout.agents.endpoint import Open
from megatron_rl.rollout.agents.fields import checked
from megatron_rl.rollout.agents.question import ApiError
from megatron_rl.rollout.agents.responses import ResponsesRequest, messages_of
from tests.fake_server import VERSION, FakeServer, wait_for
from tests.unit.rollout.test_endpoint import (
    CALL,
    MULTIPLY,
    PROMPT,
    TOKENIZER,
    chat_sample,
    check_every_token_once,
    client_of,
    sample,
)

TOOL = {"type": "function", "strict": True, **MULTIPLY["function"]}
USER = {"role": "user", "content": "3*2?"}
ANSWER = (
    "\n<|im_start|>user\n<tool_response>\n6.0\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
)


async def connected(session):
    endpoint = await session.open_endpoint()
    return AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)


def result_of(call, output="6.0"):
    return {"type": "function_call_output", "call_id": call.call_id, "output": output}


async def sends_the_items_again(session, prompt):
    async with await connected(session) as client:
        settings = {"model": "any", "tools": [TOOL], "instructions": "be brief", "store": False}
        first = await client.responses.create(input="3*2?", **settings)
        (call,) = first.output
        assert (call.type, call.name, call.status) == ("function_call", "multiply", "completed")
        assert json.loads(call.arguments) == {"a": 3, "b": 2} and first.status == "completed"
        assert first.model == "any" and first.instructions == "be brief" and not first.output_text
        assert first.usage.output_tokens == len(TOKENIZER.encode(CALL + "<|im_end|>"))
        # as clients may: another order of the arguments, and results as parts
        sent_back = call.model_dump() | {"arguments": json.dumps({"b": 2, "a": 3})}
        result = result_of(call, [{"type": "input_text", "text": "6.0"}])
        history = [USER, sent_back, result]
        last = await client.responses.create(input=history, **settings)
        assert last.output_text == "It is 6.0" and last.usage.input_tokens > 50
        sampled = first.usage.output_tokens + last.usage.output_tokens
    return session.finish(1.0, {"sampled": sampled})


async def names_the_answer(session, prompt):
    async with await connected(session) as client:
        settings = {"model": "any", "tools": [TOOL], "instructions": "be brief"}
        first = await client.responses.create(input="3*2?", **settings)
        (call,) = first.output
        last = await client.responses.create(
            input=[result_of(call)], previous_response_id=first.id, **settings
        )
        assert last.output_text == "It is 6.0" and last.previous_response_id == first.id
        sampled = first.usage.output_tokens + last.usage.output_tokens
    return session.finish(1.0, {"sampled": sampled})


async def streams(session, prompt):
    async with await connected(session) as client:
        settings = {"model": "any", "tools": [TOOL], "instructions": "be brief"}
        seen = []
        async for event in await client.responses.create(input="3*2?", stream=True, **settings):
            seen.append(event)
        assert [event.type.removeprefix("response.") for event in seen] == [
            "created", "in_progress",
            "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
            "output_item.done", "completed",
        ]  # fmt: skip
        assert [event.sequence_number for event in seen] == list(range(7))
        first = seen[-1].response
        assert json.loads(seen[3].delta) == {"a": 3, "b": 2} and seen[2].item.arguments == ""
        kinds = []
        async with client.responses.stream(
            input=[result_of(first.output[0])], previous_response_id=first.id, **settings
        ) as stream:
            async for event in stream:
                kinds.append(event.type.removeprefix("response."))
            last = await stream.get_final_response()
        assert kinds == [
            "created", "in_progress", "output_item.added", "content_part.added",
            "output_text.delta", "output_text.done", "content_part.done", "output_item.done",
            "completed",
        ]  # fmt: skip
        assert last.output_text == "It is 6.0"
        sampled = first.usage.output_tokens + last.usage.output_tokens
    return session.finish(1.0, {"sampled": sampled})


@pytest.mark.parametrize("function", [sends_the_items_again, names_the_answer, streams])
def test_a_call_and_its_result_are_one_sequence(function):
    with FakeServer("ok", source=chat_sample) as server:
        rollout, counters = sample(server, function)
        check_every_token_once(server, rollout)
    assert len(rollout.sequences) == 1 and rollout.num_spans == 2
    # `strict` is no part of the prompt: it is that of chat completions
    text = TOKENIZER.decode(rollout.tokens)
    assert text.startswith("<|im_start|>system\nbe brief") and json.dumps(MULTIPLY) in text
    ((start, end),) = rollout.environment
    assert TOKENIZER.decode(rollout.tokens[start:end]) == ANSWER
    assert server.requests[1]["input_ids"][0] == rollout.tokens[:end].tolist()
    assert (counters.tool_calls, counters.tool_errors, counters.unread_turns) == (1, 0, 0)
    assert rollout.episode_length == rollout.episode.metrics["sampled"]


def says(conversation):
    """Two calls with thinking and text; then a thought and a text."""
    if "<tool_response>" in conversation:
        return "<think>\nhm\n</think>\n\nBoth are 6.0"
    return f"<think>\ntwice\n</think>\n\nI ask.\n{CALL}\n{CALL.replace('3', '4')}"


async def asks_in_parallel(session, prompt):
    async with await connected(session) as client:
        settings = {"model": "m", "tools": [TOOL], "parallel_tool_calls": True}
        first = await client.responses.create(input=[USER], **settings)
        thinking, text, *calls = first.output
        assert [item.type for item in first.output] == [
            "reasoning", "message", "function_call", "function_call",
        ]  # fmt: skip
        assert thinking.content[0].text == "twice" and text.content[0].text == "I ask."
        assert len({call.call_id for call in calls}) == 2
        results = [result_of(call) for call in calls]
        again = {"role": "user", "content": [{"type": "input_text", "text": "again"}]}
        second = await client.responses.create(input=[USER, *first.output, *results], **settings)
        assert second.output_text == "Both are 6.0"
        # both ways of continuing, one after the other
        third = await client.responses.create(
            input=[again], previous_response_id=second.id, **settings
        )
        history = [USER, *first.output, *results, *second.output, again, *third.output, again]
        async with client.responses.stream(input=history, **settings) as stream:
            kinds = [event.type async for event in stream]
        assert "response.reasoning_text.delta" in kinds
        # chat completions continue the same conversation
        message = {"role": "assistant", "content": "I ask.", "reasoning_content": "twice"}
        message["tool_calls"] = [
            {"id": "x", "type": "function",
             "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]  # fmt: skip
        tools = [{"role": "tool", "tool_call_id": "x", "content": "6.0"}] * 2
        await client.chat.completions.create(
            model="m", messages=[USER, message, *tools], tools=[MULTIPLY]
        )
    return session.finish(1.0)


def test_parallel_calls_with_thinking_are_continued_in_both_ways():
    with FakeServer("ok", source=lambda *args: chat_sample(*args, reply=says)) as server:
        rollout, counters = sample(server, asks_in_parallel, max_tokens=1500)
        check_every_token_once(server, rollout)
    # the request of chat completions comes second to its turn: a sequence with equal tokens
    assert sorted(sequence.num_spans for sequence in rollout.sequences) == [1, 4]
    inputs = [request["input_ids"][0] for request in server.requests]
    assert inputs[1] == inputs[4] and counters.tool_calls == 2


async def asks_again(session, prompt):
    async with await connected(session) as client:
        first = await client.responses.create(model="m", input="3*2?")
        more = {"model": "m", "input": "more", "previous_response_id": first.id}
        given_up = asyncio.create_task(client.responses.create(**more))
        await asyncio.to_thread(wait_for, lambda: session.counters.requests == 2, 60)
        given_up.cancel()
        await asyncio.wait([given_up])
        await asyncio.sleep(0.05)  # the endpoint has noticed
        second = await client.responses.create(**more)
        await client.responses.create(model="m", input="more", previous_response_id=second.id)
        # the first answer is continued a second time: another attempt
        await client.responses.create(**more)
    return session.finish(1.0)


def test_a_request_that_is_sent_again_is_learned_from_once():
    with FakeServer("ok", "hang", "ok", source=chat_sample) as server:
        rollout, _ = sample(server, asks_again)
        check_every_token_once(server, rollout)
    assert sorted(sequence.num_spans for sequence in rollout.sequences) == [1, 1, 2]
    inputs = [request["input_ids"][0] for request in server.requests]
    assert len(inputs) == 5 and inputs[1] == inputs[2] == inputs[4]


known = []


async def asks_for_other_episodes(session, prompt):
    async with await connected(session) as client:
        stored = await client.responses.create(model="m", input="3*2?")
        forgotten = await client.responses.create(model="m", input="3*2?", store=False)
        for unknown in ("resp_x", forgotten.id, *known):
            with pytest.raises(NotFoundError, match=unknown) as missing:
                await client.responses.create(model="m", input="more", previous_response_id=unknown)
            assert missing.value.code == "previous_response_not_found"
            assert missing.value.param == "previous_response_id"
        known.append(stored.id)
    return session.finish(1.0)


def test_an_answer_is_known_in_its_episode_only_and_where_it_is_stored():
    known.clear()
    with FakeServer("ok", source=chat_sample) as server:
        client = client_of(server, function=f"{__name__}:asks_for_other_episodes", concurrency=1)
        settings = {"policy_version": VERSION, "temperature": 1.0, "max_tokens": 600}
        client.generate([PROMPT, replace(PROMPT, id="b")], 1, stop_token_ids=(), **settings)
    assert len(known) == 2 and len(server.requests) == 4
    gc.collect()
    assert not [kept for kept in gc.get_objects() if isinstance(kept, Open)]


REFUSED = {
    "temperature = 0.5: must be the run's, 1": {"temperature": 0.5},
    "top_p = 0.9: must be 1 in training": {"top_p": 0.9},
    "top_logprobs = 2: must be 0 in training": {"top_logprobs": 2},
    "parallel_tool_calls = False: must be True": {"parallel_tool_calls": False},
    "truncation = 'auto'": {"truncation": "auto"},
    "background = True": {"background": True},
    "include.0 = 'message.output_text.logprobs'": {"include": ["message.output_text.logprobs"]},
    "text.format.type = 'json_object'": {"text": {"format": {"type": "json_object"}}},
    "tools.0.type = 'web_search'": {"tools": [{"type": "web_search"}]},
    "tools: tool_choice = 'required', and there are: none": {"tool_choice": "required"},
    "tools: tool_choice = 'pay', and there are: multiply": {
        "tools": [TOOL], "tool_choice": {"type": "function", "name": "pay"}
    },
    "tool_choice = .*'allowed_tools'.*'auto', 'none' or 'required'": {
        "tool_choice": {"type": "allowed_tools", "tools": []}
    },
    "max_output_tokens = 0": {"max_output_tokens": 0},
    "conversation = 'c': send the items again": {"conversation": "c"},
    "a part of type 'input_image' is no text": {
        "input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]
    },
    "an item of type 'item_reference' is not known": {
        "input": [{"type": "item_reference", "id": "x"}]
    },
    "role = 'robot', must be user": {"input": [{"role": "robot", "content": "x"}]},
    "must end with a message that is not the assistant's": {
        "input": [USER, {"role": "assistant", "content": "x"}]
    },
}  # fmt: skip
NEUTRAL = {
    "temperature": 1, "top_p": 1, "truncation": "disabled", "parallel_tool_calls": True,
    "reasoning": {"effort": "low"}, "include": ["reasoning.encrypted_content"], "user": "me",
    "text": {"format": {"type": "text"}, "verbosity": "low"}, "metadata": {"a": "b"},
}  # fmt: skip
"""Settings that change nothing."""


async def asks_for_what_is_refused(session, prompt):
    async with await connected(session) as client:
        for why, wrong in REFUSED.items():
            with pytest.raises(BadRequestError, match=why) as refusal:
                await client.responses.create(**{"model": "m", "input": [USER], **wrong})
            assert refusal.value.type == "invalid_request_error" and refusal.value.param
        with pytest.raises(APIStatusError) as missing:
            await client.responses.retrieve("resp_x")
        assert missing.value.status_code == 404
        settings = {"model": "m", "input": [USER], "max_output_tokens": 3, **NEUTRAL}
        short = await client.responses.create(**settings)
        assert (short.status, short.output[-1].status) == ("incomplete", "incomplete")
        assert short.incomplete_details.reason == "max_output_tokens"
        assert short.usage.output_tokens == 3
        ends = [event async for event in await client.responses.create(stream=True, **settings)]
        assert ends[-1].type == "response.incomplete"
    return session.finish(1.0)


def test_what_would_change_the_distribution_is_refused_by_name():
    with FakeServer("ok", source=chat_sample) as server:
        rollout, _ = sample(server, asks_for_what_is_refused)
        check_every_token_once(server, rollout)
    assert len(server.requests) == 2


def test_items_of_several_answers_in_a_row_stay_apart():
    text = {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]}
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    (first, second, third) = messages_of([thought, thought, text, call, text, thought])
    assert (first["reasoning_content"], first["content"], len(first["tool_calls"])) == (
        "hmhm", "a", 1,
    )  # fmt: skip
    assert second == {"role": "assistant", "content": "a"}
    assert third == {"role": "assistant", "content": "", "reasoning_content": "hm"}
    with pytest.raises(ApiError, match="body: must be a JSON object"):
        checked(ResponsesRequest, [], 1.0)
