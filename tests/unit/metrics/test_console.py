import math

from megatron_rl.metrics import console as module
from megatron_rl.metrics.console import Console, step_line
from megatron_rl.records import StepResult

METRICS = {
    "rollout/reward_mean": 0.4301, "rollout/response_length_mean": 3.4, "rollout/truncated_frac": 0.0,
    "train/entropy": 0.61, "train/kl_mu_pi": 1.2e-3, "train/clip_high_frac": 0.02, "train/clip_low_frac": 0.01,
    "routing/router_mismatch": 0.016, "routing/replayed_mismatch": 0.0, "optim/grad_norm": 0.8,
    "time/rollout": 1.2, "time/old_logprob": 0.6, "time/update": 1.5, "time/weight_sync": 0.2, "time/step": 4.1,
    "time/split": 0.1, "time/other": 0.5,
}  # fmt: skip


def test_the_step_line():
    assert step_line(StepResult(11, 12, METRICS), 60) == (
        "step 12/60  reward 0.430  len 3.4  trunc 0.00  entropy 0.610  KL +1.2e-03  clip .02/.01  "
        "router_mismatch 1.6% (used 0.0%)  gnorm 0.80  4.1s (rollout 1.2 old 0.6 update 1.5 sync 0.2 other 0.6)"
    )


def test_missing_metrics_are_left_out_and_nan_is_shown():
    assert step_line(StepResult(0, 1, {"rollout/reward_mean": 0.5}), 8) == "step 1/8  reward 0.500"
    assert "gnorm nan" in step_line(StepResult(0, 1, {"optim/grad_norm": math.nan}), 8)
    assert "UPDATE SKIPPED" in step_line(StepResult(0, 1, {"optim/skipped_updates": 0.5}), 8)
    assert "NONFINITE 0.12% of tokens" in step_line(StepResult(0, 1, {"train/nonfinite_frac": 0.00123}), 8)
    assert step_line(StepResult(0, 1, {"train/nonfinite_frac": 0.0, "optim/skipped_updates": 0.0}), 8) == "step 1/8"


def test_missing_routes_are_shown_where_there_are_any():
    assert "missing_routes" not in step_line(StepResult(0, 1, METRICS | {"replay/missing_rows_total": 0.0}), 8)
    counted = {
        "replay/missing_rows_total": 12.0,
        "replay/masked_tokens_total": 9.0,
        "replay/dropped_samples_total": 0.0,
    }
    assert "  missing_routes 12 rows, 9 tokens masked  gnorm" in step_line(StepResult(0, 1, METRICS | counted), 8)
    assert "missing_routes 2 samples dropped" in step_line(StepResult(0, 1, {"replay/dropped_samples_total": 2.0}), 8)


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
    assert capsys.readouterr().out.splitlines() == ["sampling 1/3", "sampling 2/3"]
    monkeypatch.setattr(module, "PLAIN_PROGRESS_SECONDS", 60.0)
    with Console(enabled=True).progress("sampling", total=1) as advance:
        advance()
    assert capsys.readouterr().out == ""


def test_the_step_line_of_rollouts_of_several_turns():
    found = {
        "rollout/response_length_mean": 20.5, "rollout/turns_mean": 2.75, "rollout/environment_length_mean": 11.25,
        "rollout/environment_seconds_mean": 0.5, "episode/tool_errors": 0.0625, "episode/tool_calls": 1.75,
    }  # fmt: skip
    assert step_line(StepResult(0, 1, found), 8) == (
        "step 1/8  len 20.5  turns 2.75  tool_calls 1.75  tool_errors 0.0625  masked 11.2  environment 0.50s"
    )
    assert "turns" not in step_line(StepResult(0, 1, {"rollout/reward_mean": 0.5}), 5)
