"""A run starts the servers of its teachers' checkpoints, names the teacher whose server cannot
start, and leaves none running.
"""

import json
import sys
from contextlib import ExitStack

import pytest

from megatron_rl.config import load_config
from megatron_rl.rollout.server import process as server_module
from megatron_rl.rollout.server.server_info import ServerError
from megatron_rl.rollout.server.teacher_servers import checkpoint_problems, start_teachers

NAMES = ("math", "code")


def make_checkpoint(folder, vocab_size=64, tokenizer="{}"):
    folder.mkdir()
    config = {"dtype": "float32", "vocab_size": vocab_size}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(tokenizer)
    return folder


@pytest.fixture
def cfg(tmp_path):
    """Two teachers of checkpoints with the student's tokenizer, and a source without a teacher."""
    tables = {
        name: {"path": str(make_checkpoint(tmp_path / name)), "sources": [name]} for name in NAMES
    }
    sources = [{"name": name, "path": "x"} for name in (*NAMES, "rewards")]
    return load_config(
        None,
        [],
        {
            "run": {"dir": str(tmp_path), "name": "run", "device": "cpu"},
            "model": {"path": str(make_checkpoint(tmp_path / "student"))},
            "data": {"train": sources},
            "teachers": {**tables, "none": {"sources": ["rewards"]}},
        },
    )


@pytest.fixture
def commands(monkeypatch):
    """The checkpoints of the servers that were started, each a stub process."""
    started = []

    def command(model, rollout, *, port, want_routes, **rest) -> list[str]:
        assert not want_routes
        started.append(model.name)
        options = ["--host", rollout.host, "--port", str(port), "--weight-version", "0"]
        module = "tests.no_such_module" if (model / "broken").exists() else "tests.stub_server"
        return [sys.executable, "-m", module, *options]

    monkeypatch.setattr(server_module, "server_command", command)
    return started


def test_each_teacher_of_a_checkpoint_gets_a_server_that_ends_with_the_run(cfg, commands, tmp_path):
    said: list[str] = []
    with ExitStack() as stack:
        urls = start_teachers(cfg, "cpu", stack, said.append)
        assert commands == list(NAMES) == list(urls) and len(set(urls.values())) == 2
        running = cfg.teachers.at(urls)
        assert [running.by_name[name].urls for name in (*NAMES, "none")] == [*urls.values(), ()]
        for name, (url,) in urls.items():
            log = tmp_path / f"run/logs/teacher_{name}.log"
            assert f"teacher {name}: starting an SGLang server of" in said[NAMES.index(name)]
            assert str(log) in said[NAMES.index(name)] and "stub is up" in log.read_text()
            assert server_module.httpx.get(f"{url}/model_info").status_code == 200
    for (url,) in urls.values():
        with pytest.raises(server_module.httpx.ConnectError):
            server_module.httpx.get(f"{url}/model_info")


def test_a_server_that_cannot_start_is_named_and_the_others_end(cfg, commands, tmp_path):
    (tmp_path / "code/broken").touch()
    with (
        pytest.raises(ServerError, match="teacher code: .* exited with status 1"),
        ExitStack() as stack,
    ):
        start_teachers(cfg, "cpu", stack, lambda line: None)


def test_a_checkpoint_of_other_tokens_is_refused_before_a_server_starts(cfg, tmp_path):
    assert list(checkpoint_problems(cfg, 64)) == []
    assert [text.partition(" has ")[2][:16] for text in checkpoint_problems(cfg, 65)] == [
        "vocab_size = 64,"
    ] * 2
    (tmp_path / "math/tokenizer.json").write_text('{"other": 1}')
    (tmp_path / "code/config.json").unlink()
    of_math, of_code = checkpoint_problems(cfg, 64)
    assert of_math.startswith(f"teachers.math.path = {tmp_path}/math has other tokenizer files")
    assert of_code.startswith(f"teachers.code.path = {tmp_path}/code: cannot read config.json")
