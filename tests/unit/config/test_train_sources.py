"""[[data.train]]: several sources in a configuration."""

from pathlib import Path

import pytest

from megatron_rl.checkpoint.config_diff import check_changes
from megatron_rl.config import ConfigError, dump_config, load_config, plain_values
from megatron_rl.config.settings import explain
from megatron_rl.data.prompt_files import eval_file, train_files

TEXT = """
[model]
path = "m"
[data]
prompt_key = "text"
template = "Q: {prompt}"
[[data.train]]
name = "gsm8k"
path = "~/a.jsonl"
weight = 2
prompt_key = "question"
label_key = "answer"
[[data.train]]
name = "code.v1"
path = "b.parquet"
when_used_up = "drop"
template = "{prompt}"
[eval.sets]
gsm8k = "test.jsonl"
other = "other.jsonl"
"""


def read(tmp_path, text=TEXT, *overrides):
    path = tmp_path / "c.toml"
    path.write_text(text)
    return load_config(path, overrides)


def test_sources_are_read_written_and_read_again(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    cfg = read(tmp_path)
    gsm8k, code = cfg.data.train
    assert (gsm8k.name, gsm8k.path, gsm8k.weight) == ("gsm8k", Path("/somewhere/a.jsonl"), 2.0)
    assert (code.weight, code.when_used_up, gsm8k.when_used_up) == (1.0, "drop", "repeat")
    assert cfg.data.source_names == ("gsm8k", "code.v1")
    assert read(tmp_path, dump_config(cfg)) == cfg


def test_every_file_is_read_with_the_keys_of_its_source(tmp_path):
    cfg = read(tmp_path)
    keys = {
        name: (str(path), data.prompt_key, data.label_key, data.template, source)
        for name, (path, data, source) in train_files(cfg.data).items()
    }
    assert keys["code.v1"] == ("b.parquet", "text", "auto", "{prompt}", "code.v1")
    assert keys["gsm8k"][1:] == ("question", "answer", "Q: {prompt}", "gsm8k")
    # an evaluation set with the name of a source, another one, and what [eval] overrides
    path, data, source = eval_file(cfg, "gsm8k")
    assert (str(path), data.prompt_key, data.label_key) == ("test.jsonl", "question", "answer")
    assert (data.template, source) == ("Q: {prompt}", "gsm8k")
    assert eval_file(cfg, "other")[1].prompt_key == "text"
    overridden = read(tmp_path, TEXT, "--eval.prompt_key", "mine")
    assert eval_file(overridden, "gsm8k")[1].prompt_key == "mine"


def test_one_file_stays_a_path_also_on_the_command_line(tmp_path):
    text = '[model]\npath = "m"\n[data]\ntrain = "a.jsonl"\n[eval.sets]\nheld = "h.jsonl"\n'
    cfg = read(tmp_path, text)
    assert cfg.data.train == Path("a.jsonl") and cfg.data.source_names == ()
    assert train_files(cfg.data) == {"": (Path("a.jsonl"), cfg.data, "")}
    assert eval_file(cfg, "held") == (Path("h.jsonl"), cfg.eval_data, "")
    assert plain_values(cfg)["data"]["train"] == "a.jsonl"
    # instead of the tables of the file
    assert read(tmp_path, TEXT, "--data.train", "b.jsonl").data.train == Path("b.jsonl")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("weight = 2", "weight = 0"), "source 1 (gsm8k): weight = 0: must be greater than 0"),
        (("weight = 2", "weight = true"), "source 1 (gsm8k): weight = True: must be a number"),
        (("weight = 2", "wieght = 2"), "unknown key wieght = 2; did you mean 'weight'?"),
        (('"drop"', '"end"'), "when_used_up = 'end': must be 'repeat', 'stop' or 'drop'"),
        (('"code.v1"', '"code/v1"'), "name = 'code/v1': must be letters, digits, _, - and ."),
        (('"code.v1"', '"gsm8k"'), "has 2 sources with name = 'gsm8k'"),
        (('name = "code.v1"\n', ""), "source 2: name is missing; set it"),
        (('path = "b.parquet"\n', ""), "source 2 (code.v1): path is missing; set it"),
        (
            ('template = "{prompt}"', 'template = "x"'),
            "source code.v1: template = 'x' must contain {prompt} once",
        ),
    ],
)
def test_a_wrong_table_is_named_with_key_value_and_place(tmp_path, change, message):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, TEXT.replace(*change))
    assert message in str(caught.value), caught.value
    assert str(caught.value).startswith(f"{tmp_path}/c.toml:7:3: data.train")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.jsonl", "b.jsonl"], "source 1: must be a table, got 'a.jsonl'; write [[data.train]]"),
        ([], "train names no file; write train = FILE, or a table [[data.train]]"),
    ],
)
def test_several_files_on_the_command_line_are_refused(tmp_path, words, message):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, TEXT, "--data.train", *words)
    assert message in str(caught.value)


def test_the_number_of_sources_is_bounded_as_each_has_metrics(tmp_path):
    tables = "".join(f'[[data.train]]\nname = "s{i}"\npath = "a"\n' for i in range(33))
    with pytest.raises(ConfigError, match="has 33 sources: must have 32 at most"):
        read(tmp_path, '[model]\npath = "m"\n' + tables)


def test_settings_of_pass_rates_without_effect_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="least_chance = 0.5 has no effect with data.sampling"):
        read(tmp_path, TEXT, "--data.least_chance", "0.5")
    read(tmp_path, TEXT, "--data.least_chance", "0.5", "--data.sampling", "pass_rate")
    read(tmp_path, TEXT, "--data.pass_reward", "1.0")  # metrics of sources
    with pytest.raises(ConfigError, match="data.pass_reward = 1.0 has no effect"):
        read(tmp_path, TEXT, "--data.train", "a.jsonl", "--data.pass_reward", "1.0")


def test_a_chance_so_small_that_the_next_prompt_takes_minutes_to_draw_is_refused(tmp_path):
    sampling = ("--data.sampling", "pass_rate", "--data.least_chance")
    with pytest.raises(ConfigError, match="'1e-9': must be greater than or equal to 0.001"):
        read(tmp_path, TEXT, *sampling, "1e-9")
    assert read(tmp_path, TEXT, *sampling, "0.001").data.least_chance == 0.001


def test_settings_names_the_keys_of_a_source():
    assert "path or list of: table of name, path, weight, when_used_up" in explain("data.train")


def test_a_checkpoint_of_uniform_sampling_is_not_continued_by_pass_rates_unasked(tmp_path):
    saved = plain_values(read(tmp_path))
    for key in ("sampling", "pass_reward", "least_chance"):
        del saved["data"][key]  # as in an older checkpoint
    assert check_changes(saved, read(tmp_path), "ck") == []
    changed = read(tmp_path, TEXT, "--data.sampling", "pass_rate")
    with pytest.raises(ValueError, match="data.sampling: uniform -> pass_rate"):
        check_changes(saved, changed, "ck")
    # the tables are compared by their content, with the order of prompts
    assert check_changes(saved, read(tmp_path, TEXT, "--data.train", "a"), "ck") == ["data.train"]
