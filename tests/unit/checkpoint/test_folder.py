"""Checkpoints appear completely or not at all, wherever the process dies; only those that no rule keeps are removed."""

import math
import os
import shutil

import pytest

from megatron_rl.checkpoint.folder import (
    checkpoints,
    commit,
    latest_checkpoint,
    remove_leftovers,
    retire,
    sync,
    temporary_folder,
    write_text,
)
from megatron_rl.checkpoint.manifest import MANIFEST, damage, digest_files, manifest_text, read_manifest
from tests.crash import EXIT_CODE, MODES, Crash, run_forked

NAMES = ("a.distcp", "b.distcp", "state.json")


def save(folder, step, *, serial=None, value=None):
    temporary = temporary_folder(folder, step)
    for name in NAMES:
        with open(temporary / name, "wb") as file:
            file.write(f"{name} of {step}".encode() * 40)
            file.write(b"end")
        sync(temporary / name)
    facts = {"step": step, "serial": step if serial is None else serial, "value": value}
    write_text(temporary / MANIFEST, manifest_text(digest_files(temporary, NAMES), facts))
    return commit(temporary, step)


def save_and_retire(folder, step):
    save(folder, step)
    retire(folder, keep_last=2, keep_every=0, best=None)


def loads(path):
    return damage(path, read_manifest(path)) == []


@pytest.mark.parametrize("mode", MODES)
def test_a_crash_at_any_write_leaves_the_old_or_the_new(memory, mode):
    """At each point, on a fresh copy: the checkpoint that `latest` names is complete, and the next save works."""
    start = memory / "start"
    for step in (1, 2):
        save(start, step)
    points, seen = 0, set()
    while True:
        points += 1
        folder = memory / "run"
        shutil.copytree(start, folder)
        status = run_forked(lambda folder=folder: save_and_retire(folder, 3), Crash(points, mode, memory))
        path = latest_checkpoint(folder)
        assert path.name in ("step_000002", "step_000003") and loads(path), (mode, points)
        assert all(loads(item.path) for item in checkpoints(folder)), (mode, points)
        seen.add(path.name)
        remove_leftovers(folder)
        assert sorted(os.listdir(folder))[0] == "latest", "leftovers"
        save_and_retire(folder, 4)
        assert latest_checkpoint(folder).name == "step_000004"
        shutil.rmtree(folder)
        if status == 0:
            break
        assert status == (2 if mode == "full" else EXIT_CODE)
    assert seen == {"step_000002", "step_000003"} and points >= 15, points


def test_the_crash_test_detects_a_missing_sync(memory, monkeypatch):
    """The same without fsync: some crash leaves a visible checkpoint that is damaged."""
    monkeypatch.setitem(globals(), "sync", lambda path: None)
    spoiled = 0
    for point in range(15, 25):
        folder = memory / str(point)
        save(folder, 1)
        run_forked(lambda folder=folder: save(folder, 2), Crash(point, "lost", folder))
        spoiled += not all(loads(item.path) for item in checkpoints(folder))
    assert spoiled


def test_no_checkpoint_is_replaced_and_the_last_saved_is_latest(tmp_path):
    first, other = save(tmp_path, 5, serial=1), save(tmp_path, 9, serial=2)
    again = save(tmp_path, 5, serial=3)
    assert [path.name for path in (first, other, again)] == ["step_000005", "step_000009", "step_000005.2"]
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
