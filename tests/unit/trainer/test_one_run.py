"""A run of one rank from saved rollouts, in this process: what it does, in which order, and what it writes."""

import json

import pytest
import torch.distributed as dist

from megatron_rl.checkpoint.manifest import read_manifest
from megatron_rl.config import load_config
from tests.dist.test_resume import K, RUN, check_events, check_steps, check_token_data, metrics, progress, train_here, watched
from tests.saved_run import make_material, sections


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """Rollouts, and the default group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield make_material(tmp_path_factory.mktemp("material"), steps=2 * K, layers=1)
    dist.destroy_process_group()


def train(material, work, *, stop_at=None, **more):
    cfg = load_config(None, [], sections(material, work, steps=2 * K, run=RUN, **more))
    return train_here(cfg, material / "live", stop_at)


def test_a_stopped_run_ends_as_an_uninterrupted_one(material, tmp_path):
    tokens = {"rollout": {"dtype": "float32", "save_tensors": 0.5}}
    with watched() as log:
        assert not train(material, tmp_path / "complete")
    check_steps(log)
    assert train(material, tmp_path / "stopped", stop_at=(K - 1, 0), **tokens)
    assert not train(material, tmp_path / "stopped", **tokens)
    ends = [tmp_path / way / "run" for way in ("complete", "stopped")]
    assert metrics(ends[0]) == metrics(ends[1]) and progress(ends[0]) == progress(ends[1])
    files = [read_manifest(end / f"checkpoints/step_{2 * K:06d}").files for end in ends]
    assert [files[0][name] for name in files[0] if name.endswith((".distcp", ".safetensors"))] == [
        files[1][name] for name in files[1] if name.endswith((".distcp", ".safetensors"))
    ]
    assert not list(ends[0].glob("trained*")) and not list(ends[0].glob("rollouts*"))
    check_token_data(ends[1], replicas=1)
    check_events(ends[1])
