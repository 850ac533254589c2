"""Time-sharing in a whole run: two ranks free and restore their memory around a real server's
sampling, evaluations and checkpoints, and every step samples from the weights of the step
before."""

import re

import pytest

from tests.e2e import test_train
from tests.e2e.test_teacher_server import teacher_of
from tests.e2e.test_train import make_material, metrics_of, weights_in

OPTIONS = (
    "--rollout.release_memory", "--rollout.max_server_restarts", "0", "--checkpoint.every", "1",
    "--eval.every", "1",
    "--optim.distributed", "true",
)  # fmt: skip


def alternating(monkeypatch):
    """Let runs start with tests.e2e.alternate."""
    popen = test_train.subprocess.Popen

    def start(command, **options):
        return popen(
            [part.replace("megatron_rl.train", "tests.e2e.alternate") for part in command],
            **options,
        )

    monkeypatch.setattr(test_train.subprocess, "Popen", start)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_in_which_a_teacher_has_its_turn_between_servers_and_trainer(tmp_path, monkeypatch):
    material = make_material(tmp_path / "material", num_hidden_layers=2)
    teacher = teacher_of(tmp_path / "teacher", material)
    alternating(monkeypatch)
    teachers = (
        "--teachers.near.path", str(teacher), "--teachers.near.release_memory", "true",
        "--advantage.weight", "0", "--rollout.save_tensors",
    )  # fmt: skip
    options = (*OPTIONS, *teachers)
    process = test_train.start(material, tmp_path, steps=3, push="colocated", extra=options)
    assert process.wait(600) == 0, (tmp_path / "output.txt").read_text()
    steps = [row for row in metrics_of(tmp_path) if "train/loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    for row in steps:
        assert row["teacher/reverse_kl"] > 0
        assert 0 < row["teacher/switch_seconds"] < row["teacher/turn_seconds"]
        assert row["teacher/turn_seconds"] < row["time/rollout"]
        assert row["train/logratio_abs_mean"] <= 1e-4, "the servers had other weights"


@pytest.mark.slow
def test_a_run_in_which_trainer_and_servers_alternate(tmp_path, monkeypatch):
    material = make_material(tmp_path / "material", num_hidden_layers=3)
    alternating(monkeypatch)
    process = test_train.start(material, tmp_path, steps=3, push="colocated", extra=OPTIONS)
    assert process.wait(600) == 0, (tmp_path / "output.txt").read_text()
    rows = metrics_of(tmp_path)
    steps = [row for row in rows if "train/loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3] and sum(
        "eval/held/avg@2" in row for row in rows
    ) == 4
    assert all(row["train/logratio_abs_mean"] <= 1e-4 for row in steps), (
        "the servers had other weights"
    )
    # the first weights are sent before the first step, whose time does not count them
    assert all(row["time/weight_sync"] > 0 for row in steps[1:])
    trained, initial = weights_in(tmp_path / "runs/run/hf"), weights_in(material / "moe")
    assert any(not trained[name].equal(initial[name]) for name in initial)
    log = (tmp_path / "runs/run/logs/server.log").read_text()
    calls = re.findall(
        r"POST /(release_memory_occupation|resume_memory_occupation|generate)\b", log
    )
    assert (
        calls.count("resume_memory_occupation")
        == 2 * (calls.count("release_memory_occupation") - 1)
        or calls == []
    )
