"""Runs that sample ahead train the weights of a synchronous one, bit for bit, where servers sample
the same tokens.
"""

import os
from unittest.mock import patch

import pytest
import torch.distributed as dist

from megatron_rl.metrics.sinks import read_metrics
from tests import continuous_run
from tests.dist.launch import run_ranks
from tests.faults.samples import SPEC
from tests.saved_run import make_material, sections

STEPS = 6
WAYS = {"synchronous": None, "drain": "drain", "abort": "abort", "a server dies": "drain"}


def train_all(work):
    from megatron_rl.config import load_config
    from megatron_rl.train import train
    from megatron_rl.trainer.trainer import Trainer

    dist.init_process_group("gloo")
    for name, weight_update in WAYS.items():
        more = continuous_run.sections(work, weight_update) | {
            "parallel": {"ep": 2},
            "optim": {"schedule": "constant"},
            "checkpoint": {"export_hf": False},
        }
        cfg = load_config(None, [], sections(work, work / name, steps=STEPS, **more))
        real = Trainer.old_logprobs

        def old_logprobs(self, batches, name=name, real=real):
            if name == "a server dies" and self.meter.step == 1 and dist.get_rank() == 0:
                continuous_run.servers([os.getpid()])[0].kill()
            return real(self, batches)

        with patch.object(Trainer, "old_logprobs", old_logprobs):
            train(cfg)
        dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_when_and_where_a_group_is_sampled_does_not_change_what_is_trained(tmp_path):
    """All files of the last checkpoint: weights, optimizer, random generators."""
    from megatron_rl.checkpoint.manifest import read_manifest

    make_material(tmp_path, steps=1, layers=SPEC.num_layers)
    continuous_run.make_prompts(tmp_path, STEPS)
    run_ranks(train_all, 2, tmp_path, timeout=480)
    runs = {name: tmp_path / name / "run" for name in WAYS}
    ages = {name: set(continuous_run.check_rollouts(run, STEPS)) for name, run in runs.items()}
    assert ages == {"synchronous": {0}} | {
        name: {0, 1, 2} for name in WAYS if name != "synchronous"
    }
    files = {
        name: read_manifest(run / f"checkpoints/step_{STEPS:06d}").files
        for name, run in runs.items()
    }
    trained = {
        name: {
            file: digest
            for file, digest in found.items()
            if file.endswith((".distcp", ".safetensors"))
        }
        for name, found in files.items()
    }
    assert len(trained["synchronous"]) >= 6 and all(
        found == trained["synchronous"] for found in trained.values()
    )
    for run in runs.values():  # otherwise equal weights would prove nothing
        steps = [step.metrics for step in read_metrics(run / "metrics.jsonl") if step.metrics]
        assert len(steps) == STEPS and all(step["optim/grad_norm"] > 1e-3 for step in steps)
    assert "server_restart" in (runs["a server dies"] / "events.jsonl").read_text()
