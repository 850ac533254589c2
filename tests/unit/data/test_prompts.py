import json

import pyarrow
import pyarrow.parquet
import pytest

from megatron_rl.config import DataConfig
from megatron_rl.data.prompts import DataError, PromptSource, load_prompts
from megatron_rl.records import Prompt
from tools.make_tiny_moe import make_tokenizer

TOKENIZER = make_tokenizer()  # a real HF tokenizer, one token a character
DIGIT = TOKENIZER.convert_tokens_to_ids("0")


def load(path, tokenizer=TOKENIZER, **settings):
    return load_prompts(path, DataConfig(train=path, **{"chat_template": False, **settings}), tokenizer)


def test_jsonl_and_parquet_give_the_same_prompts(tmp_path):
    rows = [{"prompt": "1+1=", "label": "2"}, {"prompt": "2+2=", "label": "4"}]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    got = load(tmp_path / "a.jsonl")
    assert got == load(tmp_path / "a.parquet")
    assert got[1] == Prompt("a:2", "2+2=", tuple(TOKENIZER.convert_tokens_to_ids(list("2+2="))), "4")
    assert got[0].token_ids[0] == DIGIT + 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "x", ', r"line 2: not JSON"),
        (b'{"prompt": "\xff", "label": "1"}', r"line 2: not UTF-8"),
        (b'{"prompt": "x"}', r"line 2: key 'label' is missing; it has \['prompt'\]"),
        (b'{"prompt": "", "label": "1"}', r"line 2: 'prompt' must be text that is not empty, got ''"),
        (b'{"prompt": ["x"], "label": "1"}', r"line 2: 'prompt' must be text"),
        (b"[1, 2]", r"line 2: expected an object with keys, got list"),
        (b'{"prompt": "x", "label": null}', r"line 2: 'label' must be text or a number, got null"),
        ('{"prompt": "\u00e9", "label": "1"}'.encode(), r"line 2: prompt holds characters the tokenizer does not know"),
        (b'{"prompt": "123456789", "label": "1"}', r"line 2: prompt has 9 tokens, data.max_prompt_tokens = 8"),
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
    with pytest.raises(DataError, match="11 prompts, the checkpoint was made with 10"):
        PromptSource(prompts(11), seed=3, shuffle=True).load_state_dict(state)


def test_without_shuffle_the_file_order_is_kept():
    source = PromptSource(prompts(4), seed=0, shuffle=False)
    assert [p.id for p in source.take(6)] == ["0", "1", "2", "3", "0", "1"]


def test_what_was_put_back_comes_first_also_after_a_resume():
    source = PromptSource(prompts(4), seed=0, shuffle=False)
    first, second, third = source.take(3)
    source.put_back([third])
    source.put_back([second])
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
    with pytest.raises(DataError, match=r"line 2: not JSON(.|\n)*line 6: not JSON(.|\n)*and 2 more"):
        load(path)


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
