"""A saved mini-batch gives its loss, gradient and metrics again: bit for bit in its layout, within
tolerance in another.
"""

import contextlib
import dataclasses
import io
import json
import math
import re
import resource
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.dist.launch import run_ranks
from tests.tiny import random_checkpoint

SAVED = {
    "R2": {"tp": 2, "ep": 2, "etp": 1},
    "R3": {"cp": 2},
    "none": {"pp": 2},
}
"""Replay mode -> layout in which its bundle is saved; the other layouts of the list, and one rank,
compute it again.
"""
LOSS = {"kl_coef": 0.1}
RSPO = {**LOSS, "name": "rspo", "shift_floor": 0.2}
"""Of the bundle without replay, as its source has it; its layers are on two stages."""


def save_bundles(checkpoint, folder):
    """Two updates; the second, with pi != pi_old, is saved before its weights change, and its
    results are returned.
    """
    import torch.distributed as dist

    from megatron_rl.checkpoint.batches.bundle_writer import BundleNote, results_of, write_bundle
    from megatron_rl.metrics.reduce import MetricSums
    from tests.dist.engines import make_engine, random_batch

    dist.init_process_group("gloo")
    for replay, layout in SAVED.items():
        more = {"loss": RSPO if replay == "none" else LOSS, "optim": {"distributed": True}}
        of_agent = replay == "R3"  # episodes, every token with the set it was sampled from
        rollout = {"top_p": 0.9, "top_k": 40} if of_agent else {}
        engine = make_engine(checkpoint, parallel=layout, replay=replay, rollout=rollout, **more)
        batches = [
            # a policy version, as with rollout.max_staleness, adds metrics by the age of tokens
            dataclasses.replace(
                random_batch(engine, seed=seed, with_sets=of_agent, episodes=of_agent),
                policy_version=2,
            )
            for seed in (0, 1)
        ]
        passes = [engine.old_logprobs(batch, MetricSums(), replay=replay) for batch in batches]
        engine.update(batches[0], passes[0], MetricSums(), replay=replay)
        sums = MetricSums()
        grad_norm = engine.compute_gradient(batches[1], passes[1], sums, replay=replay)
        metrics = sums.reduce(dist.group.WORLD, engine.parallel.device)
        results = results_of(engine, metrics, grad_norm)
        note = BundleNote(3, "a test", with_weights=True)
        write_bundle(Path(folder) / replay, engine, batches[1], passes[1], results, note)
        engine.parallel.destroy()
    dist.destroy_process_group()


def save_where_due(checkpoint, folder):
    """Run SavedBatches on gradients and KLs of several steps; return [(names of the folders,
    reasons, lines)] per setting.
    """
    import torch.distributed as dist

    from megatron_rl.metrics.events import Events
    from megatron_rl.metrics.reduce import MetricSums
    from megatron_rl.trainer.recording.saved_batches import SavedBatches
    from tests.dist.engines import make_engine, random_batch

    dist.init_process_group("gloo")
    engine = make_engine(checkpoint, parallel={"pp": 2})
    batch = random_batch(engine)
    first = MetricSums()
    old = engine.old_logprobs(batch, first, replay="R3")
    sums = MetricSums()
    norm = engine.compute_gradient(batch, old, sums, replay="R3")
    found = []
    for setting, norms, kls in (
        ("every 2", [norm] * 4, {}),
        ("last", [norm, math.nan, norm], {}),
        ("on_anomaly", [norm, math.inf, 9e6, math.nan, 9e6, math.nan], {"anomaly_grad_norm": 8e6}),
        ("on_anomaly", [norm, norm], {"anomaly_kl": 1e-9}),
        ("off", [math.nan, norm], {}),
    ):
        run = {"save_batches": setting, "dir": folder, "name": f"run{len(found)}", **kls}
        cfg = engine.cfg.model_copy(update={"run": engine.cfg.run.model_copy(update=run)})
        lines = []
        cfg.run_dir.mkdir(parents=True, exist_ok=True)
        saver = SavedBatches(
            cfg,
            engine.parallel,
            lines.append,
            Events(cfg.run_dir / f"events_{dist.get_rank()}.jsonl"),
        )
        for step, value in enumerate(norms):
            saver.note_old_pass(batch.index, first)
            save_if_due(saver, step, engine, batch, old, sums, value)
        dist.barrier()
        folders = sorted((cfg.run_dir / "batches").glob("*"))
        headers = [json.loads((each / "bundle.json").read_text()) for each in folders]
        weights = [(each / "weights" / "config.json").exists() for each in folders]
        found.append(
            ([each.name for each in folders], [each["reason"] for each in headers], weights, lines)
        )
        found[-1] += (events_of(cfg.run_dir / f"events_{dist.get_rank()}.jsonl"),)
    found.append(save_in_vain(engine, folder, batch, old, norm))
    engine.parallel.destroy()
    dist.destroy_process_group()
    return found


def save_if_due(saver, step, engine, batch, old, sums, norm):
    """Save what is due, as Trainer.update does between gradient and optimizer."""
    from megatron_rl.trainer.trainer import Trainer

    trainer = SimpleNamespace(engine=engine, parallel=engine.parallel, saved_batches=saver)
    if (due := saver.due(step, batch.index, norm)) is not None:
        Trainer._save_batch(trainer, due, batch, old, sums, norm)


def events_of(path):
    """(kind, step, text) of each."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [(row["kind"], row["step"], row["text"]) for row in map(json.loads, lines)]


def save_in_vain(engine, folder, batch, old, norm):
    """Where rank 0 cannot make the folder, or cannot write the weights: (lines, what is left) each,
    on every rank.
    """
    import torch.distributed as dist

    from megatron_rl.metrics.reduce import MetricSums
    from megatron_rl.trainer.recording.saved_batches import SavedBatches

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    least, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    found = []
    # bytes of a file, less than the weights have
    for name, limit in (("no_folder", least), ("full", 50_000)):
        run = {"save_batches": "every 1", "dir": folder, "name": name}
        cfg = engine.cfg.model_copy(update={"run": engine.cfg.run.model_copy(update=run)})
        if name == "no_folder" and dist.get_rank() == 0:
            cfg.run_dir.write_text("")
        lines = []
        if dist.get_rank() == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
        saver = SavedBatches(cfg, engine.parallel, lines.append)
        save_if_due(saver, 0, engine, batch, old, MetricSums(), norm)
        resource.setrlimit(resource.RLIMIT_FSIZE, (least, most))
        dist.barrier()
        found.append((lines, sorted(each.name for each in (cfg.run_dir / "batches").glob("*"))))
    return found


def replay_bundles(folder):
    """Every bundle in every layout of two ranks: [(mode, layout, exit code)]."""
    import torch.distributed as dist

    from megatron_rl_tools.replay_batch import main

    dist.init_process_group("gloo")
    found = []
    for replay, saved in SAVED.items():
        for layout in SAVED.values():
            text = ",".join(f"{name}={size}" for name, size in layout.items())
            code = main(
                [str(Path(folder) / replay), "--layout", text, "--device", "cpu", "--tokens", "3"]
            )
            found.append((replay, layout == saved, code))
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundles")
    checkpoint = random_checkpoint(folder / "moe")
    run_ranks(save_bundles, 2, checkpoint, folder)
    return folder


def test_every_layout_of_two_ranks_reproduces_what_another_saved(bundles):
    for found in run_ranks(replay_bundles, 2, bundles):
        assert [code for *_, code in found] == [0] * 9


def replay_on_one_rank(folder):
    """The bundles of R2 and of RSPO, each also changed, and wrong arguments: {case: (exit code,
    output)}.
    """
    path, rspo = Path(folder) / "R2", Path(folder) / "none"
    found = {"R2": replay(path), "rspo": replay(rspo)}
    rewrite(path, lambda key, ids: (ids + 1) % 8 if key.endswith(":recorded") else ids)
    rewrite(rspo, lambda key, logs: logs - 0.5 if key.endswith(":router_logprobs") else logs)
    found |= {"other experts": replay(path), "other router": replay(rspo)}
    rewrite(rspo, lambda key, values: None if ":router_" in key and "rows" not in key else values)
    found["no router"] = replay(rspo)
    return found | {
        "no bundle": replay(path / "weights"),
        "bad layout": replay(path, "--layout", "tq=2"),
    }


def rewrite(folder, change):
    """change: (key, tensor) -> the tensor to save in its place; None leaves it out."""
    from safetensors.torch import load_file, save_file

    for file in folder.glob("rank_*.safetensors"):
        values = {key: change(key, value) for key, value in load_file(file).items()}
        save_file({key: value for key, value in values.items() if value is not None}, file)


def replay(path, *options):
    from megatron_rl_tools.replay_batch import main

    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        return main([str(path), "--device", "cpu", "--tokens", "5", *options]), out.getvalue()


def test_one_rank_reproduces_it_and_other_routes_do_not(bundles):
    header = json.loads((bundles / "R2" / "bundle.json").read_text())
    (found,) = run_ranks(replay_on_one_rank, 1, bundles)
    code, text = found["R2"]
    assert code == 0, text
    assert "saved as tp2 ep2, computed as one rank" in text and text.count("pi/mu") == 1
    assert (
        f"{header['loss']:.9g}, here" in text
        and header["step"] == 3
        and math.isfinite(header["grad_norm"])
    )
    assert len(re.findall(r"^  [+-]\d.*e[+-]\d", text, re.MULTILINE)) == 5, "five tokens"
    assert found["rspo"][0] == 0, found["rspo"][1]
    for case in ("other experts", "other router"):
        assert found[case][0] == 1 and "NOT reproduced" in found[case][1], case
    for case, message in (
        ("no router", "no router probabilities"),
        ("no bundle", "not a saved mini-batch"),
        ("bad layout", "--layout tq=2"),
    ):
        assert found[case][0] == 2 and message in found[case][1], case


def test_mini_batches_are_saved_when_due_and_where_something_is_wrong(bundles):
    ranks = run_ranks(save_where_due, 2, bundles / "moe", bundles / "runs")
    for *_, in_vain in ranks:
        assert [(len(lines), left) for lines, left in in_vain] == [(1, [])] * 2, (
            "training continues on every rank"
        )
        assert all("not saved" in lines[0] for lines, _ in in_vain)
        assert "No space" in in_vain[1][0][0] or "File too large" in in_vain[1][0][0]
    every, last, gradients, kl, off, _ = ranks[0]
    assert every[0] == ["step_000002_update_0", "step_000004_update_0"] and every[2] == [True, True]
    assert last[0] == ["last", "step_000002_update_0"] and last[2] == [False, True]
    assert "gradient norm nan" in last[1]
    assert gradients[0] == [f"step_00000{step}_update_0" for step in (2, 3, 4)], "the first three"
    assert (
        gradients[1][0] == "gradient norm inf"
        and "9e+06 above run.anomaly_grad_norm = 8e+06" in gradients[1][1]
    )
    assert len(gradients[3]) == 3 and all(
        "megatron-rl replay-batch" in line for line in gradients[3]
    )
    assert len(kl[0]) == 2 and "above run.anomaly_kl = 1e-09" in kl[1][0]
    assert off[0] == off[4] == every[4] == []
    assert [event[:2] for event in gradients[4]] == [("anomaly", step) for step in range(2, 7)], (
        "every one of them"
    )
    assert gradients[4][0][2] == "update 0: gradient norm inf" and [
        event[1] for event in last[4]
    ] == [2]
    assert [event[:2] for event in kl[4]] == [
        ("anomaly", 1),
        ("anomaly", 2),
    ] and "KL(mu, pi_old)" in kl[4][0][2]
