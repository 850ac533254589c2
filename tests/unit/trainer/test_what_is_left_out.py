"""Rewards that fail, from the pool of worker processes to every place where a user looks."""

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_rl.batch.advantage import with_advantages
from megatron_rl.checkpoint.save_policy import CheckpointPolicy
from megatron_rl.config import load_config
from megatron_rl.metrics.console import Console
from megatron_rl.metrics.sinks import Sinks, read_metrics
from megatron_rl.records import Prompt, RolloutGroup
from megatron_rl.reward.pool import RewardPool
from megatron_rl.rollout.scoring import score_groups
from megatron_rl.trainer.reporter import Reporter
from megatron_rl.trainer.rollout_source import LiveRollouts
from megatron_rl.trainer.step_meter import StepMeter
from megatron_rl.trainer.trainer import Trainer
from megatron_rl.viewer.run import Run
from tests.unit.batch.rollouts import make_rollout

WORDS = ["yes", "no", "raise"]
"""A right answer, a wrong one, and one for which the function raises; the token is the place in this list."""
STEPS = [
    [("yes", "no"), ("yes", "raise")],
    [("raise", "yes"), ("no", "raise")],
    [("yes", "no"), ("no", "yes")],
    [("no", "no"), ("raise", "no")],
    [("yes", "yes"), ("no", "no")],
]
"""Steps of groups of responses.  All rewards of step 4 are 0; in step 5 no group has rewards that differ."""
TOKENIZER = SimpleNamespace(batch_decode=lambda rows, **_: [" ".join(WORDS[token] for token in row) for row in rows])


def group_of(name, responses):
    """Of one token each, as sampled: without texts and rewards."""
    sampled = [make_rollout(f"{name}/{k}", 1, 1, routes=False) for k in range(len(responses))]
    rollouts = [
        replace(rollout, tokens=np.array([0, WORDS.index(word)]), policy_versions=np.zeros(1, np.int32))
        for rollout, word in zip(sampled, responses, strict=True)
    ]
    return RolloutGroup(Prompt(name, "a question", (0,), "yes"), tuple(rollouts))


@pytest.fixture
def cfg(tmp_path):
    function = "tests.unit.reward.functions:by_response"
    run = {"dir": str(tmp_path), "name": "run", "num_steps": len(STEPS), "prompts_per_step": 2, "num_mini_batches": 1}
    settings = {"model": {"path": "m"}, "data": {"train": "x"}, "run": run, "reward": {"function": function}}
    return load_config(None, [], settings)


def train(cfg):
    """The steps of STEPS as a run scores, counts and reports them, without a model."""
    parallel = SimpleNamespace(is_replica_leader=True, rank=0, device=torch.device("cpu"))
    idle = SimpleNamespace(failed=0, unsaved=0, finish=lambda *_: None, record=lambda *_: None)
    with RewardPool(cfg.reward) as pool, Sinks(cfg.run_dir) as sinks:
        live = SimpleNamespace(
            cfg=cfg, parallel=parallel, meter=StepMeter(), policy_version=0, finish_step=lambda: None,
            leader=SimpleNamespace(rewards=pool, recorder=idle),
        )  # fmt: skip
        trainer = SimpleNamespace(
            cfg=cfg, parallel=parallel, meter=live.meter, engine=SimpleNamespace(mismatch=lambda passes: None),
            rollouts=live, tokens=idle, saver=idle, recording=SimpleNamespace(files=idle),
            reporter=Reporter(cfg, Console(enabled=True), sinks), checkpoint_policy=CheckpointPolicy(None),
        )  # fmt: skip
        for step, groups in enumerate(STEPS):
            sampled = [group_of(f"p{k}", responses) for k, responses in enumerate(groups)]
            scored = score_groups(sampled, pool, TOKENIZER, for_training=True)
            LiveRollouts.record(live, with_advantages(scored, "mean"), step)
            Trainer.report(trainer, step, [])
        trainer.reporter.finish()


def test_failed_rewards_are_in_the_step_line_the_summary_health_the_report_and_the_viewer(cfg, tmp_path, capsys):
    train(cfg)
    output = capsys.readouterr().out
    lines, summary = re.findall(r"^step .*", output, re.MULTILINE), output[output.index("5 steps in") :]

    assert [re.findall(r"reward errors \d+", line) for line in lines] == [
        ["reward errors 1"], ["reward errors 2"], [], ["reward errors 1"], [],
    ]  # fmt: skip
    assert ["all rewards 0" in line for line in lines] == [False, False, False, True, False]
    assert ["no group taught anything" in line for line in lines] == [False, False, False, True, True]

    assert (
        "\n  steps that taught nothing 2\n  steps with all rewards 0  1\n  reward errors             4\nhealth"
        in summary
    )
    assert "nothing skipped" not in summary
    assert "\n  Reward errors since step 1: Read the first warnings in the log" in summary
    assert "\n  Steps that taught nothing since step 4: " in summary

    page = (cfg.run_dir / "report.html").read_text()
    assert "<b>Reward errors</b> since step 1" in page and "4 in the last 20 steps, 20.00% of the responses" in page
    assert re.search(r"reward errors<br><code>reward/errors_total</code>.*?number\">4<", page)

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
