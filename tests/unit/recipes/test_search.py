"""The recipe search: its tool finds passages, its reward compares as SQuAD's evaluation does."""

import importlib.util
import subprocess
import sys

import pytest

from megatron_rl.recipes import new
from tests.unit.recipes.material import DATA, read, write

FOLDER = new.recipes()["search"]


def load(name):
    """A file of the recipe as a module; every call makes another one."""
    spec = importlib.util.spec_from_file_location(f"search_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def agent(tmp_path):
    module = load("agent")
    module.CORPUS = tmp_path / "corpus.jsonl"
    texts = {
        "Lions": "Lions live in prides.",
        "Owls": "Owls hunt at night.",
        "Long": "zebra " * 500,
    }
    write(module.CORPUS, [{"title": title, "text": text} for title, text in texts.items()])
    return module


def test_a_search_returns_the_passages_with_the_words(agent):
    assert agent.search("when does the owl or Owls hunt?") == "Owls: Owls hunt at night."
    assert agent.search("quantum") == agent.search("") == "nothing found; use other words"
    assert len(agent.search("zebra")) == agent.LONGEST


def test_what_is_missing_is_named(agent, monkeypatch, tmp_path):
    agent.CORPUS = tmp_path / "none.jsonl"
    with pytest.raises(RuntimeError, match=r"none\.jsonl is missing: run python prepare\.py"):
        agent.search("owls")
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(RuntimeError, match="pip install bm25s"):
        agent.search("owls")


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<answer>The  Owl.</answer>", 1.0),
        ("<answer>no</answer> wait <answer>an owl</answer>", 1.0),
        ("<answer>barn owl</answer>", 1.0),
        ("<answer>owl</answer> no: <answer>lion</answer>", 0.0),
        ("owl", 0.0),
        ("<answer></answer>", 0.0),
    ],
)
def test_the_last_answer_is_compared_with_every_right_one(response, reward):
    assert load("reward").score("", response, "owl\nBarn Owl") == reward


def test_prepare_writes_the_corpus_of_both_sets(tmp_path):
    project = tmp_path / "project"
    assert new.main([str(project), "--recipe", "search"]) == 0
    files = [f"{n}={write(tmp_path / f'{n}.jsonl', rows)}" for n, rows in DATA["search"].items()]
    command = [sys.executable, "prepare.py", "--from", *files]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "right answers get 1.00 on average, answers of other rows 0.00" in done.stdout
    passages = read(project / "data/corpus.jsonl")
    contexts = [row["context"] for rows in DATA["search"].values() for row in rows]
    assert passages == [{"title": "Sums", "text": text} for text in contexts]
    rows = read(project / "data/train.jsonl")
    assert {"id": "train-2", "prompt": "What is half of 18?", "label": "9"} in rows


def test_a_question_without_an_answer_is_refused():
    prepare = load("prepare")
    row = DATA["search"]["train"][0] | {"answers": {"text": [], "answer_start": []}}
    with pytest.raises(ValueError, match="'answers' has no text"):
        prepare.convert(row)
