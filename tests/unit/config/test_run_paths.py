"""The names of a run's files, in both layouts."""

import pytest

from megatron_rl.config.run_paths import ALL_STEPS, RunFolder, replica_of, writer_name
from megatron_rl_tools.check_rollouts.run_files import line_files, side_file
from tests.former_layout import to_former_layout, to_present_layout

WRITTEN = [("rollouts", 1, 0), ("rollouts", 1, 2), ("trained", 1, 0), ("rollouts", 12, 10)]


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path)
    for half, step, dp_rank in WRITTEN:
        path = folder.lines_path(half, step, dp_rank)
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'{{"step": {step}}}\n')
        folder.tensors_path(half, step, dp_rank).write_bytes(b"")
    return folder


def places(files):
    return {(file.half, file.step, file.dp_rank) for file in files}


def all_files(run):
    halves = ("rollouts", "trained")
    return [file for half in halves for file in (*run.line_files(half), *run.tensor_files(half))]


def test_what_is_written_is_found(run):
    assert places(all_files(run)) == set(WRITTEN) and len(all_files(run)) == 2 * len(WRITTEN)
    assert sorted(path.name for path in run.path.iterdir()) == ["rollouts", "trained"]
    for file in all_files(run):
        assert run.file_named(file.name) == file and run.name_of(file.path) == file.name
        assert not file.is_former and not file.has_all_steps


def test_of_the_former_layout_lines_have_all_steps_and_tensors_one(run):
    to_former_layout(run.path)
    assert all(path.is_file() for path in run.path.iterdir())
    lines = {file.name: file.step for file in run.line_files("rollouts")}
    assert lines == dict.fromkeys(
        ["rollouts.jsonl", "rollouts.dp2.jsonl", "rollouts.dp10.jsonl"], ALL_STEPS
    )
    assert list(lines) == ["rollouts.jsonl", "rollouts.dp2.jsonl", "rollouts.dp10.jsonl"], "order"
    assert places(run.tensor_files("rollouts")) == {w for w in WRITTEN if w[0] == "rollouts"}
    assert all(run.file_named(file.name) == file and file.is_former for file in all_files(run))
    assert run.tensors_of("rollouts", 1, 2) == run.path / "rollouts.dp2_000001.safetensors"
    assert run.lines_of("rollouts", 1, 2) == run.path / "rollouts.dp2.jsonl"
    to_present_layout(run.path)
    assert places(all_files(run)) == set(WRITTEN)


def test_a_step_that_a_resumed_run_wrote_is_in_the_present_layout(run):
    to_former_layout(run.path)
    path = run.tensors_path("rollouts", 1, 2)
    path.parent.mkdir()
    path.write_bytes(b"")
    assert run.tensors_of("rollouts", 1, 2) == path
    assert run.tensors_of("rollouts", 12, 10).parent == run.path
    assert run.tensors_of("rollouts", 2).parent == run.path / "rollouts", "there is none"


@pytest.mark.parametrize(
    "name",
    [
        "../rollouts/step_000001.jsonl", "other/step_000001.jsonl", "rollouts/../config.toml",
        "/etc/passwd", "rollouts/step_1.jsonl", "rollouts/step_000001.dp0.jsonl", "rollouts",
        "rollouts_old.jsonl", "rollouts/step_000001.jsonl.part", "checkpoints/step_000001.jsonl",
        "rollouts/notes.jsonl", "rollouts\\step_000001.jsonl", "", "rollouts/step_\u0661.jsonl",
    ],
)  # fmt: skip
def test_no_other_name_is_a_file_of_a_step(run, name):
    assert run.file_named(name) is None


def test_files_of_others_and_folders_of_such_names_are_left_out(run):
    (run.path / "rollouts/step_000009.jsonl").mkdir()
    (run.path / "rollouts.dp3.jsonl").mkdir()
    (run.path / "rollouts/step_000001.lines").write_text("left by a killed run")
    (run.path / "rollouts_notes.jsonl").write_text("{}")
    assert places(all_files(run)) == set(WRITTEN)


def test_writers_have_the_names_that_lines_and_addresses_use():
    for dp_rank in (0, 1, 12):
        assert replica_of(writer_name("rollouts", dp_rank)) == dp_rank
    assert writer_name("rollouts", 0) == "rollouts" and writer_name("trained", 3) == "trained.dp3"


@pytest.mark.parametrize("convert", [to_former_layout, lambda folder: folder])
def test_the_stand_alone_checker_finds_the_same_files(run, convert):
    """check-rollouts imports nothing of the package."""
    convert(run.path)
    assert set(line_files(run.path)) == {file.path for file in run.line_files("rollouts")}
    for half, step, dp_rank in WRITTEN:
        if half == "rollouts":
            lines = run.lines_of(half, step, dp_rank)
            assert side_file(lines, step) == run.tensors_of(half, step, dp_rank)
