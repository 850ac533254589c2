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
        ({"urls": [URL], "release_memory": True}, "release_memory = true has no effect without"),
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


def two_teachers(**more):
    sources = [{"name": "a", "path": "a"}, {"name": "b", "path": "b"}]
    tables = {name: {"path": name, "gpus": [5], "sources": [name]} for name in "ab"}
    tables["b"] |= more
    return {"data": {"train": sources}, "teachers": tables}


IN_TURN = {"release_memory": True, "weight_sync": "colocated", "max_server_restarts": 0}


def test_teachers_share_gpus_if_all_that_use_them_release_their_memory():
    sections = two_teachers(release_memory=True)
    with pytest.raises(ConfigError, match=r"teachers.b.*GPU 5 is in teachers.a.gpus.*in turn"):
        load(**sections)
    sections["teachers"]["a"]["release_memory"] = True
    assert load(**sections).teachers.time_shared == ("a", "b")
    with pytest.raises(ConfigError, match=r"GPU 5 is in rollout.gpus.* true of rollout and of"):
        load(**sections, rollout={"gpus": [5]})
    cfg = load(**sections, rollout={"gpus": [5]} | IN_TURN)
    check_teacher_gpus(cfg, 8, 8, {})
    alone = load(**sections)
    with pytest.raises(ValueError, match=r"ranks run on GPU 5 .*release_memory = true of rollout"):
        check_teacher_gpus(alone, 8, 8, {})
    running = cfg.teachers.at({"a": (URL,)})
    assert running.time_shared == ("a", "b") and running.only(["a"]).by_name["a"].urls == (URL,)


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        (
            {"max_staleness": 1},
            "teachers.math.release_memory = true with rollout.max_staleness = 1",
        ),
        (
            {"max_staleness": 2, "partial": "resume", "over_sample": 1, "weight_update": "abort"},
            "with rollout.max_staleness = 2, partial = resume",
        ),
        ({"max_staleness": 1, "partial": "resume", "over_sample": 1}, ""),
        ({}, ""),
    ],
)
def test_a_teacher_in_turns_scores_when_nothing_is_sampled(rollout, message):
    sections = {"teachers": {"math": {"path": "t", "gpus": [1], "release_memory": True}}}
    if not message:
        assert load(rollout=rollout, **sections).rollout.steps_ahead == 0
        return
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(rollout=rollout, **sections)


def test_a_teacher_in_turns_needs_a_gpu_and_keeps_its_weights_on_the_host():
    table = {"path": "t", "release_memory": True}
    with pytest.raises(ConfigError, match=r"teachers.math.release_memory = true needs a GPU"):
        load(run={"device": "cpu"}, teachers={"math": table})
    cfg = load(teachers={"math": table | {"server_args": ["--log-requests"]}})
    rollout = server_settings(cfg.teachers.by_name["math"], cfg.rollout)
    command = server_command(
        Path("t"), rollout.model_copy(update={"dtype": "float32"}), port=1, device="cuda", seed=0,
        want_routes=False,
    )  # fmt: skip
    options = ["--enable-memory-saver", "--enable-weights-cpu-backup", "--log-requests"]
    assert command[-3:] == options


def test_two_teachers_do_not_share_a_gpu():
    with pytest.raises(ConfigError, match=r"teachers.b.gpus = \[5\]: GPU 5 is in teachers.a.gpus"):
        load(**two_teachers())


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
