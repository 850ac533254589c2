"""Mini-batches that are saved, their names, and the lines about them.

On real ranks: tests/dist/test_saved_batches.py.
"""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_rl.checkpoint.folder import CheckpointError
from megatron_rl.config import load_config
from megatron_rl.metrics.events import Events
from megatron_rl.metrics.reduce import MetricSums
from megatron_rl.trainer.recording.saved_batches import SavedBatches
from tests.unit.trainer.test_events_of_a_step import events_of


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def run(group, tmp_path):
    """run(steps, **settings) -> (the arguments of every bundle; the saver; lines).

    steps: of every step the (gradient norm, KL per token) of its updates.
    """

    def made(steps, **settings):
        written, lines = [], []

        def write(due, index):
            if settings.get("fails"):
                raise CheckpointError("No space left on device")
            note, folder = due.note, due.folder.relative_to(tmp_path).as_posix()
            written.append((folder, index, note.step, note.reason, note.with_weights, note.weights))

        keys = {"dir": str(tmp_path), "name": "name"} | {
            k: v for k, v in settings.items() if k != "fails"
        }
        cfg = load_config(None, [], {"model": {"path": "m"}, "data": {"train": "x"}, "run": keys})
        parallel = SimpleNamespace(device=torch.device("cpu"))
        saver = SavedBatches(cfg, parallel, lines.append, Events(tmp_path / "events.jsonl"))
        for step, updates in enumerate(steps):
            for index, (_, kl) in enumerate(updates):
                sums = MetricSums()
                sums.add("train/kl_mu_pi", 10 * kl, 10)
                saver.note_old_pass(index, sums)
            for index, (norm, _) in enumerate(updates):
                if (due := saver.due(step, index, norm)) is not None:
                    with saver.reported(due):
                        write(due, index)
        return written, saver, lines

    return made


GOOD = (1.0, 0.0)


def test_the_first_mini_batch_of_every_nth_step(run, tmp_path):
    written, _, lines = run([[GOOD, GOOD]] * 6, save_batches="every 3")
    folders = [f"name/batches/step_{step:06d}_update_0" for step in (3, 6)]
    assert written == [
        (
            folder,
            0,
            step,
            "run.save_batches = every 3",
            True,
            f"of step {step + 1}, before update 0",
        )
        for folder, step in zip(folders, (2, 5), strict=True)
    ]
    assert lines == [
        "mini-batch saved, run.save_batches = every 3: megatron-rl replay-batch"
        f" {tmp_path / folder}"
        for folder in folders
    ]


def test_the_latest_has_one_name_and_no_line_of_its_own(run):
    written, _, lines = run([[GOOD, GOOD]] * 2, save_batches="last")
    assert written == [
        (
            "name/batches/last",
            update,
            step,
            "the latest",
            False,
            f"of step {step + 1}, before update {update}",
        )
        for step in range(2)
        for update in range(2)
    ]
    assert lines == []


def test_each_kind_of_anomaly_is_saved_with_its_reason_and_only_the_first_three(run, tmp_path):
    limits = {"anomaly_grad_norm": 10.0, "anomaly_kl": 0.5}
    steps = [
        [(10.0, 0.5)],
        [(math.nan, 0.0), (math.inf, 0.0)],
        [GOOD, (10.5, 0.0)],
        [(1.0, -0.6)],
        [(1.0, math.nan)],
    ]
    written, _, _ = run(steps, save_batches="on_anomaly", **limits)
    reasons = [
        "gradient norm nan", "gradient norm inf",
        "gradient norm 10.5 above run.anomaly_grad_norm = 10",
        "KL(mu, pi_old) -0.6, its absolute value above run.anomaly_kl = 0.5",
    ]  # fmt: skip
    places = [(2, 0), (2, 1), (3, 1), (4, 0)]
    assert [
        (folder, reason, with_weights) for folder, _, _, reason, with_weights, _ in written
    ] == [
        (f"name/batches/step_{step:06d}_update_{update}", reason, True)
        for (step, update), reason in zip(places[:3], reasons[:3], strict=True)
    ]
    assert events_of(tmp_path / "events.jsonl") == [
        ("anomaly", step, f"update {update}: {reason}")
        for (step, update), reason in zip(places, reasons, strict=True)
    ]


def test_a_mini_batch_without_an_old_logprob_pass_has_no_kl(run):
    written, saver, _ = run([], save_batches="on_anomaly", anomaly_kl=0.5)
    assert saver.due(0, 0, 1.0) is None and written == []


def test_an_anomaly_is_saved_where_others_are_due_too(run):
    written, _, _ = run([[(math.inf, 0.0), GOOD], [GOOD, (math.inf, 0.0)]], save_batches="last")
    assert [(folder.rpartition("/")[2], reason) for folder, _, _, reason, *_ in written] == [
        ("step_000001_update_0", "gradient norm inf"), ("last", "the latest"), ("last",
        "the latest"),
        ("step_000002_update_1", "gradient norm inf"),
    ]  # fmt: skip
    written, _, _ = run([[(math.inf, 0.0)]] * 4, save_batches="every 4")
    assert [reason for _, _, _, reason, *_ in written] == ["gradient norm inf"] * 3 + [
        "run.save_batches = every 4"
    ]


def test_off_saves_nothing_and_asks_for_no_reduction(run, monkeypatch, tmp_path):
    monkeypatch.setattr(MetricSums, "mean", lambda *_: 1 / 0)
    written, saver, lines = run([[(math.nan, 9.0)]] * 4, save_batches="off")
    assert (written, lines, saver.unsaved) == ([], [], 0) and not (
        tmp_path / "events.jsonl"
    ).exists()


def test_what_could_not_be_saved_is_counted_and_reported(run):
    _, saver, lines = run([[GOOD], [(math.inf, 0.0)], [GOOD]], save_batches="every 1", fails=True)
    assert saver.unsaved == 3
    reasons = ["run.save_batches = every 1", "gradient norm inf", "run.save_batches = every 1"]
    assert lines == [
        f"mini-batch of step {step} not saved ({reason}): No space left on device"
        for step, reason in enumerate(reasons, 1)
    ]


def test_a_bundle_names_the_run_whose_rollouts_were_trained_on(run):
    _, saver, _ = run([])
    assert saver.due(0, 0, math.nan).note.rollouts_of == ""
    saver.rollouts_of = "runs/other"
    assert saver.due(1, 0, math.nan).note.rollouts_of == "runs/other"
