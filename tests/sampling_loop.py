"""What train.py does with its rollouts, without training, over a fake server: for tests of the
scheduler.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import httpx
import torch

from megatron_rl.config import load_config
from megatron_rl.data.prompts import PromptSource
from megatron_rl.metrics.console import Console
from megatron_rl.records import Prompt
from megatron_rl.rollout.client.client import RolloutClient
from megatron_rl.rollout.client.sampling import SampleRules
from megatron_rl.rollout.inference import Inference
from megatron_rl.trainer.live_rollouts import LiveRollouts
from megatron_rl.trainer.step_meter import StepMeter
from megatron_rl.weights.sync.push import WeightPushError
from tests.fake_model import FakeModel
from tests.fake_server import SPEC, FakeServer

PARALLEL = SimpleNamespace(
    rank=1, dp_rank=0, dp_size=1, device=torch.device("cpu"), host_group=None,
    node=SimpleNamespace(is_alone=True),
)  # fmt: skip
PER_STEP, GROUP = 2, 2
TOKENIZER = SimpleNamespace(eos_token_id=1, batch_decode=lambda rows, **_: [""] * len(rows))


def config(agent=None, **rollout):
    sections = {
        "run": {"num_steps": 1000, "prompts_per_step": PER_STEP, "group_size": GROUP},
        "model": {"path": "unused"},
        "data": {"train": "unused"},
        "agent": agent or {},
        "rollout": {"max_response_tokens": 6, "max_retries": 1, "temperature": 0.7} | rollout,
    }
    return load_config(None, [], sections)


class Loop:
    """What train.py does with its rollouts, without training: every weight sync is a new version of
    the fake model.
    """

    def __init__(
        self, cfg, urls, model, parallel=PARALLEL, *, leads: bool = True, server_pool=None
    ) -> None:
        self.cfg, self.model = cfg, model
        client = (
            RolloutClient(urls, cfg.rollout, SampleRules(SPEC, want_routes=True)) if leads else None
        )
        pusher = SimpleNamespace(push=self.serve, set_urls=lambda urls: None)
        self.inference = Inference(
            lambda: (), client=client, pusher=pusher, server_pool=server_pool, urls=urls, log=print
        )
        self.inference.pushed_to = urls, 0  # as after the first push
        prompts = [Prompt(str(i), "", (3, 4 + i % 60, 4 + i // 60), "") for i in range(1000)]
        self.source = PromptSource(prompts, seed=0, shuffle=False)
        self.rollouts = LiveRollouts(
            cfg,
            parallel,
            None,
            TOKENIZER,
            self.source,
            {},
            self.inference,
            None,
            StepMeter(),
            Console(enabled=False),
        )
        self.scheduler = self.rollouts.scheduler
        # called in the middle of a weight sync that keeps requests
        self.while_paused = lambda: None

    def serve(self, tensors, version: int, *, serve: bool, keep_requests: bool) -> None:
        assert serve and keep_requests == (self.inference.pending is not None)
        if keep_requests:
            self.control("/pause_generation", {"mode": "in_place"})
            self.while_paused()
        self.model.version = version
        if keep_requests:
            self.control("/continue_generation", {})

    def control(self, path: str, body: dict) -> None:
        """As WeightPusher does."""
        response = httpx.post(self.inference.urls[0] + path, json=body)
        if response.status_code != 200:
            raise WeightPushError(f"{path} answered {response.status_code}")

    def push(self, version: int) -> None:
        self.rollouts.sync_weights(version)
        assert (
            self.rollouts.policy_version == self.inference.version == self.model.version == version
        )

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
    """Prompts whose number `is_slow` get the behaviour `slowness`: answered when they are aborted,
    or after `patience`.
    """

    is_slow = staticmethod(lambda number: False)
    slowness = "slow"

    def behave(self, handler, behaviour, body) -> None:
        _, low, high = body["input_ids"][0][:3]
        is_slow = self.is_slow(low - 4 + 60 * (high - 4))
        super().behave(handler, self.slowness if is_slow else behaviour, body)


@contextmanager
def training(*script: str, **rollout):
    model = FakeModel()
    with SlowOnSome(*script, source=model) as server:
        trainer = Loop(config(**rollout), [server.url], model)
        try:
            yield trainer, server
        finally:
            trainer.inference.stop()


def contents(groups) -> list:
    """Everything of the responses that training uses, bit for bit."""
    return [
        (group.prompt.id, r.id, r.finish_reason, r.tokens.tolist(), r.rollout_logprobs.tobytes(),
        r.policy_versions.tolist(),
         r.routed_experts.tolist(), r.routes_digest)
        for group in groups for r in group.rollouts
    ]  # fmt: skip


def ages(sampled, step: int) -> set[int]:
    return {
        step - int(version)
        for group in sampled.groups
        for r in group.rollouts
        for version in r.policy_versions
    }


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
    "ahead, in place": ({"max_staleness": 1, "weight_update": "in_place"}, {0, 1}),
    "three ahead, in place": ({"max_staleness": 3, "weight_update": "in_place"}, {0, 1, 2, 3}),
}
KEEPS = [mode for mode in MODES if "resume" in mode or "abort" in mode]


def is_slow(mode: str):
    """Some prompts are slow where that makes a difference."""
    return lambda number: mode not in ("synchronous", "ahead", "three ahead") and number % 3 == 0
