"""A run starts teachers that share GPUs one after the other, and checks each one awake."""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.config import load_config
from megatron_rl.trainer import build_teachers as build

NAMES = ("alone", "first", "second")


@pytest.mark.parametrize("shares_with_trainer", [False, True])
def test_teachers_that_share_gpus_start_one_after_the_other(monkeypatch, shares_with_trainer):
    events = []

    def start(cfg, device, stack, log):
        events.append(("start", *cfg.teachers.by_name))
        return {name: (f"http://{name}:1",) for name in cfg.teachers.by_name}

    def check(cfg, spec, prompts):
        events.append(("check", *(t.urls[0] for t in cfg.teachers.by_name.values())))
        return [f"line of {name}" for name in cfg.teachers.by_name]

    def sleeping(cfg, name, spec, prompts, stack):
        events.append(("release", cfg.teachers.by_name[name].urls[0]))
        return f"sleeper of {name}"

    monkeypatch.setattr(build, "checkpoint_problems", lambda cfg, vocab_size: [])
    monkeypatch.setattr(build, "start_teachers", start)
    monkeypatch.setattr(build, "check_teachers", check)
    monkeypatch.setattr(build, "sleeping_teacher", sleeping)
    monkeypatch.setattr(build, "leave_gpus", lambda engine: events.append(("leave",)))
    monkeypatch.setattr(build, "from_rank_0", lambda make, group: make())
    tables = {
        name: {"path": name, "sources": [name], "release_memory": name != "alone"} for name in NAMES
    }
    rollout = {"release_memory": True, "weight_sync": "colocated", "max_server_restarts": 0}
    sections = {
        "model": {"path": "m"},
        "data": {"train": [{"name": name, "path": "x"} for name in NAMES]},
        "teachers": tables,
        "rollout": rollout if shares_with_trainer else {},
    }
    cfg = load_config(None, [], sections)
    parallel = SimpleNamespace(device=torch.device("cpu"), host_group="group")
    engine = SimpleNamespace(parallel=parallel, spec=SimpleNamespace(vocab_size=8))
    console = SimpleNamespace(log=lambda line: events.append(("log", line)))
    with ExitStack() as stack:
        running, turns = build.find_teachers(cfg, engine, [], stack, console)
    assert events == [
        *[("leave",)] * shares_with_trainer,
        ("start", "alone"), ("check", "http://alone:1"),
        ("start", "first"), ("check", "http://first:1"), ("release", "http://first:1"),
        ("start", "second"), ("check", "http://second:1"), ("release", "http://second:1"),
        *(("log", f"line of {name}") for name in NAMES),
    ]  # fmt: skip
    assert turns.names == NAMES[1:] and turns.group == "group" and not turns.awake
    assert turns.sleepers == {name: f"sleeper of {name}" for name in NAMES[1:]}
    assert [t.urls for t in running.teachers.by_name.values()] == [
        (f"http://{name}:1",) for name in NAMES
    ]
