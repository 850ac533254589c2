"""What train.py does with its rollouts, without training, over a fake server: for tests of the scheduler."""

from contextlib import contextmanager
from types import SimpleNamespace

import torch

from megatron_rl.config import load_config
from megatron_rl.data.prompts import PromptSource
from megatron_rl.metrics.console import Console
from megatron_rl.records import Prompt
from megatron_rl.rollout.client.client import RolloutClient
from megatron_rl.rollout.inference import Inference
from megatron_rl.trainer.rollout_source import LiveRollouts
from megatron_rl.trainer.step_meter import StepMeter
from tests.fake_model import FakeModel
from tests.fake_server import SPEC, FakeServer

PARALLEL = SimpleNamespace(dp_rank=0, dp_size=1, device=torch.device("cpu"), host_group=None)
PER_STEP, GROUP = 2, 2
TOKENIZER = SimpleNamespace(eos_token_id=1, batch_decode=lambda rows, **_: [""] * len(rows))


def config(**rollout):
    sections = {
        "run": {"num_steps": 1000, "prompts_per_step": PER_STEP, "group_size": GROUP},
        "model": {"path": "unused"},
        "data": {"train": "unused"},
        "rollout": {"max_response_tokens": 6, "max_retries": 1, "temperature": 0.7} | rollout,
    }
    return load_config(None, [], sections)


class Loop:
    """What train.py does with its rollouts, without training: every weight sync is a new version of the fake model."""

    def __init__(self, cfg, server: FakeServer, model: FakeModel) -> None:
        self.cfg, self.model = cfg, model
        client = RolloutClient([server.url], cfg.rollout, spec=SPEC, want_routes=True)
        pusher = SimpleNamespace(push=self.serve, set_urls=lambda urls: None)
        self.inference = Inference(
            lambda: (), client=client, pusher=pusher, server_pool=None, urls=[server.url], log=print
        )
        prompts = [Prompt(str(i), "", (3, 4 + i % 60, 4 + i // 60), "") for i in range(1000)]
        self.source = PromptSource(prompts, seed=0, shuffle=False)
        self.rollouts = LiveRollouts(
            cfg, PARALLEL, None, TOKENIZER, self.source, {}, self.inference, None, StepMeter(), Console(enabled=False)
        )
        self.scheduler = self.rollouts.scheduler

    def serve(self, tensors, version: int) -> None:
        assert self.inference.pending is None, "weights change while something is sampled"
        self.model.version = version

    def push(self, version: int) -> None:
        self.rollouts.sync_weights(version)
        assert self.rollouts.policy_version == self.inference.version == self.model.version == version

    def step(self, step: int):
        sampled = []

        def take(step, version):
            sampled.append(self.scheduler.take(step, version))
            return sampled[0]

        self.rollouts.draw(take, step)
        self.push(step + 1)
        self.scheduler.step_done()
        return sampled[0]


class SlowOnSome(FakeServer):
    """Prompts whose number `is_slow` are answered when they are aborted, or after `patience`."""

    is_slow = staticmethod(lambda number: False)

    def behave(self, handler, behaviour, body) -> None:
        _, low, high = body["input_ids"][0][:3]
        is_slow = self.is_slow(low - 4 + 60 * (high - 4))
        super().behave(handler, "slow" if is_slow else behaviour, body)


@contextmanager
def training(*script: str, **rollout):
    model = FakeModel()
    with SlowOnSome(*script, source=model) as server:
        trainer = Loop(config(**rollout), server, model)
        try:
            yield trainer, server
        finally:
            trainer.inference.stop()


def ages(sampled, step: int) -> set[int]:
    return {step - int(version) for group in sampled.groups for r in group.rollouts for version in r.policy_versions}


RESUME = {"over_sample": 1.0, "partial": "resume"}
MODES = {  # settings, ages of tokens after the first steps
    "synchronous": ({}, {0}),
    "drop": ({"over_sample": 1.0}, {0}),
    "resume": (RESUME | {"max_staleness": 1}, {0, 1}),
    "ahead": ({"max_staleness": 1}, {1}),
    "ahead, abort": ({"max_staleness": 1, "weight_update": "abort"}, {0, 1}),
    "ahead, resume": (RESUME | {"max_staleness": 2, "weight_update": "abort"}, {0, 1, 2}),
    "three ahead": ({"max_staleness": 3}, {0, 1, 2, 3}),
    "three ahead, abort": ({"max_staleness": 3, "weight_update": "abort"}, {0, 1, 2, 3}),
}
KEEPS = [mode for mode in MODES if "resume" in mode or "abort" in mode]


def is_slow(mode: str):
    """Some prompts are slow where that makes a difference."""
    return lambda number: mode not in ("synchronous", "ahead", "three ahead") and number % 3 == 0
