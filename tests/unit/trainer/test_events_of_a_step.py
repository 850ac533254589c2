"""Events that a step adds: an update that was skipped, servers that were replaced.

An anomaly: test_saved_batches.py.
"""

import json
import math
from types import SimpleNamespace

import torch

from megatron_rl.checkpoint.folder import CheckpointError
from megatron_rl.config import load_config
from megatron_rl.metrics.events import Events
from megatron_rl.metrics.reduce import MetricSums
from megatron_rl.trainer.live_rollouts import LiveRollouts
from megatron_rl.trainer.recording.saved_batches import SavedBatches
from megatron_rl.trainer.step_meter import StepMeter
from megatron_rl.trainer.trainer import Trainer

NAME = "run/unsaved_batches_total"


def events_of(path):
    return [
        (row["kind"], row["step"], row["text"])
        for row in map(json.loads, path.read_text().splitlines())
    ]


def test_an_update_that_is_skipped_is_an_event(tmp_path):
    norms = iter([1.0, math.inf])
    engine = SimpleNamespace(
        compute_gradient=lambda *args, **settings: next(norms),
        apply_gradient=lambda norm, *args: SimpleNamespace(skipped=not math.isfinite(norm)),
    )
    trainer = SimpleNamespace(
        cfg=SimpleNamespace(replay=SimpleNamespace(mode="R3")),
        meter=StepMeter(),
        engine=engine,
        tokens=SimpleNamespace(observer=lambda *args: None),
        saved_batches=SimpleNamespace(due=lambda *args: None),
        recording=SimpleNamespace(events=Events(tmp_path / "events.jsonl")),
    )
    trainer.meter.step = 4
    for index in range(2):
        Trainer.update(trainer, SimpleNamespace(index=index), SimpleNamespace(mismatch=None))
    assert events_of(tmp_path / "events.jsonl") == [
        ("skipped_update", 5, "update 1: gradient norm inf")
    ]


def test_mini_batches_that_could_not_be_saved_are_counted_since_the_start():
    found, nothing = [], lambda *args: None
    parallel = SimpleNamespace(rank=0, device="cpu")
    cfg = load_config(
        None,
        [],
        {"model": {"path": "m"}, "data": {"train": "x"}, "run": {"save_batches": "every 1"}},
    )
    trainer = SimpleNamespace(
        cfg=cfg,
        meter=StepMeter(),
        parallel=SimpleNamespace(rank=0, device=torch.device("cpu")),
        engine=SimpleNamespace(mismatch=nothing),
        saved_batches=SavedBatches(cfg, parallel),
        rollouts=SimpleNamespace(finish_step=nothing, policy_version=1),
        tokens=SimpleNamespace(finish=nothing),
        recording=SimpleNamespace(files=SimpleNamespace(failed=0)),
        reporter=SimpleNamespace(
            count=nothing, step=lambda result, totals: found.append(result.metrics.get(NAME))
        ),
        checkpoint_policy=SimpleNamespace(add_previous_totals=nothing, note=nothing),
    )
    for step in range(4):
        if step in (1, 3):
            with trainer.saved_batches.reported(trainer.saved_batches.due(step, 0, 1.0)):
                raise CheckpointError("full")
        Trainer.report(trainer, step, [])
    assert found == [None, 1, 1, 2]


def test_servers_that_were_replaced_are_an_event_once(tmp_path):
    inference = SimpleNamespace(restarts=0)
    live = SimpleNamespace(
        scheduler=SimpleNamespace(step_done=lambda: None),
        inference=inference,
        leader=None,
        meter=SimpleNamespace(step=0, sums=MetricSums()),
        events=Events(tmp_path / "events.jsonl"),
        restarts=0,
        parallel=SimpleNamespace(rank=1),
    )
    for step, restarts in enumerate([0, 2, 2, 3]):
        live.meter.step, inference.restarts = step, restarts
        LiveRollouts.finish_step(live)
    assert events_of(tmp_path / "events.jsonl") == [
        ("server_restart", 2, "2 replaced"),
        ("server_restart", 4, "1 replaced"),
    ]
