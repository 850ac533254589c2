import io
import json
import math
import re
import time

import pytest
from rich.console import Console as RichConsole

from megatron_rl.launch.log_lines import LogLines
from megatron_rl.metrics import console as module
from megatron_rl.metrics.console import Console, Job, clock
from megatron_rl.metrics.left_out import LEFT_OUT
from megatron_rl.metrics.step_line import WIDTH, step_line
from megatron_rl.records.packed import StepResult

METRICS = {
    "rollout/reward_mean": 0.4301, "rollout/response_length_mean": 3.4,
    "rollout/truncated_frac": 0.0,
    "train/entropy": 0.61, "train/kl_mu_pi": 1.2e-3, "train/clip_high_frac": 0.02,
    "train/clip_low_frac": 0.01,
    "routing/router_mismatch": 0.016, "routing/replayed_mismatch": 0.0, "optim/grad_norm": 0.8,
    "time/rollout": 1.2, "time/old_logprob": 0.6, "time/update": 1.5, "time/weight_sync": 0.2,
    "time/step": 4.1,
    "time/split": 0.1, "time/other": 0.5,
}  # fmt: skip


def test_the_step_line():
    assert (
        step_line(StepResult(11, 12, METRICS), 60)
        == "step 12/60  reward 0.430  len 3.4  entropy 0.610  KL +1.2e-03  router_mismatch 1.6%"
        " (used 0.0%)  gnorm 0.80  4.1s"
    )
    short = {name: METRICS[name] for name in METRICS if name.startswith(("rollout/", "time/"))}
    assert (
        step_line(StepResult(11, 12, short), 60)
        == "step 12/60  reward 0.430  len 3.4  trunc 0.00  4.1s (rollout 1.2 old 0.6 update 1.5"
        " sync 0.2 other 0.6)"
    )


LONG = METRICS | {
    "rollout/reward_mean": -0.4301, "rollout/response_length_mean": 31234.5,
    "routing/router_mismatch": 0.126,
    "optim/grad_norm": 12.8, "time/step": 12345.6, "time/rollout": 10345.6, "time/update": 1800.2,
}  # fmt: skip
AGENT = {
    "rollout/turns_mean": 12.75, "rollout/environment_length_mean": 11234.5,
    "rollout/environment_seconds_mean": 120.5,
    "episode/tool_errors": 0.0625, "episode/tool_calls": 1.75, "episode/wall_clock_seconds": 1234.0,
}  # fmt: skip
WRONG = {
    "replay/missing_rows_total": 12345.0, "replay/masked_tokens_total": 1234.0,
    "train/nonfinite_frac": 0.00123,
    "optim/skipped_updates": 1.0,
}  # fmt: skip


def test_the_longest_lines_fit_and_keep_what_matters():
    """No kind of run loses its reward, its seconds or what is wrong with it."""
    for kind, extra in {
        "long": {},
        "agent": AGENT,
        "wrong": WRONG,
        "agent, wrong": AGENT | WRONG,
    }.items():
        line = step_line(StepResult(9998, 1, LONG | extra), 10000)
        assert len(line) <= WIDTH == 120, (kind, line)
        assert line.startswith("step  9999/10000  reward -0.430") and "12346s" in line, (kind, line)
        if extra is AGENT:
            assert "turns 12.75" in line or "router_mismatch 12.6% (used 0.0%)" in line
        if "wrong" in kind:
            assert "UPDATE SKIPPED  NONFINITE 0.12%  missing routes 12345  +1 more" in line


def test_missing_metrics_are_left_out_and_nan_is_shown():
    assert step_line(StepResult(0, 1, {"rollout/reward_mean": 0.5}), 8) == "step 1/8  reward 0.500"
    assert "gnorm nan" in step_line(StepResult(0, 1, {"optim/grad_norm": math.nan}), 8)
    assert "UPDATE SKIPPED" in step_line(StepResult(0, 1, {"optim/skipped_updates": 0.5}), 8)
    assert "NONFINITE 0.12%" in step_line(StepResult(0, 1, {"train/nonfinite_frac": 0.00123}), 8)
    assert (
        step_line(StepResult(0, 1, {"train/nonfinite_frac": 0.0, "optim/skipped_updates": 0.0}), 8)
        == "step 1/8"
    )


COUNTED = {
    "reward/errors_total": 12.0, "track/wandb_failures_total": 30.0,
    "rollout/faults_sample_total": 2.0,
    "rollout/faults_http_total": 0.0, "rollout/cancelled_tokens_total": 900.0,
    "replay/missing_rows_total": 7.0,
}  # fmt: skip


def test_what_a_step_left_out_is_named_the_worst_and_largest_first():
    """Counted since the step before; not what is normal (cancelled tokens); two of several, the
    others as a number.
    """
    before = {
        "reward/errors_total": 12.0,
        "track/wandb_failures_total": 10.0,
        "replay/missing_rows_total": 7.0,
    }
    line = step_line(StepResult(1, 2, METRICS | COUNTED), 8, before)
    assert (
        "  malformed samples 2  failures of wandb 20  +1 more  4.1s" in line and len(line) <= WIDTH
    )
    of_one = step_line(StepResult(1, 2, {"reward/errors_total": 15.0}), 8, before)
    assert of_one == "step 2/8  reward errors 3"
    assert step_line(StepResult(1, 2, {"reward/errors_total": 12.0}), 8, before) == "step 2/8"


def test_the_longest_line_with_everything_that_can_be_wrong_names_the_words_and_fits():
    names = [entry.metric.replace("NAME", "mlflow") for entry in LEFT_OUT]
    line = step_line(StepResult(9998, 1, LONG | AGENT | dict.fromkeys(names, 123456.0)), 10000)
    assert (
        len(line) <= WIDTH
        and "UPDATE SKIPPED  NONFINITE" in line
        and re.search(r"\+\d+ more  12346s$", line)
    )


def test_a_step_that_taught_nothing_says_so():
    taught_nothing = METRICS | {
        "rollout/reward_mean": 0.0,
        "optim/grad_norm": 0.0,
        "rollout/zero_advantages": 1.0,
    }
    line = step_line(StepResult(0, 1, taught_nothing | {"rollout/zero_rewards": 0.0}), 8)
    assert line.endswith("  no group taught anything  4.1s") and len(line) <= WIDTH
    assert "  all rewards 0  " in step_line(
        StepResult(0, 1, taught_nothing | {"rollout/zero_rewards": 1.0}), 8
    )
    assert "taught" not in step_line(
        StepResult(0, 1, METRICS | {"rollout/zero_advantages": 0.0}), 8
    )


def test_an_evaluation_says_what_could_not_be_scored():
    found = {
        "eval/heldout/avg@4": 0.75,
        "eval/heldout/failed_frac": 0.125,
        "eval/other/failed_frac": 0.0,
        "eval/heldout/reward/failed_frac": 0.5,
        "eval/heldout/reward/loss": 0.5,
    }
    assert module.evaluation_text(found) == "heldout/avg@4 0.750  heldout/failed_frac 0.125"


def test_only_the_enabled_rank_prints_and_markup_is_text(capsys):
    Console(enabled=False).log("hidden")
    Console(enabled=True).log("[bold]kept[/bold] " + "x" * 300)
    Console(enabled=True).evaluation(60, {"eval/heldout/avg@4": 0.75, "eval/heldout/pass@4": 0.9})
    assert capsys.readouterr().out.splitlines() == [
        "[bold]kept[/bold] " + "x" * 300,
        "eval after step 60: heldout/avg@4 0.750  heldout/pass@4 0.900",
    ]


def test_progress_into_a_file_is_a_line_per_interval(capsys, monkeypatch):
    monkeypatch.setattr(module, "PLAIN_PROGRESS_SECONDS", 0.0)
    with Console(enabled=True).progress("sampling", total=3) as advance:
        for _ in range(3):
            advance()
    lines = capsys.readouterr().out.splitlines()
    assert [re.sub(r"[\d.e+]+/s, \d:\d\d left", "RATE", line) for line in lines] == [
        "sampling 1/3, RATE", "sampling 2/3, RATE",
    ]  # fmt: skip
    monkeypatch.setattr(module, "PLAIN_PROGRESS_SECONDS", 60.0)
    with Console(enabled=True).progress("sampling", total=1) as advance:
        advance()
    assert capsys.readouterr().out == ""


def test_rate_and_time_left():
    job = Job("checkpoint", 200, "MiB", done=50, started=time.monotonic() - 100)
    assert job.line == "checkpoint 50/200 MiB, 0.5 MiB/s, 5:00 left"
    assert job.values | {"seconds": 100.0} == {
        "job": "checkpoint", "done": 50, "total": 200, "unit": "MiB", "seconds": 100.0,
        "seconds_left": 300.0,
    }  # fmt: skip
    assert Job("x", 10).seconds_left is None
    assert [clock(seconds) for seconds in (3.4, 765, 11100)] == ["0:03", "12:45", "3:05:00"]


def test_lines_of_json(capsys, monkeypatch):
    """Every line is one object with the keys of docs/reference/token_data.md#log-lines; NaN is
    null, secrets are hidden.
    """
    monkeypatch.setattr(module, "PLAIN_PROGRESS_SECONDS", 0.0)
    monkeypatch.setenv("SOME_API_KEY", "abcd1234efgh")
    console = Console(enabled=True, lines=LogLines("json"))
    console.log("key abcd1234efgh\nsecond line")
    console.step(StepResult(11, 12, METRICS | {"optim/grad_norm": math.nan}), 60)
    console.evaluation(60, {"eval/heldout/avg@4": 0.75})
    with console.progress("sampling", total=2) as advance:
        advance()
    console.summary("1 step", {"steps": 1, "changed": {"rollout/reward_mean": (0.1, 0.2)}})
    rows = [
        json.loads(line, parse_constant=pytest.fail)
        for line in capsys.readouterr().out.splitlines()
    ]
    assert [row["event"] for row in rows] == ["log", "step", "evaluation", "progress", "summary"]
    assert all(row.pop("time") > 1.7e9 for row in rows)
    assert rows[0] == {"event": "log", "text": "key ***\nsecond line"}
    assert rows[1].keys() == {"event", "text", "step", "num_steps", "policy_version", "metrics"}
    assert (rows[1]["step"], rows[1]["metrics"]["optim/grad_norm"]) == (12, None)
    assert rows[1]["metrics"]["rollout/reward_mean"] == 0.4301
    assert rows[2]["metrics"] == {"eval/heldout/avg@4": 0.75}
    assert rows[3].keys() == {
        "event",
        "text",
        "job",
        "done",
        "total",
        "unit",
        "seconds",
        "seconds_left",
    }
    assert rows[4]["changed"] == {"rollout/reward_mean": [0.1, 0.2]}


def test_no_color_and_a_terminal(monkeypatch):
    """On a terminal a bar with its rate; with NO_COLOR without any color."""
    for no_color in ("", "1"):
        monkeypatch.setenv("NO_COLOR", no_color)
        console = Console(enabled=True)
        console._rich = RichConsole(file=io.StringIO(), force_terminal=True, width=100)
        with console.progress("evaluation: sampling", 4, "prompts") as advance:
            advance(2)
        written = console._rich.file.getvalue()
        assert "2/4" in written and "left" in written
        assert bool(re.search("\x1b\\[[0-9;]*3[0-9]", written)) is not bool(no_color)


def test_the_step_line_of_rollouts_of_several_turns():
    found = {
        "rollout/response_length_mean": 20.5, "rollout/turns_mean": 2.75,
        "rollout/environment_length_mean": 11.25,
        "rollout/environment_seconds_mean": 0.5, "episode/tool_errors": 0.0625,
        "episode/tool_calls": 1.75,
    }  # fmt: skip
    assert (
        step_line(StepResult(0, 1, found), 8)
        == "step 1/8  len 20.5  turns 2.75  tool_calls 1.75  tool_errors 0.0625  masked 11.2 "
        " environment 0.50s"
    )
    assert "turns" not in step_line(StepResult(0, 1, {"rollout/reward_mean": 0.5}), 5)
