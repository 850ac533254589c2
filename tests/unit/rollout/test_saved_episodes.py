"""Episodes of several sequences in the files of a checkpoint and of a run: unchanged, or refused
and named.
"""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from megatron_rl.config import dump_config, load_config
from megatron_rl.config.run_paths import RunFolder
from megatron_rl.models.spec import ModelSizes
from megatron_rl.records import Prompt, RolloutGroup
from megatron_rl.rollout.group import Group
from megatron_rl.rollout.group_files import file_name, find_groups, read_groups, write_groups
from megatron_rl.rollout.saved.recorded_rollouts import read_episodes, read_rollouts
from megatron_rl.rollout.saved.rollout_recorder import Recorder
from megatron_rl.rollout.saved.saved_steps import SavedSteps
from megatron_rl.rollout.unique_ids import with_unique_ids
from megatron_rl_tools.check_rollouts.check_rollouts import check_run
from tests.former_layout import to_former_layout
from tests.unit.batch.rollouts import make_rollout, make_tree

SPEC = ModelSizes(num_layers=3, moe_layers=(0, 1, 2), top_k=2, num_experts=8, vocab_size=64)
PROMPTS = [Prompt(f"p{n}", f"text {n}", (1, 2, 3), "label") for n in range(2)]


def assert_same(found, expected):
    assert [each.id for each in found.sequences] == [each.id for each in expected.sequences]
    assert found.episode.digest == expected.episode.digest
    for one, other in zip(found.sequences, expected.sequences, strict=True):
        for name in (
            "tokens",
            "rollout_logprobs",
            "routed_experts",
            "policy_versions",
            "prompt_length",
            "routes_digest",
        ):
            assert np.array_equal(getattr(one, name), getattr(other, name)), name


def flight(folder):
    group = Group(PROMPTS[0], 3)
    group.put(0, make_tree("p0/0", seed=1))
    group.put(2, make_rollout("p0/2", 3, 4))
    write_groups(folder / file_name(0), [group], [0])
    return group


def read(folder):
    (group,) = read_groups(find_groups(folder), PROMPTS, [0], slice(None))
    return group


def test_a_checkpoint_has_the_episodes_in_flight(tmp_path):
    group = flight(tmp_path)
    found = read(tmp_path)
    assert found.rollouts.keys() == {0, 2}
    for index, rollout in group.rollouts.items():
        assert_same(found.rollouts[index], rollout)


@pytest.mark.parametrize("change", ["swapped", "lost", "digest"])
def test_a_checkpoint_with_other_sequences_is_refused(change, tmp_path):
    flight(tmp_path)
    path = tmp_path / file_name(0)
    tensors = load_file(path)
    with safe_open(path, "numpy") as file:
        (about,) = json.loads(file.metadata()["groups"])
    tree = about["responses"][0]
    if change == "swapped":
        for kind in ("tokens", "logprobs", "routed_experts", "routes_digest"):
            one, other = f"0/0/0:{kind}", f"0/0/1:{kind}"
            tensors[one], tensors[other] = tensors[other], tensors[one]
        tree["earlier"].reverse()
    elif change == "lost":
        del tree["earlier"][1]
    else:
        del tensors["0/0:episode_digest"]
    save_file(tensors, path, metadata={"groups": json.dumps([about])})
    with pytest.raises(
        ValueError, match=r"rollout p0/0: (digest of its|3 sequences without the digest)"
    ):
        read(tmp_path)


def config(tmp_path, name="train"):
    run = {
        "name": name,
        "dir": str(tmp_path),
        "num_steps": 2,
        "prompts_per_step": 2,
        "group_size": 2,
    }
    return load_config(
        None, [], {"run": run, "model": {"path": str(tmp_path)}, "data": {"train": "x.jsonl"}}
    )


def make_step(step):
    groups = []
    for number, prompt in enumerate(PROMPTS):
        seed = 100 * step + 40 * number
        rollouts = (
            make_rollout(f"{prompt.id}/0", 3, 5, seed=seed),
            make_tree(f"{prompt.id}/1", seed=seed + 1),
        )
        rollouts = tuple(same_version(rollout, step) for rollout in rollouts)
        groups.append(RolloutGroup(prompt, rollouts, np.array([0.0, 1.0], np.float32)))
    return groups


def same_version(rollout, version):
    sequences = [
        replace(each, policy_versions=np.full_like(each.policy_versions, version))
        for each in rollout.sequences
    ]
    return sequences[-1].with_episode(earlier=tuple(sequences[:-1]))


@pytest.fixture(params=["present", "former"])
def written(tmp_path, request):
    """Step 2 was written twice, as by a resumed run; the first time an episode had another
    sequence.
    """
    folder = tmp_path / "live"
    recorder = Recorder(folder, save_tensors=True)
    recorder.record(1, make_step(0))
    first, second = make_step(1)
    tree = first.rollouts[1]
    longer = tree.with_episode(
        earlier=(*tree.episode.earlier, replace(tree.episode.earlier[0], id="p0/1/2")), digest=None
    )
    recorder.record(2, [replace(first, rollouts=(first.rollouts[0], longer)), second])
    if request.param == "former":  # there the lines of both attempts are in one file
        to_former_layout(folder)
        recorder = Recorder(tmp_path / "again", save_tensors=True)
    recorder.record(2, [first, second])
    if request.param == "former":
        shutil.copytree(tmp_path / "again/rollouts", folder / "rollouts")
        to_former_layout(folder)
    (folder / "config.toml").write_text(dump_config(config(tmp_path, "live")))
    return folder


def test_saved_episodes_come_back(written, tmp_path):
    saved = SavedSteps(written, config(tmp_path), SPEC)
    for step in (0, 1):
        for found, group in zip(saved.groups(step, 0, 1), make_step(step), strict=True):
            assert np.array_equal(found.rewards, group.rewards)
            for one, other in zip(found.rollouts, group.rollouts, strict=True):
                assert_same(one, other)
    report = check_run(written, None)
    assert report.passed, report.findings
    assert report.rollouts == 2 * 2 * 4


def test_every_sequence_has_a_line_that_names_its_episode(written):
    lines = [
        (line.id, line.episode, line.reward)
        for line in read_rollouts(RunFolder(written).lines_of("rollouts", 1))
        if line.step == 1
    ]
    of_prompt = [
        ("p0/0", "", 0.0),
        ("p0/1/0", "p0/1", 1.0),
        ("p0/1/1", "p0/1", 1.0),
        ("p0/1", "", 1.0),
    ]
    assert lines[:4] == of_prompt
    episodes = read_episodes(RunFolder(written).lines_of("rollouts", 2))
    assert [len(lines) for lines in episodes[2].values()] == [1, 3, 1, 3], "of the last writing"


def test_a_prompt_drawn_twice_has_ids_of_its_own(tmp_path):
    groups = make_step(0)[:1]
    Recorder(tmp_path, save_tensors=True).record(1, with_unique_ids([*groups, *groups]))
    ids = [line.id for line in read_rollouts(RunFolder(tmp_path).lines_of("rollouts", 1))]
    assert ids[4:] == ["p0#2/0", "p0#2/1/0", "p0#2/1/1", "p0#2/1"] and len(set(ids)) == 8


def edit_lines(folder, edit):
    path = RunFolder(folder).lines_of("rollouts", 1)
    rows = edit([json.loads(line) for line in path.read_text().splitlines()])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def edit_tensors(folder, edit):
    path = RunFolder(folder).tensors_of("rollouts", 1)
    save_file(edit(load_file(path)), path)


def swap(folder):
    """Sequences 1 of two episodes, lines and tensors."""

    def tensors(found):
        other = {
            name.replace("p0/1/1:", "?").replace("p1/1/1:", "p0/1/1:").replace("?", "p1/1/1:"): v
            for name, v in found.items()
        }
        return other

    edit_tensors(folder, tensors)


def shift(folder):
    """The second sequence begins a token earlier, with a log-prob for it."""

    def tensors(found):
        found["p0/1/1:logprobs"] = np.append(np.float32(-0.5), found["p0/1/1:logprobs"])
        return found

    def lines(rows):
        for row in rows:
            if row["id"] == "p0/1/1" and row["step"] == 1:
                row["prompt_length"] -= 1
                row["response_length"] += 1
                row["policy_versions"][0][1] += 1
        return rows

    edit_tensors(folder, tensors)
    edit_lines(folder, lines)


def repeat(folder):
    """The first sequence twice."""

    def tensors(found):
        return found | {
            name.replace("p0/1/0:", "p0/1/2:"): value
            for name, value in found.items()
            if "p0/1/0:" in name
        }

    def lines(rows):
        at = next(n for n, row in enumerate(rows) if row["id"] == "p0/1/0")
        return [*rows[: at + 2], rows[at] | {"id": "p0/1/2"}, *rows[at + 2 :]]

    edit_tensors(folder, tensors)
    edit_lines(folder, lines)


def forget(folder):
    edit_tensors(
        folder,
        lambda found: {
            name: value for name, value in found.items() if name != "p0/1:episode_digest"
        },
    )


@pytest.mark.parametrize("change", [swap, shift, repeat, forget])
def test_changed_episodes_are_found_and_not_trained_on(change, written, tmp_path):
    change(written)
    findings = check_run(written, None, step=1).findings
    assert {(each.check, each.where) for each in findings} >= {("episode", "step 1 p0/1")}
    assert {each.check for each in findings} == {"episode"}, findings
    saved = SavedSteps(written, config(tmp_path), SPEC)
    with pytest.raises(
        ValueError, match="rollout p0/1: (digest of its . sequences|3 sequences without the digest)"
    ):
        saved.groups(0, 0, 1)
