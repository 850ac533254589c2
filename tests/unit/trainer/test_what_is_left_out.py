"""Rewards that fail, from the pool of worker processes to every place where a user looks."""

import re
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_rl.batch.advantage import with_advantages
from megatron_rl.checkpoint.save_policy import CheckpointPolicy
from megatron_rl.config import load_config
from megatron_rl.metrics.console import Console
from megatron_rl.metrics.events import Events
from megatron_rl.metrics.left_out import LEFT_OUT
from megatron_rl.metrics.sinks import Sinks, read_metrics
from megatron_rl.records import Prompt, RolloutGroup
from megatron_rl.reward.failures import KINDS
from megatron_rl.reward.pool import RewardPool
from megatron_rl.rollout.client.counters import TEACHER_FAULTS, RolloutCounters, TeacherCounters
from megatron_rl.rollout.missing_routes import MissingRouteCounts, add_missing_rows
from megatron_rl.rollout.saved.rollout_recorder import GroupChoice
from megatron_rl.rollout.scoring import score_groups
from megatron_rl.trainer.live_rollouts import LiveRollouts
from megatron_rl.trainer.reporter import Reporter
from megatron_rl.trainer.step_meter import StepMeter
from megatron_rl.trainer.trainer import Trainer
from megatron_rl_viewer.run_folder import Run
from tests.unit.batch.rollouts import make_rollout

WORDS = ["yes", "no", "raise"]
"""A right answer, a wrong one, and one for which the function raises; the token is the place in
this list.
"""
STEPS = [
    [("yes", "no"), ("yes", "raise")],
    [("raise", "yes"), ("no", "raise")],
    [("yes", "no"), ("no", "yes")],
    [("no", "no"), ("raise", "no")],
    [("yes", "yes"), ("no", "no")],
]
"""Steps of groups of responses.

All rewards of step 4 are 0; in step 5 no group has rewards that differ.
"""
TOKENIZER = SimpleNamespace(
    batch_decode=lambda rows, **_: [" ".join(WORDS[token] for token in row) for row in rows]
)


def group_of(name, responses):
    """Of one token each, as sampled: without texts and rewards."""
    sampled = [make_rollout(f"{name}/{k}", 1, 1, routes=False) for k in range(len(responses))]
    rollouts = [
        replace(
            rollout, tokens=np.array([0, WORDS.index(word)]), policy_versions=np.zeros(1, np.int32)
        )
        for rollout, word in zip(sampled, responses, strict=True)
    ]
    return RolloutGroup(Prompt(name, "a question", (0,), "yes"), tuple(rollouts))


@pytest.fixture
def cfg(tmp_path):
    function = "tests.unit.reward.functions:by_response"
    run = {
        "dir": str(tmp_path),
        "name": "run",
        "num_steps": len(STEPS),
        "prompts_per_step": 2,
        "num_mini_batches": 1,
    }
    settings = {
        "model": {"path": "m"},
        "data": {"train": "x"},
        "run": run,
        "reward": {"function": function},
    }
    return load_config(None, [], settings)


@contextmanager
def training(cfg, trackers=None):
    """(a trainer without a model, whose metrics are counted and reported as in a run; its rollout
    source).
    """
    parallel = SimpleNamespace(is_replica_leader=True, rank=0, device=torch.device("cpu"))
    idle = SimpleNamespace(
        failed=0,
        unsaved=0,
        finish=lambda *_: None,
        record=lambda *_: None,
        step_done=lambda: None,
        choice=GroupChoice(0.0),
    )
    with RewardPool(cfg.reward) as pool, Sinks(cfg.run_dir, trackers) as sinks:
        leader = SimpleNamespace(
            rewards=pool,
            recorder=idle,
            client=SimpleNamespace(counters=RolloutCounters(), teachers=None),
        )
        live = SimpleNamespace(
            cfg=cfg, parallel=parallel, meter=StepMeter(), policy_version=0, leader=leader,
            scheduler=idle, prompts=SimpleNamespace(metrics=dict),
            inference=SimpleNamespace(restarts=0, teacher_seconds=dict), restarts=0,
            events=Events(),
        )  # fmt: skip
        live.finish_step = partial(LiveRollouts.finish_step, live)
        yield SimpleNamespace(
            cfg=cfg, parallel=parallel, meter=live.meter,
            engine=SimpleNamespace(mismatch=lambda passes: None),
            rollouts=live, tokens=idle, saved_batches=idle, recording=SimpleNamespace(files=idle),
            reporter=Reporter(cfg, Console(enabled=True), sinks),
            checkpoint_policy=CheckpointPolicy(SimpleNamespace(cfg=cfg.checkpoint)),
        ), live  # fmt: skip


def train(cfg):
    """The steps of STEPS, scored in worker processes."""
    with training(cfg) as (trainer, live):
        for step, groups in enumerate(STEPS):
            sampled = [group_of(f"p{k}", responses) for k, responses in enumerate(groups)]
            scored = score_groups(sampled, live.leader.rewards, TOKENIZER, for_training=True)
            LiveRollouts.record(live, with_advantages(scored, "mean"), step)
            Trainer.report(trainer, step, [])
        trainer.reporter.finish()


def test_failed_rewards_are_in_the_step_line_the_summary_health_the_report_and_the_viewer(
    cfg, tmp_path, capsys
):
    train(cfg)
    output = capsys.readouterr().out
    lines, summary = (
        re.findall(r"^step .*", output, re.MULTILINE),
        output[output.index("5 steps in") :],
    )

    assert [re.findall(r"reward errors \d+", line) for line in lines] == [
        ["reward errors 1"], ["reward errors 2"], [], ["reward errors 1"], [],
    ]  # fmt: skip
    assert ["all rewards 0" in line for line in lines] == [False, False, False, True, False]
    assert ["no group taught anything" in line for line in lines] == [
        False,
        False,
        False,
        True,
        True,
    ]

    assert (
        "\n  steps that taught nothing 2\n  steps with all rewards 0  1\n  reward errors           "
        "  4\nhealth" in summary
    )
    assert "nothing skipped" not in summary
    assert "\n  Reward errors since step 1: Read the first warnings in the log" in summary
    assert "\n  Steps that taught nothing since step 4: " in summary

    page = (cfg.run_dir / "report.html").read_text()
    assert (
        "<b>Reward errors</b> since step 1" in page
        and "4 in the last 5 steps, 20.00% of the responses" in page
    )
    assert re.search(
        r"<td>reward errors</td>.*?<code>reward/errors_total</code>.*?number\">4<", page
    )

    run = Run(cfg.run_dir, tmp_path / "cache")
    run.read_small()
    found = {finding["title"]: finding["level"] for finding in run.health()}
    assert found == {
        "Reward errors": "bad", "Steps that taught nothing": "watch",
        "Steps with all rewards 0": "watch",
    }  # fmt: skip
    steps = read_metrics(cfg.run_dir / "metrics.jsonl")
    assert [step.metrics["reward/errors_total"] for step in steps] == [1, 3, 3, 4, 4]
    assert [step.metrics["reward/responses_total"] for step in steps] == [4, 8, 12, 16, 20]


def test_every_total_counts_as_the_table_says(cfg):
    """Everything is counted in step 1, nothing in step 2: a total since the start stays, one of a
    step is 0 or absent.
    """
    trackers = SimpleNamespace(failures={"some": 3}, put=lambda call: None, close=lambda **_: None)
    with training(cfg, trackers) as (trainer, live):
        counters, pool = live.leader.client.counters, live.leader.rewards
        for name, value in vars(counters).items():
            if isinstance(value, int):
                setattr(counters, name, 3)
        counters.failures.update(timeout=3, connection=3, http_503=3, bad_body=3)
        of_teacher = TeacherCounters(
            3, 3, 3, Counter(dict.fromkeys((*TEACHER_FAULTS, "http_503"), 3))
        )
        live.leader.client.teachers = SimpleNamespace(
            totals=of_teacher.totals, take_seconds=lambda: [0.1]
        )
        counters.dropped.update(aborted=3, stale_version=3, routes_shape=3, other=3)
        pool.counters.update(dict.fromkeys((*KINDS, "unformatted", "lost_starts", "scored"), 3))
        live.inference.restarts = trainer.recording.files.failed = trainer.saved_batches.unsaved = 3
        for step in range(2):
            if step == 0:
                add_missing_rows(
                    live.meter.sums, MissingRouteCounts(3, 9, 0, 9, dropped=3, samples=9)
                )
                live.meter.sums.add_total("replay/masked_tokens_total", 3)  # as count_step
            for name, count in pool.totals().items():  # as LiveRollouts.record
                live.meter.sums.add_total(name, count)
            Trainer.report(trainer, step, [])
    first, second = (step.metrics for step in read_metrics(cfg.run_dir / "metrics.jsonl"))
    counted = {
        entry.metric.replace("NAME", "some"): entry
        for entry in LEFT_OUT
        if entry.metric.endswith("_total")
    }
    assert min(first[name] for name in counted) >= 3
    assert {name for name in counted if second.get(name, 0) > 0} == {
        name for name, entry in counted.items() if entry.per == "run"
    }
