"""What is recorded can be read back, line by line and bit by bit."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from megatron_rl.config.run_paths import RunFolder
from megatron_rl.records import Prompt, Rollout, RolloutGroup
from megatron_rl.rollout.saved.recorded_rollouts import read_rollouts
from megatron_rl.rollout.saved.rollout_recorder import Recorder, forget_steps
from megatron_rl.rollout.saved.rollout_tensors import read_tensors
from megatron_rl.rollout.unique_ids import with_unique_ids
from tests.former_layout import to_former_layout


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


def lines_in(folder):
    """The lines of replica 0, in the order of the steps."""
    files = RunFolder(folder).line_files("rollouts")
    return [line for file in files if not file.dp_rank for line in read_rollouts(file.path)]


def test_records_read_back_in_a_file_per_step(tmp_path):
    recorder = Recorder(tmp_path / "run")
    recorder.record(1, [make_group()])
    recorder.record(2, [replace(make_group(), advantages=np.array([0.5, -0.5], dtype=np.float32))])
    records = lines_in(tmp_path / "run")
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
    written = sorted(
        path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()
    )
    assert written == ["run/rollouts/step_000001.jsonl", "run/rollouts/step_000002.jsonl"]


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
    first, _ = lines_in(tmp_path)
    assert first.response == "it is ***, ***; token=1", "what only looks like a secret is data"
    assert (first.prompt, first.label) == ("***?", "***")


@pytest.mark.parametrize("is_former", [False, True])
def test_steps_of_replicas_that_a_resumed_run_has_no_more_are_forgotten(tmp_path, is_former):
    """Saved after step 2 on four replicas, stopped after step 3, and continued on two.

    Files of replicas 0 and 1 are replaced by the run; in the former layout nothing replaces them.
    """
    for dp_rank in range(4):
        for step in (1, 2, 3):
            Recorder(tmp_path, dp_rank=dp_rank, save_tensors=True).record(step, [make_group()])
    (tmp_path / "rollouts.dp3_notes.txt").write_text("of the user")
    (tmp_path / "rollouts/notes.dp3.jsonl").write_text("of the user")
    if is_former:
        (tmp_path / "rollouts/notes.dp3.jsonl").rename(tmp_path / "rollouts_notes.jsonl")
        to_former_layout(tmp_path)
        (tmp_path / "trained.dp3.jsonl").write_text('{"step": 2}\n{"step": 3}\nno json\n')
    forget_steps(tmp_path, first_step=2, dp_size=2)
    run = RunFolder(tmp_path)
    Recorder(tmp_path, dp_rank=1, save_tensors=True).record(3, [make_group()])
    Recorder(tmp_path, dp_rank=1, save_tensors=True).record(2, [make_group()])
    if not is_former:  # the first step that a process records ends its later ones
        assert not list((tmp_path / "rollouts").glob("step_000003.dp1.*"))
        Recorder(tmp_path, dp_rank=1, save_tensors=True).record(3, [make_group()])
    lines, tensors = (
        {(file.dp_rank, file.step) for file in files}
        for files in (run.line_files("rollouts"), run.tensor_files("rollouts"))
    )
    gone = {(dp_rank, 3) for dp_rank in ((0, 1, 2, 3) if is_former else (2, 3))}
    kept = {(dp_rank, step) for dp_rank in range(4) for step in (1, 2, 3)} - gone
    assert tensors == kept
    if is_former:
        lines = {
            (file.dp_rank, record.step)
            for file in run.line_files("rollouts")
            for record in read_rollouts(file.path)
        }
        assert (tmp_path / "trained.dp3.jsonl").read_text() == '{"step": 2}\nno json\n', (
            "whoever reads it names the line"
        )
    assert lines == kept
    assert (tmp_path / "rollouts.dp3_notes.txt").exists() and not list(tmp_path.rglob("*.part"))
    assert len(list(tmp_path.rglob("*notes*.jsonl"))) == 1


@pytest.mark.parametrize("is_former", [False, True])
def test_a_resumed_run_leaves_no_line_of_the_steps_that_it_writes_again(tmp_path, is_former):
    """Dynamic sampling may take other prompts this time: lines of the first attempt would belong to
    no step.
    """

    def record(recorder, step, name):
        (group,) = [make_group()]
        rollouts = tuple(rollout.named(f"{name}/{k}") for k, rollout in enumerate(group.rollouts))
        recorder.record(step, [replace(group, rollouts=rollouts)])

    first = Recorder(tmp_path)
    for step in (1, 2, 3, 4):
        record(first, step, f"first{step}")
    if is_former:
        with open(to_former_layout(tmp_path) / "rollouts.jsonl", "a") as file:
            file.write('{"step": 4, "id": "cut')
    resumed = Recorder(tmp_path)
    record(resumed, 3, "again3")
    names = ["first1", "first2", "again3"]
    assert [record.id for record in lines_in(tmp_path)] == [
        f"{name}/{k}" for name in names for k in (0, 1)
    ], "step 4 was of the first attempt, too"
    record(Recorder(tmp_path), 1, "over")
    assert [record.id for record in lines_in(tmp_path)] == ["over/0", "over/1"]


@pytest.mark.parametrize("is_former", [False, True])
def test_the_trainers_half_of_steps_that_are_trained_again_is_forgotten(tmp_path, is_former):
    """Else a sequence that another replica trains this time has a line of each attempt."""
    run = RunFolder(tmp_path)
    for dp_rank in (0, 1):
        for step in (2, 3):
            path = run.lines_path("trained", step, dp_rank)
            path.parent.mkdir(exist_ok=True)
            path.write_text(f'{{"step": {step}, "id": "q/0"}}\n')
            run.tensors_path("trained", step, dp_rank).write_bytes(b"")
        (tmp_path / f"trained.dp{dp_rank}_notes.jsonl").write_text('{"step": 3}\n')
    if is_former:
        to_former_layout(tmp_path)
    forget_steps(tmp_path, first_step=2, dp_size=2)
    lines = [json.loads(file.path.read_text()) for file in run.line_files("trained")]
    assert lines == [{"step": 2, "id": "q/0"}] * 2
    assert [file.step for file in run.tensor_files("trained")] == [2, 2]
    assert len(list(tmp_path.glob("*_notes.jsonl"))) == 2


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
    tensors, lines = read_tensors(tmp_path, 4), lines_in(tmp_path)
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
    path = RunFolder(tmp_path).tensors_path("rollouts", 4)
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
    path = RunFolder(tmp_path).tensors_path("rollouts", 4)
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
    path = tmp_path / "rollouts/step_000001.jsonl"
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match=r"rollouts/step_000001\.jsonl:3: not a rollout record"):
        list(read_rollouts(path))


def test_tensors_of_an_earlier_attempt_at_a_step_go_with_its_lines(tmp_path):
    """The new ones may fail to be written, and have other tokens under the same ids."""
    Recorder(tmp_path, save_tensors=True).record(1, [make_group()])
    path = RunFolder(tmp_path).tensors_path("rollouts", 1, 0)
    assert path.exists()
    later = []
    files = SimpleNamespace(now=lambda _, write: write(), later=lambda *call: later.append(call))
    Recorder(tmp_path, save_tensors=True, files=files).record(1, [make_group()])
    assert len(later) == 1 and not path.exists()
