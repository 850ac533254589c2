"""A run whose rollouts have two turns, as a user starts it: what it writes, and what its checks say of it."""

import json

from megatron_rl.config import ModelConfig
from megatron_rl.rollout.recorder import read_rollouts, read_tensors
from megatron_rl.tools.check_rollouts.check_rollouts import check_run
from tests.e2e.test_train import make_material, start

FUNCTION = ("--agent.function", "examples.agents.two_attempts:rollout", "--rollout.max_response_tokens", "24")


def test_a_run_of_two_attempts(tmp_path):
    material = make_material(tmp_path, num_hidden_layers=3)
    process = start(material, tmp_path, steps=2, extra=(*FUNCTION, "--rollout.save_tensors", "true"))
    output = tmp_path / "output.txt"
    assert process.wait(400) == 0, output.read_text()
    run = tmp_path / "runs/run"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in metrics if "rollout/turns_mean" in row]
    assert len(steps) == 2
    for row in steps:
        assert 1.0 < row["rollout/turns_mean"] <= 2.0 == row["rollout/turns_max"]
        assert row["episode/attempts"] == row["rollout/turns_mean"] and row["rollout/environment_length_mean"] > 0
        assert row["rollout/environment_seconds_mean"] <= row["rollout/environment_seconds_max"] < row["time/step"]
        # fp32 on both sides: over both turns the trainer computes what the server sampled
        assert row["train/logratio_abs_mean"] <= 1e-4 and row["routing/replayed_mismatch"] == 0
        assert row["routing/router_mismatch"] <= 0.001 or row["routing/flip_margin_max"] < 1e-4
    records = list(read_rollouts(run / "rollouts.jsonl"))
    tensors = read_tensors(run, 1)
    several = [record for record in records if record.step == 1 and record.environment_length]
    assert several
    for record in several:
        tokens = tensors[f"{record.id}:tokens"]
        ((first, end),) = tensors[f"{record.id}:environment"]
        assert tokens[first:end].tolist() == tokens[: record.prompt_length].tolist()  # the question again
        assert len(tokens) == record.prompt_length + record.response_length + record.environment_length
        assert record.reward in (0.0, 0.5)
    report = check_run(run, ModelConfig(path=material / "moe"), step=1)
    assert not report.findings, report.findings
