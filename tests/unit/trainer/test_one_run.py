"""A run of one rank from saved rollouts, in this process: its calls in order, and its files.

The same in other layouts: tests/dist/test_resume.py and test_token_data.py.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch.distributed as dist

from megatron_rl.checkpoint.manifest import read_manifest
from megatron_rl.config import load_config
from megatron_rl.rollout.saved.saved_steps import SavedSteps
from megatron_rl.trainer import reporter
from tests.dist.test_resume import (
    RUN,
    K,
    check_events,
    check_steps,
    check_token_data,
    metrics,
    progress,
    train_here,
    watched,
)
from tests.dist.test_token_data import check_files, record_alone
from tests.saved_run import make_material, sections
from tests.tiny import random_checkpoint


@pytest.fixture
def group():
    """The default group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_stopped_run_ends_as_an_uninterrupted_one(group, tmp_path, monkeypatch):
    # no report page, which takes longer than the run
    monkeypatch.setattr(reporter, "entry_points", lambda group: [])
    material = make_material(tmp_path, steps=2 * K, layers=1)

    def train(way, stop_at=None, **rollout):
        keys = {"run": RUN, "rollout": {"dtype": "float32"} | rollout}
        cfg = load_config(None, [], sections(material, tmp_path / way, steps=2 * K, **keys))
        return train_here(cfg, material / "live", stop_at)

    with watched() as log:
        assert not train("complete")
    check_steps(log)
    assert train("stopped", (K - 1, 0), save_tensors=0.5)
    assert not train("stopped", save_tensors=0.5)
    complete, stopped = (tmp_path / way / "run" for way in ("complete", "stopped"))
    assert metrics(complete) == metrics(stopped) and progress(complete) == progress(stopped)
    files, files_stopped = (
        read_manifest(end / f"checkpoints/step_{2 * K:06d}").files for end in (complete, stopped)
    )
    same = [name for name in files if name.endswith((".distcp", ".safetensors"))]
    assert len(same) >= 3 and [files[name] for name in same] == [
        files_stopped[name] for name in same
    ]
    assert not (complete / "trained").exists() and not (complete / "rollouts").exists()
    check_token_data(stopped, replicas=1)
    check_events(stopped)


def test_what_is_written_about_every_token_is_what_was_computed(tmp_path, monkeypatch):
    start = partial(dist.init_process_group, store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(dist, "init_process_group", start)
    computed = record_alone(random_checkpoint(tmp_path / "moe"), tmp_path)
    check_files(tmp_path / "alone/run", computed, exact=True)


def test_missing_routes_of_saved_rollouts_stop_the_run(group, tmp_path):
    material = make_material(tmp_path, steps=1, layers=1)

    def without_a_route(self, *arguments):
        first, *others = groups(self, *arguments)
        rollout = first.rollouts[0]
        missing = np.arange(len(rollout.tokens) - 1) == len(rollout.tokens) - 2
        changed = replace(rollout, missing_routes=missing)
        return [replace(first, rollouts=(changed, *first.rollouts[1:])), *others]

    groups = SavedSteps.groups
    keys = sections(
        material, tmp_path / "work", steps=1, replay={"mode": "R3", "on_missing_route": "error"}
    )
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(ValueError, match="on_missing_route = error stops the run"),
    ):
        patch.setattr(SavedSteps, "groups", without_a_route)
        train_here(load_config(None, [], keys), material / "live")
