"""A run that a signal stops and that is started again ends as one left alone, byte for byte; real ranks, saved rollouts."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.dist.launch import run_ranks
from tests.saved_run import make_material, sections

K = 2  # steps before the signal; the whole run has 2 K


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    return make_material(tmp_path_factory.mktemp("material"), steps=2 * K)


def train_here(cfg, rollouts, stop_at=None):
    """Train on this rank.  stop_at: (report number, rank that gets SIGTERM then); returns whether the signal ended it."""
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
    """Per cell: 2 K steps at once; K steps, a signal to one rank, and K more.  Everything that is left must be the same."""
    import torch.distributed as dist

    from megatron_rl.checkpoint.manifest import read_manifest
    from megatron_rl.config import load_config

    dist.init_process_group("gloo")
    for name, more in cells.items():
        for way in ("whole", "stopped"):
            cfg = load_config(None, [], sections(material, work / name / way, steps=2 * K, **more))
            stop_at = (K - 1, 1) if way == "stopped" else None
            assert train_here(cfg, material / "live", stop_at) == (way == "stopped")
            if way == "stopped":
                assert not train_here(cfg, material / "live")
        if dist.get_rank() == 0:
            ends = [work / name / way / "run" for way in ("whole", "stopped")]
            assert (ends[1] / f"checkpoints/step_{K:06d}").exists()
            assert metrics(ends[0]) == metrics(ends[1]), name
            files = [read_manifest(end / f"checkpoints/step_{2 * K:06d}").files for end in ends]
            same = [file for file in files[0] if file.endswith((".distcp", ".safetensors"))]
            assert len(same) >= 4 and [files[0][f] for f in same] == [files[1][f] for f in same], name
            assert progress(ends[0]) == progress(ends[1]), name
        dist.barrier()
    dist.destroy_process_group()


def metrics(run: Path) -> str:
    """Every step's metrics but the times, exactly: NaN is null."""
    rows = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows[row["step"]] = {key: value for key, value in row.items() if not key.startswith(("time/", "perf/"))}
    assert list(rows) == list(range(2 * K)), "each step once, in order"
    return json.dumps(rows)


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
DEFAULT = {"ep2 R3": LAYOUTS["ep2"] | {"checkpoint": {"async_save": True, "every": 1, "keep_last": 3}}}


def test_a_stopped_run_ends_as_one_left_alone(material, tmp_path):
    run_ranks(compare_runs, 2, material, tmp_path, DEFAULT)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stopped_run_ends_as_one_left_alone_in_every_layout_and_mode(material, tmp_path, layout):
    cells = {f"{layout} {mode}": LAYOUTS[layout] | {"replay": {"mode": mode}} for mode in MODES}
    run_ranks(compare_runs, 2, material, tmp_path, cells, timeout=590)
