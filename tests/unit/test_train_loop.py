"""The training loop, with a trainer that only notes what is alive."""

import os
import signal
import subprocess
import sys
import time
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_rl.config import Config, DataConfig, ModelConfig
from megatron_rl.launch.exit_codes import INTERRUPTED, REQUEUE
from megatron_rl.launch.signals import StoppedBySignal
from megatron_rl.sft import sft
from megatron_rl.train import raise_interrupt, train
from megatron_rl.trainer import build, sft_rows
from megatron_rl_tools.tiny_text import make_tokenizer
from tests.tiny import random_checkpoint

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
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    time.sleep(5)
cfg = SimpleNamespace(run=SimpleNamespace(log_format="text"), key_variables=(), run_dir="none")
status = run_job(cfg, job, "a test")
os.kill(os.getpid(), signal.SIGUSR1 if sys.argv[1] == "after" else 0)
sys.exit(status)
"""


@pytest.mark.parametrize(
    ("when", "status"),
    [("SIGTERM", REQUEUE), ("SIGUSR1", REQUEUE), ("SIGINT", INTERRUPTED), ("after", REQUEUE)],
)
def test_a_signal_outside_of_the_steps_ends_a_rank_with_its_status(when, status):
    """A scheduler may send it during the imports, and again while the ranks end; Ctrl-C asks for no
    restart.
    """
    assert subprocess.run([sys.executable, "-c", END, when], cwd=ROOT).returncode == status


LOADS = """
import sys
from megatron_rl.train import run
for options in sys.argv[1:]:
    print(run(["--config", "good.toml", *options.split()]))
"""


def test_what_the_configuration_names_and_cannot_be_loaded_needs_no_restart(tmp_path):
    """Exit status 2, as for a wrong key: torchrun and train.sh do not start it again."""
    random_checkpoint(tmp_path / "moe")
    make_tokenizer().save_pretrained(tmp_path / "moe")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1 + 1", "label": "2"}\n')
    (tmp_path / "good.toml").write_text('[model]\npath = "moe"\n[data]\ntrain = "train.jsonl"\n')
    options = ["--model.path nope", "--data.train nope.jsonl", "--agent.function nope:f"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}"}
    done = subprocess.run(
        [sys.executable, "-c", LOADS, *options],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.split() == ["2"] * len(options), done.stderr


def test_a_signal_while_the_rows_of_sft_are_read_stops_the_run(monkeypatch, sigint):
    def read_rows(cfg):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    monkeypatch.setattr(sft_rows, "read_rows", read_rows)
    before = signal.signal(signal.SIGTERM, raise_interrupt)  # as in run_job
    try:
        with pytest.raises(StoppedBySignal, match="before the first step"):
            sft(Config(model=ModelConfig(path="m"), data=DataConfig(train="d")))
    finally:
        signal.signal(signal.SIGTERM, before)
