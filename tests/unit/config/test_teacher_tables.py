"""[teachers.NAME]: what a table may say, and which settings have no meaning beside a teacher."""

import re

import pytest

from megatron_rl.config import ConfigError, dump_config, load_config
from megatron_rl.config.sections import Teacher
from megatron_rl.config.settings import explain

URL = "http://10.0.0.2:30000"
SOURCES = [{"name": "sums", "path": "a"}, {"name": "code", "path": "b"}]


def load(*overrides, **sections):
    base = {"model": {"path": "m"}, "data": {"train": "x"}, "teachers": {"math": {"urls": [URL]}}}
    return load_config(None, overrides, base | sections)


def test_one_teacher_scores_everything_and_several_are_routed_by_source():
    assert load().teachers.name_for("") == "math"
    assert load(data={"train": SOURCES}).teachers.name_for("code") == "math"
    tables = {
        "math": {"urls": [URL], "sources": ["sums"]},
        "coder": {"urls": ["http://b"], "sources": ["code"]},
    }
    routed = load(data={"train": SOURCES}, teachers=tables).teachers
    assert [routed.name_for(name) for name in ("sums", "code", "")] == ["math", "coder", ""]
    del tables["coder"]["urls"]
    of_rewards = load(data={"train": SOURCES}, teachers=tables).teachers
    assert [of_rewards.name_for(name) for name in ("sums", "code")] == ["math", ""]
    assert list(of_rewards.with_servers) == ["math"]


def test_tables_are_read_from_file_and_command_line_and_written_back(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(dump_config(load("--teachers.math.beta", "0.25")))
    cfg = load_config(path)
    assert cfg.teachers.by_name == {"math": Teacher(urls=(URL,), beta=0.25)}
    assert cfg == load("--teachers.math.beta", "0.25")
    urls = load("--teachers.math.urls", URL, "http://b:2", "--teachers.math.sources").teachers
    assert urls.by_name["math"].urls == (URL, "http://b:2") and not urls.by_name["math"].sources


@pytest.mark.parametrize("name", ["my-math", "qwen2.5", "v1.5-instruct"])
def test_the_command_line_reaches_a_teacher_by_its_name(name, tmp_path):
    """A name has dots and dashes as written; dashes of a key are underscores."""
    path = tmp_path / "config.toml"
    path.write_text(
        f'[model]\npath = "m"\n[data]\ntrain = "x"\n[teachers."{name}"]\nurls = ["{URL}"]\n'
    )
    options = [f"--teachers.{name}.beta", "0.5", f"--teachers.{name}.beta-end=0.25"]
    cfg = load_config(path, [*options, f"--teachers.{name}.beta_steps", "7"])
    teacher = Teacher(urls=(URL,), beta=0.5, beta_end=0.25, beta_steps=7)
    assert cfg.teachers.by_name == {name: teacher}
    tables = {"teachers": {name: teacher.model_dump()}}
    assert load_config(path, [], tables).teachers.by_name == {name: teacher}
    served = (f"--teachers.{name}.path", "t", f"--teachers.{name}.server-args", "--tp-size", "2")
    (table,) = load_config(
        None, served, {"model": {"path": "m"}, "data": {"train": "x"}}
    ).teachers.by_name.values()
    assert table.server_args == ("--tp-size", "2")
    with pytest.raises(ConfigError, match="unknown key bta = '1'; did you mean 'beta'"):
        load_config(path, [f"--teachers.{name}.bta", "1"])


def test_beta_changes_linearly_and_then_stays():
    teacher = Teacher(urls=(URL,), beta=1.0, beta_end=0.2, beta_steps=4)
    assert [teacher.beta_at(step) for step in (0, 1, 2, 4, 9)] == pytest.approx(
        [1.0, 0.8, 0.6, 0.2, 0.2]
    )
    assert Teacher(urls=(URL,), beta=0.3).beta_at(100) == 0.3


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (3, "teachers.math = 3: must be a table"),
        ({"urls": URL}, f"teachers.math: urls = '{URL}': must be a list; change it"),
        ({"urls": [URL], "bta": 1}, "teachers.math: unknown key bta = 1; did you mean 'beta'?"),
        ({"urls": [URL], "beta": -1}, "teachers.math: beta = -1: must be greater than or equal"),
        ({"urls": [URL], "beta": True}, "teachers.math: beta = True: must be a number"),
        ({"urls": [URL], "beta": float("nan")}, "teachers.math: beta = nan: must be"),
        ({"urls": [URL], "teach": "none"}, "teachers.math: teach = 'none': must be 'all' or"),
        ({"urls": ["10.0.0.2:30000"]}, "teachers.math: urls has '10.0.0.2:30000': must begin with"),
        ({"urls": [URL, URL]}, "must name every server once"),
        ({"urls": [URL], "beta_end": 0.0}, "beta_end = 0.0 with beta_steps = 0: a schedule needs"),
        ({"urls": [URL], "beta_steps": 5}, "beta_end = None with beta_steps = 5: a schedule needs"),
        ({"urls": [URL], "api_key_env": "TEACHER"}, "must have KEY, TOKEN, SECRET or PASSWORD as"),
        ({"beta": 0.5}, "without a server there is no teacher"),
        ({}, "teachers.math has neither urls nor path"),
    ],
)
def test_wrong_tables_are_refused(table, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(teachers={"math": table})


def test_a_name_is_as_metrics_have_it():
    with pytest.raises(ConfigError, match="a table 'a b': a name must be letters"):
        load(teachers={"a b": {"urls": [URL]}})


@pytest.mark.parametrize(
    ("teachers", "message"),
    [
        ({"math": ["sums"]}, "source 'code' of data.train has no teacher"),
        (
            {"math": ["sums", "cod"]},
            "teachers.math.sources has 'cod', no source of data.train; did",
        ),
        ({"math": ["sums", "code"], "b": ["code"]}, "is in teachers.math and teachers.b"),
        ({"math": [], "b": ["code"]}, "teachers.math has no sources, and there are 2 tables"),
    ],
)
def test_every_source_has_one_teacher(teachers, message):
    tables = {name: {"urls": [URL], "sources": sources} for name, sources in teachers.items()}
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(data={"train": SOURCES}, teachers=tables)


def test_a_source_needs_tables_in_data_train():
    with pytest.raises(ConfigError, match="no source of data.train; data.train is one file"):
        load(teachers={"math": {"urls": [URL], "sources": ["sums"]}})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"rollout": {"temperature": 0.7}}, "rollout.temperature = 0.7 with a teacher"),
        ({"rollout": {"top_p": 0.9, "top_k": 8}}, "renormalised over kept sets"),
        ({"rollout": {"urls": [f"{URL}/"]}}, f"teachers.math.urls has {URL} of rollout.urls"),
        ({"batch": {"dynamic_sampling": True}}, "batch.dynamic_sampling with a teacher"),
        ({"loss": {"name": "sft"}, "run": {"group_size": 1}}, "[teachers] has no effect"),
        ({"teachers": {}, "advantage": {"weight": 0.0}}, "advantage.weight = 0 without a teacher"),
        ({"run": {"group_size": 1}}, "needs run.group_size >= 2"),
        (
            {"loss": {"teacher_form": "reverse"}},
            "teacher_form = reverse with loss.teacher_top_k = 0",
        ),
        ({"loss": {"teacher_top_k": 8}}, "teacher_form = token with loss.teacher_top_k = 8"),
        (
            {"teachers": {}, "loss": {"teacher_form": "forward", "teacher_top_k": 8}},
            "loss.teacher_form = forward has no effect without a teacher",
        ),
        ({"loss": {"teacher_form": "reverse", "teacher_top_k": 65536}}, "must be 65535 or less"),
    ],
)
def test_settings_without_a_meaning_are_refused(sections, message):
    if "sft" in str(sections):
        sections |= {"replay": {"mode": "none", "measure": False}}
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(**sections)


@pytest.mark.parametrize(
    ("sections", "setting"),
    [
        ({"batch": {"length_penalty": 0.5}}, "batch.length_penalty = 0.5"),
        ({"batch": {"overlong_cache": 100}}, "batch.overlong_cache = 100"),
    ],
)
def test_settings_of_advantages_are_refused_where_teachers_alone_teach(sections, setting):
    load(**sections)
    alone = sections | {"advantage": sections.get("advantage", {}) | {"weight": 0.0}}
    with pytest.raises(ConfigError, match=f"{setting} has no effect with advantage.weight = 0"):
        load(**alone)


def test_a_teacher_alone_needs_no_group_and_failures_read_the_pass_reward():
    assert load(run={"group_size": 1}, advantage={"weight": 0.0}).advantage.weight == 0
    data = {"train": "x", "pass_reward": 0.9}
    with pytest.raises(ConfigError, match="data.pass_reward = 0.9 has no effect"):
        load(data=data)
    load(data=data, teachers={"math": {"urls": [URL], "teach": "failures"}})


def test_the_keys_are_explained():
    assert "beta_steps" in explain("teachers")
