"""Steps sampled ahead and over several steps, over a fake server whose every number is a fingerprint of version and tokens."""

import signal
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_rl.config import ConfigError, EvalConfig, load_config
from megatron_rl.data.prompts import PromptSource
from megatron_rl.metrics.console import Console
from megatron_rl.records import Prompt
from megatron_rl.rollout.client.client import RolloutClient, RolloutError
from megatron_rl.rollout.inference import Inference, SamplingStopped
from megatron_rl.rollout.sampler import num_prompts
from megatron_rl.trainer.rollout_source import LiveRollouts
from megatron_rl.trainer.step_meter import StepMeter
from megatron_rl.trainer.trainer import Trainer
from tests.fake_model import FakeModel, assert_fingerprints
from tests.fake_server import SPEC, FakeServer, wait_for

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


@pytest.fixture(autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


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
        self.sampler = self.rollouts.sampler

    def serve(self, tensors, version: int) -> None:
        assert self.inference.pending is None, "weights change while something is sampled"
        self.model.version = version

    def push(self, version: int) -> None:
        self.rollouts.sync_weights(version)
        assert self.rollouts.policy_version == self.inference.version == self.model.version == version

    def step(self, step: int):
        sampled = []

        def take(step, version):
            sampled.append(self.sampler.take(step, version))
            return sampled[0]

        self.rollouts.draw(take, step)
        self.rollouts.sample_ahead(step + 1)
        self.push(step + 1)
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


MODES = {
    "synchronous": ({}, {0}),
    "ahead": ({"max_staleness": 1}, {1}),
    "drop": ({"over_sample": 1.0}, {0}),
    "ahead, drop": ({"over_sample": 1.0, "max_staleness": 1}, {1}),
    "resume": ({"over_sample": 1.0, "partial": "resume", "max_staleness": 1}, {0, 1}),
    "ahead, resume": ({"over_sample": 1.0, "partial": "resume", "max_staleness": 2}, {1, 2}),
    "resume twice": ({"over_sample": 1.0, "partial": "resume", "max_staleness": 3}, {1, 2, 3}),
}


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_lost_trained_twice_or_too_old_and_every_token_is_what_was_sampled(mode):
    settings, expected = MODES[mode]
    steps, trained, seen = 12, Counter(), Counter()
    with training("ok", **settings) as (trainer, server):
        server.is_slow, server.patience = lambda number: "over_sample" in settings and number % 3 == 0, 0.3
        for step in range(steps):
            sampled = trainer.step(step)
            assert len(sampled.groups) == PER_STEP and [g.prompt for g in sampled.groups] == sampled.prompts
            found = ages(sampled, step)
            assert found <= (expected if step else {0}) and max(found) <= trainer.cfg.rollout.max_staleness
            seen.update(found)
            for group in sampled.groups:
                trained[group.prompt.id] += 1
                for rollout in group.rollouts:
                    assert_fingerprints(rollout)
        counters, sampler = trainer.inference.client.counters, trainer.sampler
        taken = trainer.source.position
        again = [trainer.source.prompts[i].id for i in sampler.prompts_state()["returned"]]
        for request in server.requests:
            check_request(request)
    assert set(seen) - {0} <= expected and max(seen) >= min(expected)
    assert max(trained.values()) == 1, "a prompt was trained on twice"
    assert counters.dropped.total() == counters.lost_samples == counters.failures.total() == 0
    if "resume" not in mode:
        assert counters.cut_samples == counters.resumed_samples == 0 and not sampler.left
        assert counters.cancelled_groups == taken - len(trained) - len(again)
        return
    assert counters.cancelled_groups == 0 and counters.cut_samples > 0 and counters.resumed_samples > 0
    assert set(again).isdisjoint(trained) and len(trained) + len(again) == taken, "a prompt was lost"
    assert {group.prompt.id for group in sampler.left} <= set(again)


def check_request(request):
    """Every sample at rollout.temperature, and of at most max_response_tokens with what there was of it before."""
    params, tokens = request["sampling_params"], request["input_ids"]
    for each, ids in zip(params if isinstance(params, list) else [params] * len(tokens), tokens, strict=True):
        assert (each["temperature"], each["stop_token_ids"], each["max_new_tokens"]) == (0.7, [1], 6 - (len(ids) - 3))


def test_a_response_that_is_never_finished_is_sampled_again_and_then_waited_for():
    settings, _ = MODES["resume"]
    with training("ok", **settings) as (trainer, server):
        server.is_slow = lambda number: number < 2
        for step in (0, 1):
            trainer.step(step)
            assert {group.prompt.id for group in trainer.sampler.left} == {"0", "1"}
        server.patience, asked = 0.5, len(server.requests)
        sampled = trainer.step(2)
    assert [prompt.id for prompt in sampled.prompts] == ["0", "1"], "although others were complete before"
    assert trainer.inference.client.counters.stale_samples == 4 and ages(sampled, 2) == {0}
    assert all(len(ids) == 3 for request in server.requests[asked:] for ids in request["input_ids"]), "from the start"


def test_the_trainer_continues_while_the_next_step_is_sampled():
    with training("ok", max_staleness=1) as (trainer, server):
        sampler = trainer.sampler
        sampler.take(0, 0)
        server.script = ["slow"]
        sampler.start(1, 1)
        assert sampler.pending is not None and wait_for(lambda: len(server.requests) == 2 * PER_STEP, 10)
        with pytest.raises(AssertionError, match="weights are pushed while rollouts are sampled"):
            trainer.inference.push(1)
        server.stopping.set()  # the slow ones answer, as aborted; the script's last entry serves the retries
        server.script = ["ok"]
        sampler.finish(1)
        assert trainer.inference.pending is None and sampler.ahead is not None
        assert sampler.prompts_state()["returned"] == [2, 3], "a checkpoint knows what was not trained on yet"
        assert [prompt.id for prompt in sampler.take(1, 1).prompts] == ["2", "3"]
        assert sampler.prompts_state()["returned"] == []


def test_sampling_that_fails_ahead_stops_the_run_where_it_is_waited_for():
    with training("ok", max_staleness=1) as (trainer, server):
        trainer.sampler.take(0, 0)
        server.script = ["http_400"]
        trainer.sampler.start(1, 1)
        with pytest.raises(RolloutError, match="refused prompt"):
            trainer.sampler.finish(1)


def test_a_run_that_ends_stops_what_is_sampled_ahead():
    with training("hang", max_staleness=1) as (trainer, server):
        trainer.sampler.start(0, 0)
        assert wait_for(lambda: len(server.requests) == PER_STEP, 10)
        trainer.inference.stop()
        assert not any(thread.name == "sampling" for thread in threading.enumerate())
        with pytest.raises(SamplingStopped):
            trainer.sampler.finish(0)


def test_an_interrupt_ends_the_wait_for_samples(sigint):
    with training("hang") as (trainer, _):
        interrupt = threading.Timer(1.0, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            trainer.sampler.take(0, 0)
    assert not any(thread.name == "sampling" for thread in threading.enumerate())


def saved_at(trainer, folder, *, is_step_done: bool):
    """(state of the prompts, folder) as a checkpoint keeps them."""
    folder.mkdir()
    for name, write in trainer.sampler.files(is_step_done=is_step_done).items():
        write(folder / name)
    return trainer.sampler.prompts_state(), folder


@contextmanager
def resumed(saved, version: int, **settings):
    state, folder = saved
    with training("ok", **settings) as (trainer, server):
        trainer.source.load_state_dict(state)
        trainer.push(version)
        trainer.said = trainer.sampler.restore(folder, [])
        yield trainer, server


def contents(groups) -> list:
    """Everything of the responses that training uses, bit for bit."""
    return [
        (group.prompt.id, r.id, r.finish_reason, r.tokens.tolist(), r.rollout_logprobs.tobytes(), r.policy_versions.tolist(),
         r.routed_experts.tolist(), r.routes_digest)
        for group in groups for r in group.rollouts
    ]  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_run_trains_on_what_was_in_flight(mode, tmp_path):
    """After each step: what was ready is bitwise the same, what was cut short continues, no prompt is lost or comes twice."""
    settings, expected = MODES[mode]
    with training("ok", **settings) as (trainer, server):
        server.is_slow, server.patience = lambda number: "over_sample" in settings and number % 3 == 0, 0.3
        before = [trainer.step(step) for step in range(3)]
        saved = saved_at(trainer, tmp_path / "saved", is_step_done=True)
        ready = trainer.sampler.ahead
        left = {group.prompt.id for group in trainer.sampler.left}
        asked = len(server.requests)
    with resumed(saved, 3, **settings) as (again, server):
        sampled = again.sampler.take(3, 3)
        ids = [prompt.id for step in (*before, sampled) for prompt in step.prompts]
        open_prompts = {prompt.id for prompt in again.source.returned}
    assert asked > 0 and len(ids) == len(set(ids)) and left <= {*ids, *open_prompts}
    if ready is None:
        assert ages(sampled, 3) <= expected | {0} and (again.said is None) == (not left)
        return
    assert contents(sampled.groups) == contents(ready.groups) and ages(sampled, 3) == ages(ready, 3) <= expected
    assert "responses of" in again.said


@pytest.mark.parametrize("mode", ["synchronous", "ahead", "ahead, resume"])
def test_a_step_stopped_before_it_trained_is_not_sampled_again(mode, tmp_path):
    """A signal between sampling and the first update: the step's own groups, and those of the next step, are kept."""
    settings, _ = MODES[mode]
    with training("ok", **settings) as (trainer, _):
        trainer.step(0)
        state = trainer.sampler.prompts_state()  # as Run.begin notes it
        trainer.sampler.step_done()
        taken = trainer.sampler.take(1, 1)
        if "ahead" in mode:
            trainer.sampler.start(2, 2)
            trainer.sampler.finish(1)
        following = trainer.sampler.ahead
        _, folder = saved_at(trainer, tmp_path / "saved", is_step_done=False)
    with resumed((state, folder), 1, **settings) as (again, server):
        sampled = again.sampler.take(1, 1)
        assert contents(sampled.groups) == contents(taken.groups)
        if mode == "ahead":  # with over_sample others may have become whole since
            again.sampler.start(2, 2)
            again.sampler.finish(1)
            assert contents(again.sampler.ahead.groups) == contents(following.groups)
        if "resume" not in mode:
            assert not server.requests, "everything was there"


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_the_groups_of_a_reported_step_are_released(max_staleness):
    """As `train` and `--only rollout` report it: else the rollouts of the whole run would stay in memory, routes and all."""
    checkpoint_policy = SimpleNamespace(add_previous_totals=lambda metrics: None, note=lambda step, metrics: None)
    with training("ok", max_staleness=max_staleness) as (trainer, _):
        run = SimpleNamespace(
            engine=SimpleNamespace(mismatch=lambda passes: None), rollouts=trainer.rollouts, parallel=PARALLEL,
            meter=trainer.rollouts.meter, checkpoint_policy=checkpoint_policy,
            reporter=SimpleNamespace(step=lambda result: None, count=lambda sums: None),
            tokens=SimpleNamespace(finish=lambda step: None),
            recording=SimpleNamespace(files=SimpleNamespace(failed=0)),
        )  # fmt: skip
        for step in range(4):
            trainer.step(step)
            Trainer._report(run, step, [])
            assert len(trainer.sampler.started) == max_staleness * PER_STEP


def test_groups_that_no_longer_fit_the_settings_are_sampled_again(tmp_path):
    with training("ok", max_staleness=1) as (trainer, _):
        trainer.step(0)
        saved = saved_at(trainer, tmp_path / "saved", is_step_done=True)
    with resumed(saved, 1, max_staleness=1) as (again, server):
        assert "4 responses of 2 groups in flight: sampled again, as loss.name changed" in again.sampler.restore(
            saved[1], ["loss.name"]
        )
        again.sampler.left = []
        cfg = again.sampler.cfg
        again.sampler.cfg = cfg.model_copy(
            update={"replay": cfg.replay.model_copy(update={"mode": "none", "measure": False})}
        )
        assert "2 of this replica's 2 do not fit the settings: sampled again" in again.sampler.restore(saved[1], [])
        assert not again.sampler.left
        again.sampler.cfg = cfg
        assert [prompt.id for prompt in again.sampler.take(1, 1).prompts] == ["2", "3"] and server.requests


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"max_staleness": 2}, "max_staleness = 2 has no effect with partial = drop"),
        ({"partial": "resume", "max_staleness": 1}, "partial = resume needs over_sample > 0"),
        ({"partial": "resume", "over_sample": 0.5}, "max_staleness >= 1, got 0"),
        ({"max_staleness": -1}, "max_staleness"),
        (
            {"max_staleness": 1, "weight_sync": "colocated", "release_memory": True, "max_server_restarts": 0},
            "release_memory = true takes the servers' memory",
        ),
    ],
)
def test_settings_without_effect_are_refused(rollout, message):
    with pytest.raises(ConfigError, match=message):
        config(**rollout)


def test_responses_older_than_the_budget_stop_the_run_before_they_are_trained_on():
    with training("ok") as (trainer, _):
        groups = [replace(group, rewards=np.zeros(GROUP)) for group in trainer.sampler.take(0, 0).groups]
    recorded = []

    def record(version, budget):
        recorder = SimpleNamespace(record=lambda step, groups: recorded.append(step))
        leader = SimpleNamespace(recorder=recorder, rewards=SimpleNamespace(counters=Counter()))
        run = SimpleNamespace(
            cfg=config(max_staleness=budget), parallel=SimpleNamespace(is_replica_leader=True), leader=leader,
            policy_version=version, meter=StepMeter(), client_totals={},
        )  # fmt: skip
        LiveRollouts.record(run, groups, version)

    record(0, 0)
    record(1, 1)
    with pytest.raises(
        RuntimeError, match=r"'0/0', '0/1', .*tokens of weights older than version 1 = 1 - rollout.max_staleness"
    ):
        record(1, 0)
    assert recorded == [1, 2]


def test_an_evaluation_samples_with_its_own_settings():
    with training("ok") as (trainer, server):
        for settings, max_tokens in (({}, 6), ({"max_response_tokens": 7}, 7)):
            cfg = trainer.cfg.model_copy(update={"eval": EvalConfig(samples=3, temperature=0.3, **settings)})
            tokenizer = SimpleNamespace(eos_token_id=1)
            run = SimpleNamespace(
                cfg=cfg,
                inference=trainer.inference,
                tokenizer=tokenizer,
                score=lambda groups, for_training: groups,
                console=Console(enabled=False),
            )
            LiveRollouts.sample_for_evaluation(run, trainer.source.prompts[:1])
            params = server.requests[-1]["sampling_params"]
            assert (params["temperature"], params["max_new_tokens"], params["stop_token_ids"]) == (0.3, max_tokens, [1])
            assert len(server.requests[-1]["input_ids"]) == 3


def test_number_of_prompts_that_a_step_samples():
    assert num_prompts(config(), 1) == PER_STEP and num_prompts(config(over_sample=0.1), 2) == 4
    assert [config(**settings).rollout.samples_ahead for settings, _ in MODES.values()] == [False, True] * 3 + [True]
