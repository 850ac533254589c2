"""megatron-rl new: every recipe is complete, its project passes the dry run and has the planner's
layout, and nothing is overwritten.
"""

import os
import re
import shutil
import stat
import subprocess
import tomllib

import pytest

from megatron_rl.config import load_config
from megatron_rl.models.known import HUB, KNOWN, RENDERERS
from megatron_rl.plan.dry_run import MEMORY_TITLE, report
from megatron_rl.plan.functions import problem_of
from megatron_rl.plan.hardware import find_hardware
from megatron_rl.plan.preflight import REWARD_ARGUMENTS
from megatron_rl.recipes import new
from megatron_rl.recipes.toml_values import with_values
from megatron_rl_tools.tiny_text import make_tokenizer
from tests.tiny import random_checkpoint

RECIPES = sorted(new.recipes())


def joined(text):
    return " ".join(text.split())


def make(folder, recipe, *options):
    return new.main([str(folder), "--recipe", recipe, *options])


def test_the_list_names_every_recipe(capsys):
    assert new.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == RECIPES and {"gsm8k", "math"} <= set(RECIPES)
    assert all(len(line.split()) > 4 for line in lines)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_complete(recipe):
    folder = new.recipes()[recipe]
    names = {path.name for path in folder.iterdir()} - {"__pycache__"}
    assert {"README.md", "config.toml", "prepare.py", "run.sh"} <= names
    assert names & {"reward.py", "agent.py"} and "__init__.py" not in names
    readme, config = (folder / "README.md").read_text(), (folder / "config.toml").read_text()
    assert new.TITLE.match(readme)["name"] == recipe and "not\nrun** on GPUs" in readme
    assert len(new.BLOCK.search(readme)[1].splitlines()) == 3, "the next three commands"
    assert new.get_model(new.MODEL) in readme and len(new.LAYOUT.findall(config)) == 1
    assert "NOT RUN on GPUs" in config
    run = (folder / "run.sh").read_text()
    assert len(new.PER_NODE.findall(run)) == len(new.NODES.findall(run)) == 1
    assert new.KIND.findall(run) == [""] and f"--dry-run --model.path {new.MODEL}`" in joined(
        readme
    )
    assert max(map(len, (folder / "prepare.py").read_text().splitlines())) <= 100
    assert len((folder / "prepare.py").read_text().splitlines()) <= 60, "a screen"


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_recipes_layout_is_the_planners(recipe, tmp_path):
    assert make(tmp_path / "p", recipe, "--gpus", "8", "--model", new.MODEL) == 0
    for path in new.recipes()[recipe].iterdir():
        if path.is_file():
            assert (tmp_path / "p" / path.name).read_text() == path.read_text(), path.name
    assert os.stat(tmp_path / "p/run.sh").st_mode & stat.S_IXUSR


@pytest.mark.parametrize(
    ("recipe", "model", "gpus"),
    [(recipe, "qwen3-30b-a3b", gpus) for recipe in RECIPES for gpus in (8, 16)]
    + [("gsm8k", "olmoe-1b-7b", 2), ("gsm8k", "qwen3-235b-a22b", 64)],
)
def test_a_project_passes_the_dry_run(recipe, model, gpus, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert make(tmp_path / "p", recipe, "--gpus", str(gpus), "--model", model) == 0
    monkeypatch.chdir(tmp_path / "p")
    cfg = load_config("config.toml", ["--model.path", model])
    found = report(cfg, gpus)
    assert "WARNING, more" not in found and "Memory of a GPU by phase" in found
    assert load_config("config.toml").model.path.parts == ("checkpoints", model)
    assert bool(cfg.rollout.urls) == (gpus > 8) and cfg.rollout.release_memory == (gpus <= 8)
    run = (tmp_path / "p/run.sh").read_text()
    assert f'"${{GPUS:={min(gpus, 8)}}}" "${{NNODES:={max(gpus // 8, 1)}}}"' in run
    line = new.LAYOUT.search((tmp_path / "p/config.toml").read_text())[0]
    assert line.startswith(f"# Layout: {model} on {gpus} x H100-SXM: tp {cfg.parallel.tp}, ")
    # what the file says is what was planned: every setting of the layout is in it
    planned = re.search(r"measured: ([\d.]+) of", line)[1]
    table = found.partition(MEMORY_TITLE)[2].partition("saving a checkpoint")[0]
    totals = [float(total) for total in re.findall(r"([\d.]+) GiB$", table, re.M)]
    assert max(totals) == pytest.approx(float(planned), abs=0.06)
    # with the servers that the file names
    seconds = float(re.search(r"a step +([\d.]+) s", found)[1])
    assert float(re.search(r", (\d+) s a step", line)[1]) == pytest.approx(seconds, abs=0.6)
    readme = joined((tmp_path / "p/README.md").read_text())
    assert HUB[model] in readme and f"--dry-run --model.path {model}`" in readme


def test_a_project_for_other_gpus_checks_them(tmp_path, monkeypatch):
    """Four H200 hold what four H100 do not: the servers alternate with the trainer on both."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert make(tmp_path / "p", "gsm8k", "--gpus", "4", "--gpu", "H200") == 0
    assert '"${GPU:=h200}"' in (tmp_path / "p/run.sh").read_text()
    cfg = load_config(tmp_path / "p/config.toml", ["--model.path", new.MODEL, "--run.device=cuda"])
    assert "Memory of a GPU by phase" in report(cfg, 4, find_hardware("h200"))
    with pytest.raises(ValueError, match="training: a GPU would hold") as error:
        report(cfg, 4)
    assert "use more ranks, or another layout" in str(error.value)
    assert "--gpu" in str(error.value) and "release_memory" not in str(error.value)


def test_a_project_with_adapters_has_their_layout_and_ten_times_the_rate(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert make(tmp_path / "p", "gsm8k", "--lora") == 0
    monkeypatch.chdir(tmp_path / "p")
    cfg, plain = load_config("config.toml"), load_config(new.recipes()["gsm8k"] / "config.toml")
    assert (cfg.lora.rank, cfg.lora.alpha, cfg.lora.targets) == (16, 32.0, ("all",))
    assert cfg.optim.lr == pytest.approx(10 * plain.optim.lr)
    line = new.LAYOUT.search((tmp_path / "p/config.toml").read_text())[0]
    assert line.endswith("; adapters of rank 16")
    planned = float(re.search(r"measured: ([\d.]+) of", line)[1])
    text = report(load_config("config.toml", ["--model.path", new.MODEL]), 8)
    table = text.partition(MEMORY_TITLE)[2].partition("saving a checkpoint")[0]
    totals = [float(total) for total in re.findall(r"([\d.]+) GiB$", table, re.M)]
    assert max(totals) == pytest.approx(planned, abs=0.06)
    assert make(tmp_path / "q", "gsm8k", "--lora", "64") == 0
    assert load_config(tmp_path / "q/config.toml").lora.rank == 64


@pytest.mark.parametrize("recipe", ["agent", "search"])
def test_a_project_of_an_agent_has_the_models_chat_format(recipe, tmp_path, capsys):
    assert make(tmp_path / "p", recipe, "--model", "deepseek-v3", "--gpus", "512") == 0
    assert load_config(tmp_path / "p/config.toml").agent.renderer == "deepseek-v3"
    assert "chat format" not in capsys.readouterr().out
    model = random_checkpoint(tmp_path / "model", max_position_embeddings=8192)
    assert make(tmp_path / "q", recipe, "--model", str(model), "--gpus", "1") == 0
    assert load_config(tmp_path / "q/config.toml").agent.renderer == "qwen3"
    assert "agent.renderer = qwen3 may not be its chat format" in capsys.readouterr().out
    from renderers.base import MODEL_RENDERER_MAP  # imports transformers: seconds

    assert {name: MODEL_RENDERER_MAP.get(HUB[name]) for name in HUB} == {
        name: RENDERERS.get(name) for name in HUB
    }


@pytest.mark.parametrize("recipe", RECIPES)
def test_comments_hold_for_the_layout_that_is_written(recipe, tmp_path):
    """16 GPUs have another recompute in some recipes, and servers that others started."""
    assert make(tmp_path / "p", recipe, "--gpus", "16") == 0
    config = (tmp_path / "p/config.toml").read_text()
    (line,) = [line for line in config.splitlines() if line.startswith("recompute = ")]
    assert "none and selective are faster and need more memory" in line
    assert tomllib.loads(config)["rollout"]["urls"]
    assert "alternation" not in config and "colocated" not in config


def test_every_known_model_has_a_checkpoint_on_the_hub():
    assert HUB.keys() == KNOWN.keys()


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_reward_of_a_recipe_can_be_called(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(new.recipes()[recipe])
    config = tomllib.loads((new.recipes()[recipe] / "config.toml").read_text())
    if ":" in (name := config["reward"]["function"]):
        assert problem_of(name, *REWARD_ARGUMENTS) is None


def test_a_directory_of_a_model_is_used_as_it_is(tmp_path, capsys):
    model = tmp_path / "my model"
    random_checkpoint(model, max_position_embeddings=256)
    make_tokenizer().save_pretrained(model)
    assert make(tmp_path / "p", "gsm8k", "--model", str(model), "--gpus", "1") == 2
    assert "max_position_embeddings" in capsys.readouterr().err
    assert not (tmp_path / "p").exists(), "nothing is written where the model does not fit"
    random_checkpoint(model, max_position_embeddings=4096)
    assert make(tmp_path / "p", "gsm8k", "--model", str(model), "--gpus", "1") == 0
    assert load_config(tmp_path / "p/config.toml").model.path == model
    block = new.BLOCK.search((tmp_path / "p/README.md").read_text())[1]
    assert block.splitlines()[0] == "python prepare.py", "nothing is downloaded for it"
    assert "at the plan first: `bash run.sh --dry-run`." in (tmp_path / "p/README.md").read_text()
    assert "next:\n  cd" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--recipe", "gsm9k"], "--recipe gsm9k: no such recipe; did you mean gsm8k?"),
        (["--recipe", "zzz"], "no such recipe; recipes: "),
        (["--recipe", "gsm8k", "--model", "qwen3-30b"], "did you mean qwen3-30b-a3b?"),
        (["--recipe", "gsm8k", "--gpus", "1"], "give --gpus 2 or more, or a smaller"),
        (["--recipe", "gsm8k", "--gpus", "2"], "no layout of qwen3-30b-a3b fits on 2 x H100"),
        (["--recipe", "gsm8k", "--gpu", "h1000"], "h100"),
        (["--recipe", "gsm8k", "--gpus", "12"], "it must be at most 8 or a multiple of it"),
        (["--recipe", "gsm8k", "--gpus", "12"], "use 8 or 16"),
    ],
)
def test_what_cannot_be_made_is_refused_and_nothing_is_written(options, message, tmp_path, capsys):
    assert new.main([str(tmp_path / "p"), *options]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "p").exists()


def test_no_folder_is_overwritten(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert make(tmp_path / "empty", "gsm8k") == 0
    before = {path: path.read_bytes() for path in (tmp_path / "empty").iterdir()}
    assert make(tmp_path / "empty", "math") == 2
    assert "is not empty (README.md, config.toml, prepare.py, ...)" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (tmp_path / "empty").iterdir()} == before
    (tmp_path / "file").write_text("")
    assert make(tmp_path / "file", "math") == 2
    assert "file is a file; name a new folder" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        new.main([str(tmp_path / "p")])
    assert "needs DIR and --recipe NAME; --list shows the recipes" in capsys.readouterr().err


def test_values_change_and_comments_stay():
    text = '[a]\nx = 1    # one\ny = [1, 2]\n\n# of b\n[b]\nurl = "a # b"  # two\n'
    changed = with_values(text, {"a.x": 1234, "a.y": None, "a.z": True, "b.url": "c", "c.d": []})
    assert changed == (
        '[a]\nx = 1234 # one\nz = true\n\n# of b\n[b]\nurl = "c"      # two\n\n[c]\nd = []\n'
    )
    with pytest.raises(ValueError, match=r"a.x could not be set to 5: write its value on one line"):
        with_values("[a]\nx = [\n1,\n]\n", {"a.x": 5})


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("nodes", "rank"), [("1", "0"), ("2", "1")])
def test_run_sh_starts_the_ranks_or_checks(recipe, nodes, rank, tmp_path):
    """With a stand-in of megatron-rl that prints its arguments."""
    shutil.copytree(new.recipes()[recipe], tmp_path / "p")
    stub = tmp_path / "bin/megatron-rl"
    stub.parent.mkdir()
    stub.write_text('#!/bin/sh\necho "$PWD" "$PYTHONPATH" "$@"\n')
    stub.chmod(0o755)
    env = {"PATH": f"{stub.parent}:/usr/bin:/bin", "NNODES": nodes, "NODE_RANK": rank, "GPUS": "4"}

    def run(*options, **more):
        command = ["bash", str(tmp_path / "p/run.sh"), *options]
        done = subprocess.run(command, env=env | more, capture_output=True, text=True, cwd=tmp_path)
        return done.stdout.split()

    here = str(tmp_path / "p")
    assert run("--dry-run", "--run.seed", "1") == [
        here, here, "train", "--config", "config.toml", "--gpus", str(4 * int(nodes)),
        "--dry-run", "--run.seed", "1",
    ]  # fmt: skip
    assert run("--dry-run", GPU="h200")[5:] == [
        "--gpus", str(4 * int(nodes)), "--gpu", "h200", "--dry-run",
    ]  # fmt: skip
    words = run("--run.seed", "1", GPU="h200")
    assert words[:3] == [here, here, "launch"] and words[-2:] == ["--run.seed", "1"]
    text = " ".join(words)
    assert f"--nnodes {nodes} --node-rank {rank} --nproc-per-node 4 " in text
    assert f"is_host={int(rank == '0')} -m megatron_rl.train --config config.toml" in text
    assert re.search(r"--rdzv-endpoint 127\.0\.0\.1:\d+ ", text)
