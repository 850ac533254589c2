"""Rows of SFT: which tokens are learned, read from the text by itself, and what is refused."""

import json
import re
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from megatron_rl.batch.pack import pack
from megatron_rl.config import load_config
from megatron_rl.data.demonstrations import load_demonstrations, make_demonstration, shared_rows
from megatron_rl.data.rows import DataError
from megatron_rl.records.packed import Sample
from megatron_rl.rollout.agents.chat import Chat
from megatron_rl_tools.tiny_text import make_tokenizer
from tests.words import qwen_tokenizer

CALL = {"id": "x", "type": "function", "function": {"name": "calculate", "arguments": {"a": 2}}}
TURNS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "4.0"},
    {"role": "assistant", "content": "it is 4"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "yes", "reasoning_content": "let me see"},
]


@pytest.fixture(scope="module")
def qwen():
    return qwen_tokenizer()


def write(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(path, tokenizer, *, renderer="", source="", **sections):
    settings = {
        "model": {"path": "m"},
        "loss": {"name": "sft"},
        "run": {"group_size": 1},
        "replay": {"mode": "none", "measure": False},
        "data": {"train": str(path), **sections.pop("data", {})},
        **sections,
    }
    cfg = load_config(None, [], settings)
    render = Chat(renderer, tokenizer).demonstration if renderer else None
    return load_demonstrations(path, cfg.data, cfg.sft, tokenizer, render, source)


def learned_text(row, tokenizer) -> list[str]:
    return [tokenizer.decode(row.tokens[start:end]) for start, end in row.spans]


def test_the_assistants_turns_are_learned_and_nothing_else(tmp_path, qwen):
    file = load(write(tmp_path / "a.jsonl", {"messages": TURNS}), qwen, renderer="qwen3")
    (row,) = file.rows
    text = qwen.decode(row.tokens)
    # by the template's own text: what follows the header of the assistant, up to its end token
    turns = re.findall(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", text, re.DOTALL)
    assert learned_text(row, qwen) == turns and len(turns) == 3
    assert turns[0] == (
        '<tool_call>\n{"name": "calculate", "arguments": {"a": 2}}\n</tool_call><|im_end|>'
    )
    assert turns[2] == "<think>\nlet me see\n</think>\n\nyes<|im_end|>"
    assert text.endswith(turns[2]), "tokens that no learned token sees are left out"
    assert f"1 rows of {tmp_path}/a.jsonl, {sum(b - a for a, b in row.spans)} tokens" in file.line


def test_a_packed_row_has_the_learned_tokens_in_its_mask(tmp_path, qwen):
    (row,) = load(write(tmp_path / "a.jsonl", {"messages": TURNS}), qwen, renderer="qwen3").rows
    batch = pack([Sample(row.rollout, 1.0, response=0)])
    labels = batch.labels[batch.loss_mask].tolist()
    assert labels == [int(t) for a, b in row.spans for t in row.tokens[a:b]]
    assert set(batch.advantages[batch.loss_mask].tolist()) == {1.0}
    assert int(batch.response_lengths[0]) == len(labels)


@pytest.mark.parametrize(
    "turn",
    [
        {"reasoning_content": "two and two"},
        {"reasoning_content": "4"},  # it occurs in the answer, too
        {"content": "<think>\ntwo and two\n</think>\n\nit is 4"},
        {"content": [{"type": "text", "text": "two and two</think>it is 4"}]},
    ],
)
def test_thinking_that_the_format_would_leave_out_is_refused(tmp_path, qwen, turn):
    messages = [*TURNS[:4], TURNS[4] | turn, *TURNS[5:]]
    refusal = r"line 1: messages: .* leaves out the thinking of message 5.*ends with this turn"
    with pytest.raises(DataError, match=refusal):
        load(write(tmp_path / "a.jsonl", {"messages": messages}), qwen, renderer="qwen3")
    # a row that ends with this turn has it
    path = write(tmp_path / "b.jsonl", {"messages": messages[:5]})
    (row,) = load(path, qwen, renderer="qwen3").rows
    thinking = turn.get("reasoning_content", "two and two")
    assert learned_text(row, qwen)[-1] == f"<think>\n{thinking}\n</think>\n\nit is 4<|im_end|>"


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [
        ("reasoning", "two and two", "name it reasoning_content"),
        ("thinking", "two and two", "name it reasoning_content"),
        ("function_call", {"name": "calculate", "arguments": "{}"}, "one of tool_calls"),
        ("weight", 0, "a prompt of the turns before"),
    ],
)
def test_a_key_that_no_format_reads_is_refused(tmp_path, qwen, key, value, fix):
    path = write(tmp_path / "a.jsonl", {"messages": [*TURNS[:4], {**TURNS[4], key: value}]})
    with pytest.raises(DataError, match=f"line 1: '{key}' of message 5 is not read.*{fix}"):
        load(path, qwen, renderer="qwen3")
    empty = [{**TURNS[1], "weight": 0}, {**TURNS[4], "weight": 1, "thinking": None}]
    path = write(tmp_path / "b.jsonl", {"messages": empty})
    assert len(load(path, qwen, renderer="qwen3").rows) == 1


def test_a_prompt_and_its_response_are_one_turn(tmp_path, qwen):
    rows = [{"question": "2+2?", "answer": "4", "id": "q"}, {"question": "1?", "answer": "one"}]
    file = load(write(tmp_path / "a.jsonl", *rows), qwen, renderer="qwen3", source="s")
    assert [row.id for row in file.rows] == ["q", "s:2"]
    assert [row.source for row in file.rows] == ["s", "s"]
    first = qwen.decode(file.rows[0].tokens)
    assert first.startswith("<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n")
    assert learned_text(file.rows[0], qwen)[0].endswith("4<|im_end|>")


def test_arguments_that_other_rows_have_are_not_learned_as_null(tmp_path, qwen):
    def row(name, arguments, tool):
        function = {"name": name, "arguments": arguments}
        call = {"id": "x", "type": "function", "function": function}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        return {"messages": [TURNS[1], turn], "tools": [{"type": "function", "function": tool}]}

    def tool(name, **properties):
        return {"name": name, "parameters": {"type": "object", "properties": properties}}

    rows = [
        row("add", {"a": 2, "b": [1]}, tool("add", a={"type": "integer"}, b={"type": "array"})),
        row("find", {"city": {"name": "Rome"}}, tool("find", city={"type": "object"})),
    ]
    written = write(tmp_path / "a.jsonl", *rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    texts = [
        [qwen.decode(row.tokens) for row in load(path, qwen, renderer="qwen3").rows]
        for path in (written, tmp_path / "a.parquet")
    ]
    assert texts[0] == texts[1] and "null" not in texts[0][0]
    # in JSON null is a value
    path = write(tmp_path / "b.jsonl", row("find", {"city": None}, tool("find")))
    (null,) = load(path, qwen, renderer="qwen3").rows
    assert '"arguments": {"city": null}' in qwen.decode(null.tokens)


def test_earlier_turns_of_a_prompt_are_not_learned(tmp_path, qwen):
    earlier = {**TURNS[4], "reasoning_content": "that qwen3 leaves out"}
    asked = [*TURNS[:2], earlier, TURNS[5]]
    path = write(tmp_path / "a.jsonl", {"prompt": asked, "response": "yes"})
    (row,) = load(path, qwen, renderer="qwen3").rows
    assert learned_text(row, qwen) == ["<think>\n\n</think>\n\nyes<|im_end|>"]
    text = qwen.decode(row.tokens)
    assert "it is 4<|im_end|>" in text and text.count("<|im_start|>assistant") == 2


def test_plain_texts_are_encoded_apart_and_end_with_eos(tmp_path):
    tokenizer = make_tokenizer()
    row = {"prompt": "1+1=", "response": "2"}
    data = {"chat_template": False, "template": "q {prompt}"}
    (row,) = load(write(tmp_path / "a.jsonl", row), tokenizer, data=data).rows
    prompt = tokenizer.encode("q 1+1=", add_special_tokens=False)
    assert row.tokens.tolist() == [*prompt, *tokenizer.encode("2"), tokenizer.eos_token_id]
    assert row.spans == ((len(prompt), len(prompt) + 2),)


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ({"messages": TURNS}, {}, "needs agent.renderer"),
        ({"messages": TURNS}, {"data": {"chat_template": False}}, "chat_template = true"),
        ({"prompt": "a"}, {"data": {"chat_template": False}}, "'response' is missing"),
        ({"prompt": "a", "response": 4}, {"data": {"chat_template": False}}, "must be text"),
        ({"prompt": "a", "response": " "}, {"data": {"chat_template": False}}, "not empty"),
        (
            {"prompt": "a", "response": "b" * 9},
            {"data": {"chat_template": False}, "sft": {"max_row_tokens": 8}},
            "sft.max_row_tokens = 8; raise",
        ),
    ],
)
def test_a_broken_row_is_named(tmp_path, row, settings, message):
    path = write(tmp_path / "a.jsonl", row)
    with pytest.raises(DataError, match=re.escape(message)):
        load(path, make_tokenizer(), **settings)


def test_a_template_is_refused_where_it_would_have_no_effect(tmp_path, qwen):
    data = {"template": "Q: {prompt}"}
    path = write(tmp_path / "a.jsonl", {"messages": TURNS})
    with pytest.raises(DataError, match=r"'messages' is a conversation, on which template = 'Q: "):
        load(path, qwen, renderer="qwen3", data=data)
    path = write(tmp_path / "b.jsonl", {"prompt": [TURNS[1]], "response": "4"})
    (row,) = load(path, qwen, renderer="qwen3", data=data).rows
    assert "Q: 2+2?" in qwen.decode(row.tokens)


def test_messages_of_an_unknown_role_and_broken_tools_are_named(tmp_path, qwen):
    wrong = [{"role": "robot", "content": "x"}, {"role": "assistant", "content": "y"}]
    path = write(tmp_path / "a.jsonl", {"messages": wrong}, {"messages": TURNS, "tools": "{"})
    with pytest.raises(DataError, match=r"line 1: messages: role = 'robot'(.|\n)*line 2: 'tools'"):
        load(path, qwen, renderer="qwen3")


def test_long_rows_are_dropped_and_counted(tmp_path):
    rows = [{"prompt": "a", "response": "b"}, {"prompt": "a", "response": "b" * 9}]
    file = load(
        write(tmp_path / "a.jsonl", *rows),
        make_tokenizer(),
        data={"chat_template": False, "on_long_prompt": "drop"},
        sft={"max_row_tokens": 8},
    )
    assert len(file.rows) == 1
    assert "1 rows left out, longer than sft.max_row_tokens = 8" in file.line


def test_a_row_without_a_prompt_or_an_answer_is_refused():
    with pytest.raises(DataError, match="nothing predicts"):
        make_demonstration("a", [1, 2], [True, True], "")
    with pytest.raises(DataError, match="nothing to learn"):
        make_demonstration("a", [1, 2], [False, False], "")


def test_rows_are_told_apart_by_what_is_learned():
    def file(learned):
        row = make_demonstration("a", np.arange(4), learned, "")
        return type("File", (), {"rows": [row]})

    same, other = file([False, True, True, True]), file([False, True, False, True])
    assert shared_rows([same], same) == 1 and shared_rows([same], other) == 0
