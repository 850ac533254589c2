import json
import zlib

import pyarrow
import pyarrow.parquet
import pytest

from megatron_rl.config import DataConfig
from megatron_rl.data.prompts import (
    DataError,
    PromptSource,
    leaked_prompts,
    load_prompt_files,
    load_prompts,
)
from megatron_rl.records import Prompt
from megatron_rl_tools.tiny_text import make_tokenizer

TOKENIZER = make_tokenizer()  # a real HF tokenizer, one token a character
DIGIT = TOKENIZER.convert_tokens_to_ids("0")


def load_file(path, tokenizer=TOKENIZER, **settings):
    return load_prompts(
        path, DataConfig(train=path, **{"chat_template": False, **settings}), tokenizer
    )


def load(path, tokenizer=TOKENIZER, **settings):
    return load_file(path, tokenizer, **settings).prompts


def test_jsonl_and_parquet_give_the_same_prompts(tmp_path):
    rows = [{"prompt": "1+1=", "label": "2"}, {"prompt": "2+2=", "label": "4"}]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    got = load(tmp_path / "a.jsonl")
    assert got == load(tmp_path / "a.parquet")
    assert got[1] == Prompt(
        "a:2", "2+2=", tuple(TOKENIZER.convert_tokens_to_ids(list("2+2="))), "4"
    )
    assert got[0].token_ids[0] == DIGIT + 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "x", ', r"line 2: not JSON"),
        (b'{"prompt": "x", "label": ' + b"1" * 5000 + b"}", r"line 2: not JSON: Exceeds the limit"),
        (b'{"prompt": "\xff", "label": "1"}', r"line 2: not UTF-8"),
        (b'{"prompt": "x"}', r"line 2: key 'label' is missing; it has \['prompt'\]"),
        (
            b'{"prompt": "", "label": "1"}',
            r"line 2: 'prompt' must be text that is not empty, got ''",
        ),
        (b'{"prompt": ["x"], "label": "1"}', r"line 2: 'prompt' must be text"),
        (b"[1, 2]", r"line 2: expected an object with keys, got list"),
        (b'{"prompt": "x", "label": null}', r"line 2: 'label' must be text or a number, got null"),
        (
            '{"prompt": "\u00e9", "label": "1"}'.encode(),
            r"line 2: prompt has characters the tokenizer does not know",
        ),
        (
            b'{"prompt": "123456789", "label": "1"}',
            r"line 2: prompt has 9 tokens, data.max_prompt_tokens = 8",
        ),
        (
            rb'{"prompt": "x\ud800", "label": "1"}',
            r"line 2: 'prompt' has half a character at position 1",
        ),
        (
            rb'{"prompt": "x", "label": "1", "id": "q\ud800"}',
            r"line 2: 'id' has half a character at position 1",
        ),
        (b'{"prompt": "x", "label": NaN}', r"line 2: 'label' must be finite, got nan"),
        (
            b'{"prompt": "x", "label": ["1"]}',
            r"line 2: 'label' must be text or a number, got list; label.0 is the first",
        ),
        (
            b'{"prompt": "x", "label": "1", "images": ["a.png"]}',
            r"line 2: 'images' is not empty: prompts are text only",
        ),
    ],
)
def test_a_broken_row_names_file_line_and_rule(tmp_path, line, message):
    path = tmp_path / "broken.jsonl"
    path.write_bytes(b'{"prompt": "x", "label": 1}\n' + line + b"\n")
    with pytest.raises(DataError, match="broken.jsonl, " + message):
        load(path, max_prompt_tokens=8)


def test_missing_and_empty_files_and_missing_template(tmp_path):
    with pytest.raises(DataError, match="nowhere.jsonl: cannot be read: No such file"):
        load(tmp_path / "nowhere.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="no prompts in it"):
        load(tmp_path / "empty.jsonl")
    (tmp_path / "a.jsonl").write_text('{"prompt": "x", "label": "1"}')
    with pytest.raises(DataError, match="a.jsonl: data.chat_template = true but"):
        load(tmp_path / "a.jsonl", chat_template=True)


def prompts(count):
    return [Prompt(str(i), str(i), (i,), "") for i in range(count)]


def test_every_epoch_is_a_new_permutation_and_resume_continues():
    source = PromptSource(prompts(10), seed=3, shuffle=True)
    stream = [p.id for p in source.take(25)]
    assert sorted(stream[:10]) == sorted(stream[10:20]) == sorted(str(i) for i in range(10))
    assert stream[:10] != stream[10:20]
    state = json.loads(json.dumps(source.state_dict()))
    following = [p.id for p in source.take(12)]
    resumed = PromptSource(prompts(10), seed=3, shuffle=True)
    resumed.load_state_dict(state)
    assert [p.id for p in resumed.take(12)] == following
    with pytest.raises(DataError, match="num_prompts = 11, the checkpoint was made with 10"):
        PromptSource(prompts(11), seed=3, shuffle=True).load_state_dict(state)


def test_checksums_are_computed_once_for_prompts_and_once_an_epoch_for_the_order(monkeypatch):
    """Every rank makes a state_dict twice a step."""
    crc32, read = zlib.crc32, []
    monkeypatch.setattr(
        zlib, "crc32", lambda data, *start: read.append(len(data)) or crc32(data, *start)
    )
    source = PromptSource(prompts(10), seed=3, shuffle=True)
    first = source.state_dict()
    assert len(read) == 10 + 1
    source.take(3)
    assert source.state_dict() == first | {"position": 3} and len(read) == 11
    source.take(8)
    assert source.state_dict()["order_crc32"] != first["order_crc32"] and len(read) == 12


def test_without_shuffle_the_file_order_is_kept():
    source = PromptSource(prompts(4), seed=0, shuffle=False)
    assert [p.id for p in source.take(6)] == ["0", "1", "2", "3", "0", "1"]


def test_returned_prompts_come_first_also_after_a_resume():
    source = PromptSource(prompts(4), seed=0, shuffle=False)
    first, second, third = source.take(3)
    source.load_state_dict(source.state_dict(first=[second, third]))
    state = json.loads(json.dumps(source.state_dict(first=[first])))
    assert [p.id for p in source.take(4)] == ["1", "2", "3", "0"]
    resumed = PromptSource(prompts(4), seed=0, shuffle=False)
    resumed.load_state_dict(state)
    assert [p.id for p in resumed.take(5)] == ["0", "1", "2", "3", "0"]
    del state["returned"]  # a checkpoint of an older version
    resumed.load_state_dict(state)
    assert [p.id for p in resumed.take(1)] == ["3"]


def test_every_broken_row_is_counted(tmp_path):
    path = tmp_path / "broken.jsonl"
    path.write_text('{"prompt": "1", "label": "1"}\n' + "nonsense\n" * 7)
    with pytest.raises(
        DataError, match=r"line 2: not JSON(.|\n)*line 6: not JSON(.|\n)*and 2 more"
    ):
        load(path)


VERL = {
    "data_source": "openai/gsm8k", "prompt": [{"content": "1+1=", "role": "user",
    "tool_calls": None}], "ability": "math",
    "reward_model": {"ground_truth": "2", "style": "rule"},
    "extra_info": {"answer": "wrong", "index": 0, "question": "wrong", "split": "train"},
}  # fmt: skip
SLIME = {
    "prompt": [{"role": "user", "content": "1+1="}],
    "label": "2",
    "metadata": {"rm_type": "math"},
}
LAYOUTS = {
    "verl": VERL,
    "slime": SLIME,
    "slime, messages": {"messages": SLIME["prompt"], "label": "2"},
    "slime, text": {"prompt": "1+1=", "label": 2},
    "AIME 2024": {
        "id": 60,
        "problem": "1+1=",
        "solution": "wrong",
        "answer": "2",
        "url": "x",
        "year": "2024",
    },
    "AIME 2024, capital letters": {
        "ID": "2024-I-1",
        "Problem": "1+1=",
        "Solution": "wrong",
        "Answer": 2,
    },
    "AIME 2025": {"question": "1+1=", "answer": "2"},
    "DeepMath": {"question": "1+1=", "final_answer": "2", "answer": "wrong", "difficulty": 1.0},
    "an empty column": {"prompt": "1+1=", "label": None, "answer": "2", "images": []},
}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_of_public_datasets_are_read_unchanged(tmp_path, name, suffix):
    path, rows = tmp_path / f"a.{suffix}", [LAYOUTS[name]] * 2
    if suffix == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{{ 9 if 'tool_calls' in m }}{% endfor %}"
    )
    prompts = load(path, tokenizer, chat_template=True)
    assert [(prompt.text, prompt.label) for prompt in prompts] == [("1+1=", "2")] * 2
    assert prompts[1].id == str(LAYOUTS[name].get("id", "a:2"))


def test_keys_are_of_the_first_row_and_paths_reach_into_rows(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"q": {"text": "1"}, "answers": ["3", "4"], "a.b": "5"}\n')
    found = load_file(path, prompt_key="q.text", label_key="answers.1")
    assert (found.prompts[0].text, found.prompts[0].label, found.prompt_key) == ("1", "4", "q.text")
    assert load(path, prompt_key="q.text", label_key="a.b")[0].label == "5"
    for wrong in ("answers.2", "q.text.0", "answers.x"):
        with pytest.raises(DataError, match=f"line 1: key '{wrong}' is missing; it has"):
            load(path, prompt_key="q.text", label_key=wrong)
    path.write_text('{"problem": "1", "answer": "1"}\n{"question": "1", "label": "1"}\n')
    with pytest.raises(
        DataError, match=r"line 2: key 'problem' is missing; it has \['question', 'label'\]"
    ):
        load(path)


def test_a_number_as_label_has_no_exponent(tmp_path):
    """A reward reads "1e-05" as a multiple of Euler's number."""
    path = tmp_path / "a.jsonl"
    numbers = ("0.00001", "-2.5e-6", "1e16", "0.5", "3.0", "7", "-0.0")
    path.write_text("".join(f'{{"prompt": "1", "label": {text}}}\n' for text in numbers))
    assert [prompt.label for prompt in load(path)] == [
        "0.00001", "-0.0000025", "10000000000000000", "0.5", "3.0", "7", "-0.0",
    ]  # fmt: skip


def test_long_prompts_are_dropped_and_counted_on_request(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": "1" * n, "label": n}) + "\n" for n in (3, 9, 8, 10))
    )
    config = DataConfig(train=path, chat_template=False, max_prompt_tokens=8, on_long_prompt="drop")
    found = load_prompts(path, config, TOKENIZER)
    assert [prompt.label for prompt in found.prompts] == ["3", "8"] and found.num_long == 2
    assert "2 prompts of" in found.line(
        config
    ) and "2 of 4 dropped, longer than data.max_prompt" in found.line(config)
    with pytest.raises(
        DataError, match="no prompts in it within data.max_prompt_tokens = 2; raise it"
    ):
        load(path, max_prompt_tokens=2, on_long_prompt="drop")


def test_one_error_names_the_broken_rows_of_all_files(tmp_path):
    row = '{"prompt": "1", "label": "1"}\n'
    (tmp_path / "a.jsonl").write_text(
        row + "[]\n" + '{"prompt": "123456789", "label": "1"}\n' + "{\n"
    )
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"prompt": "1", "label": None}]), tmp_path / "b.parquet"
    )
    config = DataConfig(train=tmp_path, chat_template=False, max_prompt_tokens=8)
    with pytest.raises(DataError) as caught:
        load_prompt_files(
            {name: (tmp_path / name, config, "") for name in ("a.jsonl", "b.parquet", "c.jsonl")},
            TOKENIZER,
        )
    places = [
        "a.jsonl, line 2: ",
        "a.jsonl, line 3: prompt has 9",
        "a.jsonl, line 4: not JSON",
        "b.parquet, row 1",
        "c.jsonl: ",
    ]
    lines = str(caught.value).splitlines()
    assert len(lines) == 5 and all(
        place in line for place, line in zip(places, lines, strict=True)
    ), lines


def test_the_template_goes_around_the_prompt(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "1+1=", "label": "2"}\n')
    assert load(path, template="({prompt})")[0].text == "(1+1=)"
    with pytest.raises(ValueError, match="must contain {prompt} once"):
        DataConfig(train=path, template="no place")


def test_messages_that_end_with_the_answer_are_refused(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    path = tmp_path / "a.jsonl"
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    path.write_text(json.dumps({"messages": messages, "label": "2"}))
    with pytest.raises(
        DataError, match="must end with a message to answer, not with the assistant's"
    ):
        load(path, tokenizer, chat_template=True)


def test_the_chat_template_renders_text_and_messages(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[a]"
    messages = [{"role": "system", "content": "add."}, {"role": "user", "content": "1+1="}]
    rows = [{"prompt": "1+1=", "label": 2}, {"prompt": messages, "label": 2, "id": "mine"}]
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    first, second = load(path, tokenizer, chat_template=True)
    assert (first.text, second.text) == ("[user]1+1=[a]", "[system]add.[user]1+1=[a]")
    assert (first.label, first.id, second.id) == ("2", "chat:1", "mine")
    with pytest.raises(DataError, match="line 2: 'prompt' is a list of chat messages"):
        load(path, tokenizer, chat_template=False)


def test_another_file_of_the_same_length_is_not_resumed():
    state = PromptSource(prompts(10), seed=3, shuffle=True).state_dict()
    other = [Prompt(p.id, p.text + "!", p.token_ids, p.label) for p in prompts(10)]
    with pytest.raises(DataError, match="crc32"):
        PromptSource(other, seed=3, shuffle=True).load_state_dict(state)
    with pytest.raises(DataError, match="seed = 4"):
        PromptSource(prompts(10), seed=4, shuffle=True).load_state_dict(state)
    with pytest.raises(DataError, match="numpy .* shuffles epoch 0 with seed 3 into another order"):
        PromptSource(prompts(10), seed=3, shuffle=True).load_state_dict(state | {"order_crc32": 1})


@pytest.mark.parametrize("resume_at", [0, 1, 3])
def test_the_order_is_the_same_for_any_number_of_replicas_also_after_a_resume_on_another(resume_at):
    """The shares of dp replicas together are the step of a single replica: 5 steps of 12 out of
    20.
    """
    alone = [
        [p.id for p in source.take(12)]
        for source in [PromptSource(prompts(20), seed=7, shuffle=True)]
        for _ in range(5)
    ]
    for dp_size, later_dp_size in ((2, 4), (4, 1), (3, 2)):
        sources = [PromptSource(prompts(20), seed=7, shuffle=True) for _ in range(dp_size)]
        for step in range(5):
            if step == resume_at:
                state = json.loads(json.dumps(sources[0].state_dict()))
                sources = [
                    PromptSource(prompts(20), seed=7, shuffle=True) for _ in range(later_dp_size)
                ]
                for source in sources:
                    source.load_state_dict(state)
            size = len(sources)
            shares = [
                [p.id for p in source.take(12)][rank::size] for rank, source in enumerate(sources)
            ]
            assert [name for names in zip(*shares, strict=True) for name in names] == alone[step]


def test_further_columns_are_the_metadata_of_a_prompt(tmp_path):
    rows = [
        {
            "prompt": "1+1=",
            "reward_model": {"ground_truth": "2", "style": "rule"},
            "id": "a",
            "level": 3,
            "images": [],
            "x": None,
        },
        {"prompt": "2+2=", "reward_model": {"ground_truth": "4"}},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(train=path, chat_template=False)
    first, second = load_prompts(path, config, TOKENIZER).prompts
    assert first.metadata == {"reward_model": rows[0]["reward_model"], "level": 3, "images": []}
    assert second.metadata == {"reward_model": {"ground_truth": "4"}} and hash(first) != hash(
        second
    )
    none = load_prompts(
        path, config.model_copy(update={"max_metadata_bytes": 0}), TOKENIZER
    ).prompts
    assert [prompt.metadata for prompt in none] == [{}, {}]
    with pytest.raises(
        DataError,
        match=r"line 1: the columns .* take 82 bytes .*data.max_metadata_bytes = 50 .*'reward_mo",
    ):
        load_prompts(path, config.model_copy(update={"max_metadata_bytes": 50}), TOKENIZER)
    state = PromptSource([first, second], seed=0, shuffle=False).state_dict()
    with pytest.raises(DataError, match="metadata_crc32"):
        PromptSource(none, seed=0, shuffle=False).load_state_dict(state)
    del state["row_metadata_crc32"]  # as in the oldest checkpoints
    PromptSource(none, seed=0, shuffle=False).load_state_dict(state)


def test_metadata_that_moved_to_another_prompt_is_not_resumed():
    """An older checkpoint does not show that metadata moved, but it shows another text."""
    test, other = {"test": "assert f(1) == 2"}, {"test": "assert f(1) == 3"}

    def source(*metadata):
        prompts = [Prompt(f"p{k}", f"{k}", (k,), "1", row) for k, row in enumerate(metadata)]
        return PromptSource(prompts, seed=0, shuffle=True)

    state = source(test, {}, test, {}).state_dict()
    source(test, {}, test, {}).load_state_dict(state)
    moved = [({}, test, test, {}), (test, test, {}, {}), (test, {}, {}, test), ({}, test, {}, test)]
    for metadata in [*moved, (other, {}, test, {}), ({}, {}, {}, {})]:
        with pytest.raises(DataError, match="row_metadata_crc32"):
            source(*metadata).load_state_dict(state)
    texts = (json.dumps(test, sort_keys=True) * 2).encode()
    older = state | {"metadata_crc32": zlib.crc32(texts)}
    del older["row_metadata_crc32"]
    for metadata in [(test, {}, test, {}), *moved]:
        source(*metadata).load_state_dict(older)
    with pytest.raises(DataError, match=" metadata_crc32"):
        source(other, {}, test, {}).load_state_dict(older)


def test_prompts_that_are_trained_on_and_evaluated_are_named(tmp_path):
    files = {}
    for name, sums in {
        "train": ("1+1=", "1+2="),
        "held": ("2+2=",),
        "mixed": ("1+2=", "2+2=", "1+2="),
    }.items():
        files[name] = tmp_path / f"{name}.jsonl"
        files[name].write_text(
            "".join(json.dumps({"prompt": text, "label": "2"}) + "\n" for text in sums)
        )
    config = DataConfig(train=files["train"], chat_template=False)
    found = load_prompt_files({name: (path, config, "") for name, path in files.items()}, TOKENIZER)
    train = found.pop("train")
    (line,) = leaked_prompts([train], found)
    assert (
        line
        == f"WARNING 2 of 3 prompts of eval.sets.mixed, {files['mixed']}, are also in data.train ="
        f" {train.path}"
    )
    assert not list(leaked_prompts([train], {}))


def test_parquet_columns_that_are_not_json(tmp_path):
    import datetime
    import decimal

    import pyarrow
    import pyarrow.parquet

    row = {
        "prompt": "1+1=",
        "label": "2",
        "day": datetime.date(2025, 2, 3),
        "price": decimal.Decimal("1.50"),
    }
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    config = DataConfig(train=path, chat_template=False)
    assert load_prompts(path, config, TOKENIZER).prompts[0].metadata == {
        "day": "2025-02-03",
        "price": "1.50",
    }
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{**row, "raw": b"1"}]), path)
    with pytest.raises(
        DataError, match=r"row 1: a column has a value of type bytes, .*data.max_metadata_bytes = 0"
    ):
        load_prompts(path, config, TOKENIZER)
