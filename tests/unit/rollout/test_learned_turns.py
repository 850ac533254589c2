"""The tokens that SFT learns in every chat format: turns, with the token that ends them."""

from functools import lru_cache
from itertools import pairwise

import pytest
from renderers.configs import _CONFIG_BY_NAME
from tokenizers import AddedToken

from megatron_rl.rollout.agents.chat import NOT_NAMED, Chat
from tests.conversations.model import special_tokens
from tests.words import qwen_tokenizer

NEEDS_DOWNLOAD = ("gpt-oss",)
"""Formats whose library reads a vocabulary from the network."""
FORMATS = sorted(set(_CONFIG_BY_NAME) - {*NOT_NAMED, *NEEDS_DOWNLOAD})
OPEN_AT_THE_END = ("glm-4.5", "glm-5", "glm-5.1", "glm-5.3", "hy3")
"""Formats that write nothing after the last turn."""
FUNCTION = {"name": "calc", "arguments": {"a": 2}}
CALL = {"id": "functions.calc:0", "type": "function", "function": FUNCTION}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "calc", "description": "d", "parameters": PARAMETERS},
    }
]
CALLED = [user := {"role": "user", "content": "2+2?"}, {"role": "assistant", "tool_calls": [CALL]}]
ANSWERED = [
    *CALLED,
    {"role": "tool", "content": "4", "tool_call_id": "functions.calc:0", "name": "calc"},
    {"role": "assistant", "content": "four"},
]
CONVERSATIONS = {
    "one turn": [user, {"role": "assistant", "content": "four"}],
    "an empty turn": [user, {"role": "assistant", "content": ""}],
    "a call": CALLED,
    "an answer after a call": ANSWERED,
    "two questions": [*ANSWERED, user, {"role": "assistant", "content": "yes"}],
}


@lru_cache
def chat_of(name: str):
    tokenizer = qwen_tokenizer()
    special = special_tokens(name, tokenizer)
    tokenizer.add_tokens([AddedToken(token, special=True) for token in special])
    return Chat(name, tokenizer), tokenizer


def learned_spans(chat, messages, tools=TOOLS, **options):
    tokens, learned = chat.demonstration(messages, tools, **options)
    edges = [i for i, (a, b) in enumerate(pairwise([False, *learned, False])) if a != b]
    return tokens, [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def learned_texts(name, messages, tools=()):
    chat, tokenizer = chat_of(name)
    tokens, spans = learned_spans(chat, messages, tools)
    return [tokenizer.decode(tokens[start:end]) for start, end in spans]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_every_turn_is_learned_from_the_prompts_end_to_its_stop_token(name, messages):
    chat, _ = chat_of(name)
    tokens, spans = learned_spans(chat, messages)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    assert len(spans) == len(turns)
    for _, end in spans:
        assert tokens[end - 1] in chat.stop_token_ids
    # formats that write a turn without thinking in another way than the prompt opens it: sft.md
    prompt = chat.render(messages[: turns[-1]], TOOLS)
    if tokens[: len(prompt)] == prompt:
        assert spans[-1][0] <= len(prompt), "a token between the prompt and the turn is sampled"


@pytest.mark.parametrize("name", OPEN_AT_THE_END)
def test_the_end_of_the_last_turn_is_what_the_format_writes_before_the_next_message(name):
    last, middle = learned_texts(name, ANSWERED)[-1], learned_texts(name, [*ANSWERED, *CALLED])[1]
    chat, tokenizer = chat_of(name)
    # hy3 has one stop token
    end = tokenizer.decode(chat.stop_token_ids) if name == "hy3" else "<|user|>"
    assert last.endswith(f"four{end}") and middle.endswith(f"four{end}")
    called = learned_texts(name, CALLED)[-1]
    assert called.endswith(end if name == "hy3" else "</tool_call><|observation|>")


def test_the_line_break_that_glm_samples_after_its_prompt_is_learned():
    texts = learned_texts("glm-4.5", [*ANSWERED, user, {"role": "assistant", "content": "yes"}])
    assert texts[1:] == ["\n<think></think>\nfour<|user|>", "\n<think></think>\nyes<|user|>"]
    assert texts[0].startswith("\n<think></think>\n<tool_call>calc")


def test_a_turn_that_the_format_does_not_end_is_refused():
    messages = [*ANSWERED, {"role": "system", "content": "be brief"}, *CALLED]
    with pytest.raises(ValueError, match="end of message 4 before one with role = 'system'"):
        chat_of("glm-5")[0].demonstration(messages, TOOLS)


def test_thinking_that_is_written_but_not_learned_is_refused():
    # without reasoning_effort, hy3 writes it into the prompt
    messages = [user, {"role": "assistant", "content": "four", "reasoning_content": "let me see"}]
    with pytest.raises(ValueError, match="thinking of message 2.*remove the thinking"):
        chat_of("hy3")[0].demonstration(messages)
    assert learned_texts("glm-5", messages) == ["let me see</think>four<|user|>"]
