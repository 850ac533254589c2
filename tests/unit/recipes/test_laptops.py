"""Recipes on a laptop: settings that can be read, the rows that laptop.py writes, their rewards.

tests/e2e/test_laptop_training.py trains with them.
"""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from benchmarks.recipe import NAMES, held_out, laptop_commands
from megatron_rl.config import load_config
from megatron_rl.config.rules.sft_rules import DEFAULTS, check_is_sft
from megatron_rl.data.prompts import prompt_text
from megatron_rl.recipes import new
from megatron_rl.reward.code_tests import CodeTests
from megatron_rl.reward.scored_response import Episode
from megatron_rl.rollout.agents.chat import Chat
from megatron_rl_tools.tiny_chat import MAX_LENGTH, make_chat_tokenizer
from megatron_rl_tools.tiny_tasks import TASKS
from tests.unit.recipes.material import read, write
from tests.unit.recipes.test_code import require_sandbox

WITH_SFT = ("code", "search")


@cache
def tokenizer():
    """The tokenizer of the tiny model that chats."""
    train, _ = TASKS["chat"].make(0, 200)
    return make_chat_tokenizer(TASKS["chat"].stages(train)[-1][1])


@pytest.fixture
def project(request, tmp_path, monkeypatch):
    """The project of a recipe, as the current folder."""
    assert new.main([str(tmp_path / "p"), "--recipe", request.param]) == 0
    monkeypatch.chdir(tmp_path / "p")
    return request.param


def call(*arguments):
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("project", NAMES, indirect=True)
def test_the_settings_are_those_of_the_commands(project):
    commands = laptop_commands(project)
    assert commands[0] == "megatron-rl make-tiny-model tiny --task chat"
    assert commands[-1].endswith("GPUS=1 bash run.sh --config laptop.toml")
    cfg = load_config("laptop.toml")
    assert cfg.data.train == Path("laptop_data/train.jsonl") and cfg.run.device == "cpu"
    assert cfg.eval.sets == {"test": Path("laptop_data/test.jsonl")}
    if project in WITH_SFT:
        sft = load_config("laptop_sft.toml", defaults=DEFAULTS)
        check_is_sft(sft)
        assert "megatron-rl sft --config laptop_sft.toml" in commands
        assert cfg.model.path == Path("runs") / sft.run.name / "hf"
        assert (sft.model.path, sft.data.train) == (Path("tiny"), Path("laptop_data/sft.jsonl"))


SEARCHED = """
import json, sys
from agent import TASK, search
from megatron_rl.rollout.agents.tools import described
print(json.dumps([TASK, described(search)[0], search(sys.argv[1])]))
"""


@pytest.mark.parametrize("project", ["search"], indirect=True)
def test_books_are_in_the_corpus_and_rows_of_sft_are_as_the_run_writes_them(project, monkeypatch):
    text = call("laptop.py")
    assert "right answers get 1.00 on average, answers of other rows 0.00" in text
    train, test, sft = sets()
    assert len({row["prompt"] for row in train + test}) == len(train) + len(test) == 90
    monkeypatch.setenv("CORPUS", "laptop_data/corpus.jsonl")
    book = "".join(filter(str.isdigit, test[0]["prompt"]))
    task, tool, answer = json.loads(call("-c", SEARCHED, book))
    assert answer == f"Library: Book {book} is on shelf {test[0]['label']}."
    limit = load_config("laptop_sft.toml", defaults=DEFAULTS).sft.max_row_tokens
    chat = Chat("qwen3", tokenizer())
    for row in sft:
        tokens, learned = chat.demonstration(row["messages"], row["tools"])
        question = [{"role": "system", "content": task}, row["messages"][1]]
        prompt = chat.render(question, [tool])
        assert tokens[: len(prompt)] == prompt and not any(learned[: len(prompt)])
        assert len(tokens) <= limit <= MAX_LENGTH


@pytest.mark.parametrize("project", ["code"], indirect=True)
def test_half_of_the_answers_of_sft_pass_the_tests(project):
    require_sandbox()
    text = call("laptop.py")
    assert "right answers get 1.00 on average" in text
    train, test, sft = sets()
    prompts = [row["prompt"] for row in train]
    assert not set(prompts) & {row["prompt"] for row in test}
    assert [row["messages"][0]["content"] for row in sft] == prompts
    cfg, chat = load_config("laptop.toml"), Chat("qwen3", tokenizer())
    tokens, learned = chat.demonstration(sft[0]["messages"])
    prompt = prompt_text(sft[0]["messages"][:1], cfg.data, tokenizer())
    ids = tokenizer().encode(prompt, add_special_tokens=False)
    assert tokens[: len(ids)] == ids and all(learned[len(ids) : -1]), "as the run asks"
    judge = CodeTests()
    for row, conversation in list(zip(train, sft, strict=True))[:6]:
        answer = conversation["messages"][1]["content"]
        episode = Episode(row["prompt"], answer, row["label"], metadata={"tests": row["tests"]})
        assert judge(episode).value == ("(" in answer.partition("return")[2])
    assert sum("return (" in row["messages"][1]["content"] for row in sft) == len(sft) // 2


@pytest.mark.parametrize("project", ["agent"], indirect=True)
def test_the_questions_of_the_tiny_model_are_prepared(project):
    for name, examples in zip(("train", "heldout"), TASKS["chat"].make(0, 200), strict=True):
        rows = [{"prompt": each.prompt, "label": each.label} for each in examples[:60]]
        Path("tiny").mkdir(exist_ok=True)
        write(Path(f"tiny/{name}.jsonl"), rows)
    text = call(*laptop_commands("agent")[1].split()[1:], "--model", "none")
    assert "right answers get 1.00 on average, answers of other rows 0.00" in text
    train, test = (read(Path(f"laptop_data/{name}.jsonl")) for name in ("train", "test"))
    assert len(train) == len(test) == 60 and train[0]["prompt"].startswith("What is ")


def sets():
    return [read(Path(f"laptop_data/{name}.jsonl")) for name in ("train", "test", "sft")]


def test_the_held_out_reward_is_the_mean_and_no_bound_of_it():
    lines = (
        {"eval/test/avg@2": mean, "eval/test/avg@2_low": 0.0, "eval/test/avg@2_high": 1.0}
        for mean in (0.25, 0.5, 0.625)
    )
    metrics = "\n".join(map(json.dumps, ({"train/loss": 0.0}, *lines)))
    assert held_out(metrics) == {"before": 0.25, "after": 0.625}
