"""`megatron-rl rehearse` as a user starts it: a recipe of examples/ at full width, two layers; and
small models in one process, for what that recipe does not have.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.saved_run import GROUP, PROMPTS, make_material

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


@pytest.mark.slow
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


SMALL = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 1024,
    "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "max_position_embeddings": 40960, "rope_theta": 1e6,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
LENGTH, TOP_K = 96, 20


def case(gpus, *options, **parallel):
    sizes = dict(tp=1, cp=1, ep=1, etp=1) | parallel
    layout = [text for key, value in sizes.items() for text in (f"--parallel.{key}", value)]
    sized = ["--run.max_tokens_per_micro_batch", LENGTH, "--data.max_prompt_tokens", 32,
             "--rollout.max_response_tokens", 64]  # fmt: skip
    return ["--config", RECIPE, "--gpus", gpus, *layout, *sized, *options]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Name -> rehearsal.json, of rehearsals that passed."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text(json.dumps(SMALL))
    make_material(folder, steps=1)
    model = ("--model", folder / "model")
    cases = {
        "interleaved": case(
            2, *model, "--layers", 8, "--length", LENGTH, "--micro-batches", 2,
            "--model.recompute", "block", pp=2, vp=2,
        ),
        "every rank": case(
            4, *model, "--layers", 1, "--length", LENGTH, "--micro-batches", 1, "--ranks", "all",
            "--turns", 3, "--rollout.top_p", 0.9, "--rollout.top_k", TOP_K,
            "--rollout.max_staleness", 2, "--megatron.use_precision_aware_optimizer", "true",
            "--megatron.exp_avg_dtype", "bfloat16", tp=2, cp=2, ep=2,
        ),
        "saved": case(
            1, "--model", folder / "moe", "--layers", 2, "--from-rollouts", folder / "live",
            "--run.prompts_per_step", 4, "--run.group_size", 2, "--run.num_mini_batches", 1,
        ),
    }  # fmt: skip
    text = json.dumps({name: list(map(str, options)) for name, options in cases.items()})
    done = subprocess.run(
        [sys.executable, "-m", "tests.rehearsed_steps", folder, "transformer_engine"],
        cwd=ROOT, capture_output=True, text=True, timeout=900, input=text,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for name, status in json.loads(done.stdout.splitlines()[-1]).items():
        assert status == 0, (folder / f"{name}.txt").read_text()
    return {name: json.loads((folder / name / "rehearsal.json").read_text()) for name in cases}


@pytest.mark.slow
def test_nothing_is_guessed_and_the_plan_agrees(small):
    for name, report in small.items():
        assert report["errors"] == report["not_known"] == report["slow"] == [], name
        for rank, _, peak, planned, _ in report["memory"]:
            assert abs(planned - peak) <= 0.03 * peak, (name, rank)


@pytest.mark.slow
def test_an_interleaved_pipeline_runs_both_chunks_of_a_rank(small):
    report = small["interleaved"]
    assert report["ranks"] == [0, 1]
    # two chunks of two layers on each of two ranks; embedding and head are on one each
    first, last = (report["by_rank"][rank]["parameters"] for rank in "01")
    assert first == last - SMALL["hidden_size"]  # the final norm


@pytest.mark.slow
def test_the_expert_ids_that_were_not_rehearsed_are_known(small):
    for item in small["interleaved"]["by_rank"].values():
        planned = item["planned"]
        layers, rows = SMALL["num_hidden_layers"] // 2, sum(item["rows"])
        here = rows * layers * SMALL["num_experts_per_tok"]  # one byte for an id
        assert planned["routes"] - planned["ids not rehearsed"] == here > 0


@pytest.mark.slow
def test_ranks_that_are_no_role_take_no_more_memory(small):
    memory = {rank: peak for rank, _, peak, _, _ in small["every rank"]["memory"]}
    assert memory.keys() == {0, 1, 2, 3}
    assert max(memory.values()) <= max(memory[rank] for rank in (0, 2, 3)) + 8192


@pytest.mark.slow
def test_kept_sets_go_to_the_ranks_that_have_their_rows(small):
    copies = [
        num_bytes
        for phase, _, line, _, num_bytes in small["every rank"]["copies"]
        if phase == "gradient, second" and "sets_of_tokens" in line
    ]
    # rank 0 has the first and the last quarter of the sequence, with 18 and 19 sampled tokens
    assert copies.count(37 * TOP_K * 8) == 2  # ids, and the row of each


@pytest.mark.slow
def test_a_checkpoint_has_weights_and_the_optimizers_state(small):
    for rank, item in small["every rank"]["by_rank"].items():
        state, planned = item["checkpoint"], item["planned"]
        assert state["bytes of the optimizer"] == planned["optimizer"], rank
        assert state["bytes"] == planned["optimizer"] + 2 * item["parameters"], rank
        memory = item["memory"]["checkpoint"]
        assert memory["peak"] == memory["start"] == memory["end"]


@pytest.mark.slow
def test_saved_rollouts_are_trained_on(small):
    lengths = small["saved"]["by_rank"]["0"]["lengths"]
    assert len(lengths) == PROMPTS * GROUP and lengths == sorted(lengths, reverse=True)
    assert max(lengths) < LENGTH // 4  # which invented ones would fill
