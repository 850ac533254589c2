"""The language of the tiny model that chats: it writes every text, and its prompts are those of the
renderer and of the chat template, token for token.
"""

import json
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, Qwen3MoeForCausalLM

from examples.agents.openai_agent import CALCULATE, calculate
from megatron_rl.rollout.agents.chat import Chat
from megatron_rl_tools.make_tiny_moe import Settings, language_of, model_config, write_checkpoint
from megatron_rl_tools.tiny_chat import (
    END,
    MARKS,
    START,
    TURN_END,
    encode_chat,
    make_chat_tokenizer,
)
from megatron_rl_tools.tiny_tasks import CALCULATORS, CHAIN_SUM, TASKS, chain_sums

SPECIAL = (END, START, TURN_END, *MARKS)


@pytest.fixture(scope="module")
def stages():
    train, _ = TASKS["chat"].make(0, 200)
    return TASKS["chat"].stages(train)


@pytest.fixture(scope="module")
def tokenizer(stages):
    return language_of("chat", stages).tokenizer


@pytest.fixture(scope="module")
def chat(tokenizer):
    return Chat("qwen3", tokenizer)


texts = st.one_of(
    st.text(),
    st.lists(
        st.sampled_from([*SPECIAL, "\n", " ", "7", '{"a": ', "What is ", "é", "🙂", "\0"])
    ).map("".join),
)


@settings(max_examples=400, deadline=None)
@given(texts)
def test_every_text_is_written_exactly(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert sum(tokenizer.convert_ids_to_tokens(ids).count(digit) for digit in "0123456789") == sum(
        text.count(digit) for digit in "0123456789"
    ), "each digit is a token"


def test_special_tokens_are_single_and_as_in_qwen3(tokenizer):
    for token in SPECIAL:
        assert len(tokenizer.encode(token, add_special_tokens=False)) == 1
    assert (tokenizer.eos_token, tokenizer.pad_token) == (TURN_END, END)
    assert tokenizer.unk_token is None and tokenizer.bos_token is None
    text = f"{START}a<tool_call>b</tool_call>{TURN_END}"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == (
        "a<tool_call>b</tool_call>"
    )


calls = st.fixed_dictionaries(
    {
        "type": st.just("function"),
        "function": st.fixed_dictionaries(
            {
                "name": st.sampled_from(["calculate", "öl"]),
                "arguments": st.one_of(
                    st.just('{"a": 37, "operator": "*", "b": 48}'),
                    st.dictionaries(texts, st.one_of(st.integers(), texts, st.lists(texts))),
                ),
            }
        ),
    }
)
asked = st.fixed_dictionaries({"role": st.just("user"), "content": texts})
replies = st.one_of(
    st.fixed_dictionaries({"role": st.just("assistant"), "content": texts}),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": texts, "tool_calls": st.lists(calls)}
    ),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": texts, "reasoning_content": texts}
    ),
)
answers = st.fixed_dictionaries({"role": st.just("tool"), "content": texts})
systems = st.fixed_dictionaries({"role": st.just("system"), "content": texts})
conversations = st.builds(
    lambda system, first, others: [*system, first, *others],
    st.lists(systems, max_size=1),
    asked,
    st.lists(st.one_of(asked, replies, answers), max_size=5),
)
tools = st.one_of(
    st.just(()),
    st.lists(st.sampled_from(CALCULATORS), min_size=1, max_size=2),
    texts.map(lambda text: [{"type": "function", "function": {"name": "f", "description": text}}]),
)


@settings(max_examples=300, deadline=None)
@given(conversations, tools)
def test_the_renderer_writes_what_the_chat_template_writes(chat, tokenizer, messages, tools):
    by_template = tokenizer.apply_chat_template(
        messages, tools=list(tools) or None, add_generation_prompt=True, return_dict=False
    )
    assert chat.render(messages, tools) == by_template


def test_the_cold_start_shows_what_an_agents_program_makes_of_the_models_turns(
    chat, tokenizer, stages
):
    _, (_, examples) = stages
    for example in [*examples[:6], examples[8000], examples[-1], stages[0][1][0]]:
        data = encode_chat(tokenizer, [example])
        system = [{"role": "system", "content": example.system}] if example.system else []
        question = {"role": "user", "content": example.prompt}
        tokens = chat.render([*system, question], example.tools)
        is_models = [False] * len(tokens)
        for number, turn in enumerate(example.turns):
            completion = tokenizer.encode(turn + TURN_END)
            added = []
            if number < len(example.answers):
                answer = {"role": example.answered_by, "content": example.answers[number]}
                added = chat.extend(tokens, completion, [answer])
            tokens = [*tokens, *completion, *added]
            is_models += [True] * len(completion) + [False] * len(added)
        assert data.tokens.tolist() == [tokens] and data.is_models.tolist() == [is_models]


def test_its_calls_are_read_and_answered_by_the_example_program(chat, tokenizer, stages):
    _, (_, examples) = stages
    assert CALCULATORS[0] == CALCULATE, "the program's tool is one that the model was shown"
    for example in examples[:20]:
        prompt = chat.render([{"role": "user", "content": example.prompt}], example.tools)
        reply = chat.parse(prompt, tokenizer.encode(example.turns[0] + TURN_END), example.tools)
        (call,) = reply.tool_calls
        assert (call.name, call.problem) == ("calculate", "")
        answer = calculate(call.arguments_json)
        assert answer == f"{int(example.label)}.0" and example.answers[0] in (
            answer,
            example.label,
        )
        assert example.turns[1] == example.label and len(example.turns) == 2


def test_sums_are_asked_as_reasoning_gym_asks_and_answered_rightly():
    questions = []
    for example in chain_sums(50, 3):
        assert len(example.turns) == 3 and example.label == example.turns[0] and not example.tools
        questions += zip((example.prompt, *example.answers), example.turns, strict=True)
    before, after = CHAIN_SUM.split("{}")
    for question, turn in questions:
        expression = question.removeprefix(before).removesuffix(after)
        assert re.fullmatch(r"[0-9]( [+-] [0-9]){1,2}", expression)
        assert question == before + expression + after
        assert int(turn) == sum(map(int, re.findall("[+-]?[0-9]", expression.replace(" ", ""))))


@pytest.mark.slow
def test_a_fifth_of_the_examples_with_a_tool_answers_at_once(stages):
    (first, short), (second, complete) = stages
    assert first == 0 < second and not any(example.tools for example in short)
    with_tool = [example for example in complete if example.tools]
    at_once = [example for example in with_tool if len(example.turns) == 1]
    assert len(with_tool) == 5 * len(at_once) and 0.5 < len(with_tool) / len(complete) < 0.6
    assert all(example.turns == (example.label,) and not example.answers for example in at_once)
    assert [example.prompt for example in short] == [
        example.prompt for example in complete if example not in at_once
    ]


def test_the_same_examples_give_the_same_tokenizer(stages, tokenizer):
    again = make_chat_tokenizer(stages[-1][1])
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def test_the_checkpoint_is_an_hf_checkpoint_of_two_million_parameters(tmp_path, tokenizer):
    recipe = Settings(task="chat", **TASKS["chat"].settings)
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(model_config(recipe, tokenizer))
    assert 1.5e6 < sum(p.numel() for p in model.parameters()) < 2.5e6
    _, heldout = TASKS["chat"].make(0, 3)
    out = tmp_path / "chat"
    write_checkpoint(out, model, tokenizer, {}, heldout, heldout)
    loaded, read = Qwen3MoeForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert read.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert read.chat_template == tokenizer.chat_template
    assert loaded.generation_config.eos_token_id == read.eos_token_id == model.config.eos_token_id
    tokens = torch.tensor([read.encode("What is 37 * 48? 🙂")])
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model.eval()(tokens).logits)
    rows = [json.loads(line) for line in (out / "heldout.jsonl").read_text().splitlines()]
    assert rows == [{"prompt": e.prompt, "label": e.label} for e in heldout]
