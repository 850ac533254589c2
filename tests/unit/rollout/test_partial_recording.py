"""rollout.save_tensors = SHARE: which groups are saved, and what reads a recording that has some of
them.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from megatron_rl.config import ConfigError, dump_config, load_config
from megatron_rl.rollout.saved.rollout_recorder import GroupChoice, Recorder
from megatron_rl.rollout.saved.rollout_tensors import read_tensors
from megatron_rl.rollout.saved.saved_steps import SavedSteps
from megatron_rl_tools.check_rollouts.check_rollouts import check_run, main
from tests.unit.rollout.test_saved import SPEC, config, make_step


def test_the_same_prompts_are_chosen_on_any_number_of_replicas():
    whole = [GroupChoice(0.3, seed=5).of(step, 24) for step in range(1, 5)]
    assert [len(chosen) for chosen in whole] == [7] * 4 and len(set(whole)) == 4, (
        "other groups at every step"
    )
    for replicas in (2, 4, 8):
        for step, expected in enumerate(whole, start=1):
            parts = [
                GroupChoice(0.3, 5, dp_rank, replicas).of(step, 24 // replicas)
                for dp_rank in range(replicas)
            ]
            assert {i * replicas + d for d, part in enumerate(parts) for i in part} == expected
    assert whole != [GroupChoice(0.3, seed=6).of(step, 24) for step in range(1, 5)]


def test_a_small_share_is_one_group_and_shares_add_up_over_steps():
    assert all(len(GroupChoice(1e-9).of(step, 10)) == 1 for step in range(1, 20))
    assert GroupChoice(1.0).of(1, 4) == {0, 1, 2, 3} and GroupChoice(0.0).of(1, 4) == frozenset()
    counts = np.bincount(
        [i for step in range(1, 401) for i in GroupChoice(0.25).of(step, 8)], minlength=8
    )
    assert counts.sum() == 800 and counts.min() > 60, "every group has the same chance"


def test_the_choice_is_not_that_of_the_mini_batches():
    """Else one share of the groups would always be of the first mini-batch (batch/split.py)."""
    firsts = [
        set(np.random.default_rng([0, step]).permutation(8)[:4].tolist()) for step in range(20)
    ]
    chosen = [GroupChoice(0.5).of(step + 1, 8) for step in range(20)]
    assert len({len(first & own) for first, own in zip(firsts, chosen, strict=True)}) > 1


@pytest.mark.parametrize(
    ("text", "share"), [("true", 1), ("false", 0), ("0.05", 0.05), ("1.0", 1), ("1", 1), (None, 1)]
)
def test_a_share_or_a_boolean_is_read_from_the_command_line(text, share):
    words = ["--rollout.save_tensors"] + ([text] if text else [])
    found = load_config(None, words, {"model": {"path": "m"}, "data": {"train": "x"}})
    assert found.rollout.saved_share == share
    assert (
        load_config(None, [], {"model": {"path": "m"}, "data": {"train": "x"}}).rollout.saved_share
        == 0
    )


@pytest.mark.parametrize("text", ["0.0", "1.5", "-0.1", "some", "nan"])
def test_other_shares_are_refused_with_the_key(text):
    with pytest.raises(ConfigError, match=r"rollout\.save_tensors"):
        load_config(
            None, ["--rollout.save_tensors", text], {"model": {"path": "m"}, "data": {"train": "x"}}
        )


@pytest.fixture
def partial(tmp_path):
    """Two replicas, two steps, of whose four groups each one is saved: no replica has a file of
    every step.
    """
    folder = tmp_path / "live"
    for dp_rank in (0, 1):
        choice = GroupChoice(0.25, 3, dp_rank, 2)
        recorder = Recorder(folder, dp_rank=dp_rank, save_tensors=choice)
        for step in (1, 2):
            recorder.record(
                step, [of_one_version(group) for group in make_step(step - 1)[dp_rank::2]]
            )
    cfg = config(tmp_path, "live", rollout={"save_tensors": 0.25})
    (folder / "config.toml").write_text(dump_config(cfg))
    return folder


def of_one_version(group):
    versions = [
        replace(each, policy_versions=np.zeros_like(each.policy_versions))
        for each in group.rollouts
    ]
    return replace(group, rollouts=tuple(versions))


def test_a_share_of_the_groups_is_written(partial):
    names = []
    for step in (1, 2):
        [side] = partial.glob(f"rollouts/step_{step:06d}*.safetensors")
        with safe_open(side, framework="numpy") as file:
            assert file.metadata() == {"schema": "1"}
            # not a dict
            names.append({name.rpartition("/")[0] for name in file.keys()})  # noqa: SIM118
    assert [len(groups) for groups in names] == [1, 1], names
    lines = [
        json.loads(line)
        for path in partial.glob("rollouts/*.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert len(lines) == 16, "every rollout has its line"


def test_a_step_written_again_without_tensors_has_no_old_ones(tmp_path):
    groups = make_step(0)
    Recorder(tmp_path, save_tensors=True).record(1, groups)
    assert read_tensors(tmp_path, 1)
    Recorder(tmp_path).record(1, groups)
    assert not list(tmp_path.rglob("*.safetensors")) and not list(tmp_path.rglob("*.part"))


def test_training_refuses_a_share_with_key_and_fix(partial, tmp_path):
    with pytest.raises(
        ValueError, match=r"save_tensors = 0\.25 in .*config\.toml: only that share.*--only rollout"
    ):
        SavedSteps(partial, config(tmp_path), SPEC)


def test_check_rollouts_checks_what_is_there_and_says_so(partial, capsys):
    report = check_run(partial, None)
    assert report.passed and report.rollouts == 4
    assert main([str(partial)]) == 0
    assert "save_tensors = 0.25: 4 of 16 sequences have tensors" in capsys.readouterr().out
    side = next(partial.glob("rollouts/*.safetensors"))
    side.write_bytes(side.read_bytes()[:-50])
    assert [finding.check for finding in check_run(partial, None).findings] == ["files"]


def test_a_kill_leaves_the_lines_of_a_step_complete_or_absent(tmp_path, monkeypatch):
    recorder = Recorder(tmp_path)
    recorder.record(1, make_step(0)[:1])

    def killed(path, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        recorder.record(2, make_step(1)[:1])
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["step_000001.jsonl"]
    recorder.record(2, make_step(1)[:1])
    lines = (tmp_path / "rollouts/step_000002.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2, 2]
