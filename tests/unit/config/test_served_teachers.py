"""Teachers whose checkpoints the run serves itself: their settings, and the GPUs that they need."""

import re
from pathlib import Path

import pytest

from megatron_rl.config import ConfigError, dump_config, load_config
from megatron_rl.config.rules.teacher_servers import check_teacher_gpus, server_settings
from megatron_rl.rollout.server.process import server_command

URL = "http://10.0.0.2:30000"


def load(*overrides, **sections):
    base = {"model": {"path": "m"}, "data": {"train": "x"}, "teachers": {"math": {"path": "t"}}}
    return load_config(None, overrides, base | sections)


def test_a_checkpoint_is_a_teacher_and_gets_the_address_of_its_server(tmp_path):
    cfg = load("--teachers.math.gpus", "2", "3", "--teachers.math.beta", "0.5")
    teacher = cfg.teachers.with_servers["math"]
    assert (teacher.path, teacher.gpus, teacher.urls) == (Path("t"), (2, 3), ())
    assert cfg.teachers.name_for("") == "math"
    (tmp_path / "config.toml").write_text(dump_config(cfg))
    assert load_config(tmp_path / "config.toml") == cfg
    running = cfg.teachers.at({"math": (URL,)}).by_name["math"]
    assert (running.urls, running.path, running.gpus, running.beta) == ((URL,), None, (), 0.5)
    assert cfg.teachers.by_name["math"].path == Path("t"), "the run's settings stay"


def test_its_server_has_the_options_of_its_table_and_not_the_students():
    cfg = load(
        rollout={"gpus": [0, 1], "num_servers": 2, "port": 30000, "max_total_tokens": 512,
                 "server_args": ["--decode-log-interval", "7"], "dtype": "bfloat16"},
        teachers={"math": {"path": "t", "gpus": [2, 3], "server_args": ["--log-requests"]}},
    )  # fmt: skip
    rollout = server_settings(cfg.teachers.by_name["math"], cfg.rollout)
    assert (rollout.num_servers, rollout.port, rollout.dtype) == (1, 0, "auto")
    command = server_command(
        Path("t"), rollout.model_copy(update={"dtype": "float32"}), port=1, device="cuda", seed=0,
        want_routes=False,
    )  # fmt: skip
    text = " ".join(command)
    assert "--tp-size 2" in text and "--log-requests" in text
    assert "--max-total-tokens 512" in text and "--decode-log-interval" not in text
    assert "--enable-return-routed-experts" not in text


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"path": "t", "urls": [URL]}, "a run attaches to running servers or starts one of path"),
        ({"urls": [URL], "gpus": [1]}, "gpus = [1] has no effect without path"),
        ({"urls": [URL], "server_args": ["--a"]}, "server_args = ['--a'] has no effect without"),
        ({"path": "t", "gpus": [1, 1]}, "teachers.math: gpus = [1, 1] must be distinct"),
        ({"path": "t", "server_args": ["--port", "1"]}, "teachers.math: server_args has --port"),
        (
            {"path": "t", "gpus": [2, 3, 4], "server_args": ["--tp-size", "2"]},
            "teachers.math: server_args = ['--tp-size', '2'] need 2 GPUs for a server",
        ),
        ({"path": "t", "gpus": [1, 2]}, "teachers.math.gpus = [1, 2]: GPU 1 is in rollout.gpus"),
    ],
)
def test_wrong_settings_of_its_server_are_refused(table, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(teachers={"math": table}, rollout={"gpus": [0, 1]})


def test_two_teachers_do_not_share_a_gpu():
    sources = [{"name": "a", "path": "a"}, {"name": "b", "path": "b"}]
    tables = {name: {"path": name, "gpus": [5], "sources": [name]} for name in "ab"}
    with pytest.raises(ConfigError, match=r"teachers.b.gpus = \[5\]: GPU 5 is in teachers.a.gpus"):
        load(data={"train": sources}, teachers=tables)


@pytest.mark.parametrize(
    ("gpus", "message"),
    [
        ([], "teachers.math.gpus = [] with path = t: must name the GPUs of its server"),
        ([8], "teachers.math.gpus = [8]: the host of rank 0 has GPUs 0 to 7, not 8"),
        ([3, 4], "teachers.math.gpus = [3, 4]: training ranks run on GPU 3 (they have 0, 1, 2, 3)"),
        ([4, 5], ""),
    ],
)
def test_on_gpus_it_needs_gpus_that_nobody_uses(gpus, message):
    cfg = load(teachers={"math": {"path": "t", "gpus": gpus}})
    arguments = (cfg, 4, 8, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    if not message:
        check_teacher_gpus(*arguments)
        return
    with pytest.raises(ValueError, match=re.escape(message)):
        check_teacher_gpus(*arguments)
