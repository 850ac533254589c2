"""Checkpoints appear completely or not at all, wherever the process dies; only those that no rule
keeps are removed.
"""

import errno
import math
import os
import shutil
from pathlib import Path

import pytest

from megatron_rl.checkpoint.folder import (
    STATE,
    CheckpointError,
    checkpoints,
    commit,
    latest_checkpoint,
    make_folder,
    read_state,
    remove_leftovers,
    retire,
    sync,
    temporary_folder,
    write_text,
)
from megatron_rl.checkpoint.lock import locked
from megatron_rl.checkpoint.manifest import (
    MANIFEST,
    damage,
    digest_files,
    manifest_text,
    read_manifest,
)
from tests.crash import EXIT_CODE, MODES, Crash, run_forked

NAMES = ("a.distcp", "b.distcp", "state.json")


def save(folder, step, *, serial=None, value=None, metric=None):
    temporary = temporary_folder(folder, step)
    for name in NAMES:
        with open(temporary / name, "wb") as file:
            file.write(f"{name} of {step}".encode() * 40)
            file.write(b"end")
        sync(temporary / name)
    facts = {"step": step, "serial": step if serial is None else serial, "value": value}
    facts |= {} if metric is None else {"metric": metric}
    write_text(temporary / MANIFEST, manifest_text(digest_files(temporary, NAMES), facts))
    return commit(temporary, step)


def save_and_retire(folder, step):
    save(folder, step)
    retire(folder, keep_last=2, keep_every=0, best=None)


def loads(path):
    return damage(path, read_manifest(path)) == []


@pytest.mark.parametrize("mode", MODES)
def test_a_crash_at_any_write_leaves_the_old_or_the_new(memory, mode):
    """At each point, whatever a power cut leaves: what `latest` names is complete, and the next
    start saves.
    """
    start = memory / "start"
    for step in (1, 2):
        save(start, step)
    points, trials, seen = 0, 0, set()
    status = None
    while status != 0:
        points += 1
        disk = memory / "disk"
        folder = disk / "run"
        shutil.copytree(start, folder)
        crash = Crash(points, mode, disk)
        status = run_forked(lambda folder=folder: save_and_retire(folder, 3), crash)
        assert status in (0, 2 if mode == "full" else EXIT_CODE)
        for left in crash.outcomes():
            trials += 1
            path = latest_checkpoint(folder)
            assert path.name in ("step_000002", "step_000003")[status == 0 :], (points, left)
            assert all(loads(item.path) for item in checkpoints(folder)), (points, left)
            seen.add(path.name)
            remove_leftovers(folder)
            assert sorted(os.listdir(folder))[0] == "latest", "leftovers"
            save_and_retire(folder, 4)
            assert latest_checkpoint(folder).name == "step_000004"
        shutil.rmtree(disk)
    print(f"{mode}: {points - 1} points, {trials} disks afterwards")
    assert (
        seen == {"step_000002", "step_000003"} and points >= 15 and (trials > 100 or mode != "lost")
    )


def test_the_crash_test_detects_a_missing_sync(memory, monkeypatch):
    """The same without fsync: some crash leaves a visible checkpoint that is damaged."""
    monkeypatch.setitem(globals(), "sync", lambda path: None)
    spoiled = 0
    for point in range(15, 25):
        folder = memory / str(point)
        save(folder, 1)
        crash = Crash(point, "lost", folder)
        run_forked(lambda folder=folder: save(folder, 2), crash)
        for _ in crash.outcomes():
            spoiled += not all(loads(item.path) for item in checkpoints(folder))
    assert spoiled


def test_the_first_checkpoint_of_a_run_survives_a_power_cut(memory):
    """Its folder and the folders above it are new, too."""
    status, points = None, 0
    while status != 0:
        points += 1
        disk = memory / str(points)
        disk.mkdir()
        folder = disk / "runs/name/checkpoints"

        def start(folder=folder):
            with locked(folder.parent):
                save_and_retire(folder, 1)

        crash = Crash(points, "lost", disk)
        status = run_forked(start, crash)
        for left in crash.outcomes():
            path = latest_checkpoint(folder)
            assert loads(path) if path else status != 0, (points, left)
            assert all(loads(item.path) for item in checkpoints(folder)), (points, left)


def test_a_removal_that_was_killed_continues_only_when_its_names_are_on_the_disk(memory):
    """Else a power cut brings a part of the checkpoint back under its name."""
    status, points = None, 0
    while status != 0:
        points += 1
        folder = memory / str(points)
        for step in (1, 2):
            save(folder, step)

        def start_after_a_kill(folder=folder):
            os.rename(folder / "step_000001", folder / ".step_000001.old")
            remove_leftovers(folder)

        crash = Crash(points, "lost", folder)
        status = run_forked(start_after_a_kill, crash)
        for left in crash.outcomes():
            assert all(loads(item.path) for item in checkpoints(folder)), (points, left)


def test_no_checkpoint_is_replaced_and_the_last_saved_is_latest(tmp_path):
    first, other = save(tmp_path, 5, serial=1), save(tmp_path, 9, serial=2)
    again = save(tmp_path, 5, serial=3)
    assert [path.name for path in (first, other, again)] == [
        "step_000005",
        "step_000009",
        "step_000005.2",
    ]
    assert latest_checkpoint(tmp_path) == again
    assert [item.path for item in checkpoints(tmp_path)] == [first, other, again]
    (tmp_path / "latest").unlink()
    assert latest_checkpoint(tmp_path) == again
    shutil.rmtree(again)
    assert latest_checkpoint(tmp_path) == other
    assert latest_checkpoint(tmp_path / "none") is None


@pytest.mark.parametrize("best", ["max", "min"])
def test_an_evaluation_that_scored_nothing_does_not_hide_the_best(tmp_path, best):
    for step, value in {1: 0.5, 2: math.nan, 3: math.inf, 4: math.nan}.items():
        save(tmp_path, step, value=value)
    retire(tmp_path, keep_last=1, keep_every=0, best=best)
    assert [kept.step for kept in checkpoints(tmp_path)] == [1, 4]


def test_values_of_another_metric_are_not_compared(tmp_path):
    """A resumed run may name another checkpoint.best_metric."""
    for step, (value, metric) in enumerate(
        [(812.0, "rollout/length"), (0.71, "eval/a"), (0.4, None), (0.6, "eval/a")], start=1
    ):
        save(tmp_path, step, value=value, metric=metric)
    retire(tmp_path, keep_last=1, keep_every=0, best="max", metric="eval/a")
    assert [kept.step for kept in checkpoints(tmp_path)] == [2, 4]


def test_an_old_checkpoint_that_cannot_be_removed_stops_nothing(tmp_path, monkeypatch, caplog):
    """NFS refuses that while another process reads a file of it; the next start removes it."""
    for step in (1, 2):
        save(tmp_path, step)
    remove = shutil.rmtree

    def busy(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    monkeypatch.setattr(shutil, "rmtree", busy)
    retire(tmp_path, keep_last=1, keep_every=0, best=None)
    save(tmp_path, 1, serial=3)  # the same step again, after a resume
    retire(tmp_path, keep_last=1, keep_every=0, best=None)
    assert [kept.step for kept in checkpoints(tmp_path)] == [1]
    assert caplog.text.count("stays on the disk until the next start") == 2
    remove_leftovers(tmp_path)
    monkeypatch.setattr(shutil, "rmtree", remove)
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.glob("*step_*")] == ["step_000001"]


def test_retention_rules(tmp_path):
    values = {1: 0.1, 2: 0.9, 3: None, 4: 0.9, 5: 0.3, 6: 0.2, 7: 0.5}
    for step, value in values.items():
        save(tmp_path, step, value=value)
    (tmp_path / "step_000001" / MANIFEST).write_text("damaged")

    def left():
        return sorted(int(path.name[5:]) for path in tmp_path.glob("step_*"))

    assert retire(tmp_path, keep_last=0, keep_every=0, best=None) == [] and len(left()) == 7
    retire(tmp_path, keep_last=2, keep_every=3, best="max")
    assert left() == [1, 3, 4, 6, 7], (
        "1 has no readable manifest, 3 and 6 by period, 4 the later best, 6 and 7 the last two"
    )
    retire(tmp_path, keep_last=1, keep_every=0, best="min")
    assert left() == [1, 6, 7]
    assert latest_checkpoint(tmp_path).name == "step_000007"


def test_retention_counts_saves_not_steps(tmp_path):
    """A run that continued from an earlier step saves lower steps after higher ones: the last saved
    are its own.
    """
    for serial, step in enumerate([5, 9, 10, 6, 7], 1):
        save(tmp_path, step, serial=serial, value=0.5)
    retire(tmp_path, keep_last=2, keep_every=0, best=None)
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_000006", "step_000007"]
    assert latest_checkpoint(tmp_path).name == "step_000007"
    save(tmp_path, 11, serial=6, value=0.1)
    save(tmp_path, 8, serial=7, value=0.5)
    retire(tmp_path, keep_last=1, keep_every=0, best="min")
    assert [kept.step for kept in checkpoints(tmp_path)] == [11, 8], (
        "the best by value, and the last saved"
    )


def test_a_start_removes_only_what_a_killed_save_or_removal_left(tmp_path):
    kept = {save(tmp_path, 1).name, "latest", "notes", "step_x", ".step_000001"}
    for name in (".step_000002.tmp", ".step_000001.2.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.distcp").write_text("")
    for name in (".latest.tmp", ".stopped.tmp", "stopped"):
        (tmp_path / name).write_text("")
    for name in ("notes", "step_x", ".step_000001"):
        (tmp_path / name).mkdir()
    for _ in range(2):
        remove_leftovers(tmp_path)
        assert set(os.listdir(tmp_path)) == kept
    assert [item.path.name for item in checkpoints(tmp_path)] == ["step_000001"]
    remove_leftovers(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_checkpoints_without_a_readable_manifest_come_first_by_step(tmp_path):
    for serial, step in enumerate([10, 3, 3, 5], 1):
        save(tmp_path, step, serial=serial)
    for name in ("step_000010", "step_000003.2"):
        (tmp_path / name / MANIFEST).unlink()
    save(tmp_path, 3, serial=9)
    plain = save(tmp_path, 7)
    (plain / MANIFEST).write_text(manifest_text(digest_files(plain, NAMES), {"step": 7}))
    names = [
        "step_000003.2",
        "step_000007",
        "step_000010",
        "step_000003",
        "step_000005",
        "step_000003.3",
    ]
    assert [item.path.name for item in checkpoints(tmp_path)] == names
    assert [item.serial for item in checkpoints(tmp_path)] == [-1, -1, -1, 2, 4, 9]
    removed = retire(tmp_path, keep_last=1, keep_every=0, best=None)
    assert [path.name for path in removed] == ["step_000003", "step_000005"], (
        "the user decides about others"
    )


def test_a_save_begins_in_an_empty_folder(tmp_path):
    temporary = temporary_folder(tmp_path / "run/checkpoints", 3)
    (temporary / "a.distcp").write_text("of a save that could not be removed")
    assert temporary_folder(tmp_path / "run/checkpoints", 3) == temporary and not os.listdir(
        temporary
    )


def test_a_folder_that_another_process_creates_meanwhile_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "exists", lambda self: self == tmp_path)
    (tmp_path / "runs").mkdir()
    make_folder(tmp_path / "runs/name")
    assert os.listdir(tmp_path / "runs") == ["name"]


def test_another_folder_hides_no_checkpoint(tmp_path, monkeypatch):
    """In whichever order the file system lists them."""
    path = save(tmp_path, 1)
    monkeypatch.setattr(
        Path, "glob", lambda self, pattern: [tmp_path / "step_x", path, tmp_path / "step_1.old"]
    )
    assert [item.path for item in checkpoints(tmp_path)] == [path]


def test_a_sync_leaves_no_file_open(tmp_path):
    before = os.listdir("/proc/self/fd")
    write_text(tmp_path / "file", "text")
    assert os.listdir("/proc/self/fd") == before and (tmp_path / "file").read_text() == "text"


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not JSON: "), ("[1]", "holds a list, must be a JSON object")]
)
def test_a_state_that_cannot_be_read_is_named(tmp_path, text, message):
    path = save(tmp_path, 1)
    (path / STATE).write_text(text)
    with pytest.raises(CheckpointError, match=rf"step_000001/state\.json: {message}"):
        read_state(path)
    (path / STATE).write_text('{"step": 1}')
    assert read_state(path) == {"step": 1}
    (path / STATE).unlink()
    with pytest.raises(CheckpointError, match=r"state\.json: not JSON: .*No such file"):
        read_state(path)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"name": "step_000001"}', '{"manifest": "x"}'])
def test_a_pointer_that_names_nothing_lists_the_checkpoints_newest_first(tmp_path, text):
    for step in (1, 2):
        save(tmp_path, step)
    (tmp_path / "latest").write_text(text)
    message = (
        f"{tmp_path}/latest: does not name a checkpoint; checkpoints there: step_000002,"
        f" step_000001; choose one with --checkpoint.load {tmp_path}/NAME"
    )
    with pytest.raises(ValueError) as caught:
        latest_checkpoint(tmp_path)
    assert str(caught.value) == message
