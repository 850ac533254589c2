"""Beginnings of answers that the client wrote, through both doors that serve them: the model
continues them, they are never learned from, and the joined message is continued by its tokens.
"""

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI, BadRequestError

from megatron_rl.rollout.agents.chat import Chat
from megatron_rl.rollout.agents.prefill import Prefill, encoded
from megatron_rl.rollout.agents.reply import Reply
from tests.fake_server import FakeServer
from tests.unit.rollout.test_endpoint import (
    MULTIPLY,
    TOKENIZER,
    chat_sample,
    check_every_token_once,
    sample,
)
from tests.words import qwen_tokenizer

USER = {"role": "user", "content": "3*2?"}
CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}


def says(conversation):
    """Continues the last message."""
    opened = conversation.rsplit("<|im_start|>assistant\n", 1)[1]
    return {"": "OK", "It is": " 6.0", "It is ": "6.0", "Yes": ""}.get(opened, " and more")


def source(*args):
    return chat_sample(*args, reply=says)


def assistant(text):
    return {"role": "assistant", "content": text}


async def anthropic_of(session):
    endpoint = await session.open_endpoint()
    return AsyncAnthropic(base_url=endpoint.root_url, api_key=endpoint.api_key, max_retries=0)


async def openai_of(session):
    endpoint = await session.open_endpoint()
    return AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)


async def asks_anthropic(session, prompt):
    async with await anthropic_of(session) as client:
        asked = {"model": "m", "max_tokens": 100}

        async def ask(*messages):
            answer = await client.messages.create(messages=list(messages), **asked)
            return "".join(block.text for block in answer.content)

        opened = [USER, assistant("It is")]
        counted = await client.messages.count_tokens(model="m", messages=opened)
        assert await ask(*opened) == " 6.0"
        joined = assistant([{"type": "text", "text": "It is 6.0"}])
        assert await ask(USER, joined, USER) == "OK"
        # what followed as a message of its own; a second beginning
        both = [USER, assistant("It is"), assistant(" 6.0"), USER, assistant("OK"), USER]
        async with client.messages.stream(messages=[*both, assistant("It is ")], **asked) as stream:
            assert await stream.get_final_text() == "6.0"
        assert await ask(*both, assistant("It is 6.0"), USER) == "OK"
    return session.finish(1.0, {"counted": counted.input_tokens})


async def asks_openai(session, prompt):
    async with await openai_of(session) as client:

        async def ask(*messages, **extra):
            answer = await client.chat.completions.create(
                model="m", messages=list(messages), extra_body=extra
            )
            return answer.choices[0].message.content

        assert await ask(USER, assistant("It is"), **CONTINUED) == " 6.0"
        history = [USER, assistant("It is 6.0"), USER]
        assert await ask(*history, add_generation_prompt=True) == "OK"
        history += [assistant("OK"), USER]
        # other servers need only one of the two fields
        assert await ask(*history, assistant("It is "), continue_final_message=True) == "6.0"
        assert await ask(*history, assistant("It is 6.0"), USER) == "OK"
    count = len(TOKENIZER.encode("<|im_start|>user\n3*2?<|im_end|>\n<|im_start|>assistant\nIt is"))
    return session.finish(1.0, {"counted": count})


@pytest.mark.parametrize("function", [asks_anthropic, asks_openai])
def test_a_beginning_is_part_of_the_input_and_the_joined_message_is_continued(function):
    with FakeServer("ok", source=source) as server:
        rollout, counters = sample(server, function)
        check_every_token_once(server, rollout)
    assert len(rollout.sequences) == 1 and rollout.num_spans == 4 and not counters.unread_turns
    first = server.requests[0]["input_ids"][0]
    assert TOKENIZER.decode(first).endswith("<|im_start|>assistant\nIt is")
    assert len(first) == rollout.prompt_length == rollout.episode.metrics["counted"]
    ends = [TOKENIZER.decode(rollout.tokens[a:b]) for a, b in rollout.environment]
    between = "\n<|im_start|>user\n3*2?<|im_end|>\n<|im_start|>assistant\n"
    assert ends == [between, between + "It is ", between]
    contents = [message["content"] for message in rollout.episode.messages]
    assert contents == ["It is 6.0", "3*2?", "OK", "3*2?", "It is 6.0", "3*2?", "OK"]


async def begins_twice(session, prompt):
    async with await openai_of(session) as client:
        answers = await client.chat.completions.create(
            model="m", messages=[USER, assistant("It is")], n=2, logprobs=True, extra_body=CONTINUED
        )
        assert [choice.message.content for choice in answers.choices] == [" 6.0"] * 2
        sampled = [len(choice.logprobs.content) for choice in answers.choices]
        assert sampled == [len(TOKENIZER.encode(" 6.0<|im_end|>"))] * 2
        # only the end is sampled
        message = [USER, assistant("Yes")]
        empty = await client.chat.completions.create(
            model="m", messages=message, extra_body=CONTINUED
        )
        assert empty.choices[0].message.content == "" and empty.usage.completion_tokens == 1
        for _ in range(2):  # another attempt has equal tokens
            await client.chat.completions.create(model="m", messages=[*message, USER])
        # another beginning than was sampled from is another sequence
        await client.chat.completions.create(
            model="m", messages=[USER, assistant("It is 6.0 or so"), USER]
        )
    return session.finish(1.0)


def test_choices_continue_side_by_side_and_an_edited_message_is_another_sequence():
    with FakeServer("ok", source=source) as server:
        rollout, _ = sample(server, begins_twice)
        check_every_token_once(server, rollout)
    assert sorted(sequence.num_spans for sequence in rollout.sequences) == [1, 1, 1, 1, 2]
    inputs = [request["input_ids"][0] for request in server.requests]
    assert inputs[3] == inputs[4] and len(inputs) == 6


CALLS = [{"id": "x", "type": "function", "function": {"name": "multiply", "arguments": "{}"}}]
REFUSED = {
    "or set continue_final_message = true and add_generation_prompt = false": (
        [USER, assistant("It is")],
        {},
    ),
    "must be the opposite of continue_final_message, True": (
        [USER, assistant("It is")],
        {"continue_final_message": True, "add_generation_prompt": True},
    ),
    "must be the opposite of continue_final_message, False": (
        [USER],
        {"add_generation_prompt": False},
    ),
    "the last message must be the assistant's": ([USER], CONTINUED),
    "it must have text, and neither tool calls": ([USER, assistant("")], CONTINUED),
    "neither tool calls nor thinking": (
        [USER, {**assistant("It is"), "tool_calls": CALLS}],
        CONTINUED,
    ),
    "nor thinking; remove": ([USER, {**assistant("It"), "reasoning_content": "hm"}], CONTINUED),
    "must be text or a list of text parts": ([USER, assistant([{"type": "audio"}])], CONTINUED),
    "does not read '<think>' as the beginning": ([USER, assistant("<think>")], CONTINUED),
    "does not read 'It<.im_end.>' as": ([USER, assistant("It<|im_end|>")], CONTINUED),
    "must end with a message that is not": ([assistant("It is")], CONTINUED),
    "tokens of input are more than the test allows": ([USER, assistant("x" * 9999)], CONTINUED),
}


async def begins_what_is_refused(session, prompt):
    async with await openai_of(session) as client:
        for why, (messages, extra) in REFUSED.items():
            with pytest.raises(BadRequestError, match=why) as refusal:
                await client.chat.completions.create(
                    model="m", messages=messages, tools=[MULTIPLY], extra_body=extra
                )
            assert refusal.value.param
        await client.chat.completions.create(model="m", messages=[USER])
    return session.finish(1.0)


def test_a_beginning_that_cannot_be_is_refused():
    with FakeServer("ok", source=source) as server:
        rollout, _ = sample(server, begins_what_is_refused)
    assert len(server.requests) == 1 and rollout.episode.reward == 1.0


def test_a_beginning_with_which_the_format_would_think_is_refused():
    """Qwen3.5's generation prompt opens a thought, unless the tokenizer's template does not."""
    chat, thought = Chat("qwen3", TOKENIZER), TOKENIZER.encode("<|im_start|>assistant\n<think>\n")
    start = encoded("It is", TOKENIZER, None)
    with pytest.raises(ValueError, match="may begin with a thought"):
        start.check(chat, thought)
    start.check(chat, TOKENIZER.encode("<|im_start|>assistant\n"))


@pytest.mark.parametrize(
    "text, response, content",
    [("\nIt is", " 6.0", " 6.0"), ("It is ", "", ""), ("It is", "\n", "")],
)
def test_the_reply_is_what_follows_the_beginning(text, response, content):
    chat, prompt = Chat("qwen3", TOKENIZER), TOKENIZER.encode("<|im_start|>assistant\n")
    sampled = TOKENIZER.encode(response + "<|im_end|>")
    reply = encoded(text, TOKENIZER, None).read(chat, prompt, sampled, "", ())
    assert reply.content == content


def test_a_reply_after_which_the_format_reads_the_beginning_as_a_thought_is_read_alone():
    tokens = "[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <arg_key> </arg_key>"
    tokenizer = qwen_tokenizer()
    tokenizer.add_tokens([*tokens.split(), "<arg_value>", "</arg_value>"], special_tokens=True)
    chat, prompt = Chat("glm-4.5", tokenizer), tokenizer.encode("<|assistant|>")
    sampled, stop = tokenizer.encode("</think>\n6!"), "!"
    assert chat.parse(prompt, tokenizer.encode("It</think>\n6")).reasoning == "It"
    reply = encoded("It", tokenizer, None).read(chat, prompt, sampled, stop, ())
    assert reply == Reply("\n6", None, ())


def test_of_a_long_beginning_no_more_is_encoded_than_is_too_long():
    assert encoded("a" * 10**5, TOKENIZER, 10) == Prefill(
        "a" * 10**5, tuple(TOKENIZER.encode("a" * 16 * 11))
    )
    # of few tokens for its length
    spaces = " " * 16 * 30
    many = max(len(TOKENIZER.encode(spaces[: 16 * 11])), 10)
    assert encoded(spaces, TOKENIZER, many).token_ids == tuple(TOKENIZER.encode(spaces))
