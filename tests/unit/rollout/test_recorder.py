"""What is recorded can be read back, line by line and bit by bit."""

from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from megatron_rl.records import Prompt, Rollout, RolloutGroup
from megatron_rl.rollout.saved.recorded_rollouts import read_rollouts
from megatron_rl.rollout.saved.rollout_recorder import Recorder, forget_steps
from megatron_rl.rollout.saved.rollout_tensors import read_tensors, tensors_path
from megatron_rl.rollout.unique_ids import with_unique_ids


def make_group(num_experts_dtype=np.uint8) -> RolloutGroup:
    prompt = Prompt(id="q1", text="2 + 2 = ?\nthink", token_ids=(3, 4), label="4")
    rollout = Rollout(
        id="step1/q1/0",
        tokens=np.array([3, 4, 9, 1]),
        prompt_length=2,
        rollout_logprobs=np.array([-0.5, -0.25], dtype=np.float32),
        routed_experts=np.arange(12).reshape(3, 2, 2).astype(num_experts_dtype),
        finish_reason="stop",
        policy_versions=np.array([3, 4], np.int32),
        response_text="vier é",
        missing_routes=np.array([False, True, False]),
    )
    other = replace(
        rollout,
        id="step1/q1/1",
        routed_experts=None,
        missing_routes=None,
        routes_digest=None,
        finish_reason="length",
    )
    return RolloutGroup(prompt, (rollout, other), rewards=np.array([1.0, 0.0], dtype=np.float32))


def test_records_read_back_and_are_appended(tmp_path):
    recorder = Recorder(tmp_path / "run")
    recorder.record(1, [make_group()])
    recorder.record(2, [replace(make_group(), advantages=np.array([0.5, -0.5], dtype=np.float32))])
    records = list(read_rollouts(tmp_path / "run" / "rollouts.jsonl"))
    assert [(r.step, r.id, r.reward, r.advantage) for r in records] == [
        (1, "step1/q1/0", 1.0, None),
        (1, "step1/q1/1", 0.0, None),
        (2, "step1/q1/0", 1.0, 0.5),
        (2, "step1/q1/1", 0.0, -0.5),
    ]
    first = records[0]
    assert (first.prompt_id, first.prompt, first.response, first.label) == (
        "q1",
        "2 + 2 = ?\nthink",
        "vier é",
        "4",
    )
    assert (first.prompt_length, first.response_length, first.finish_reason) == (2, 2, "stop")
    assert first.policy_versions == [[3, 1], [4, 1]]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["rollouts.jsonl"]


def test_a_secret_that_an_environment_printed_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setenv("NAMED_BY_THE_RUN", "open sesame")
    monkeypatch.setenv("SOME_API_KEY", "s3cr3t-Va1ue.9")
    group = make_group()
    texts = [
        replace(rollout, response_text="it is open sesame, s3cr3t-Va1ue.9; token=1")
        for rollout in group.rollouts
    ]
    prompt = replace(group.prompt, text="open sesame?", label="s3cr3t-Va1ue.9")
    Recorder(tmp_path, hidden=["NAMED_BY_THE_RUN"]).record(
        1, [replace(group, prompt=prompt, rollouts=tuple(texts))]
    )
    first, _ = read_rollouts(tmp_path / "rollouts.jsonl")
    assert first.response == "it is ***, ***; token=1", "what only looks like a secret is data"
    assert (first.prompt, first.label) == ("***?", "***")


def test_steps_of_replicas_that_a_resumed_run_has_no_more_are_forgotten(tmp_path):
    """Saved after step 2 on four replicas, stopped after step 3, and continued on two."""
    for dp_rank in range(4):
        for step in (1, 2, 3):
            Recorder(tmp_path, dp_rank=dp_rank, save_tensors=True).record(step, [make_group()])
    (tmp_path / "trained.dp3.jsonl").write_text('{"step": 2}\n{"step": 3}\nno json\n')
    (tmp_path / "rollouts.dp3_notes.txt").write_text("of the user")
    forget_steps(tmp_path, first_step=2, dp_size=2)
    for dp_rank, steps in enumerate([(1, 2, 3), (1, 2, 3), (1, 2), (1, 2)]):
        stem = "rollouts" if dp_rank == 0 else f"rollouts.dp{dp_rank}"
        assert {record.step for record in read_rollouts(tmp_path / f"{stem}.jsonl")} == set(steps)
        assert {int(path.stem[-6:]) for path in tmp_path.glob(f"{stem}_0*.safetensors")} == set(
            steps
        )
    assert (tmp_path / "trained.dp3.jsonl").read_text() == '{"step": 2}\nno json\n', (
        "whoever reads it names the line"
    )
    assert (tmp_path / "rollouts.dp3_notes.txt").exists() and not list(tmp_path.glob("*.part"))


def test_a_resumed_run_leaves_no_line_of_the_steps_that_it_writes_again(tmp_path):
    """Dynamic sampling may take other prompts this time: lines of the first attempt would belong to
    no step.
    """

    def record(recorder, step, name):
        (group,) = [make_group()]
        rollouts = tuple(rollout.named(f"{name}/{k}") for k, rollout in enumerate(group.rollouts))
        recorder.record(step, [replace(group, rollouts=rollouts)])

    first, path = Recorder(tmp_path), tmp_path / "rollouts.jsonl"
    for step in (1, 2, 3, 4):
        record(first, step, f"first{step}")
    with open(path, "a") as file:
        file.write('{"step": 4, "id": "cut')
    resumed = Recorder(tmp_path)
    for step in (3, 4):
        record(resumed, step, f"again{step}")
    names = ["first1", "first2", "again3", "again4"]
    assert [record.id for record in read_rollouts(path)] == [
        f"{name}/{k}" for name in names for k in (0, 1)
    ]
    record(Recorder(tmp_path), 1, "over")
    assert [record.id for record in read_rollouts(path)] == ["over/0", "over/1"]


def test_the_trainers_half_of_steps_that_are_trained_again_is_forgotten(tmp_path):
    """Else a sequence that another replica trains this time has a line of each attempt."""
    names = ("trained", "trained.dp1")
    for name in names:
        (tmp_path / f"{name}.jsonl").write_text(
            '{"step": 2, "id": "q/0"}\n{"step": 3, "id": "q/0"}\n'
        )
        for step in (2, 3):
            tensors_path(tmp_path, step, name).write_bytes(b"")
        (tmp_path / f"{name}_notes.jsonl").write_text('{"step": 3}\n')
    forget_steps(tmp_path, first_step=2, dp_size=2)
    for name in names:
        assert (tmp_path / f"{name}.jsonl").read_text() == '{"step": 2, "id": "q/0"}\n'
        assert (
            tensors_path(tmp_path, 2, name).exists()
            and not tensors_path(tmp_path, 3, name).exists()
        )
        assert (tmp_path / f"{name}_notes.jsonl").exists()


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
def test_tensors_read_back_exactly(tmp_path, dtype):
    group = make_group(dtype)
    Recorder(tmp_path, save_tensors=True).record(4, [group])
    tensors = read_tensors(tmp_path, 4)
    rollout = group.rollouts[0]
    assert set(tensors) == {f"step1/q1/{k}:{what}" for k in (0, 1) for what in ("tokens",
    "logprobs")} | {
        "step1/q1/0:routed_experts", "step1/q1/0:routes_digest", "step1/q1/0:missing_routes"
    }  # fmt: skip
    assert tensors["step1/q1/0:routes_digest"].tobytes() == rollout.routes_digest
    for name, expected in [
        ("tokens", rollout.tokens),
        ("logprobs", rollout.rollout_logprobs),
        ("routed_experts", rollout.routed_experts),
        ("missing_routes", rollout.missing_routes),
    ]:
        assert tensors[f"step1/q1/0:{name}"].dtype == expected.dtype
        assert np.array_equal(tensors[f"step1/q1/0:{name}"], expected)


def test_a_prompt_drawn_twice_in_a_step_keeps_both_groups_tensors(tmp_path):
    first, other = make_group(), make_group()
    second = replace(
        first,
        rollouts=tuple(replace(r, rollout_logprobs=r.rollout_logprobs - 1) for r in first.rollouts),
    )
    Recorder(tmp_path, save_tensors=True).record(4, with_unique_ids([first, second, other]))
    tensors, lines = read_tensors(tmp_path, 4), list(read_rollouts(tmp_path / "rollouts.jsonl"))
    assert [line.id for line in lines] == [
        f"step1/q1{name}/{k}" for name in ("", "#2", "#3") for k in (0, 1)
    ]
    assert {line.prompt_id for line in lines} == {"q1"}
    for line, rollout in zip(
        lines, [r for group in (first, second, other) for r in group.rollouts], strict=True
    ):
        assert np.array_equal(tensors[f"{line.id}:logprobs"], rollout.rollout_logprobs)


@pytest.mark.parametrize("kind", ["tokens", "routed_experts", "routes_digest"])
def test_loading_detects_tokens_and_routes_of_different_rollouts(tmp_path, kind):
    Recorder(tmp_path, save_tensors=True).record(4, [make_group()])
    path = tensors_path(tmp_path, 4)
    tensors = load_file(path)
    changed = tensors[f"step1/q1/0:{kind}"].copy()
    changed.flat[0] += 1
    save_file(tensors | {f"step1/q1/0:{kind}": changed}, path)
    with pytest.raises(
        ValueError, match="rollout step1/q1/0: digest of tokens and routed experts is .*, must be"
    ):
        read_tensors(tmp_path, 4)


def test_loading_routes_without_their_digest_is_refused(tmp_path):
    Recorder(tmp_path, save_tensors=True).record(4, [make_group()])
    path = tensors_path(tmp_path, 4)
    save_file(
        {name: value for name, value in load_file(path).items() if "digest" not in name}, path
    )
    with pytest.raises(ValueError, match="rollout step1/q1/0: digest .* none"):
        read_tensors(tmp_path, 4)


@pytest.mark.parametrize(
    "line", ["{cut", "[]", '{"step": 1}', '{"surprise": 1}', '{"policy_version": 1}', "null"]
)
def test_a_damaged_line_is_named(tmp_path, line):
    Recorder(tmp_path).record(1, [make_group()])
    path = tmp_path / "rollouts.jsonl"
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match=r"rollouts\.jsonl:3: not a rollout record"):
        list(read_rollouts(path))
