"""chat_template_kwargs: settings of the model's chat format that a request may give."""

from functools import partial

import anthropic
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI, BadRequestError

from megatron_rl.rollout.agents.chat import MAX_VARIANTS, Chat
from tests.fake_server import FakeServer
from tests.unit.rollout.test_endpoint import TOKENIZER, chat_sample, check_every_token_once, sample
from tests.words import qwen_tokenizer

USER = {"role": "user", "content": "3*2?"}
NO_THOUGHT = "<think>\n\n</think>\n\n"


def says(conversation):
    """Thinks where the prompt leaves it to the model."""
    opened = conversation.rsplit("<|im_start|>", 1)[1]
    return "6.0" if NO_THOUGHT in opened else "<think>\nhm\n</think>\n\nOK"


async def connected(session):
    endpoint = await session.open_endpoint()
    return AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)


async def thinks_or_not(session, prompt):
    async with await connected(session) as client:

        async def ask(*messages, **extra):
            answer = await client.chat.completions.create(
                model="m", messages=list(messages), extra_body=extra
            )
            return answer.choices[0].message

        quick = {"chat_template_kwargs": {"enable_thinking": False}}
        first = await ask(USER, **quick)
        assert first.content == "6.0" and not getattr(first, "reasoning_content", None)
        opened = {"role": "assistant", "content": "It is "}
        second = await ask(USER, first, USER, opened, continue_final_message=True, **quick)
        assert second.content == "6.0"
        # the format's default, named or not, is the same conversation
        third = await ask(USER, chat_template_kwargs={"enable_thinking": True})
        assert third.content == "OK" and third.reasoning_content == "hm"
        # as written with the setting, and so a sequence of its own
        await ask(USER, third, USER, **quick)
        await ask(USER, third, USER)
    return session.finish(1.0)


def test_a_setting_of_the_format_writes_the_prompt_and_names_the_conversation():
    with FakeServer("ok", source=lambda *args: chat_sample(*args, reply=says)) as server:
        rollout, _ = sample(server, thinks_or_not)
        check_every_token_once(server, rollout)
    inputs = [TOKENIZER.decode(request["input_ids"][0]) for request in server.requests]
    opened = "<|im_start|>user\n3*2?<|im_end|>\n<|im_start|>assistant\n"
    assert inputs[0] == opened + NO_THOUGHT and inputs[2] == opened
    assert inputs[1] == f"{inputs[0]}6.0<|im_end|>\n{inputs[0]}It is "
    assert inputs[4].endswith("\n" + opened) and inputs[3].endswith(opened + NO_THOUGHT)
    assert "hm" in inputs[4] and "hm" not in inputs[3]
    assert sorted(sequence.num_spans for sequence in rollout.sequences) == [1, 2, 2]


QUICK = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}


async def asks_responses(session, prompt):
    async with await connected(session) as client:
        create = partial(client.responses.create, model="m")
        first = await create(input=[USER], **QUICK)
        assert [item.type for item in first.output] == ["message"] and first.output_text == "6.0"
        await create(input=[USER], previous_response_id=first.id, **QUICK)
        # another sequence: it would be written otherwise
        other = await create(input=[USER], previous_response_id=first.id)
        assert other.output[0].content[0].text == "hm" and other.output_text == "OK"
    return session.finish(1.0)


async def asks_messages(session, prompt):
    endpoint = await session.open_endpoint()
    async with AsyncAnthropic(base_url=endpoint.root_url, api_key=endpoint.api_key) as client:
        create = partial(client.messages.create, model="m", max_tokens=200)
        counted = await client.messages.count_tokens(model="m", messages=[USER], **QUICK)
        first = await create(messages=[USER], **QUICK)
        assert [block.text for block in first.content] == ["6.0"]
        assert first.usage.input_tokens == counted.input_tokens
        with pytest.raises(anthropic.BadRequestError, match="has no 'add_vision_id'"):
            wrong = {"chat_template_kwargs": {"add_vision_id": True}}
            await client.messages.count_tokens(model="m", messages=[USER], extra_body=wrong)
        history = [USER, {"role": "assistant", "content": first.content}, USER]
        await create(messages=history, **QUICK)
        other = await create(messages=history)
        assert (other.content[0].thinking, other.content[1].text) == ("hm", "OK")
    return session.finish(1.0)


@pytest.mark.parametrize("function", [asks_responses, asks_messages])
def test_every_protocol_with_messages_takes_the_settings_of_the_format(function):
    with FakeServer("ok", source=lambda *args: chat_sample(*args, reply=says)) as server:
        rollout, _ = sample(server, function)
        check_every_token_once(server, rollout)
    inputs = [TOKENIZER.decode(request["input_ids"][0]) for request in server.requests]
    opened = "<|im_start|>user\n3*2?<|im_end|>\n<|im_start|>assistant\n"
    assert inputs[0] == opened + NO_THOUGHT
    assert inputs[1] == f"{inputs[0]}6.0<|im_end|>\n{opened}{NO_THOUGHT}"
    assert inputs[2].endswith(f"6.0<|im_end|>\n{opened}")
    assert sorted(sequence.num_spans for sequence in rollout.sequences) == [1, 2]


async def names_other_settings(session, prompt):
    async with await connected(session) as client:
        for values, why in (
            ({"add_vision_id": True}, "'qwen3' has no 'add_vision_id'; it has: enable_thinking"),
            ({"thinking_retention": "all"}, "has no 'thinking_retention'"),
            ({"enable_thinking": "often"}, "chat_template_kwargs: .*enable_thinking"),
            ([], "chat_template_kwargs = \\[\\]"),
        ):
            with pytest.raises(BadRequestError, match=why) as refusal:
                await client.chat.completions.create(
                    model="m", messages=[USER], extra_body={"chat_template_kwargs": values}
                )
            assert refusal.value.param == "chat_template_kwargs"
            with pytest.raises(BadRequestError, match=why) as refusal:
                await client.responses.create(
                    model="m", input=[USER], extra_body={"chat_template_kwargs": values}
                )
            assert refusal.value.param == "chat_template_kwargs"
        await client.chat.completions.create(model="m", messages=[USER])
    return session.finish(1.0)


def test_settings_that_the_format_does_not_have_are_refused():
    with FakeServer("ok", source=chat_sample) as server:
        sample(server, names_other_settings)
    assert len(server.requests) == 1


@pytest.mark.parametrize("history", ["keep", "split"])
def test_a_format_is_made_once_for_equal_settings(history):
    chat = Chat("qwen3", qwen_tokenizer(), history, 100)
    quick = chat.with_template({"enable_thinking": False})
    assert chat.with_template({}) is chat.with_template({"enable_thinking": True}) is chat
    assert chat.with_template({"enable_thinking": 0}).template == quick.template
    assert chat.with_template({"enable_thinking": False}) is quick is not chat
    assert (chat.template, quick.template) == ("", '{"enable_thinking": false}')
    assert quick._config.thinking_retention == chat._config.thinking_retention
    assert quick._longest == chat._longest == 100
    assert chat._variant.cache_info().maxsize == MAX_VARIANTS
