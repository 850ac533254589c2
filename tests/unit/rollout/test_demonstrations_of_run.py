"""Rejection sampling: the saved rollouts of a run as rows of SFT."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_rl.config.sections import SftConfig
from megatron_rl.data.rows import DataError
from megatron_rl.records import Prompt, RolloutGroup
from megatron_rl.rollout.saved.demonstrations_of_run import demonstrations_of_run
from megatron_rl.rollout.saved.rollout_recorder import GroupChoice, Recorder
from megatron_rl_tools.tiny_text import make_tokenizer
from tests.unit.batch.rollouts import make_rollout

TOKENIZER = make_tokenizer()


def group(name, rewards, *, change=lambda k, rollout: rollout):
    rollouts = [make_rollout(f"{name}/{k}", 3, 4, seed=k) for k in range(len(rewards))]
    rollouts = [with_text(change(k, rollout)) for k, rollout in enumerate(rollouts)]
    prompt = Prompt(name, "x", tuple(rollouts[0].tokens[:3].tolist()), "1")
    return RolloutGroup(prompt, tuple(rollouts), np.array(rewards, np.float32))


def with_text(rollout):
    text = TOKENIZER.decode(rollout.tokens[rollout.prompt_length :], skip_special_tokens=True)
    return replace(rollout, response_text=rollout.response_text or text)


def save(folder, *groups, save_tensors=True):
    recorder = Recorder(folder, save_tensors=save_tensors)
    for step, of_step in enumerate(groups, start=1):
        recorder.record(step, of_step)
    return folder


def test_responses_with_enough_reward_are_rows(tmp_path):
    groups = [group("p", [1.0, 0.4, np.nan]), group("q", [0.5, 0.0, 1.0])]
    folder = save(tmp_path / "run", [groups[0]], [groups[1]])
    file = demonstrations_of_run(folder, SftConfig(min_reward=0.5), TOKENIZER, "good")
    assert [row.id for row in file.rows] == ["good:1:p/0", "good:2:q/0", "good:2:q/2"]
    sampled = [groups[0].rollouts[0], groups[1].rollouts[0], groups[1].rollouts[2]]
    for row, rollout in zip(file.rows, sampled, strict=True):
        assert row.tokens.tolist() == rollout.tokens.tolist() and row.source == "good"
        assert row.rollout.sampled.tolist() == rollout.sampled.tolist()
    assert "3 rows of" in file.line and "left out: 3 below the reward" in file.line
    every = demonstrations_of_run(folder, SftConfig(), TOKENIZER)
    assert len(every.rows) == 5, "all but the one without a reward"


@pytest.mark.parametrize("reward", [0.1, 0.5, 0.7, 0.9, 0.95])
def test_a_reward_equal_to_the_least_is_enough(tmp_path, reward):
    folder = save(tmp_path / "run", [group("p", [reward, reward - 0.01])])
    file = demonstrations_of_run(folder, SftConfig(min_reward=reward), TOKENIZER)
    assert [row.id for row in file.rows] == ["run:1:p/0"]


def test_what_an_environment_wrote_is_not_learned(tmp_path):
    def with_answer(k, rollout):
        place = rollout.prompt_length + 1
        return replace(
            rollout,
            environment=((place, place + 1),),
            rollout_logprobs=rollout.rollout_logprobs[1:],
            policy_versions=rollout.policy_versions[1:],
            routed_experts=None,
            routes_digest=None,
            missing_routes=None,
        )

    folder = save(tmp_path / "run", [group("p", [1.0], change=with_answer)])
    (row,) = demonstrations_of_run(folder, SftConfig(), TOKENIZER).rows
    assert row.spans == ((3, 4), (5, 7))


def test_cut_off_and_long_responses_are_left_out_and_counted(tmp_path):
    def cut(k, rollout):
        return replace(rollout, finish_reason="length") if k == 0 else rollout

    folder = save(tmp_path / "run", [group("p", [1.0, 1.0], change=cut)])
    file = demonstrations_of_run(folder, SftConfig(), TOKENIZER)
    assert [row.id for row in file.rows] == ["run:1:p/1"] and "1 cut off" in file.line
    with pytest.raises(DataError, match="no saved rollouts to learn from .*1 longer than"):
        demonstrations_of_run(folder, SftConfig(max_row_tokens=6), TOKENIZER)


def test_rollouts_of_another_tokenizer_and_without_tokens_are_refused(tmp_path):
    def other(k, rollout):
        return replace(rollout, response_text="something else")

    folder = save(tmp_path / "run", [group("p", [1.0], change=other)])
    with pytest.raises(DataError, match="p/0 reads .* must be one tokenizer"):
        demonstrations_of_run(folder, SftConfig(), TOKENIZER)
    folder = save(tmp_path / "plain", [group("p", [1.0])], save_tensors=False)
    with pytest.raises(DataError, match=r"rollout.save_tensors = true"):
        demonstrations_of_run(folder, SftConfig(), TOKENIZER)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no saved rollouts"):
        demonstrations_of_run(tmp_path / "empty", SftConfig(), TOKENIZER)


def test_what_a_share_of_the_groups_left_unsaved_is_counted(tmp_path):
    """A replica may have saved nothing of a step, and has no file of it then."""
    groups = [[group("a", [1.0]), group("b", [1.0])], [group("c", [1.0]), group("d", [1.0])]]
    folder = save(tmp_path / "run", *groups, save_tensors=GroupChoice(0.5, seed=0))
    for path in (folder / "rollouts").glob("*000002*.safetensors"):
        path.unlink()
    file = demonstrations_of_run(folder, SftConfig(), TOKENIZER)
    assert len(file.rows) == 1 and file.rows[0].id.startswith("run:1:")
    assert "left out: 3 without saved tokens" in file.line
