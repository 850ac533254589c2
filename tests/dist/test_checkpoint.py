"""Checkpoints on real ranks: a resumed run is bit-identical in its own layout, and equal up to
rounding in another.
"""

import tempfile
from pathlib import Path

import pytest

from tests.dist.launch import run_ranks
from tests.dist.test_engine import one_update, weights_of
from tests.tiny import random_checkpoint


@pytest.fixture(scope="module")
def checkpoint():
    with tempfile.TemporaryDirectory() as folder:
        yield random_checkpoint(Path(folder) / "moe")


PROGRESS = {"policy_version": 2, "prompts": {"epoch": 1}, "rate": 0.1}
SCHEDULE = {"schedule": "linear", "warmup_updates": 1, "weight_decay": 0.1}


def optimizer_of(engine):
    """Every tensor of the optimizer's state on this rank, in order, and Adam's step count."""
    import torch

    from megatron_rl.checkpoint.state import adam_step, inner_optimizers

    states = [o.optimizer.state for o in inner_optimizers(engine) if o.optimizer is not None]
    tensors = [
        entry[name].clone()
        for state in states
        for entry in state.values()
        for name in sorted(entry)
    ]
    return [*tensors, torch.tensor(adam_step(engine))]


def all_rng():
    """A draw from every generator of this rank; draws move them."""
    import random

    import numpy as np
    import torch
    from megatron.core import tensor_parallel

    draws = [
        random.random(),
        random.gauss(0, 1),
        float(np.random.standard_normal()),
        float(torch.rand(())),
    ]
    tracker = tensor_parallel.get_cuda_rng_tracker()
    for name in tracker.get_states():
        with tracker.fork(name):
            draws.append(float(torch.rand(())))
    return draws


def equal(ours, theirs):
    return len(ours) == len(theirs) and all(a.equal(b) for a, b in zip(ours, theirs, strict=True))


def updates(engine, seeds):
    from tests.dist.engines import random_batch

    spec = engine.spec
    routed = {"num_experts": spec.num_experts, "top_k": spec.top_k, "layers": len(spec.moe_layers)}
    return [one_update(engine, random_batch(engine, seed=seed, **routed)) for seed in seeds]


def run_parts(*parts):
    """On a rank: call every (function, *arguments) in turn; what they return."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    results = [function(*arguments) for function, *arguments in parts]
    dist.destroy_process_group()
    return results


def save_and_resume(checkpoint, folder, layouts):
    """Two updates, save, two more; against load, two more: weights, optimizer, metrics and
    generators bit-identical.
    """
    from megatron_rl.checkpoint.checkpointer import Checkpointer, Snapshot
    from megatron_rl.checkpoint.folder import latest_checkpoint
    from tests.dist.engines import make_engine

    for name, (parallel, optim, model, saving, after, megatron) in layouts.items():
        make = {
            "parallel": parallel,
            "optim": SCHEDULE | optim,
            "model": model,
            "checkpoint": saving,
            "megatron": megatron,
        }
        engine = make_engine(checkpoint, **make)
        writer = Checkpointer(engine, folder / name)
        updates(engine, range(after))
        all_rng()
        engine.optimizer.skipped_in_a_row = 1
        write = hold_back(writer)
        writer.save(Snapshot(after, PROGRESS))
        # with async_save before anything of the checkpoint is written
        metrics = updates(engine, [2, 3])
        assert bool(saving.get("async_save")) == (latest_checkpoint(folder / name) is None), name
        write.set()
        writer.wait()
        expected, moments, draws = weights_of(engine), optimizer_of(engine), all_rng()
        engine.parallel.destroy()

        resumed = make_engine(checkpoint, **make)
        for _ in range(2):  # not where the generators were at the save: no update draws from them
            all_rng()
        restored = Checkpointer(resumed, folder / name).load(latest_checkpoint(folder / name))
        assert (restored.step, restored.progress) == (after, PROGRESS), name
        assert resumed.optimizer.skipped_in_a_row == 1
        again = updates(resumed, [2, 3])
        assert repr(again) == repr(metrics), name  # NaN equals NaN, and nothing else is rounded
        assert equal(expected, weights_of(resumed)), name
        assert equal(moments, optimizer_of(resumed)), name
        assert draws == all_rng(), name
        resumed.parallel.destroy()


def hold_back(writer):
    """An event that a background save waits for before it writes: it must still write the state at
    the time of `save`.
    """
    import threading

    may_write, write = threading.Event(), writer._write

    def held(*arguments):
        assert threading.current_thread().name != "checkpoint" or may_write.wait(60)
        write(*arguments)

    writer._write = held
    return may_write


def case(parallel, *, optim=None, model=None, saving=None, after=2, megatron=None):
    return parallel, optim or {}, model or {}, saving or {}, after, megatron or {}


DISTRIBUTED = {"distributed": True}
BF16 = {"dtype": "bfloat16"}
CASES = {
    "ep2_async": case({"ep": 2}, saving={"async_save": True}),
    "vp2": case({"pp": 2, "vp": 2}),
    "ep2_distributed": case({"ep": 2}, optim=DISTRIBUTED),
    "dp2_bf16_distributed_async": case(
        {}, optim=DISTRIBUTED, model=BF16, saving={"async_save": True}
    ),
}
MORE_CASES = {
    "dp2": case({}),
    "tp2": case({"tp": 2}),
    "cp2": case({"cp": 2}),
    "pp2": case({"pp": 2}),
    "uneven": case({"pp": 2, "layers_per_stage": [1, 3]}),
    "tp2_ep2_distributed": case({"tp": 2, "ep": 2, "etp": 1}, optim=DISTRIBUTED),
    "pp2_distributed": case({"pp": 2}, optim=DISTRIBUTED),
    "tp2_bf16": case({"tp": 2}, model=BF16),
    "ep2_bf16": case({"ep": 2}, model=BF16),
    "distributed_before_the_first_update": case({}, optim=DISTRIBUTED, after=0),
    "plain_before_the_first_update": case({"ep": 2}, after=0),
    "bf16_before_the_first_update": case({"ep": 2}, model=BF16, after=0),
}


@pytest.mark.slow
def test_resume_is_bit_identical_in_more_layouts(checkpoint, tmp_path):
    run_ranks(run_parts, 2, (save_and_resume, checkpoint, tmp_path, MORE_CASES))


def change_layout(checkpoint, folder, optim, source, targets, lora=None):
    """Save in one layout, load in others: the same bits at first, and after two more updates the
    same to fp32 rounding.
    """
    import torch.distributed as dist

    from megatron_rl.checkpoint.checkpointer import Checkpointer, Snapshot
    from tests.dist.engines import make_engine

    def exported(engine):
        # rank 0 has them
        return {name: tensor.clone() for name, tensor in engine.export() if tensor is not None}

    optim = SCHEDULE | optim
    engine = make_engine(checkpoint, parallel=source, optim=optim, lora=lora)
    updates(engine, [0, 1])
    writer = Checkpointer(engine, folder)
    writer.save(Snapshot(2, PROGRESS))
    saved = exported(engine)
    norms = [row["optim/grad_norm"] for row in updates(engine, [2, 3])]
    end = exported(engine)
    engine.parallel.destroy()
    for target in targets:
        engine = make_engine(checkpoint, parallel=target, optim=optim, lora=lora)
        restored = Checkpointer(engine, folder).load(folder / "step_000002")
        assert (restored.step, restored.progress) == (2, PROGRESS)
        assert target == source or any("seeded again" in line for line in restored.lines)
        loaded = exported(engine)
        assert saved.keys() == loaded.keys() and all(
            loaded[name].equal(saved[name]) for name in saved
        ), target
        again = [row["optim/grad_norm"] for row in updates(engine, [2, 3])]
        assert again == pytest.approx(norms, rel=1e-4), target
        now = exported(engine)
        if dist.get_rank() == 0:
            compare(f"{source} -> {target}", saved, end, now)
        engine.parallel.destroy()


def compare(what, before, expected, found):
    assert before.keys() == expected.keys() == found.keys() and before
    worst = max(float((found[name] - expected[name]).abs().max()) for name in expected)
    moved = max(float((before[name] - expected[name]).abs().max()) for name in expected)
    print(f"{what}: max |difference| {worst:.1e} after two updates that moved {moved:.1e}")
    assert worst < 1e-3 * moved, what


@pytest.mark.slow
def test_a_checkpoint_of_the_distributed_optimizer_loads_into_other_layouts(checkpoint, tmp_path):
    targets = [{"ep": 2}, {"tp": 2, "ep": 2, "etp": 1}, {"pp": 2}, {"cp": 2}]
    run_ranks(run_parts, 2, (change_layout, checkpoint, tmp_path, DISTRIBUTED, {}, targets))


# Damage and crashes -------------------------------------------------------------------------------


def spoil_and_load(checkpoint, folder, trials):
    """Damage of every kind to every file of a real checkpoint: each load is refused and names the
    file and an alternative.
    """
    import random

    from megatron_rl.checkpoint.checkpointer import Checkpointer, Snapshot
    from megatron_rl.checkpoint.folder import CheckpointError
    from megatron_rl.distributed import from_rank_0
    from tests.dist.engines import make_engine
    from tests.unit.checkpoint.test_manifest import KINDS, spoil

    engine = make_engine(checkpoint)
    writer = Checkpointer(engine, folder)
    for step in (1, 2):
        writer.save(Snapshot(step, PROGRESS))
    path, rng = folder / "step_000002", random.Random(0)
    original = from_rank_0(lambda: {file.name: file.read_bytes() for file in path.iterdir()})

    def restore():
        for file, content in original.items():
            if not (path / file).exists() or (path / file).read_bytes() != content:
                (path / file).write_bytes(content)

    before = weights_of(engine)
    refused = dict.fromkeys(KINDS, 0)
    for trial in range(trials):
        kind, name = KINDS[trial % len(KINDS)], sorted(original)[trial % len(original)]
        if from_rank_0(lambda kind=kind, name=name: spoil(path / name, kind, rng)):
            with pytest.raises(CheckpointError) as error:
                writer.load(path)
            text = str(error.value)
            assert name in text or "manifest.json" in text
            assert f"--checkpoint.load {folder}/step_000001" in text
            refused[kind] += 1
        from_rank_0(restore)
    assert equal(before, weights_of(engine)), "a refused checkpoint must not touch the engine"
    assert writer.load(path).step == 2
    engine.parallel.destroy()
    return refused


def fail_to_write(checkpoint, folder):
    """A full disk on one rank, and an impossible path: the error is raised on all ranks, no file is
    left.
    """
    import errno
    import os

    import torch.distributed as dist

    from megatron_rl.checkpoint.checkpointer import Checkpointer, Snapshot
    from megatron_rl.checkpoint.folder import CheckpointError, latest_checkpoint
    from megatron_rl.checkpoint.torch_dist.shard_writer import Shards
    from tests.dist.engines import make_engine

    def full(self):
        raise OSError(errno.ENOSPC, "No space left on device")

    write = Shards.write
    for asynchronous in (False, True):
        engine = make_engine(checkpoint, checkpoint={"async_save": asynchronous})
        writer = Checkpointer(engine, folder / str(asynchronous))
        writer.save(Snapshot(1, PROGRESS))
        writer.wait()
        if engine.parallel.rank == 1:
            Shards.write = full
        with pytest.raises(
            CheckpointError,
            match=r"step 2 .*rank 1: OSError: .*No space left.*older checkpoints are complete",
        ):
            writer.save(Snapshot(2, PROGRESS))
            writer.wait()
        Shards.write = write
        there = sorted(os.listdir(folder / str(asynchronous)))
        dist.barrier()  # rank 0 begins the next one
        assert there == ["latest", "step_000001"]
        writer.save(Snapshot(2, PROGRESS))
        writer.wait()
        assert writer.load(latest_checkpoint(folder / str(asynchronous))).step == 2
        engine.parallel.destroy()
    engine = make_engine(checkpoint)
    # under a file; root may write into read-only folders
    nowhere = folder / "False/latest/checkpoints"
    with pytest.raises(
        RuntimeError, match=r"checkpoint of step 1.*Not a directory.*nothing was written"
    ):
        Checkpointer(engine, nowhere).save(Snapshot(1, PROGRESS))
    engine.parallel.destroy()


def plan_once(checkpoint, folder, tp):
    """The first save plans with all ranks, later ones only where the parts of a rank have changed;
    every one of them loads.
    """
    from megatron.core.dist_checkpointing.strategies import fully_parallel

    from megatron_rl.checkpoint.checkpointer import Checkpointer, Snapshot
    from megatron_rl.checkpoint.torch_dist import shard_writer
    from megatron_rl.checkpoint.torch_dist.metadata import read_metadata
    from tests.dist.engines import make_engine

    def counted(state):
        planned.add(step)
        return exchange(state)

    engine = make_engine(checkpoint, optim=DISTRIBUTED, parallel={"tp": tp})
    planned, exchange = set(), shard_writer.determine_global_metadata
    shard_writer.determine_global_metadata = fully_parallel.determine_global_metadata = counted
    saver, expected = Checkpointer(engine, folder), {}
    for step in range(1, 6):
        if step in (3, 4) and engine.parallel.rank == 1:
            saver._planner._parts = None  # as if rank 1 had other parts than before
        updates(engine, [step])
        saver.save(Snapshot(step, PROGRESS))
        expected[step] = weights_of(engine), optimizer_of(engine)
    shard_writer.determine_global_metadata = fully_parallel.determine_global_metadata = exchange
    assert planned == {1, 3, 4}
    for step, (weights, moments) in expected.items():
        path = folder / f"step_{step:06d}"
        saver.load(path)
        assert equal(weights, weights_of(engine)) and equal(moments, optimizer_of(engine)), step
        assert read_metadata(path) == read_metadata(folder / "step_000001")
    engine.parallel.destroy()


def test_resume_is_bit_identical_in_any_layout_and_damage_is_refused(checkpoint, tmp_path):
    """Quick: a few cases of everything here, in one launch."""
    parts = [
        (save_and_resume, checkpoint, tmp_path, CASES),
        (
            change_layout,
            checkpoint,
            tmp_path / "layouts",
            {},
            {"ep": 2},
            [{"tp": 2}, {"pp": 2, "vp": 2}],
        ),
        (fail_to_write, checkpoint, tmp_path / "full"),
        (plan_once, checkpoint, tmp_path / "planned", 1),
        (plan_once, checkpoint, tmp_path / "planned_tp", 2),
        (spoil_and_load, checkpoint, tmp_path / "damage", 15),
    ]
    (*_, refused), _ = run_ranks(run_parts, 2, *parts)
    assert sum(refused.values()) >= 12


@pytest.mark.slow
def test_a_thousand_damaged_files_of_a_real_checkpoint_are_refused(checkpoint, tmp_path):
    ((refused,),) = run_ranks(
        run_parts, 1, (spoil_and_load, checkpoint, tmp_path, 1200), timeout=590
    )
    print(f"refused: {refused}")
    assert sum(refused.values()) >= 1000 and min(refused.values()) >= 150


def crash_and_load(checkpoint, folder, points_per_mode):
    """Crash a real save at points spread over its writes, most of them near its end, in every mode;
    then the latest one loads.

    Every checkpoint on every disk that a power cut may leave is checked by its manifest; one disk
    of every fifth crash is loaded in a new process.  Returns the numbers of points, crashes and
    disks, and what `latest` names on the disks.
    """
    import shutil
    from collections import Counter

    import tests.dist.engines  # once, before forking
    from megatron_rl.checkpoint.checkpointer import Checkpointer, Snapshot
    from megatron_rl.checkpoint.folder import checkpoints, latest_checkpoint
    from megatron_rl.checkpoint.manifest import damage, read_manifest
    from tests.crash import EXIT_CODE, MODES, Crash, run_forked

    def in_engine(work):
        engine = tests.dist.engines.make_engine(checkpoint)
        work(Checkpointer(engine, folder / "run"))

    def save(step, crash=None):
        def work(writer):
            if crash is not None:
                crash.install()
            writer.save(Snapshot(step, PROGRESS))
            if crash is not None and crash.at == 0:
                (folder / "count").write_text(str(crash.count))

        return run_forked(lambda: in_engine(work), crash, install=False)

    assert save(1) == 0
    shutil.copytree(folder / "run", folder / "start")
    assert save(2, Crash(0, "exit", folder / "run")) == 0
    count, tried, ended = int((folder / "count").read_text()), 0, Counter()
    half = points_per_mode // 2
    points = sorted(
        {count - index for index in range(half)}
        | {1 + index * (count - half) // half for index in range(half)}
    )
    for mode in MODES:
        for point in points:
            shutil.rmtree(folder / "run")
            shutil.copytree(folder / "start", folder / "run")
            crash = Crash(point, mode, folder / "run")
            status = save(2, crash)
            assert status in (0, 2 if mode == "full" else EXIT_CODE), (mode, point, status)
            for left in crash.outcomes(most=8):
                path = latest_checkpoint(folder / "run")
                assert path.name in ("step_000001", "step_000002")[status == 0 :], (
                    mode,
                    point,
                    left,
                )
                for kept in checkpoints(folder / "run"):
                    assert damage(kept.path, read_manifest(kept.path)) == [], (mode, point, left)
                ended[path.name] += 1
            if tried % 5 == 0:
                assert (
                    run_forked(lambda path=path: in_engine(lambda writer: writer.load(path))) == 0
                ), (mode, point)
            tried += 1
    return count, tried, ended


@pytest.fixture(scope="module")
def smaller(checkpoint):
    return random_checkpoint(checkpoint.parent / "smaller", num_hidden_layers=1, num_experts=2)


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_after_a_crash_at_any_of_hundreds_of_writes_a_checkpoint_loads(smaller, tmp_path):
    ((count, tried, ended),) = run_ranks(crash_and_load, 1, smaller, tmp_path, 72, timeout=1900)
    print(
        f"{count} changes to the disk in a save; {tried} crashes, latest on the disks afterwards:"
        f" {dict(ended)}"
    )
    assert tried >= 200 and len(ended) == 2 and ended.total() >= 2 * tried
