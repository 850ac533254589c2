import json
import math

import pytest

from megatron_rl.metrics.sinks import Sinks, read_metrics
from megatron_rl.records.packed import StepResult


def test_what_is_written_is_read_and_is_strict_json(tmp_path):
    results = [
        StepResult(
            0, 1, {"train/loss": 0.5, "train/entropy": math.nan}, {"routing/flip_rate": [0.0, 0.25]}
        ),
        StepResult(1, 2, {"train/loss": math.inf}),
    ]
    with Sinks(tmp_path) as sinks:
        sinks.write(results[0])
        assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1  # readable during the run
        sinks.write(results[1])
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert (first.step, first.policy_version, first.metrics["train/loss"]) == (0, 1, 0.5)
    assert math.isnan(first.metrics["train/entropy"]) and math.isnan(second.metrics["train/loss"])
    assert first.per_layer == {"routing/flip_rate": [0.0, 0.25]}


def test_resuming_appends_and_the_last_value_of_a_step_counts(tmp_path):
    with Sinks(tmp_path) as sinks:
        sinks.write(StepResult(0, 1, {"a": 1.0}))
        sinks.write(StepResult(1, 2, {"a": 2.0}))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "policy_ver')  # killed while writing
    with Sinks(tmp_path, last_step=2) as sinks:
        sinks.write(StepResult(1, 2, {"a": 3.0}))
        sinks.write(StepResult(1, 2, {"eval/x/avg@4": 0.5}))
    assert [(r.step, r.metrics) for r in read_metrics(tmp_path / "metrics.jsonl")] == [
        (0, {"a": 1.0}),
        (1, {"a": 3.0, "eval/x/avg@4": 0.5}),
    ]


@pytest.mark.parametrize(
    "line", ["nonsense", "[1]", '{"step": 1}', '{"step": 1, "policy_version": 1, "a": "x"}']
)
def test_a_broken_line_is_named(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "policy_version": 0}\n' + line + "\n")
    with pytest.raises(ValueError, match="metrics.jsonl, line 2: not a step's metrics"):
        read_metrics(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize(("last_step", "left"), [(-1, []), (0, [-1]), (1, [-1, 0])])
def test_steps_that_are_trained_again_are_forgotten(tmp_path, last_step, left):
    """Metrics of the earlier attempt alone must not stay, nor its steps beyond the new end."""
    with Sinks(tmp_path) as sinks:
        sinks.write(StepResult(-1, 0, {"eval/x/avg@4": 0.5}))
        for step in range(3):
            sinks.write(StepResult(step, 1, {"a": 1.0, "only/then_total": 7.0}))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write("not a line of ours\n")
    with Sinks(tmp_path, last_step=last_step):
        pass
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] - 1 for line in lines[:-1]] == left
    assert lines[-1] == "not a line of ours"
