"""Messages between turns: what the model sampled stays, token for token; the calculator of
examples/agents.
"""

import asyncio
import functools
import gc
import json
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
from pydantic import BaseModel, ValidationError

from examples.agents.calculator import calculate
from examples.agents.guess import Guess
from megatron_rl.records import Prompt
from megatron_rl.rollout.agents import Step, Turn
from megatron_rl.rollout.agents import chat as chat_module
from megatron_rl.rollout.agents.chat import Chat, text_of
from megatron_rl.rollout.agents.conversation import chained
from megatron_rl.rollout.agents.known_texts import KnownTexts
from megatron_rl.rollout.agents.reply import MAX_DEPTH, ToolCall, is_deep
from megatron_rl.rollout.agents.threads import called
from megatron_rl.rollout.agents.tools import Tools
from tests.fake_server import wait_for
from tests.words import qwen_tokenizer, word_tokenizer


@pytest.fixture(scope="module")
def qwen():
    return qwen_tokenizer()


PROMPT = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
CALL = (
    '<tool_call>\n{"name": "calculate", "arguments": {"a": 2, "operator": "+", "b":'
    " 2}}\n</tool_call><|im_end|>"
)


def test_a_tool_message_is_appended_in_the_models_format(qwen):
    chat, prompt, turn = Chat("qwen3", qwen), qwen.encode(PROMPT), qwen.encode(CALL)
    added = chat.extend(prompt, turn, [{"role": "tool", "content": "4.0"}])
    assert qwen.decode(added) == (
        "\n<|im_start|>user\n<tool_response>\n4.0\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert qwen.convert_tokens_to_ids("<|im_end|>") in chat.stop_token_ids


def test_tokens_that_encoding_would_merge_otherwise_stay_as_sampled(qwen):
    """The turn's text encodes to other tokens than were sampled: what is added must not depend on
    that.
    """
    chat, prompt = Chat("qwen3", qwen), qwen.encode(PROMPT)
    sampled = [
        *qwen.encode("<tool_"),
        *qwen.encode("call>x"),
        qwen.convert_tokens_to_ids("<|im_end|>"),
    ]
    assert qwen.encode(qwen.decode(sampled)) != sampled
    added = chat.extend(prompt, sampled, [{"role": "user", "content": "go"}])
    assert qwen.decode(added) == "\n<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"


def test_a_turn_cut_at_its_limit_is_closed_first(qwen):
    chat = Chat("qwen3", qwen)
    added = chat.extend(
        qwen.encode(PROMPT), qwen.encode("I was cut"), [{"role": "user", "content": "go"}]
    )
    assert qwen.decode(added).startswith("<|im_end|>\n<|im_start|>user\ngo")


def echo(text: str) -> str:
    """Say it again.

    Args:
        text: what to say
    """
    return text


@pytest.mark.parametrize(
    "arguments, why",
    [
        ("[" * 2000, "recursion depth exceeded"),
        ('{"text": ' + "1" * 5000 + "}", "Exceeds the limit"),
        ("[" * 150 + "]" * 150, "nested more than 100 deep"),
    ],
)
def test_a_call_of_thousands_of_brackets_or_digits_is_answered(qwen, arguments, why):
    """Models in a loop write such ones: the error is the model's, not the run's."""
    turn = qwen.encode(
        f'<tool_call>\n{{"name": "echo", "arguments": {arguments}}}\n</tool_call><|im_end|>'
    )
    reply = Chat("qwen3", qwen).parse(qwen.encode(PROMPT), turn)
    (call,) = reply.tool_calls
    answer, is_error = asyncio.run(Tools([echo]).answer(call))
    assert (
        is_error and answer.startswith("error: this tool call could not be read") and why in answer
    )
    assert arguments in str(reply.message) and chained(b"", reply.message)


@pytest.mark.parametrize("name", ["5", "true", '["echo"]', '{"a": 1}'])
def test_a_call_whose_name_is_no_text_is_answered(qwen, name):
    chat, prompt = Chat("qwen3", qwen), qwen.encode(PROMPT)
    turn = qwen.encode(
        f'<tool_call>\n{{"name": {name}, "arguments": {{"text": "x"}}}}\n</tool_call><|im_end|>'
    )
    reply = chat.parse(prompt, turn)
    (call,) = reply.tool_calls
    answer, is_error = asyncio.run(Tools([echo]).answer(call))
    assert is_error and answer == "error: this tool call could not be read: its name is no text"
    history = [
        {"role": "user", "content": "2+2?"},
        reply.message,
        {"role": "user", "content": answer},
    ]
    assert name in qwen.decode(chat.render(history)), "the model sees what it wrote, as text"


def plot(function: str) -> str:
    """Draw it.

    Args:
        function: what to draw
    """
    return function


@pytest.mark.parametrize("name", ["function", "self", "arguments", ""])
def test_an_argument_of_any_name_is_answered(name):
    """The model writes the names; none may be taken for one of our own calls."""
    answer = asyncio.run(Tools([echo]).answer(ToolCall("id", "echo", {"text": "x", name: 1}, "")))
    assert answer == (f"error: arguments of echo: {name}: Unexpected keyword argument", True)
    assert asyncio.run(Tools([plot]).answer(ToolCall("id", "plot", {"function": "x"}, ""))) == (
        "x",
        False,
    )


class Article(BaseModel):
    price: float


def look_up(name: str) -> str:
    """Look up a price.

    Args:
        name: the article
    """
    return str(Article.model_validate({"cost": 3}).price)


async def look_up_later(name: str) -> str:
    """Look up a price.

    Args:
        name: the article
    """
    return look_up(name)


@pytest.mark.parametrize("function", [look_up, look_up_later])
def test_an_error_of_a_tools_code_is_none_of_its_arguments(function):
    """Pydantic raises the same error for both: the model can mend one of them alone."""
    call = ToolCall("id", function.__name__, {"name": "apple"}, "")
    with pytest.raises(ValidationError, match="Article"):
        asyncio.run(Tools([function]).answer(call))
    wrong = replace(call, arguments={"name": ["apple"]})
    answer = f"error: arguments of {call.name}: name: Input should be a valid string"
    assert asyncio.run(Tools([function]).answer(wrong)) == (answer, True)


def test_half_an_emoji_is_a_question_mark(qwen):
    """JSON may hold it (a model that escapes one stops in its middle), but no tokenizer and no HTTP
    client takes it.
    """
    chat, prompt = Chat("qwen3", qwen), qwen.encode(PROMPT)
    turn = qwen.encode(
        '<tool_call>\n{"name": "echo", "arguments": {"text": "\\ud83d"}}\n</tool_call><|im_end|>'
    )
    reply = chat.parse(prompt, turn)
    (call,) = reply.tool_calls
    assert asyncio.run(Tools([echo]).answer(call)) == ("?", False)
    assert json.dumps(reply.message, ensure_ascii=False).encode()
    assert "\n?\n" in qwen.decode(
        chat.extend(prompt, turn, [{"role": "tool", "content": "\ud83d"}])
    )


def test_of_megabytes_no_more_is_encoded_than_fills_a_sequence(qwen, monkeypatch):
    monkeypatch.setattr(chat_module, "CHARACTERS_PER_TOKEN", 4)
    chat, prompt, turn = (
        Chat("qwen3", qwen, longest=20),
        qwen.encode(PROMPT),
        qwen.encode("ok<|im_end|>"),
    )
    huge = {"role": "user", "content": "x" * 10**6}
    for tokens in (chat.render([huge]), chat.extend(prompt, turn, [huge])):
        assert 20 < len(tokens) < 200
    # more than 4 characters a token: it fits
    dense = {"role": "user", "content": "<tool_response>" * 15}
    assert qwen.decode(chat.render([dense])).count("<tool_response>") == 15


@pytest.mark.parametrize("name", ["auto", "default", "no-such-model", "qwen3"])
def test_a_format_that_is_not_the_models_is_refused(name):
    with pytest.raises(ValueError, match=f"agent.renderer = '{name}'"):
        Chat(name, word_tokenizer())


@pytest.mark.parametrize(
    "call, answer",
    [
        ({"arguments": {"a": 2, "operator": "*", "b": 3.5}}, "7.0"),
        ({"arguments": {"a": 1, "operator": "/", "b": 0}}, "error: ZeroDivisionError"),
        ({"arguments": {"a": 1, "operator": "**", "b": 9}}, "error: KeyError"),
        ({"arguments": ["a"]}, "error: TypeError"),
        ({"name": "calculate"}, "error: KeyError"),
    ],
)
def test_the_calculator_answers_every_call(call, answer):
    assert calculate(json.dumps(call)).startswith(answer)
    assert calculate("{not json").startswith("error: JSONDecodeError")


def test_the_game_says_where_the_number_is():
    game = Guess()
    game.reset(Prompt("q", "6+7=", (1,), "13"))
    answers = [game.step(Turn(text, (), "stop")) for text in ("9", "20", "13")]
    assert [answer.observation for answer in answers] == ["+6+7=", "=6+7=", ""]
    assert answers[-1] == Step(reward=1 / 3, done=True, metrics={"guesses": 3, "numbers": 1.0})
    assert game.step(Turn("x", (), "stop")).done


def test_arguments_are_shown_as_they_were_written():
    assert ToolCall("id", "echo", {"text": "\u00e9"}, "").arguments_json == '{"text": "\u00e9"}'


@pytest.mark.parametrize(
    "content", [["x"], [{"type": "text", "text": "x"}, "x"], [{"type": "image_url"}], 3]
)
def test_content_is_text_or_parts_of_text(content):
    with pytest.raises(ValueError, match="must be text or a list of text parts"):
        text_of(content)
    assert (
        text_of([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]) == "ab"
        and text_of(None) == ""
    )


def test_special_tokens_do_not_count_towards_a_text(qwen):
    """A text of as many tokens as the longest sequence has is given to the format whole."""
    chat, message = Chat("qwen3", qwen, longest=10), {"role": "user", "content": "x" * 200}
    chat._tokenizer = SimpleNamespace(
        encode=lambda text, add_special_tokens: [0] * (10 + add_special_tokens)
    )
    assert chat._shortened(message) is message


def test_known_texts_are_encoded_as_the_tokenizer_encodes_them(qwen):
    known, places = KnownTexts(qwen), {"add_special_tokens": False, "return_offsets_mapping": True}
    for text, named in (("a", places), ("a", {}), ("a" * 99, places), (["a", "b"], places)):
        for _ in range(2):
            assert dict(known(text, **named)) == dict(qwen(text, **named))


class Counter:
    def __init__(self, start):
        self.value = start

    def add(self, more: int) -> int:
        """Add to the counter.

        Args:
            more: what to add
        """
        self.value += more
        return self.value

    async def read(self) -> int:
        """Read the counter."""
        return self.value


def test_methods_are_tools_of_their_object_which_ends_with_its_last_use():
    counters = [Counter(1), Counter(10)]
    tools = [Tools([counter.add, counter.read]) for counter in counters]
    parameters = tools[0].schemas[0]["function"]["parameters"]
    assert parameters["required"] == ["more"] and list(parameters["properties"]) == ["more"]
    add, read = (
        ToolCall("id", name, arguments, "")
        for name, arguments in (("add", {"more": "2"}), ("read", {}))
    )
    assert [asyncio.run(tool.answer(add)) for tool in tools] == [("3", False), ("12", False)]
    assert asyncio.run(tools[1].answer(read)) == ("12", False)
    wrong = replace(add, arguments={"more": "x"})
    assert "arguments of add: more: " in asyncio.run(tools[0].answer(wrong))[0]
    gone = weakref.ref(counters[0])
    del counters, tools
    # the thread of the last call may still be ending
    assert wait_for(lambda: gc.collect() >= 0 and gone() is None, 10)


def decorated(function):
    @functools.wraps(function)
    def call(*values, **named):
        return function(*values, **named)

    return call


@decorated
async def wait_and_echo(text: str) -> str:
    """Say it again.

    Args:
        text: what to say
    """
    await asyncio.sleep(0)
    return text


def test_an_async_function_behind_a_decorator_is_awaited():
    call = ToolCall("id", "wait_and_echo", {"text": "x"}, "")
    assert asyncio.run(Tools([wait_and_echo]).answer(call)) == ("x", False)
    assert asyncio.run(called(wait_and_echo, text="x")) == "x"


class WithCall:
    """Say it again."""

    def __call__(self, text: str) -> str:
        return text


@pytest.mark.parametrize(
    "tool, name", [(functools.partial(echo, text="x"), "partial"), (WithCall(), "WithCall object")]
)
def test_an_object_that_is_no_function_is_refused_by_name(tool, name):
    why = f"tools: .*{name}.* cannot be described to the model: .*must be a function or a method"
    with pytest.raises(ValueError, match=why):
        Tools([tool])


@pytest.mark.parametrize("function", [{"name": ""}, {"name": 5}, {}, "multiply"])
def test_a_tool_without_a_name_is_refused(function):
    with pytest.raises(ValueError, match="tools: .* must be"):
        Tools([{"type": "function", "function": function}])
    with pytest.raises(
        ValueError, match="tools: 'multiply' must be a function, or the schema of one"
    ):
        Tools(["multiply"])


def test_arguments_nested_deeper_than_tools_recurse_are_found():
    arguments = 1
    for depth in range(1, 150):
        arguments = [arguments] if depth % 2 else {"a": arguments}
        assert is_deep(arguments) == (depth > MAX_DEPTH), depth


def test_a_conversation_is_written_with_its_thinking_and_opens_the_next_turn(qwen):
    answer = {"role": "assistant", "content": "OK", "reasoning_content": "hm"}
    messages = [{"role": "user", "content": "go"}, answer, {"role": "tool", "content": "4"}]
    assert qwen.decode(Chat("qwen3", qwen).render(messages)) == (
        "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\nOK"
        "<|im_end|>\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_later_message_that_the_format_leaves_out_is_refused(qwen):
    def bridge(prompt, completion, messages, tools):
        tokens = [*prompt, *completion, *qwen.encode("<|im_start|>assistant\n")]
        return SimpleNamespace(token_ids=tokens, message_indices=[-1] * len(tokens))

    chat = Chat("qwen3", qwen)
    chat._renderer = SimpleNamespace(bridge_to_next_turn=bridge)
    with pytest.raises(ValueError, match="does not write the one with role = 'system'"):
        chat.continuation([1, 2], [3], [{"role": "system", "content": "be brief"}])


def test_a_tool_that_is_only_a_schema_is_not_called():
    schema = {"type": "function", "function": {"name": "echo"}}
    with pytest.raises(ValueError, match="tool 'echo' is only a schema: answer its calls yourself"):
        asyncio.run(Tools([schema]).answer(ToolCall("id", "echo", {"text": "x"}, "")))
