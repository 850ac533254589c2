"""Every mode of the scheduler, over a fake server whose every number is a fingerprint of version
and tokens.
"""

import signal
import threading
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist

from megatron_rl.config import ConfigError, EvalConfig
from megatron_rl.metrics.console import Console
from megatron_rl.reward.pool import Rewarded
from megatron_rl.rollout.client.call import Call
from megatron_rl.rollout.client.client import RolloutError
from megatron_rl.rollout.inference import SamplingStopped
from megatron_rl.rollout.saved.rollout_recorder import GroupChoice
from megatron_rl.rollout.scheduler import num_prompts
from megatron_rl.trainer.live_rollouts import LiveRollouts
from megatron_rl.trainer.step_meter import StepMeter
from megatron_rl.trainer.trainer import Trainer
from tests.fake_model import assert_fingerprints
from tests.fake_server import wait_for
from tests.sampling_loop import (
    GROUP,
    KEEPS,
    MODES,
    PARALLEL,
    PER_STEP,
    RESUME,
    ages,
    config,
    is_slow,
    training,
)

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_lost_trained_twice_or_too_old_and_every_token_is_what_was_sampled(mode):
    settings, expected = MODES[mode]
    steps, trained, seen = 12, Counter(), Counter()
    with training("ok", **settings) as (trainer, server):
        server.is_slow, server.patience = is_slow(mode), 0.3
        server.slowness = "growing" if "in place" in mode else "slow"
        for step in range(steps):
            sampled = trainer.step(step)
            assert (
                len(sampled.groups) == PER_STEP
                and [g.prompt for g in sampled.groups] == sampled.prompts
            )
            found = ages(sampled, step)
            assert (
                found <= (expected if step else {0})
                and max(found) <= trainer.cfg.rollout.max_staleness
            )
            seen.update(found)
            for group in sampled.groups:
                trained[group.prompt.id] += 1
                for rollout in group.rollouts:
                    assert_fingerprints(rollout)
        counters, scheduler = trainer.inference.client.counters, trainer.scheduler
        taken = trainer.source.position
        again = [trainer.source.prompts[i].id for i in scheduler.prompts_state()["returned"]]
        for request in server.requests:
            check_request(request)
    assert max(seen) == max(expected), "the budget was not used"
    assert max(trained.values()) == 1, "a prompt was trained on twice"
    assert counters.dropped.total() == counters.lost_samples == counters.failures.total() == 0
    assert [group.prompt.id for group in scheduler.groups] == again, (
        "a checkpoint knows other prompts than the queue"
    )
    assert (
        set(again).isdisjoint(trained)
        and len(trained) + len(again) + counters.cancelled_groups == taken
    ), "one was lost"
    assert (counters.cancelled_groups > 0) == (mode == "drop")
    assert len(again) == PER_STEP * (trainer.cfg.rollout.steps_ahead + ("resume" in mode)), (
        "the queue has another length"
    )
    if "in place" in mode:
        assert server.pauses == ["in_place"] * steps
        return
    if mode not in KEEPS:
        assert counters.cut_samples == counters.resumed_samples == 0
        return
    assert counters.cut_samples > 0 and counters.resumed_samples > 0


def check_request(request):
    """Every sample at rollout.temperature, and of at most max_response_tokens with what there was
    of it before.
    """
    params, tokens = request["sampling_params"], request["input_ids"]
    for each, ids in zip(
        params if isinstance(params, list) else [params] * len(tokens), tokens, strict=True
    ):
        assert (each["temperature"], each["stop_token_ids"], each["max_new_tokens"]) == (
            0.7,
            [1],
            6 - (len(ids) - 3),
        )


def test_a_step_waits_for_groups_that_would_be_too_old_for_the_next_one():
    settings, _ = MODES["resume"]
    with training("ok", **settings) as (trainer, server):
        server.is_slow = lambda number: number < 2
        trainer.step(0)
        assert {group.prompt.id for group in trainer.scheduler.groups} == {"0", "1"}
        server.patience, asked = 0.5, len(server.requests)
        sampled = trainer.step(1)
    assert [prompt.id for prompt in sampled.prompts] == ["0", "1"], (
        "although others were complete before"
    )
    assert trainer.inference.client.counters.stale_samples == 0 and ages(sampled, 1) == {0, 1}
    slow = [
        ids for request in server.requests[asked:] for ids in request["input_ids"] if ids[1] < 6
    ]
    assert len(slow) == PER_STEP * GROUP and all(len(ids) == 5 for ids in slow), (
        "continued, not sampled again"
    )


def test_of_more_groups_that_are_due_a_step_waits_for_as_many_as_it_takes():
    """Four of the first queue are due in step 2, which takes two; the others are too old after it,
    and sampled again.
    """
    settings, _ = MODES["ahead, resume"]
    with training("ok", **settings) as (trainer, server):
        server.is_slow = lambda number: number in (2, 3, 4, 5)
        for step in range(2):
            trainer.step(step)
        assert [group.prompt.id for group in trainer.scheduler.groups[:4]] == ["2", "3", "4", "5"]
        assert all(group.has_oldest_version(0) for group in trainer.scheduler.groups[:4])
        server.is_slow, server.patience = (lambda number: number in (4, 5)), 20.0
        sampled = trainer.scheduler.take(2, 2)
        assert [prompt.id for prompt in sampled.prompts] == ["2", "3"] and max(
            ages(sampled, 2)
        ) == 2
        assert not any(group.is_complete for group in trainer.scheduler.groups[:2]), "they are late"
        trainer.push(3)
        trainer.scheduler.step_done()
        assert trainer.inference.client.counters.stale_samples == 0
        server.is_slow = lambda number: False
        sampled = trainer.scheduler.take(3, 3)
        assert trainer.inference.client.counters.stale_samples == 2 * GROUP
        assert ages(sampled, 3) <= {0, 1, 2}


def test_the_trainer_continues_while_the_next_step_is_sampled():
    with training("ok", max_staleness=1) as (trainer, server):
        scheduler = trainer.scheduler
        server.is_slow = lambda number: number in (2, 3)
        assert [prompt.id for prompt in scheduler.take(0, 0).prompts] == ["0", "1"]
        assert (
            wait_for(lambda: len(server.requests) == 2 * PER_STEP, 10)
            and not scheduler.groups[0].is_complete
        )
        with pytest.raises(AssertionError, match="weights are pushed while rollouts are sampled"):
            trainer.inference.push(1)
        server.is_slow = lambda number: False
        server.stopping.set()  # the slow ones answer, as aborted; they are requested again
        scheduler.end_sampling()
        assert trainer.inference.pending is None and all(
            group.is_complete for group in scheduler.groups
        )
        assert scheduler.prompts_state()["returned"] == [2, 3], (
            "a checkpoint knows what was not trained on yet"
        )
        assert [prompt.id for prompt in scheduler.take(1, 0).prompts] == ["2", "3"]
        assert scheduler.prompts_state()["returned"] == [4, 5]


def test_sampling_that_fails_ahead_stops_the_run_where_it_is_waited_for():
    with training("ok", "ok", "http_400", max_concurrency=1, max_staleness=1) as (trainer, _):
        trainer.scheduler.take(0, 0)
        with pytest.raises(RolloutError, match="refused prompt"):
            trainer.scheduler.end_sampling()


def test_a_run_that_ends_stops_what_is_sampled_ahead(new_threads):
    with training("ok", "ok", "hang", max_concurrency=1, max_staleness=1) as (trainer, server):
        trainer.scheduler.take(0, 0)
        assert wait_for(lambda: len(server.requests) == PER_STEP + 1, 10)
        trainer.inference.stop()
        assert not any(thread.name == "sampling" for thread in new_threads())
        with pytest.raises(SamplingStopped):
            trainer.scheduler.end_sampling()


def test_a_drain_completes_what_was_started_and_starts_nothing(monkeypatch):
    draining, drain = threading.Event(), Call.drain

    async def announced(call):
        draining.set()
        await drain(call)

    monkeypatch.setattr(Call, "drain", announced)
    with training("ok", max_staleness=3, max_concurrency=3) as (trainer, server):
        model = server.source

        def answer(body, given, sample_id):
            assert given[1] < 6 or draining.wait(30)
            return model(body, given, sample_id)

        server.source = answer
        trainer.scheduler.take(0, 0)
        assert wait_for(lambda: len(server.requests) == 5, 10), (
            "three at a time, after the two that the step took"
        )
        trainer.push(1)
        assert [group.is_complete for group in trainer.scheduler.groups] == [True] * 3 + [False] * 3
        assert len(server.requests) == 5
        sampled = [trainer.step(step) for step in (1, 2)]
    assert [prompt.id for each in sampled for prompt in each.prompts] == ["2", "3", "4", "5"]
    assert [ages(each, step) for step, each in enumerate(sampled, 1)] == [{1}, {1, 2}]


def test_groups_that_are_drawn_again_come_from_what_is_sampled_ahead_which_is_refilled():
    """As dynamic sampling does: the queue is as long after it as before."""
    with training("ok", max_staleness=1, max_concurrency=1) as (trainer, _):
        scheduler = trainer.scheduler
        assert [prompt.id for prompt in scheduler.take(0, 0).prompts] == ["0", "1"]
        assert [prompt.id for prompt in scheduler.take_more(1, 0).prompts] == ["2"]
        assert [prompt.id for prompt in scheduler.queue] == ["3", "4"]
        more = scheduler.take_more(3, 0)
        assert [prompt.id for prompt in more.prompts] == ["3", "4", "5"] and ages(more, 0) == {0}
        assert [group.prompt.id for group in scheduler.removed] == [str(i) for i in range(6)], (
            "all are kept by a checkpoint"
        )
        assert [prompt.id for prompt in scheduler.queue] == ["6", "7"]


def test_nothing_is_sampled_for_steps_after_the_last():
    with training("ok", max_staleness=3) as (trainer, server):
        run = trainer.cfg.run.model_copy(update={"num_steps": 4})
        trainer.scheduler.cfg = trainer.cfg.model_copy(update={"run": run})
        trained = [prompt.id for step in range(4) for prompt in trainer.step(step).prompts]
        assert (
            sorted(trained) == [str(i) for i in range(8)]
            and len(server.requests) == 8
            and not trainer.scheduler.queue
        )


def test_what_a_weight_sync_cuts_short_is_counted_in_its_step():
    with training("ok", max_staleness=1, weight_update="abort") as (trainer, server):
        server.is_slow = lambda number: number in (2, 3)
        trainer.rollouts.leader = SimpleNamespace(client=trainer.inference.client)
        trainer.rollouts.missing_routes = SimpleNamespace(check=lambda *_, **__: None)
        trainer.rollouts.score = lambda groups, for_training: groups
        trainer.scheduler.score = lambda groups: None
        trainer.rollouts.draw(trainer.scheduler.take, 0)
        assert wait_for(lambda: len(server.requests) == 2 * PER_STEP, 10)
        trainer.push(1)
        trainer.rollouts.finish_step()
        found = trainer.rollouts.meter.take_sums().reduce(dist.group.WORLD, "cpu")
    assert (
        found["rollout/cut_samples_total"] == 2 * GROUP
        and found["rollout/resumed_samples_total"] == 0
    )


def test_complete_groups_are_scored_while_others_are_sampled():
    """The second prompt is answered only when the first one's group has been scored."""
    scored, calls = threading.Event(), []

    def score_episodes(groups, *, is_last, **_):
        calls.append(([len(episodes) for episodes in groups], is_last))
        scored.set()
        return [[Rewarded(float(len(calls))) for _ in episodes] for episodes in groups]

    with training("ok") as (trainer, server):
        pool = SimpleNamespace(score_episodes=score_episodes)
        trainer.rollouts.leader = SimpleNamespace(client=trainer.inference.client, rewards=pool)
        trainer.rollouts.missing_routes = SimpleNamespace(check=lambda *_, **__: None)
        model = server.source

        def answer(body, given, sample_id):
            assert given[1] == 4 or scored.wait(20), "scored only when all were sampled"
            return model(body, given, sample_id)

        server.source = answer
        prompts, groups = trainer.rollouts.draw(trainer.scheduler.take, 0)
    assert calls == [([GROUP], False), ([GROUP], True)], (
        "each once, the last call for the step's check"
    )
    assert [group.prompt for group in groups] == prompts
    assert [group.rewards.tolist() for group in groups] == [[1.0] * GROUP, [2.0] * GROUP]


def test_a_response_that_is_sampled_again_is_scored_again():
    settings, _ = MODES["resume"]
    with training("ok", **settings) as (trainer, _):
        trainer.scheduler.take(0, 0)
        (group, *_) = (each for each in trainer.scheduler.groups if each.is_complete)
        group.scored = group.rollout_group()
        assert not group.drop_older(0, has_request=False) and group.rollout_group() is group.scored
        assert group.drop_older(1, has_request=True) and group.scored is None


def test_an_interrupt_ends_the_wait_for_samples(sigint, new_threads):
    with training("hang") as (trainer, _):
        interrupt = threading.Timer(
            1.0, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)
        )
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            trainer.scheduler.take(0, 0)
    assert not any(thread.name == "sampling" for thread in new_threads())


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_the_groups_of_a_reported_step_are_released(max_staleness):
    """As `train` and `--only rollout` report it: else the rollouts of the whole run would stay in
    memory, routes and all.
    """
    checkpoint_policy = SimpleNamespace(
        add_previous_totals=lambda metrics: None, note=lambda step, metrics: None
    )
    with training("ok", max_staleness=max_staleness) as (trainer, _):
        run = SimpleNamespace(
            engine=SimpleNamespace(mismatch=lambda passes: None), rollouts=trainer.rollouts,
            parallel=PARALLEL,
            meter=trainer.rollouts.meter, checkpoint_policy=checkpoint_policy,
            reporter=SimpleNamespace(step=lambda *_: None, count=lambda sums: None),
            tokens=SimpleNamespace(finish=lambda step: None),
            recording=SimpleNamespace(files=SimpleNamespace(failed=0)),
            saved_batches=SimpleNamespace(unsaved=0),
        )  # fmt: skip
        for step in range(4):
            trainer.step(step)
            Trainer.report(run, step, [])
            assert (
                not trainer.scheduler.removed
                and len(trainer.scheduler.groups) == max_staleness * PER_STEP
            )
            assert trainer.inference.pending is None


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        (
            {"max_staleness": 1, "over_sample": 0.5},
            "over_sample = 0.5 with partial = drop must be 0 where max_staleness = 1",
        ),
        (
            RESUME | {"max_staleness": 2},
            "weight_update = drain would wait .* set weight_update = abort",
        ),
        (
            RESUME | {"max_staleness": 1, "weight_update": "abort"},
            "weight_update = abort has no effect with max_staleness = 1",
        ),
        ({"partial": "resume", "max_staleness": 1}, "partial = resume needs over_sample > 0"),
        ({"partial": "resume", "over_sample": 0.5}, "max_staleness >= 1, got 0"),
        ({"max_staleness": -1}, "max_staleness"),
        (
            {
                "max_staleness": 1,
                "weight_sync": "colocated",
                "release_memory": True,
                "max_server_restarts": 0,
            },
            "release_memory = true takes the servers' memory",
        ),
    ],
)
def test_settings_without_effect_are_refused(rollout, message):
    with pytest.raises(ConfigError, match=message):
        config(**rollout)


def test_responses_older_than_the_budget_stop_the_run_before_they_are_trained_on():
    with training("ok") as (trainer, _):
        groups = [
            replace(group, rewards=np.zeros(GROUP)) for group in trainer.scheduler.take(0, 0).groups
        ]
    recorded = []

    def record(version, budget):
        recorder = SimpleNamespace(
            record=lambda step, groups: recorded.append(step), choice=GroupChoice(0.0)
        )
        leader = SimpleNamespace(recorder=recorder, rewards=SimpleNamespace(totals=dict))
        run = SimpleNamespace(
            cfg=config(max_staleness=budget), parallel=SimpleNamespace(is_replica_leader=True),
            leader=leader,
            policy_version=version, meter=StepMeter(),
        )  # fmt: skip
        LiveRollouts.record(run, groups, version)

    record(0, 0)
    record(1, 1)
    with pytest.raises(
        RuntimeError,
        match=r"'0/0', '0/1', .*tokens of weights older than version 1 = 1 - rollout.max_staleness",
    ):
        record(1, 0)
    assert recorded == [1, 2]


def test_an_evaluation_samples_with_its_own_settings():
    with training("ok") as (trainer, server):
        for settings, max_tokens in (({}, 6), ({"max_response_tokens": 7}, 7)):
            cfg = trainer.cfg.model_copy(
                update={"eval": EvalConfig(samples=3, temperature=0.3, **settings)}
            )
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
            assert (params["temperature"], params["max_new_tokens"], params["stop_token_ids"]) == (
                0.3,
                max_tokens,
                [1],
            )
            assert len(server.requests[-1]["input_ids"]) == 3


def test_number_of_prompts_that_a_step_samples():
    assert num_prompts(config(), 1) == PER_STEP and num_prompts(config(over_sample=0.1), 2) == 4
    for percent in range(101):
        cfg = config(over_sample=percent / 100)
        cfg = cfg.model_copy(update={"run": cfg.run.model_copy(update={"prompts_per_step": 100})})
        assert num_prompts(cfg, 1) == 100 + percent
        assert num_prompts(cfg, 2) == 100 + percent + percent % 2
    assert [config(**settings).rollout.steps_ahead for settings, _ in MODES.values()] == [
        *(0, 0, 0, 1, 1, 1, 3, 3),
        *(1, 3),
    ]
