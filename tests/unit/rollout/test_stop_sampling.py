"""A signal ends sampling immediately, on every rank at the same place; a resumed run takes the same
prompts first.
"""

import contextlib
import threading
import time
from types import SimpleNamespace

import pytest

from megatron_rl.config import load_config
from megatron_rl.data.prompts import PromptSource
from megatron_rl.records import Prompt
from megatron_rl.rollout.inference import SamplingStopped
from megatron_rl.rollout.scheduler import Scheduler
from tests.fake_server import SPEC, FakeServer
from tests.one_rank import one_rank_inference
from tests.tiny import random_checkpoint

PROMPTS = [Prompt(f"p{n}", f"text {n}", (3, 4, 5), "1") for n in range(6)]


@contextlib.contextmanager
def progress(text, total):
    yield lambda: None


def test_sampling_that_hangs_is_stopped_and_nothing_of_it_is_lost(tmp_path):
    checkpoint = random_checkpoint(tmp_path / "moe", num_hidden_layers=1, num_experts=2)
    with FakeServer("hang") as server:
        sections = {
            "run": {"device": "cpu", "dir": str(tmp_path), "prompts_per_step": 2, "group_size": 2},
            "model": {"path": str(checkpoint), "dtype": "float32"},
            "data": {"train": "none.jsonl"},
            "rollout": {"urls": [server.url], "request_timeout_seconds": 30.0, "max_retries": 0},
        }
        cfg = load_config(None, [], sections)
        with one_rank_inference(cfg, SPEC, list, None) as inference:
            source = PromptSource(PROMPTS, seed=0, shuffle=False)
            alone = SimpleNamespace(is_alone=True)
            parallel = SimpleNamespace(dp_rank=0, dp_size=1, device="cpu", node=alone)
            scheduler = Scheduler(cfg, parallel, inference, source, [1], progress)
            threading.Timer(0.3, inference.client.stop).start()
            started = time.monotonic()
            with pytest.raises(SamplingStopped):
                scheduler.take(0, version=0)
            assert time.monotonic() - started < 25
            resumed = PromptSource(PROMPTS, seed=0, shuffle=False)
            resumed.load_state_dict(scheduler.prompts_state())
            assert [prompt.id for prompt in resumed.take(3)] == ["p0", "p1", "p2"]
            inference.start([], temperature=1.0, max_tokens=1, stop_token_ids=[1])
            inference.wait(0)  # a replica with nothing to sample is not stopped
