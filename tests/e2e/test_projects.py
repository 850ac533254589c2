"""A recipe's project on a machine without a GPU, by the commands of its README: prepare.py on rows
in its data's schema, the dry run, and (slow) two steps of a tiny random model with a real SGLang
server.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.recipes import new
from tests.tiny import random_checkpoint
from tests.unit.recipes.material import DATA, write
from tests.words import qwen_tokenizer

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n"
)
LAPTOP = """
--run.device cpu --run.num_steps 2 --run.prompts_per_step 4 --run.group_size 2
--run.max_tokens_per_micro_batch 2048 --run.num_mini_batches 1
--model.dtype float32 --model.layer_spec local --model.recompute none
--parallel.tp 1 --parallel.cp 1 --parallel.ep 1 --optim.distributed false
--rollout.dtype float32 --rollout.num_servers 1 --rollout.gpus --rollout.weight_sync distributed
--rollout.release_memory false --rollout.max_total_tokens 8192
--rollout.max_response_tokens {length}
--rollout.max_running_requests 16 --reward.num_workers 1 --eval.max_prompts 1 --eval.every 0
--eval.samples 1 --eval.temperature 0 --checkpoint.every 0
"""
"""The recipe's settings that a laptop cannot have."""


def call(folder, *command):
    """Run a command of the README in the project; return what it printed."""
    env = os.environ | {
        # megatron-rl, and the python of agent.command, which has the openai package
        "PATH": f"{folder.parent / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tools", ROOT / "viewer"))),
        "GPUS": "1",
        "MASTER_PORT": "0",
    }
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def make_project(recipe: str, folder: Path) -> Path:
    """Make a project of the recipe with a tiny random model, and its data."""
    program = folder / "bin/megatron-rl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m megatron_rl.cli "$@"\n')
    program.chmod(0o755)
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = TEMPLATE
    model = random_checkpoint(
        folder / "model",
        vocab_size=len(tokenizer),
        num_hidden_layers=2,
        max_position_embeddings=65_536,
        eos_token_id=tokenizer.eos_token_id,
    )
    tokenizer.save_pretrained(model)
    project = folder / "project"
    assert new.main([str(project), "--recipe", recipe, "--gpus", "1", "--model", str(model)]) == 0
    files = [
        f"{name}={write(folder / f'{name}.jsonl', rows)}" for name, rows in DATA[recipe].items()
    ]
    printed = call(project, sys.executable, "prepare.py", "--from", *files)
    assert "longest prompt: " in printed and "right answers get 1.00 on average" in printed
    return project


def laptop_options(recipe: str) -> list[str]:
    # what tools answer is part of a response
    return LAPTOP.format(length=200 if recipe in ("agent", "search") else 8).split()


def test_a_recipe_prepares_its_data_and_passes_the_dry_run(tmp_path):
    project = make_project("gsm8k", tmp_path)
    assert "Ranks" in call(project, "bash", "run.sh", "--dry-run", *laptop_options("gsm8k"))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["gsm8k", "agent", "math", "search"])
def test_a_recipe_prepares_checks_and_trains(recipe, tmp_path):
    project, options = make_project(recipe, tmp_path), laptop_options(recipe)
    assert "Ranks" in call(project, "bash", "run.sh", "--dry-run", *options)
    printed = call(project, "bash", "run.sh", *options)
    if recipe != "agent":  # the last number of random tokens may be right
        place = printed.index("WARNING before the first update: every response of this step has")
        assert place < printed.index("step 1/2"), "random tokens solve nothing, which is said first"
    run = project / f"runs/{recipe}"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2]
    sets = {f"eval/{name}/avg@1" for name in DATA[recipe] if name != "train"}
    assert sets <= rows[0].keys() and (run / "hf/config.json").is_file()
