"""The lines at the end of a run."""

from megatron_rl.metrics.health import examine_results
from megatron_rl.metrics.summary import summarize_run
from megatron_rl.records.packed import StepResult


def results():
    yield StepResult(-1, 0, {"eval/heldout/avg@4": 0.25, "eval/heldout/avg@4_low": 0.2})
    for step in range(10):
        metrics = {
            "rollout/reward_mean": step / 10, "train/kl_mu_pi": 1e-3, "time/step": 12.0,
            "time/rollout": 6.0, "time/update": 3.0,
            "time/other": 3.0, "routing/router_mismatch": 0.02, "routing/replayed_mismatch": 0.0,
            "optim/skipped_updates": 0.5 if step == 3 else 0.0,
            "replay/missing_rows_total": 4.0 if step > 7 else 0.0,
            "rollout/server_restarts_total": step // 5, "track/wandb_failures_total": step,
            "rollout/cancelled_groups_total": 2, "rollout/retries_total": 3,
            "reward/responses_total": 40,
        }  # fmt: skip
        yield StepResult(step, step, metrics)
    yield StepResult(9, 10, {"eval/heldout/avg@4": 0.75})


def test_what_changed_and_where_to_look(tmp_path):
    (tmp_path / "tensorboard").mkdir()
    found = summarize_run(list(results()), tmp_path, ("top",), tmp_path / "report.html")
    assert found.text.splitlines() == [
        "10 steps in 2:00: rollout 50%, update 25%, other 25%",
        "  reward                     0.050 -> 0.850",
        "  KL                         +1.0e-03 -> +1.0e-03",
        "  heldout/avg@4              0.250 -> 0.750",
        "  router_mismatch            2.0% (used 0.0%)",
        "  steps with skipped updates 1",
        "  failures of wandb          9",
        "  missing routes             8",
        "  server restarts            1",
        "  cancelled groups           2 (normal)",
        "  requests sent again        3 (counted above)",
        "health",
        (
            "  Steps with skipped updates since step 4: Find the first step that has them, and"
            " compute its batch again (megatron-rl replay-batch)."
        ),
        (
            "  Missing routes since step 9: Look at the servers' faults and at"
            " replay.on_missing_route."
        ),
        "  Server restarts since step 6: Read the log of the server in the run's folder.",
        "  Failures of wandb since step 2: The log has the first failure.",
        "look at",
        f"  megatron-rl top {tmp_path}",
        f"  tensorboard --logdir {tmp_path}",
        f"  {tmp_path / 'report.html'}",
    ]
    assert found.values["counts"] == {
        "steps with skipped updates": 1, "failures of wandb": 9, "missing routes": 8,
        "server restarts": 1,
        "cancelled groups": 2, "requests sent again": 3,
    }  # fmt: skip


def test_the_losses_of_supervised_training(tmp_path):
    rows = [StepResult(-1, 0, {"eval/heldout/loss": 2.0})]
    rows += [StepResult(n, n, {"sft/loss": 2 - n / 10, "time/step": 1.0}) for n in range(10)]
    rows += [StepResult(9, 10, {"eval/heldout/loss": 1.25})]
    assert summarize_run(rows, tmp_path, (), None).text.splitlines()[:3] == [
        "10 steps in 0:10",
        "  loss                  1.950 -> 1.150",
        "  heldout/loss          2.000 -> 1.250",
    ]


def test_a_set_that_was_never_scored_has_no_line(tmp_path):
    """reward.on_error = drop, and the reward of every response failed."""
    unscored = [StepResult(step, step, {"eval/bad/avg@4": float("nan")}) for step in (-1, 9)]
    text = summarize_run([*results(), *unscored], tmp_path, (), None).text
    assert "heldout/avg@4" in text and "bad/avg@4" not in text


def test_health_is_in_the_words_of_the_viewer(tmp_path):
    found = summarize_run(list(results()), tmp_path, (), None)
    said = [finding.to_json() for finding in examine_results(list(results()))]
    assert found.values["health"] == said and len(said) == 4 and said[0]["level"] == "bad"
    fine = summarize_run(list(results())[:2], tmp_path, (), None)
    assert [each["title"] for each in fine.values["health"]] == ["Nothing stands out"]


def test_a_run_without_a_step(tmp_path):
    found = summarize_run([], tmp_path, (), None)
    assert found.text.splitlines()[:2] == ["0 steps in 0:00", "  nothing skipped or left out"]
