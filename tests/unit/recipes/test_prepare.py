"""prepare.py of the recipes, on hand-written rows in the schemas of their data: what is written,
what is left out and said, and what is refused.
"""

import hashlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from megatron_rl.config import load_config
from megatron_rl.data.prompts import load_prompts
from megatron_rl.plan.dry_run import report
from megatron_rl.plan.preflight import prompt_problems
from megatron_rl.recipes import new, prompt_set
from megatron_rl.recipes.prepare import main
from tests.unit.recipes.material import DATA, HELD, SUMS, gsm8k, problems, read, verl, write
from tests.words import qwen_tokenizer

SUFFIXES = {
    "agent": ".jsonl",
    "distil": ".parquet",
    "gsm8k": ".jsonl",
    "math": ".parquet",
    "search": ".parquet",
}


def script(recipe) -> ModuleType:
    """prepare.py of a recipe, as a module."""
    path = new.recipes()[recipe] / "prepare.py"
    spec = importlib.util.spec_from_file_location(f"prepare_{recipe}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def project(tmp_path, monkeypatch, capsys):
    """project(recipe): prepares in a new project: (exit status, what was printed).

    reward: the content of reward.py, which is compared with the labels; False: it is not asked,
    which takes seconds.
    """

    def make(recipe="gsm8k", reward=False):
        assert new.main([str(tmp_path / "p"), "--recipe", recipe]) == 0
        monkeypatch.chdir(tmp_path / "p")
        monkeypatch.setattr(sys, "path", [str(tmp_path / "p"), *sys.path])
        if reward:
            (tmp_path / "p/reward.py").write_text(reward)
        module = script(recipe)
        solution = None if reward is False else module.solution
        capsys.readouterr()

        def prepare(*arguments):
            status = main(module.SOURCES, solution, [*map(str, arguments)])
            printed = capsys.readouterr()
            return status, printed.out + printed.err

        return prepare

    return make


def files(tmp_path, recipe):
    suffix = SUFFIXES[recipe]
    return [
        f"{name}={write(tmp_path / f'{name}-{recipe}{suffix}', rows)}"
        for name, rows in DATA[recipe].items()
    ]


@pytest.mark.parametrize("recipe", DATA)
def test_a_recipe_prepares_what_its_configuration_names(recipe, project, tmp_path):
    """By the command of its README, with the files of its README; then the dry run and the run's
    own reader accept them.
    """
    project(recipe)
    command = [sys.executable, "prepare.py", "--from", *files(tmp_path, recipe)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "reward:score on the first 5 rows: right answers get 1.00 on average, answers" in (
        done.stdout
    )
    assert "other rows 0.00\n" in done.stdout and "WARNING" not in done.stdout
    cfg = load_config("config.toml")
    assert not list(prompt_problems(cfg))
    rows = read(cfg.data.train)
    assert [row["prompt"] for row in rows] == [question for question, _ in SUMS]
    assert [row["label"].replace(",", "") for row in rows] == [
        answer.replace(",", "") for _, answer in SUMS
    ]
    assert rows[0]["id"] == "train-1" and "NOT CHECKED: lengths in tokens" in done.stdout
    for path in [cfg.data.train, *cfg.eval.sets.values()]:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert f"wrote {path}: {len(read(path))} rows, sha256 {digest}\n" in done.stdout
    tokenizer = qwen_tokenizer()
    data = cfg.data.model_copy(update={"chat_template": False})
    if recipe not in ("search", "agent"):  # their programs write the messages
        assert "\\boxed{}" in load_prompts(cfg.data.train, data, tokenizer).prompts[0].text


def test_what_is_left_out_is_counted_and_named(project, tmp_path):
    prepare = project()
    rows = gsm8k([*SUMS, SUMS[0], ("what is  HALF of 18?", "9"), HELD[0], ("1+1?", "2")])
    rows += gsm8k([("1+1?", "3")])
    train, test = write(tmp_path / "a.jsonl", rows), write(tmp_path / "b.jsonl", gsm8k(HELD))
    status, text = prepare("--from", train, f"test={test}")
    assert status == 0, text
    assert "train: 10 rows of" in text and "openai/gsm8k had 7,473 rows: another version?" in text
    assert "  left out 3: its prompt is also in an earlier row (train-6, train-7, train-10)" in text
    assert "  left out 1: its prompt has another label in another row" in text and "(train-9)" in (
        text
    )
    assert "  left out 1: its prompt is also in the evaluation set test (train-8)" in text
    assert len(read(tmp_path / "p/data/train.jsonl")) == 5


def conversation(*texts):
    """Messages of the user and of the assistant in turn."""
    roles = ("user", "assistant")
    return [{"role": roles[turn % 2], "content": content} for turn, content in enumerate(texts)]


def test_prompts_that_differ_before_the_last_message_are_all_kept(project, tmp_path):
    system = {"role": "system", "content": "Be brief."}
    chats = {
        "6": conversation("What is 1+2?", "3", "Double it."),
        "14": conversation("What is 3+4?", "7", "Double it."),
        "22": conversation("What is 5+6?", "11", "Double it."),
        "8": conversation("What is 1+3?", "4", "Double it."),
        "9": [system, *conversation("What is half of 18?")],
        "nine": conversation("What is half of 18?"),
    }
    rows = [{"messages": chat, "label": label} for label, chat in chats.items()]
    rows += [{"messages": conversation("what  is 1+2?", "3", "Double it."), "label": "6"}]
    rows_of_test = [{"messages": [system, *chats["8"]], "label": "8"}]
    train, test = write(tmp_path / "a.jsonl", rows), write(tmp_path / "b.jsonl", rows_of_test)
    prepare = project()
    status, text = prepare("--from", train, f"test={test}")
    assert status == 0, text
    assert "  left out 1: its prompt is also in an earlier row (train-7)" in text
    assert "  left out 1: its prompt is also in the evaluation set test (train-4)" in text
    written = {row["label"]: row["prompt"] for row in read(tmp_path / "p/data/train.jsonl")}
    assert written == {label: chat for label, chat in chats.items() if label != "8"}


def test_the_length_of_a_prompt_is_that_of_all_its_messages(project, tmp_path):
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [
        {"messages": conversation("a" * 600, "yes", "Double it."), "label": "6"},
        {"messages": conversation("What is 3+4?", "7", "Double it."), "label": "14"},
    ]
    path = write(tmp_path / "a.jsonl", rows)
    prepare = project()
    status, text = prepare("--from", path, "--model", tmp_path / "model")
    assert status == 0, text
    assert "left out 1: its prompt has more than data.max_prompt_tokens = 512 tokens (train-1)" in (
        text
    )
    assert [row["label"] for row in read(tmp_path / "p/data/train.jsonl")] == ["14"]


def test_the_guides_output_is_real(project, tmp_path, capsys):
    """The blocks of docs/guides/gsm8k.md, but for digests, paths and left out lines."""
    page = (Path(__file__).parents[3] / "docs/guides/gsm8k.md").read_text()
    made, prepared, checked = re.findall(r"^```\n\$ .*\n((?:.*\n)*?)```$", page, re.M)
    options = ["--recipe", "gsm8k", "--model", "qwen3-30b-a3b", "--gpus", "8"]
    assert new.main([str(tmp_path / "my_gsm8k"), *options]) == 0
    assert capsys.readouterr().out.replace(f"{tmp_path}/", "") == made
    prepare = project(reward=(new.recipes()["gsm8k"] / "reward.py").read_text())
    rows = write(tmp_path / "p/rows.jsonl", gsm8k([*SUMS, SUMS[1]]))
    held = write(tmp_path / "p/held.jsonl", gsm8k([*HELD, SUMS[0]]))
    status, text = prepare("--from", f"train={rows.name}", f"test={held.name}")
    assert status == 0, text
    printed = [re.sub(r"\b[0-9a-f]{64}\b", "...", line) for line in text.splitlines()]
    shown = [line for line in prepared.splitlines() if line != "..."]
    assert len(shown) > 8 and not [line for line in shown if line not in printed]
    cfg = load_config("config.toml", ["--model.path", "qwen3-30b-a3b"])
    assert report(cfg, 8).splitlines()[-1] == checked.strip()


def test_the_same_rows_have_one_digest_in_any_file(project, tmp_path):
    prepare = project()
    digests = set()
    for suffix in (".jsonl", ".parquet"):
        path = write(tmp_path / f"rows{suffix}", gsm8k(SUMS))
        status, text = prepare("--from", path)
        assert status == 0 and "not there yet: eval.sets.test = data/test.jsonl" in text
        digests.add(text.partition("sha256 of its rows: ")[2].partition("\n")[0])
    assert len(digests) == 1 and len(digests.pop()) == 64


def test_a_model_without_a_chat_template_is_refused(project, tmp_path):
    qwen_tokenizer().save_pretrained(tmp_path / "model")
    path = write(tmp_path / "a.jsonl", gsm8k(SUMS))
    status, text = project()("--from", path, "--model", tmp_path / "model")
    assert status == 1 and "nothing was written" in text
    reason = "data.chat_template = true but the tokenizer has no chat template; set"
    assert f"prepare.py: {tmp_path / 'model'}: {reason}" in text


def test_long_prompts_are_left_out_with_the_models_tokenizer(project, tmp_path):
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(tmp_path / "model")
    prepare = project()
    rows = gsm8k([*SUMS, ("How many? " + "a" * 600, "600")])
    path = write(tmp_path / "a.jsonl", rows)
    status, text = prepare("--from", path, "--model", tmp_path / "model")
    assert status == 0 and "NOT CHECKED" not in text
    reason = "its prompt has more than data.max_prompt_tokens = 512 tokens (train-6)"
    assert f"  left out 1: {reason}" in text and "longest prompt: 6" in text
    only = write(tmp_path / "b.jsonl", rows[-1:])
    status, text = prepare("--from", only, "--model", tmp_path / "model")
    assert status == 1 and f"no row of {only} is left (1: {reason[:46]}" in text


@pytest.mark.parametrize(
    ("rows", "name"),
    [
        (verl(SUMS), "columns of verl: prompt prompt, label reward_model.ground_truth"),
        ([{"prompt": q, "label": a} for q, a in SUMS], "columns of slime, or megatron_rl: prompt"),
        ([{"input": q, "label": a} for q, a in SUMS], "columns of OpenRLHF: prompt input, label"),
        (
            [{"context_messages": [{"role": "user", "content": q}], "answer": a} for q, a in SUMS],
            "columns of OpenRLHF: prompt context_messages, label answer",
        ),
        (problems(SUMS), "columns of AIME, HMMT or MATH-500: prompt problem, label answer"),
    ],
)
def test_files_of_other_trainers_are_recognised_and_named(project, tmp_path, rows, name):
    status, text = project()("--from", write(tmp_path / "a.parquet", rows))
    assert status == 0 and name in text, text
    assert [prompt_set.text_of(row["prompt"]) for row in read(tmp_path / "p/data/train.jsonl")] == [
        question for question, _ in SUMS
    ]


def test_an_instruction_that_every_prompt_has_is_named(project, tmp_path):
    ending = ' Let\'s think step by step and output the final answer after "####".'
    rows = verl([(f"What is {n}+{n}?", str(2 * n)) for n in range(9)], after=ending)
    prepare = project()
    status, text = prepare("--from", write(tmp_path / "a.jsonl", rows))
    assert status == 0 and "every prompt ends with" in text and 'data.template = "{prompt}"' in text
    rows = [*rows[:8], *verl([("What is 8+8?", "16")])]
    status, text = prepare("--from", write(tmp_path / "b.jsonl", rows))
    assert status == 0 and "every prompt ends" not in text


BROKEN = {
    "missing": (None, "No such file"),
    "empty": ("", "train: {path} has no rows; copy it again"),
    "not JSON": ('{"question": 1', "line 1: not JSON"),
    "a list": ("[1, 2]\n", "line 1: expected an object with keys, got list"),
    "not UTF-8": (b"\xff\xfe\n", "line 1: not UTF-8"),
    "no answer": (
        '{"question": "1+1?", "answer": "#### 2"}\n{"question": "2+2?"}\n',
        "1 of 2 rows of {path} cannot be used:\n{path}, line 2: key 'answer' is missing",
    ),
    "number": (
        '{"question": "1+1?", "answer": 2}\n',
        "line 1: 'answer' must be text, got int 2\ncorrect them, or delete them from the file",
    ),
    "no mark": (
        '{"question": "1+1?", "answer": "two"}\n',
        "'answer' must end with #### and the answer, got 'two'",
    ),
    "empty prompt": ('{"question": " ", "answer": "#### 2"}\n', "'prompt' must be text that is"),
    "empty label": ('{"question": "1+1?", "answer": "####"}\n', "'label' must be text that is"),
    "foreign": (
        '{"instruction": "Add 1+1", "output": "2"}\n',
        "its columns ['instruction', 'output'] are those of no known prompt file; openai/gsm8k has"
        " ['question', 'answer']; rename columns to prompt and label",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_files_are_named_and_nothing_is_written(what, project, tmp_path):
    content, message = BROKEN[what]
    path = tmp_path / "a.jsonl"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    status, text = project()("--from", path)
    assert status == 1 and message.format(path=path) in text, text
    assert "prepare.py: nothing was written" in text and not (tmp_path / "p/data").exists()


def test_one_file_as_two_sets_and_unknown_sets_are_refused(project, tmp_path):
    prepare = project()
    path = write(tmp_path / "a.jsonl", gsm8k(SUMS))
    copy = write(tmp_path / "b.jsonl", gsm8k(SUMS))
    for arguments, message in {
        (path, f"test={copy}"): "have the same content; an evaluation on the training prompts",
        (path, copy): "two files for train",
        (f"held={path}",): "no set 'held'; sets: train, test",
    }.items():
        status, text = prepare("--from", *arguments)
        assert status == 1 and message in text, text
    rows = gsm8k(reversed(SUMS))
    status, text = prepare("--from", path, f"test={write(tmp_path / 'c.jsonl', rows)}")
    assert status == 1 and "is left (5: its prompt is also in the evaluation set test)" in text


def test_sets_of_an_earlier_call_count_for_the_overlap(project, tmp_path):
    prepare = project()
    test = write(tmp_path / "b.jsonl", gsm8k([*HELD, SUMS[1]]))
    assert prepare("--from", f"test={test}")[0] == 0
    status, text = prepare("--from", write(tmp_path / "a.jsonl", gsm8k(SUMS)))
    assert status == 0 and "evaluation set test (train-2)" in text
    test = write(tmp_path / "b.jsonl", gsm8k([*HELD, SUMS[2]]))
    status, text = prepare("--from", f"test={test}")
    assert status == 1 and "1 prompts of data/train.jsonl are in these evaluation sets" in text


REWARDS = {
    "nothing": ("return 0.0", "disagrees with the labels: right answers to the first 5 rows get"),
    "everything": ("return 1.0", "get 1.00 on average, answers of other rows 1.00; for example"),
    "the reverse": ("return float(label not in response)", "get 0.00 on average, answers"),
    "another form": ("return float(response == label)", "'The answer is \\\\boxed{42}.' for label"),
    "raises": ("raise KeyError('x')", "failed on all 10 responses: KeyError: 'x'"),
}


@pytest.mark.parametrize("what", REWARDS)
def test_a_reward_that_disagrees_with_the_labels_is_named(what, project, tmp_path):
    body, message = REWARDS[what]
    prepare = project(reward=f"def score(prompt, response, label):\n    {body}\n")
    status, text = prepare("--from", write(tmp_path / "a.jsonl", gsm8k(SUMS)))
    assert status == 1 and message in text, text
    assert "nothing was written" in text and not (tmp_path / "p/data").exists()


def test_single_labels_that_the_reward_does_not_accept_are_named(project, tmp_path):
    rows = [*gsm8k(SUMS), {"question": "Which colour?", "answer": "#### blue or green"}]
    body = "return float('blue' not in label and label in response)"
    prepare = project(reward=f"def score(prompt, response, label):\n    {body}\n")
    status, text = prepare("--from", write(tmp_path / "a.jsonl", rows))
    assert status == 0 and "right answers get 0.83 on average" in text
    assert "WARNING train-6: 'The answer is \\\\boxed{blue or green}.' is not accepted" in text


def test_a_download_reads_the_hub_and_says_what_to_do_without(project, monkeypatch):
    prepare = project(reward="")
    asked = []

    def load_dataset(kind, data_files, split):
        asked.append((kind, data_files, split))
        if "train" in data_files:
            return gsm8k([(f"What is {n}+1?", str(n + 1)) for n in range(60)])
        return gsm8k(HELD)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    status, text = prepare()
    assert status == 0 and "train: 60 rows of openai/gsm8k" in text, text
    assert "on the first 50 rows" in text
    assert asked[0] == (
        "parquet", "hf://datasets/openai/gsm8k/main/train-00000-of-00001.parquet", "train",
    )  # fmt: skip

    def fail(*arguments, **options):
        raise ConnectionError("name or service not known\nmore")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=fail))
    status, text = prepare()
    assert status == 1 and "ConnectionError: name or service not known; without a network" in text
    assert "hf download openai/gsm8k main/train-00000-of-00001.parquet --repo-type dataset" in text
    monkeypatch.setitem(sys.modules, "datasets", None)
    status, text = prepare()
    assert status == 1 and "pip install datasets; without a network" in text


def test_a_wrong_configuration_is_named(project, tmp_path):
    prepare = project()
    path = write(tmp_path / "a.jsonl", gsm8k(SUMS))
    status, text = prepare("--from", path, "--config", "none.toml")
    assert status == 1 and "none.toml" in text
