"""A run of one rank resumes bit by bit, and damage is refused.

Other layouts: tests/dist/test_checkpoint.py.
"""

import errno
import json
import math
import os
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException

from megatron_rl.checkpoint import checkpoint_loader, checkpointer
from megatron_rl.checkpoint.checkpointer import Checkpointer, Snapshot
from megatron_rl.checkpoint.folder import CheckpointError, checkpoints, latest_checkpoint
from megatron_rl.checkpoint.manifest import digest_files, manifest_text, read_manifest
from megatron_rl.checkpoint.torch_dist import shard_writer
from tests.dist.engines import make_engine
from tests.dist.test_checkpoint import (
    BF16,
    DISTRIBUTED,
    PROGRESS,
    SCHEDULE,
    case,
    save_and_resume,
    spoil_and_load,
    updates,
)
from tests.tiny import random_checkpoint

CASES = {
    "plain_async": case({}, saving={"async_save": True}),
    "distributed": case({}, optim=DISTRIBUTED),
    "bf16": case({}, model=BF16),
    "before_the_first_update": case({}, optim=DISTRIBUTED, after=0),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The default group of one rank, and a model of two layers."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield random_checkpoint(tmp_path_factory.mktemp("one_rank") / "moe", num_hidden_layers=2)
    dist.destroy_process_group()


@pytest.mark.parametrize("name", CASES)
def test_resume_is_bit_identical(checkpoint, tmp_path, name):
    save_and_resume(checkpoint, tmp_path, {name: CASES[name]})


def test_damage_is_refused(checkpoint, tmp_path):
    refused = spoil_and_load(checkpoint, tmp_path, 15)
    assert sum(refused.values()) >= 12


@pytest.fixture
def make(checkpoint, tmp_path):
    """make(**sections): a Checkpointer of a new engine in tmp_path, and the lines that it logs."""
    engines = []

    def made(progress=None, **sections):
        destroy()
        engines.append(make_engine(checkpoint, **sections))
        lines = []
        return Checkpointer(engines[-1], tmp_path, lines.append, progress), lines

    def destroy():
        while engines:
            engines.pop().parallel.destroy()

    yield made
    destroy()


def test_a_save_numbers_itself_and_removes_what_no_rule_keeps(make, tmp_path):
    saver, lines = make(checkpoint={"keep_last": 1, "best_metric": "rollout/reward_mean"})
    for step, value in ((1, 0.5), (2, math.nan), (3, 0.25), (4, None)):
        saver.save(Snapshot(step, PROGRESS, value=value))
    assert [(item.step, item.serial, item.value) for item in checkpoints(tmp_path)] == [
        (1, 1, 0.5),
        (4, 4, None),
    ]
    assert {item.metric for item in checkpoints(tmp_path)} == {"rollout/reward_mean"}
    saved = [line for line in lines if line.startswith("checkpoint ")]
    assert len(saved) == 4 and re.fullmatch(
        rf"checkpoint {tmp_path}/step_000001 \(\d+\.\d MiB, committed in \d+\.\d s\)", saved[0]
    )
    size = sum(file.stat().st_size for file in (tmp_path / "step_000001").iterdir()) / 2**20
    assert float(re.search(r"\((\S+) MiB", saved[0])[1]) == pytest.approx(size, abs=0.1)
    removed = [line for line in lines if line.startswith("removed")]
    assert removed == ["removed checkpoint step_000002", "removed checkpoint step_000003"]
    names = {file.name for file in (tmp_path / "step_000004").iterdir()}
    assert names == {
        "__0_0.distcp", "__0_1.distcp", ".metadata", "common.pt", "metadata.json",
        "rng_00000.safetensors",
        "state.json", "manifest.json",
    }  # fmt: skip
    assert names - {"manifest.json"} == read_manifest(tmp_path / "step_000004").files.keys()


def test_what_is_no_number_is_not_known_and_without_a_metric_none_is_the_best(make, tmp_path):
    saver, _ = make(
        checkpoint={"keep_last": 2, "best_metric": "rollout/reward_mean", "async_save": True}
    )
    for step, value in ((1, 0.5), (2, math.nan), (3, math.inf)):
        saver.save(Snapshot(step, PROGRESS, value=value))  # completes the one before
    saver.wait()
    assert [(item.step, item.value) for item in checkpoints(tmp_path)] == [
        (1, 0.5),
        (2, None),
        (3, None),
    ]
    saver, _ = make(checkpoint={"keep_last": 2})
    saver.save(Snapshot(4, PROGRESS))
    assert [item.step for item in checkpoints(tmp_path)] == [3, 4]


def test_every_file_is_on_the_disk_before_the_checkpoint_has_its_name(make, tmp_path, monkeypatch):
    synced, named, fsync, rename = {}, [], os.fsync, os.rename

    def note_sync(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)
        synced[path.name.removeprefix(".").removesuffix(".tmp")] = (
            path.read_bytes() if path.is_file() else b""
        )

    def check_all(source, target):
        files = {path.name.removeprefix("."): path.read_bytes() for path in Path(source).iterdir()}
        assert {name: synced.get(name) for name in files} == files and len(files) == 9
        named.append(Path(target).name)
        rename(source, target)

    saver, _ = make()
    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "rename", check_all)
    saver.save(
        Snapshot(
            1,
            PROGRESS,
            files={"rollouts_00000.safetensors": lambda path: path.write_bytes(b"rollouts")},
        )
    )
    assert named == ["step_000001"]


def test_a_save_is_planned_once_and_again_where_its_parts_have_changed(make, tmp_path, monkeypatch):
    planned, exchange = [], shard_writer.determine_global_metadata
    monkeypatch.setattr(
        shard_writer,
        "determine_global_metadata",
        lambda state: planned.append(step) or exchange(state),
    )
    saver, _ = make()
    for step in (1, 2, 3):
        if step == 3:
            saver._planner._parts = []
        updates(saver.engine, [step])
        saver.save(Snapshot(step, PROGRESS))
    assert planned == [1, 3]
    metadata = [(tmp_path / f"step_{step:06d}/.metadata").read_bytes() for step in (1, 2, 3)]
    assert metadata[0] == metadata[1] == metadata[2]
    part = ShardedTensor.from_rank_offsets("half", torch.zeros(2), (0, 0, 2))
    with pytest.raises(CheckpointingException):
        saver._planner.plan({"half": part}, tmp_path)


def test_people_can_read_the_state_and_its_version_of_core_is_named(make, tmp_path, monkeypatch):
    saver, _ = make()
    saver.save(Snapshot(1, PROGRESS))
    text = (tmp_path / "step_000001/state.json").read_text()
    state = json.loads(text)
    assert (
        text == json.dumps(state, indent=1) + "\n"
        and state["megatron_core"] == checkpointer.core_version
    )
    assert len(saver.load(tmp_path / "step_000001").lines) == 2, "no setting differs"
    suspected = []
    monkeypatch.setattr(
        checkpoint_loader,
        "SafeCheckpoint",
        lambda path, saved_by: suspected.append(saved_by) or 1 / 0,
    )
    for version in (state["megatron_core"], None):
        rewrite_state(tmp_path / "step_000001", megatron_core=version)
        with pytest.raises(CheckpointError, match="^rank 0: ZeroDivisionError"):
            saver.load(tmp_path / "step_000001")
    assert suspected == [state["megatron_core"], "(unknown)"]


def test_the_lines_of_a_load_say_what_was_loaded(make, tmp_path, monkeypatch):
    saver, _ = make(optim=SCHEDULE)
    updates(saver.engine, [0, 1, 2])
    saver.save(Snapshot(3, PROGRESS))
    changed = SCHEDULE | {"lr": 0.5}
    loader, _ = make(optim=changed, checkpoint={"every": 3, "allow_changes": ["optim.lr"]})
    clock = iter([100.0, 103.5])
    monkeypatch.setattr(checkpoint_loader, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    restored = loader.load(tmp_path / "step_000003")
    assert (restored.path, restored.step, restored.progress) == (
        tmp_path / "step_000003",
        3,
        PROGRESS,
    )
    files, state, differing = restored.lines
    assert re.fullmatch(r"  7 files, \d+\.\d MiB, digests checked in 3\.5 s", files)
    monkeypatch.undo()
    assert (
        state
        == "  model and optimizer (3 updates by Adam, schedule at 4), saved as one rank on 1 ranks,"
        " now one rank; random generators of every rank"
    )
    assert differing == "  settings that differ from the checkpoint's: optim.lr"
    assert restored.accepted == ["optim.lr"] and loader.engine.optimizer.scheduler.num_steps == 4
    rewrite_state(tmp_path / "step_000003", layout="tp2")
    assert (
        "; random generators seeded again, because the layout changed"
        in loader.load(restored.path).lines[1]
    )
    rewrite_state(tmp_path / "step_000003", layout="one rank", ranks=2)
    assert "saved as one rank on 2 ranks" in loader.load(restored.path).lines[1]


def rewrite_state(path, **changes):
    """Change state.json (None: leave the key out), with a manifest that agrees."""
    state = json.loads((path / "state.json").read_text()) | changes
    (path / "state.json").write_text(
        json.dumps({key: value for key, value in state.items() if value is not None})
    )
    manifest = read_manifest(path)
    (path / "manifest.json").write_text(
        manifest_text(digest_files(path, manifest.files), manifest.facts)
    )


def test_a_checkpoint_of_another_version_or_without_a_part_is_refused(make, tmp_path):
    saver, _ = make()
    saver.save(Snapshot(1, PROGRESS))
    path = tmp_path / "step_000001"
    rewrite_state(path, version=9)
    with pytest.raises(CheckpointError, match=r"state\.json: version 9, must be 1; "):
        saver.load(path)
    rewrite_state(path, version=1, layout=None)
    with pytest.raises(CheckpointError, match=r"state\.json: keys are missing: layout; "):
        saver.load(path)
    rewrite_state(path, layout="one rank")
    (path / "rng_00000.safetensors").write_bytes(b"none")
    rewrite_state(path)
    with pytest.raises(CheckpointError, match=r"rng_00000\.safetensors: not a safetensors file"):
        saver.load(path)


def test_a_damaged_checkpoint_is_described_with_an_alternative(make, tmp_path):
    saver, _ = make(checkpoint={"keep_last": 3})
    for step in (1, 2, 3):
        saver.save(Snapshot(step, PROGRESS))
    names = ["__0_0.distcp", ".metadata", "common.pt", "metadata.json", "rng_00000.safetensors"]
    for name in names:
        (tmp_path / "step_000003" / name).write_bytes(b"")
    (tmp_path / "step_000002/common.pt").unlink()
    with pytest.raises(CheckpointError) as caught:
        saver.load(tmp_path / "step_000003")
    first, *named, offer = str(caught.value).splitlines()
    assert first == f"checkpoint {tmp_path}/step_000003 is damaged:" and len(named) == 5
    assert all(any(f"/{name}: 0 bytes, " in line for line in named) for name in names)
    assert (
        offer
        == "The newest undamaged checkpoint is of step 1: continue from it with --checkpoint.load"
        f" {tmp_path}/step_000001"
    )
    (tmp_path / "step_000003/state.json").write_bytes(b"")
    with pytest.raises(CheckpointError) as caught:
        saver.load(tmp_path / "step_000003")
    assert (
        str(caught.value).splitlines()[6] == "... and 1 more"
        and len(str(caught.value).splitlines()) == 8
    )
    (tmp_path / "step_000001/manifest.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        saver.load(tmp_path / "step_000001")
    assert str(caught.value).splitlines()[1:] == [
        f"{tmp_path}/step_000001/manifest.json: missing; every complete checkpoint has one",
        f"There is no undamaged checkpoint in {tmp_path}; start over with --checkpoint.no_resume",
    ]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_save_that_fails_leaves_nothing_and_the_next_one_works(make, tmp_path, is_async):
    saver, _ = make(checkpoint={"async_save": is_async})
    saver.save(Snapshot(1, PROGRESS))
    saver.wait()

    def write_in_vain(path):
        path.write_bytes(b"half")
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as error:
            raise RuntimeError("unexpected position") from error

    with pytest.raises(CheckpointError) as caught:
        saver.save(Snapshot(2, PROGRESS, files={"rollouts_00000.safetensors": write_in_vain}))
        while is_async:
            saver.poll()
    assert (
        str(caught.value)
        == f"checkpoint of step 2 in {tmp_path}: rank 0: OSError: [Errno 28] No space left on"
        " device; it was removed, older checkpoints are complete"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000001"]
    saver.save(
        Snapshot(
            2,
            PROGRESS,
            files={"rollouts_00000.safetensors": lambda path: path.write_bytes(b"rollouts")},
        )
    )
    saver.wait()
    assert (tmp_path / "step_000002/rollouts_00000.safetensors").read_bytes() == b"rollouts"
    assert saver.load(latest_checkpoint(tmp_path)).step == 2
    with pytest.raises(
        CheckpointError, match="^checkpoint of step 3 .*FileNotFoundError.*; it was removed"
    ):
        saver.save(Snapshot(3, PROGRESS, files={"file": lambda path: shutil.rmtree(path.parent)}))
        saver.wait()
    (tmp_path / "file").write_text("")
    nowhere = Checkpointer(saver.engine, tmp_path / "file/checkpoints")
    with pytest.raises(
        CheckpointError,
        match=r"^checkpoint of step 1: .*file/checkpoints: .*Not a directory.*; nothing was",
    ):
        nowhere.save(Snapshot(1, PROGRESS))


def test_a_save_that_cannot_begin_leaves_nothing(make, tmp_path, monkeypatch):
    (tmp_path / ".step_000001.tmp").mkdir()
    saver, _ = make()
    assert not list(tmp_path.iterdir()), "left by a run that was killed"

    def write_in_vain(path, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpointer, "write_text", write_in_vain)
    with pytest.raises(CheckpointError) as caught:
        saver.save(Snapshot(1, PROGRESS))
    assert (
        str(caught.value)
        == f"checkpoint of step 1: {tmp_path}: [Errno 28] No space left on device; nothing was"
        " written, older checkpoints are complete"
    )
    assert not list(tmp_path.iterdir())


def test_the_progress_of_a_save_is_that_of_the_files_of_this_rank(make, tmp_path, monkeypatch):
    shown = []
    saver, _ = make(progress="progress")
    monkeypatch.setattr(
        checkpointer, "show_writing", lambda *args: shown.append(args) or nullcontext()
    )
    saver.save(Snapshot(2, PROGRESS))
    ((progress, text, files, num_bytes),) = shown
    assert (progress, text) == ("progress", "checkpoint of step 2, rank 0")
    assert [file.relative_to(tmp_path).as_posix() for file in files] == [
        ".step_000002.tmp/__0_0.distcp",
        ".step_000002.tmp/__0_1.distcp",
    ]
    written = sum((tmp_path / "step_000002" / file.name).stat().st_size for file in files)
    assert 0.8 * written < num_bytes <= written
