"""`make demo` in bf16 on both sides: the demo's own script against a real server, and wrong models
against the same answers.
"""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from megatron_rl_tools.make_tiny_moe import Settings, model_config, write_checkpoint
from megatron_rl_tools.tiny_tasks import sums
from megatron_rl_tools.tiny_text import make_tokenizer
from tests.dist.launch import run_ranks

ROOT = Path(__file__).resolve().parents[2]
MODEL = ".cache/tiny_moe-0"


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    """A folder in which the demo's script finds what it needs.

    The checkpoint is random and says it is the demo's: training that one takes longer than the run.
    """
    folder = tmp_path_factory.mktemp("demo")
    for name in ("examples", "megatron_rl", "tools"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(sys.prefix)
    settings = Settings()
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    model = Qwen3MoeForCausalLM(model_config(settings, tokenizer))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0.0, 0.3 if "gate.weight" in name or "lm_head" in name else 0.1)
    train, heldout = sums(0, 8)
    write_checkpoint(
        folder / MODEL,
        model,
        tokenizer,
        {"digest": settings.digest, "heldout_accuracy": 0.0},
        train[:64],
        heldout,
    )
    return folder


@pytest.fixture(scope="module")
def output(demo) -> str:
    """What `make demo STEPS=2 NAME=bf16 ARGS='--model.dtype bfloat16'` prints, with small steps
    whose rollouts are kept.
    """
    small = (
        "--run.prompts_per_step",
        "16",
        "--eval.samples",
        "1",
        "--rollout.save_tensors",
        "True",
    )
    done = subprocess.run(
        ["bash", "examples/tiny_cpu/run.sh", "--model.dtype", "bfloat16", *small],
        cwd=demo, env=os.environ | {"STEPS": "2", "NAME": "bf16"}, capture_output=True, text=True,
        timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_a_bf16_trainer_and_a_bf16_server_start_and_train(demo, output):
    assert "up to date" in output and "SGLang" in output
    assert re.search(
        r"^parity: trainer bfloat16, server bfloat16: \|log mu - log pi\| mean \d\.\de-0\d ",
        output,
        re.M,
    )
    # the random model solves nothing, which is said before the first update
    assert re.findall("WARNING.*", output) == re.findall(
        "WARNING before the first update: every response of this step has reward 0.*", output
    )
    rows = [
        json.loads(line) for line in (demo / "runs/bf16/metrics.jsonl").read_text().splitlines()
    ]
    steps = [row for row in rows if "train/loss" in row]
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        assert all(
            math.isfinite(row[name])
            for name in ("rollout/reward_mean", "train/loss", "optim/grad_norm")
        )
        assert row["train/nonfinite_frac"] == 0 and row["optim/skipped_updates"] == 0
        assert 1e-5 < row["train/logratio_abs_mean"] < 0.1, (
            "bf16 on both sides, the same weights after every push"
        )
        assert row["routing/replayed_mismatch"] == 0
    assert list((demo / "runs/bf16/hf").glob("*.safetensors"))


@pytest.mark.slow
def test_wrong_models_are_refused_in_bf16(demo, output):
    """The rollouts of step 1 are the served checkpoint's: with its weights the parity check passes,
    with wrong ones it does not."""
    ((warnings, refused),) = run_ranks(check_demo, 1, demo, timeout=200)
    assert not warnings
    wrong = {
        "layer 2 of another seed", "all layers of another seed", "rope theta 100 times smaller",
        "experts of layer 2 permuted",
        "experts of all layers permuted", "temperature 0.7 instead of 1",
        "answers shifted by one token",
    }  # fmt: skip
    assert wrong <= refused.keys()
    for text in refused.values():
        assert re.search(
            r"rollout\.parity_(max_logprob_diff|min_expert_overlap) = [\d.]+, the limit of a"
            r" bfloat16 trainer",
            text,
        )


def check_demo(demo: Path) -> tuple[list[str], dict[str, str]]:
    """On a rank: (warnings about the right model, {wrong model: the error})."""
    from megatron_rl.config import load_config
    from megatron_rl.config.parity_limits import parity_limits
    from megatron_rl.distributed import make_parallel
    from megatron_rl.engine.engine import Engine
    from megatron_rl.engine.parity import ParityError, compare
    from megatron_rl.rollout.saved.saved_steps import SavedSteps
    from tests.wrong_models import wrong_models

    os.chdir(demo)  # the configuration's paths are relative to it
    run = Path("runs/bf16")
    cfg = load_config(run / "config.toml", ["--parallel.ep", "1", "--run.name", "wrong"])
    engine = Engine(
        cfg, make_parallel(cfg.parallel, device="cpu", timeout_minutes=2), total_updates=1
    )
    groups = SavedSteps(run, cfg, engine.spec).groups(0, 0, 1)
    limits, warnings, refused = parity_limits(cfg, "bfloat16"), [], {}
    compare(engine, groups, cfg).check(limits, warnings.append)
    for wrong, found in wrong_models(engine, groups, cfg):
        try:
            found.check(limits, lambda text: None)
        except ParityError as error:
            refused[wrong] = str(error)
    compare(engine, groups, cfg).check(limits, warnings.append)  # every change was reverted
    engine.parallel.destroy()
    return warnings, refused


def learned(folder: Path, script: str, steps: int) -> list[dict[str, float]]:
    """Run the first steps of a demo in `folder`; return its metrics, a row per step and
    evaluation.
    """
    for name in ("examples", "megatron_rl", "tools"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(sys.prefix)
    done = subprocess.run(
        ["bash", script],
        cwd=folder, env=os.environ | {"STEPS": str(steps), "NAME": "run"}, capture_output=True,
        text=True, timeout=3000,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = (folder / "runs/run/metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_the_tiny_model_learns_to_call_a_calculator(tmp_path):
    """`make demo-tools`, half of its steps: calls, right answers, the experts of every turn's own
    request.
    """
    rows = learned(tmp_path, "examples/tools_cpu/run.sh", 20)
    before, after = (row["eval/heldout/avg@2"] for row in rows if "eval/heldout/avg@2" in row)
    assert after >= before + 0.3
    steps = [row for row in rows if "train/loss" in row]
    assert steps[-1]["episode/tool_calls"] > steps[0]["episode/tool_calls"] + 0.5
    assert all(
        row["routing/replayed_mismatch"] == 0 < row["rollout/environment_length_mean"]
        for row in steps
    )
    assert 2 <= steps[-1]["rollout/turns_mean"] < 4
    assert {"episode/tool_errors", "rollout/environment_seconds_mean"} <= steps[-1].keys()


@pytest.mark.slow
def test_the_tiny_model_that_chats_learns_to_serve_an_openai_program(tmp_path):
    """`make demo-agent`: the program's own reward rises, and nothing of an episode is lost."""
    rows = learned(tmp_path, "examples/agent_cpu/run.sh", 15)
    before, after = (row["eval/heldout/avg@1"] for row in rows if "eval/heldout/avg@1" in row)
    assert after >= before + 0.3
    steps = [row for row in rows if "train/loss" in row]
    assert steps[-1]["episode/calls"] > 0.8
    for row in steps:
        assert row["routing/replayed_mismatch"] == 0 == row["rollout/failed_episodes_total"]
        assert row["rollout/unread_turns_total"] == 0


@pytest.mark.slow
def test_a_student_learns_two_tasks_from_two_teachers(tmp_path):
    """`make demo-distil`: both held-out accuracies rise without a reward, and the divergence from
    the teachers falls.
    """
    rows = learned(tmp_path, "examples/distil_cpu/run.sh", 60)
    for source in ("sums", "flips"):
        name = f"eval/{source}/avg@4"
        before, after = (row[name] for row in rows if name in row)
        assert after >= before + 0.3, source
    steps = [row for row in rows if "train/loss" in row]
    assert steps[-1]["teacher/divergence"] < 0.3 * steps[0]["teacher/divergence"]
    assert steps[-1]["teacher/top1_frac"] > steps[0]["teacher/top1_frac"]
