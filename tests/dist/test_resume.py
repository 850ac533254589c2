"""A run that a signal stops and that is restarted ends byte for byte as an uninterrupted one; real
ranks, saved rollouts.

The uninterrupted one is logged: what each step does with which mini-batch, in which order, at which
learning rate.
"""

import json
import os
import signal
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.dist.launch import run_ranks
from tests.saved_run import GROUP, PROMPTS, make_material, sections

K = 2  # steps before the signal; the complete run has 2 K
N = 2  # mini-batches of a step
RUN = {"num_mini_batches": N, "seed": 7}  # with this seed the mini-batches differ between steps


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    return make_material(tmp_path_factory.mktemp("material"), steps=2 * K)


def train_here(cfg, rollouts, stop_at=None):
    """Train on this rank.

    stop_at: (report number, rank that gets SIGTERM then); returns whether the signal ended it.
    """
    import torch.distributed as dist

    from megatron_rl.launch.signals import StoppedBySignal
    from megatron_rl.train import train
    from megatron_rl.trainer.trainer import Trainer

    report = Trainer.report

    def report_and_kill(self, step, *args):
        if stop_at == (step, dist.get_rank()):
            os.kill(os.getpid(), signal.SIGTERM)
        return report(self, step, *args)

    Trainer.report = report_and_kill
    try:
        train(cfg, rollouts)
    except StoppedBySignal:
        return True
    finally:
        Trainer.report = report
    return False


def compare_runs(material, work, cells):
    """Per cell: 2 K steps; or K steps, a signal to one rank, and K more.  The resulting files must
    be the same.

    The stopped run writes token data (rollout.save_tensors), the complete one does not: that must
    not change a bit either.
    """
    import torch.distributed as dist

    from megatron_rl.checkpoint.manifest import read_manifest
    from megatron_rl.config import load_config

    dist.init_process_group("gloo")
    for name, more in cells.items():
        for way in ("complete", "stopped"):
            rollout = {
                "rollout": {"dtype": "float32", "save_tensors": 0.5 if way == "stopped" else False}
            }
            cfg = load_config(
                None,
                [],
                sections(material, work / name / way, steps=2 * K, run=RUN, **rollout, **more),
            )
            stop_at = (K - 1, 1) if way == "stopped" else None
            with watched() as log:
                assert train_here(cfg, material / "live", stop_at) == (way == "stopped")
            if way == "stopped":
                assert not train_here(cfg, material / "live")
            else:
                check_steps(log)
        if dist.get_rank() == 0:
            ends = [work / name / way / "run" for way in ("complete", "stopped")]
            assert (ends[1] / f"checkpoints/step_{K:06d}").exists()
            assert metrics(ends[0]) == metrics(ends[1]), name
            files = [read_manifest(end / f"checkpoints/step_{2 * K:06d}").files for end in ends]
            same = [file for file in files[0] if file.endswith((".distcp", ".safetensors"))]
            assert len(same) >= 4 and [files[0][f] for f in same] == [files[1][f] for f in same], (
                name
            )
            assert progress(ends[0]) == progress(ends[1]), name
            assert not (ends[0] / "trained").exists() and not (ends[0] / "rollouts").exists()
            check_token_data(ends[1], replicas=2 if name.startswith(("dp2", "ep2")) else 1)
            check_events(ends[1])
        dist.barrier()
    dist.destroy_process_group()


@contextmanager
def watched():
    """A log of the calls of this rank's Engine and Trainer: (name, mini-batch or version, result or
    argument).
    """
    from megatron_rl.engine.engine import Engine
    from megatron_rl.trainer.trainer import Trainer

    log = []

    def old_logprobs(engine, batch, *arguments, **settings):
        log.append(("old", batch, found := real_old(engine, batch, *arguments, **settings)))
        return found

    def compute_gradient(engine, batch, old, *arguments, **settings):
        log.append(("update", batch, old))
        return real_gradient(engine, batch, old, *arguments, **settings)

    def logged(name):
        def method(run, *arguments, **options):
            log.append((name, arguments[0] if arguments else options["version"], None))
            real[name](run, *arguments, **options)

        return method

    real_old, real_gradient = Engine.old_logprobs, Engine.compute_gradient
    real = {name: getattr(Trainer, name) for name in ("sync_weights", "save")}
    Engine.old_logprobs, Engine.compute_gradient = old_logprobs, compute_gradient
    for name in real:
        setattr(Trainer, name, logged(name))
    try:
        yield log
    finally:
        Engine.old_logprobs, Engine.compute_gradient = real_old, real_gradient
        for name, method in real.items():
            setattr(Trainer, name, method)


def check_steps(log):
    """pi_old of all N mini-batches before the first update, one update of each with its own pi_old,
    then the weight sync; every response once a step, and not always in the same mini-batch."""
    import torch.distributed as dist

    names = [*["old"] * N, *["update"] * N, "sync_weights", "save"]
    # the last: at the end of the run
    assert [name for name, _, _ in log] == [*names * 2 * K, "save"]
    assert log[-1][1] == 2 * K
    members: list[list[list[str]]] = []
    for step in range(2 * K):
        *calls, (_, synced, _), (_, saved, _) = log[step * len(names) : (step + 1) * len(names)]
        assert synced == saved == step + 1
        for (_, batch, found), (_, updated, given) in zip(calls[:N], calls[N:], strict=True):
            assert batch is updated and found is given
        members.append(
            [
                [name for micro in batch.micro_batches for name in micro.rollout_ids]
                for _, batch, _ in calls[:N]
            ]
        )
    ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, members)
    parts = [
        [{name for rank in ranks for name in rank[step][part]} for part in range(N)]
        for step in range(2 * K)
    ]
    every = {f"p{p}/{k}" for p in range(PROMPTS) for k in range(GROUP)}
    assert all(set().union(*step) == every and sum(map(len, step)) == len(every) for step in parts)
    assert any(step != parts[0] for step in parts), "the same split at every step"


def metrics(run: Path) -> str:
    """Exact metrics of every step, without times: NaN is null."""
    rows = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows[row["step"]] = {
            key: value for key, value in row.items() if not key.startswith(("time/", "perf/"))
        }
    assert list(rows) == list(range(1, 2 * K + 1)), "each step once, in order"
    # linear, the warm-up of one update done
    rates = [1e-3 * (1 - update / (2 * K * N)) for update in range(2 * K * N)]
    assert [row["optim/lr"] for row in rows.values()] == pytest.approx(
        [sum(rates[N * (s - 1) :][:N]) / N for s in rows]
    )
    assert [row["policy_version"] for row in rows.values()] == list(rows)
    return json.dumps(rows)


def check_token_data(run: Path, *, replicas: int) -> None:
    """The lines of every step name each sequence once, and half of the groups have both halves of
    their tensors.

    Under data parallelism sequences are trained on any replica: a line names the file of the
    rollout's line.
    """
    from safetensors.numpy import load_file

    from megatron_rl.config.run_paths import RunFolder, replica_of

    rollouts = {
        (line["step"], file.writer, line["id"]): line
        for file in RunFolder(run).line_files("rollouts")
        for line in read_lines(file.path)
    }
    trained = {
        (line["step"], line["sampled_by"], line["id"]): line
        for path in run.glob("trained/*.jsonl")
        for line in read_lines(path)
    }
    assert trained.keys() == rollouts.keys() and len(trained) == 2 * K * PROMPTS * GROUP
    assert (
        len({sampled_by for _, sampled_by, _ in trained})
        == replicas
        == len({file.dp_rank for file in RunFolder(run).line_files("trained")})
    )
    saved = {key: line for key, line in trained.items() if line["tensors"]}
    assert len(saved) == len(trained) // 2, "save_tensors = 0.5"
    choices = [{name for at, _, name in saved if at == step} for step in range(1, 2 * K + 1)]
    assert any(choice != choices[0] for choice in choices), "the same groups at every step"
    for (step, sampled_by, name), line in saved.items():
        servers, own = (
            load_file(RunFolder(run).tensors_of("rollouts", step, replica_of(sampled_by))),
            load_file(run / line["tensors"]),
        )
        sampled, length = len(servers[f"{name}:logprobs"]), len(servers[f"{name}:tokens"])
        assert own[f"{name}:logprobs"].shape == (1, sampled) and own[f"{name}:flags"].shape == (
            sampled,
        )
        assert own[f"{name}:advantage"][0] == pytest.approx(
            rollouts[step, sampled_by, name]["advantage"], rel=1e-6
        )
        if f"{name}:own_experts" in own:
            assert own[f"{name}:own_experts"].shape == servers[f"{name}:routed_experts"].shape
            assert own[f"{name}:flips"].shape == (length - 1, 1)
        gap = (servers[f"{name}:logprobs"] - own[f"{name}:old_logprobs"]).astype(np.float64)
        assert line["kl"] == pytest.approx(gap.mean(), rel=1e-5, abs=1e-6)
    assert not list(run.glob("*.part"))


def check_events(run: Path) -> None:
    """The resumed run continues the file of the one that the signal stopped."""
    events = read_lines(run / "events.jsonl")
    assert [event["kind"] for event in events if event["kind"] in ("start", "resume", "stop")] == [
        "start", "stop", "resume", "stop",
    ]  # fmt: skip
    first, second = (event for event in events if event["kind"] == "stop")
    assert (
        "StoppedBySignal" in first["text"]
        and second["text"] == "finished"
        and first["time"] <= second["time"]
    )
    assert {event["step"] for event in events if event["kind"] == "checkpoint"} >= {K, 2 * K}


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def progress(run: Path) -> dict:
    state = json.loads((run / f"checkpoints/step_{2 * K:06d}/state.json").read_text())
    return {key: state[key] for key in ("step", "progress", "schedule", "adam_step")}


LAYOUTS = {
    "dp2": {"parallel": {}},
    "tp2": {"parallel": {"tp": 2}},
    "pp2": {"parallel": {"pp": 2}},
    "ep2": {"parallel": {"ep": 2}},
    "vp2": {"parallel": {"pp": 2, "vp": 2}},
}
MODES = ("none", "R2", "R3")
DEFAULT = {
    "ep2 R3": LAYOUTS["ep2"] | {"checkpoint": {"async_save": True, "every": 1, "keep_last": 3}}
}


def test_a_stopped_run_ends_as_an_uninterrupted_one(material, tmp_path):
    run_ranks(compare_runs, 2, material, tmp_path, DEFAULT)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stopped_run_ends_as_an_uninterrupted_one_in_every_layout_and_mode(
    material, tmp_path, layout
):
    cells = {f"{layout} {mode}": LAYOUTS[layout] | {"replay": {"mode": mode}} for mode in MODES}
    run_ranks(compare_runs, 2, material, tmp_path, cells, timeout=590)
