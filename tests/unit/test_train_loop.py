"""The training loop, with a trainer that only notes what is alive."""

import subprocess
import sys
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_rl.config import Config, DataConfig, ModelConfig
from megatron_rl.launch.exit_codes import INTERRUPTED, REQUEUE
from megatron_rl.train import train
from megatron_rl.trainer import build

ROOT = Path(__file__).parents[2]


class Thing:
    """What can be referred to weakly."""


def test_a_steps_rollouts_end_before_the_next_is_sampled(monkeypatch):
    """Two steps' routes would be two times gigabytes."""
    known, alive = [], []

    def sample(step):
        alive.append([reference() is not None for reference in known])
        groups = [Thing()]
        known.extend(map(weakref.ref, groups))
        return groups

    def add_advantages(groups, step):
        groups = [Thing()]
        known.extend(map(weakref.ref, groups))
        return groups

    def make_batches(groups, step):
        batches = [Thing(), Thing()]
        batches[0].samples = groups
        known.extend(map(weakref.ref, batches))
        return batches

    def old_logprobs(batches):
        passes = [Thing() for _ in batches]
        passes[0].samples = batches  # of rollout.save_tensors
        known.extend(map(weakref.ref, passes))
        return passes

    def nothing(*args, **options):
        return None

    trainer = SimpleNamespace(
        first_step=0, steps=lambda: iter(range(3)), sample=sample,
        add_advantages=add_advantages, record=nothing, make_batches=make_batches,
        old_logprobs=old_logprobs, update=nothing, listen=nothing,
        evaluate=nothing, sync_weights=nothing, report=nothing, save=nothing, finish=nothing,
    )  # fmt: skip
    monkeypatch.setattr(build, "start_trainer", lambda cfg, rollouts: nullcontext(trainer))
    train(Config(model=ModelConfig(path="m"), data=DataConfig(train="d")))
    assert alive == [[], [False] * 6, [False] * 12]


END = """
import os, signal, sys, time
from types import SimpleNamespace
from megatron_rl.launch.signals import StoppedBySignal
from megatron_rl.train import run_job
def job():
    if sys.argv[1] == "after":
        raise StoppedBySignal("saved")
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(5)
cfg = SimpleNamespace(run=SimpleNamespace(log_format="text"), key_variables=(), run_dir="none")
status = run_job(cfg, job, "a test")
os.kill(os.getpid(), signal.SIGUSR1 if sys.argv[1] == "after" else 0)
sys.exit(status)
"""


@pytest.mark.parametrize(("when", "status"), [("before", INTERRUPTED), ("after", REQUEUE)])
def test_sigusr1_outside_of_the_steps_ends_a_rank_as_sigterm_does(when, status):
    """A scheduler may send it before the first step, and again while the ranks end."""
    assert subprocess.run([sys.executable, "-c", END, when], cwd=ROOT).returncode == status
