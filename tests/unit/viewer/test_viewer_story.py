"""The sentences at the top of a run's page."""

import json
import math
import os
import time

import pytest

from megatron_rl_viewer.run_folder import LIVE_SECONDS, Run
from megatron_rl_viewer.story import held_out, learned, story, trend
from tests.viewer_run import add_events, write_run


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ([], "No step has a reward yet."),
        ([math.nan, None], "No step has a reward yet."),
        ([0.25], "The mean reward is 0.250."),
        ([0.2, 0.4, 0.5, 0.6, 0.7, 0.7, 0.8, 0.8, 0.8, 0.9],
         "The mean reward rises from 0.300 to 0.850 over steps 1 to 10."),
        ([0.9, None, 0.1], "The mean reward falls from 0.900 to 0.100 over steps 1 to 3."),
        ([0.5] * 5, "The mean reward stays at 0.500 over steps 1 to 5."),
        ([0.0] * 5, "The mean reward stays at 0.000 over steps 1 to 5."),
    ],
)  # fmt: skip
def test_reward_in_a_sentence(values, sentence):
    assert trend("reward", range(1, len(values) + 1), values) == sentence


def test_a_run_without_rewards_has_a_sentence():
    assert trend("reward", [1, 2, 3], []) == "No step has a reward yet."
    assert learned({"steps": [1], "metrics": {}}) == ("Reward", "No step has a reward yet.")


def test_supervised_training_has_a_loss_and_no_rewards():
    table = {"steps": [1, 2], "metrics": {"sft/loss": [4.0, 2.0]}}
    assert learned(table) == ("Loss", "The mean loss falls from 4.000 to 2.000 over steps 1 to 2.")
    evaluations = {"steps": [0, 2], "metrics": {"eval/rows/loss": [4.5, 2.5]}}
    assert held_out(evaluations) == "rows loss goes from 4.500 after step 0 to 2.500 after step 2."


def test_held_out_sets_in_a_sentence():
    table = {
        "steps": [0, 30, 60],
        "metrics": {
            "eval/heldout/avg@4": [0.309, None, 0.905],
            "eval/heldout/avg@4_low": [0.2, None, 0.8],
            "eval/heldout/avg@4_high": [0.4, None, 1.0],
            "eval/heldout/reward/loss": [0.4, None, 1.0],
            "eval/heldout/episode/avg@4": [0.4, None, 1.0],
            "eval/heldout/pass@4": [0.5, None, 0.95],
            "eval/aime/avg@2": [None, 0.125, None],
        },
    }
    assert held_out(table) == (
        "aime avg@2 is 0.125 after step 30; heldout avg@4 goes from 0.309 after step 0 to 0.905"
        " after step 60."
    )
    assert held_out({"steps": [], "metrics": {}}) == "No held-out set was evaluated yet."


def told(run):
    run.update()
    return {part["title"]: (part["text"], part["level"]) for part in story(run)}


def test_the_story_of_a_run(tmp_path):
    folder = write_run(tmp_path / "run", steps=6)
    run = Run(folder, tmp_path / "cache")
    found = told(run)
    assert list(found) == ["Run", "Reward", "Held out", "Health"]
    assert found["Run"][0] == "It stopped after 6 of 6 steps: the last step is finished."
    assert found["Health"] == ("Nothing stands out.", "ok")
    add_events(folder, {"step": 6, "kind": "stop", "text": "finished"})
    assert told(run)["Run"][0] == "It finished: 6 of 6 steps."
    add_events(folder, {"step": 6, "kind": "resume", "text": "after step 6"})
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    with open(folder / "metrics.jsonl", "a") as file:
        for step in range(7, 12):
            row = lines[-1] | {"step": step, "train/kl_mu_pi_k3": 9.0, "first_order/total_p95": 2.0}
            file.write(json.dumps(row) + "\n")
    found = told(run)
    assert found["Run"][0].endswith(": 11 of 6 steps.")
    (worst, *others) = [finding for finding in run.health() if finding["level"] != "ok"]
    text, level = found["Health"]
    assert text.startswith(worst["title"]) and level == worst["level"] != "ok"
    assert (f"{len(others)} more" in text) == bool(others)


def test_a_run_that_has_done_its_last_step_runs_until_nothing_is_written(tmp_path):
    """Its last evaluation, checkpoint and export come after the step."""
    folder = write_run(tmp_path / "run", steps=2, tokenizer=False)
    add_events(folder, {"step": 2, "kind": "resume", "text": "after step 1"})
    run = Run(folder, tmp_path / "cache")
    assert told(run)["Run"][0].startswith("It runs: all 2 steps are done; ") and run.is_live()
    before = time.time() - 2 * LIVE_SECONDS
    for path in folder.glob("*.jsonl"):
        os.utime(path, (before, before))
    text = "Nothing was written for a while: all 2 steps are done."
    assert told(run)["Run"][0] == text and not run.is_live()


def test_the_story_of_an_empty_run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text("[run]\nnum_steps = 5\n")
    found = told(Run(folder, tmp_path / "cache"))
    assert found["Reward"][0] == "No step has a reward yet."
    assert found["Health"] == ("No step is finished yet.", "ok")
