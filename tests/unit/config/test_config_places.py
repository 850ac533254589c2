"""Errors of a configuration file name its line and column; ~ is the home directory; names of other
trainers are known.
"""

from pathlib import Path

import pytest

from megatron_rl.config import ConfigError, load_config
from megatron_rl.config.schema import OTHER_NAMES, SECTIONS
from megatron_rl.config.toml_places import key_places
from megatron_rl.models.spec import ModelError, load_hf_config

FILE = '''# a run
[model]
path = "m"
[data]
train = "t"
template = """
[optim]
lr = {prompt}
"""
[rollout]
urls = [
  "http://a:1",
]
  temperature = 0.7
[eval.sets]
easy = "e"
[eval]
samples = 2
'''


def test_places_are_those_of_statements():
    """Lines within a string or a list are no keys; the first mention of a table counts."""
    places = key_places(FILE + "run.seed = 1\n")
    assert (
        places["data.template"] == "6:1"
        and places["rollout.temperature"] == "14:3"
        and places["eval.sets"] == "15:2"
    )
    assert places["model"] == "2:2" and places["eval.samples"] == "18:1"
    assert not {"optim", "optim.lr"} & places.keys()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[optim]\nlr = 1e-6\nlearning_rate = 1\n",
            "21:1: unknown key optim.learning_rate = 1; did you mean optim.lr?",
        ),
        ("[optim]\n  lr = -1\n", "20:3: optim.lr = -1: must be greater"),
        ("[trainer]\nx = 1\n", "19:2: unknown section [trainer]; known: run, model"),
        (
            "[loss]\nname = 'minrl'\n",
            "20:1: loss.name = 'minrl' is not a known loss; did you mean 'minirl'?",
        ),
        (
            "[advantage]\nkind = 'mean'\n[run]\ngroup_size = 1\n",
            "20:1: advantage.kind = mean needs run.group_size >= 2",
        ),
        ("[optim]\nlr = = 1\n", "20:6: not valid TOML"),
        ("[optim]\nlr = [1,\n", "20:1: not valid TOML"),
    ],
)
def test_an_error_names_line_and_column(tmp_path, text, message):
    path = tmp_path / "my.toml"
    path.write_text(FILE + text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"{path}:{message}"), caught.value


def test_a_key_outside_any_section_has_its_place(tmp_path):
    path = tmp_path / "my.toml"
    path.write_text("# nothing\nlearning_rate = 1\n" + FILE)
    with pytest.raises(
        ConfigError,
        match=r"my.toml:2:1: learning_rate = 1 is outside any section; did you mean optim.lr\?",
    ):
        load_config(path)


def test_a_value_of_the_command_line_has_no_place_in_the_file(tmp_path):
    path = tmp_path / "my.toml"
    path.write_text(FILE)
    with pytest.raises(ConfigError, match=r"^rollout.temperature = '-1': must"):
        load_config(path, ["--rollout.temperature", "-1"])


def test_names_of_other_trainers_lead_to_settings():
    for name, setting in OTHER_NAMES.items():
        section, _, key = setting.partition(".")
        assert key in SECTIONS[section].model_fields and not any(
            name in each.model_fields for each in SECTIONS.values()
        )


def test_the_home_directory_is_expanded_in_paths_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    sections = {
        "model": {"path": "~/tiny"},
        "data": {"train": "~/t.jsonl", "template": "~{prompt}"},
    }
    cfg = load_config(None, ["--eval.sets", "a", "~/a.jsonl", "--run.dir", "~"], sections)
    assert (cfg.model.path, cfg.data.train, cfg.run.dir) == (
        tmp_path / "tiny",
        tmp_path / "t.jsonl",
        tmp_path,
    )
    assert cfg.eval.sets == {"a": tmp_path / "a.jsonl"} and cfg.data.template == "~{prompt}"


def test_a_hub_id_gets_the_command_that_downloads_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="hf download Qwen/Qwen3-0.6B --local-dir DIR"):
        load_hf_config(Path("Qwen/Qwen3-0.6B"))
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ModelError) as caught:
        load_hf_config(Path("checkpoints/none"))
    assert "hub" not in str(caught.value) and "no such folder" in str(caught.value)
    with pytest.raises(ModelError, match="models/none: no such folder; give") as caught:
        load_hf_config(Path("models/none"))
    assert "hub" not in str(caught.value), "the usual name of a folder"
    (tmp_path / "checkpoints/empty").mkdir()
    with pytest.raises(ModelError, match="no config.json there"):
        load_hf_config(Path("checkpoints/empty"))
