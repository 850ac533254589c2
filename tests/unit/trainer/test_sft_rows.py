"""The rows of a supervised run: steps of its epochs, lines for the log, and rows that the model
cannot compute; and the command from its configuration to a model that has learned them.
"""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_rl.config import dump_config, load_config
from megatron_rl.config.rules.sft_rules import DEFAULTS
from megatron_rl.data.rows import DataError
from megatron_rl.metrics.reduce import MetricSums
from megatron_rl.trainer.sft_rows import SftSource, name_of, read_rows
from megatron_rl_tools.tiny_text import make_tokenizer
from tests.saved_run import make_material, sections
from tests.tiny import random_checkpoint

ROOT = Path(__file__).resolve().parents[3]
ROWS = [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(10)]


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    folder = make_material(tmp_path_factory.mktemp("material"), steps=2)
    write(folder / "rows.jsonl", ROWS)
    write(folder / "held_out.jsonl", [*ROWS[:3], {"prompt": "ab", "response": "cd"}])
    return folder


def write(path: Path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def configuration(material: Path, work: Path, **more):
    settings = {"rollout": {}, "data": {}, "sft": {}, "eval": {}} | more
    data = {"train": str(material / "rows.jsonl"), "chat_template": False} | settings["data"]
    base = sections(material, work, steps=3, run={"group_size": 1})
    return load_config(None, [], base | settings | {"data": data}, defaults=DEFAULTS)


def test_epochs_are_steps_rounded_up(material, tmp_path):
    rows = read_rows(configuration(material, tmp_path, sft={"epochs": 1.5}))
    assert rows.cfg.run.num_steps == 4, "15 rows of 4 a step"
    assert read_rows(configuration(material, tmp_path)).cfg.run.num_steps == 3
    # 1.1 x 10 = 11.000000000000002 in floating point
    exact = {"sft": {"epochs": 1.1}, "run": {"prompts_per_step": 1, "group_size": 1}}
    assert read_rows(configuration(material, tmp_path, **exact)).cfg.run.num_steps == 11


def test_the_log_says_what_is_learned_and_what_is_also_held_out(material, tmp_path):
    sets = {"held_out": str(material / "held_out.jsonl")}
    lines = read_rows(configuration(material, tmp_path, eval={"sets": sets})).lines
    learned = sum(len(row["response"]) + 1 for row in ROWS)
    assert lines[0].endswith(f"10 rows of {material}/rows.jsonl, {learned} tokens to learn")
    assert lines[-1] == "WARNING 3 of 4 rows of eval.sets.held_out are also trained on"


def test_a_source_may_be_the_folder_of_a_run(material, tmp_path):
    train = [
        {"name": "best", "path": str(material / "live")},
        {"name": "rows", "path": str(material / "rows.jsonl")},
    ]
    cfg = configuration(material, tmp_path, data={"train": train}, sft={"min_reward": 0.5})
    rows = read_rows(cfg)
    assert "left out: " in rows.lines[0] and "below the reward" in rows.lines[0]
    taken = rows.train.take(8)
    assert sorted({row.source for row in taken}) == ["best", "rows"]


def test_a_least_reward_without_the_folder_of_a_run_is_refused(material, tmp_path):
    with pytest.raises(DataError, match=r"^sft.min_reward = 0.5 has no effect on rows of files"):
        read_rows(configuration(material, tmp_path, sft={"min_reward": 0.5}))


def test_errors_of_all_files_are_reported_together(material, tmp_path):
    write(tmp_path / "a.jsonl", [{"prompt": "a"}])
    write(tmp_path / "b.jsonl", [{"prompt": "a", "answer_to": "b"}])
    train = [{"name": name, "path": str(tmp_path / f"{name}.jsonl")} for name in "ab"]
    with pytest.raises(DataError, match=r"a.jsonl, line 1(.|\n)*b.jsonl, line 1"):
        read_rows(configuration(material, tmp_path, data={"train": train}))


def test_tokens_outside_the_models_vocabulary_are_refused(material, tmp_path):
    random_checkpoint(tmp_path / "small", vocab_size=8, eos_token_id=1)
    make_tokenizer().save_pretrained(tmp_path / "small")
    model = {"path": str(tmp_path / "small"), "dtype": "float32"}
    with pytest.raises(DataError, match="must be below the model's vocabulary, 8"):
        read_rows(configuration(material, tmp_path, model=model))


def test_metrics_of_a_sampler_are_left_out():
    assert name_of("train/loss") == "sft/loss" and name_of("optim/lr") == "optim/lr"
    assert name_of("train/ratio_mean") is None and name_of("logratio/staleness ") is None


def test_the_command_learns_the_rows(material, tmp_path):
    sets = {"same": str(material / "rows.jsonl")}
    cfg = configuration(
        material,
        tmp_path,
        sft={"epochs": 12.0},
        optim={"lr": 3e-3, "distributed": False},
        eval={"sets": sets},
    )
    (tmp_path / "config.toml").write_text(dump_config(cfg))
    done = subprocess.run(
        [sys.executable, "-m", "megatron_rl.cli", "sft", "--config", tmp_path / "config.toml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    losses = [row["eval/same/loss"] for row in map(json.loads, lines) if "eval/same/loss" in row]
    assert len(losses) == 2 and losses[1] < 0.3 * losses[0], losses
    assert (tmp_path / "run/hf/model.safetensors.index.json").exists()
    assert not (tmp_path / "run/rollouts").exists()


def test_an_evaluation_reads_the_first_rows_of_a_set(material, tmp_path):
    sets = {"held_out": str(material / "held_out.jsonl")}
    cfg = configuration(material, tmp_path, eval={"sets": sets, "max_prompts": 2})
    asked = []
    source = SimpleNamespace(
        cfg=cfg, rows=read_rows(cfg), _batches=lambda rows: asked.extend(rows) or [],
        engine=SimpleNamespace(parallel=SimpleNamespace(device="cpu")),
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MetricSums, "reduce", lambda *_: {})
        assert SftSource.evaluate(source) == {}
    assert [row.id for row in asked] == [row.id for row in source.rows.sets["held_out"].rows[:2]]
