"""`megatron-rl rehearse` as a user starts it: a recipe of examples/ at full width, two layers."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "examples/qwen3_30b_a3b/off_policy_n4_r3.toml"


def rehearse(out, *options, config=RECIPE):
    return subprocess.run(
        [
            sys.executable, "-m", "megatron_rl.cli", "rehearse", "--config", config, "--out", out,
            *map(str, options),
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip


def test_a_recipe_passes_and_agrees_with_its_plan(tmp_path):
    done = rehearse(tmp_path, "--model", "qwen3-30b-a3b", "--gpus", 8, "--micro-batches", 1)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "rehearsal.json").read_text())
    assert report["errors"] == report["not_known"] == report["slow"] == []
    assert report["ranks"] == [0, 7] and report["operations"] > 5000
    for _, phase, peak, planned, _ in report["memory"]:
        assert phase == "gradient, second"
        assert abs(planned - peak) <= 0.05 * peak
    seconds = report["phases"]
    update = seconds["gradient, second"] + seconds["optimizer, second"]
    assert abs(report["planned_seconds"]["update"] - update) <= 0.2 * update
    # whatever is in a layer or a micro-batch waits on a GPU each time
    waits = {(phase, what) for whose, phase, what, _, _ in report["waits"] if whose != "core"}
    assert not any("gradient" in phase and what != "Event.synchronize" for phase, what in waits)
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in trace} == {0, 7}
    assert "No error on 2 ranks" in (tmp_path / "rehearsal.html").read_text()


def test_what_a_run_would_refuse_is_refused(tmp_path):
    done = rehearse(tmp_path, "--model", "qwen3-30b-a3b", "--gpus", 12)
    assert done.returncode == 2 and "12" in done.stderr
    done = rehearse(tmp_path, "--model", "qwen9", "--gpus", 8)
    assert done.returncode == 2 and "qwen9" in done.stderr
    assert "Traceback" not in done.stderr


def test_weights_that_leave_the_gpu_come_back(tmp_path):
    """The swap with the KL reference, and a colocated run's offload, leave the memory as it was."""
    done = rehearse(
        tmp_path, "--model", "qwen3-30b-a3b", "--gpus", 8, "--ranks", 0, "--micro-batches", 1,
        "--loss.kl_coef", 0.001, "--rollout.release_memory", "true",
        "--rollout.weight_sync", "colocated", "--rollout.max_server_restarts", 0,
        "--rollout.num_servers", 4, "--rollout.gpus", *range(8),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rank = json.loads((tmp_path / "rehearsal.json").read_text())["by_rank"]["0"]
    memory, planned = rank["memory"], rank["planned"]
    before, left = memory["export"]["end"], memory["free weights"]["end"]
    state = planned["weights"] + planned["gradients"] + planned["optimizer"]
    assert abs(before - left - state) <= 0.02 * state
    assert memory["restore"]["end"] == before
    assert memory["old-logprob, second"]["end"] <= before
