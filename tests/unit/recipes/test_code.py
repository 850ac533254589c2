"""prepare.py and reward.py of the recipe `code`, on rows in the schema of MBPP."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from megatron_rl.config import RewardConfig, load_config
from megatron_rl.plan.preflight import needs_sandbox, sandbox_problems
from megatron_rl.reward import Episode
from megatron_rl.reward.pool import RewardPool
from megatron_rl.reward.sandbox import box
from megatron_rl.reward.sandbox.box import SandboxError, find_box
from megatron_rl_tools.doctor.check_model import failed_check

FOLDER = Path(__file__).parents[3] / "megatron_rl/recipes/code"
ROWS = [
    {
        "task_id": 11,
        "text": "Write a function to add two numbers.",
        "code": "def add(a, b):\r\n  return a + b",
        "test_list": ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"],
        "test_setup_code": "",
        "challenge_test_list": [],
    },
    {
        "task_id": 12,
        "text": "Write a function to find the roots of a number.",
        "code": "import math\r\ndef root(x):\r\n  return math.sqrt(x)",
        "test_list": [
            "assert math.isclose(root(2.0), 1.4142135, rel_tol=1e-6)",
            "assert root(4) == 2",
        ],
        "test_setup_code": "import math",
        "challenge_test_list": [],
    },
]
HELD = [dict(ROWS[0], text="Write a function to add, too.", task_id=13)]


@pytest.fixture
def prepare(tmp_path, monkeypatch, capsys):
    """prepare(train, test): (exit status, what was printed, rows that were written)."""
    recipes = pytest.importorskip("megatron_rl.recipes.prepare")
    spec = importlib.util.spec_from_file_location("prepare_code", FOLDER / "prepare.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("config.toml", "reward.py"):
        (tmp_path / name).write_text((FOLDER / name).read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def run(train=ROWS, test=HELD, solution=None):
        for name, rows in (("train", train), ("test", test)):
            Path(f"{name}-in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        arguments = ["--from", "train=train-in.jsonl", "test=test-in.jsonl"]
        status = recipes.main(module.SOURCES, solution and module.solution, arguments)
        printed = capsys.readouterr()
        path = Path("data/train.jsonl")
        written = [json.loads(line) for line in path.open()] if path.exists() else []
        return status, printed.out + printed.err, written

    return run


def test_rows_keep_their_tests_and_show_the_first(prepare):
    status, printed, rows = prepare()
    assert status == 0 and "train: 2 rows" in printed
    first, second = rows
    assert first["prompt"] == (
        "Write a function to add two numbers. Your code should pass this test:\n\n"
        "assert add(1, 2) == 3"
    )
    assert first["tests"] == ROWS[0]["test_list"] and first["setup"] == ""
    assert second["setup"] == "import math" and second["label"] == ROWS[1]["code"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"test_list": []}, "'test_list' must have tests as texts, got []"),
        ({"test_list": [1]}, "'test_list' must have tests as texts"),
        ({"test_list": "assert add(1, 2) == 3"}, "'test_list' must be a list, got str"),
        ({"code": "def add(:"}, "'code' is not Python"),
        ({"test_list": ["assert add(1, 2) == 3", "assert ("]}, "'test_list.1' is not Python"),
        ({"text": 7}, "'text' must be text, got int"),
    ],
)
def test_broken_rows_are_named_and_nothing_is_written(prepare, change, message):
    status, printed, rows = prepare(train=[ROWS[1], ROWS[0] | change])
    assert status == 1 and f"line 2: {message}" in printed and not rows


def test_solutions_are_tried_before_anything_is_written(prepare):
    require_sandbox()
    status, printed, rows = prepare(solution=True)
    assert status == 0 and len(rows) == 2
    assert "right answers get 1.00 on average, answers of other rows 0.00" in printed
    wrong = [ROWS[0] | {"code": "def add(a, b): return 7"}, ROWS[1] | {"code": "root = 7"}]
    Path("data/train.jsonl").unlink()
    status, printed, rows = prepare(train=wrong, solution=True)
    assert status == 1 and "disagrees with the labels" in printed and not rows


@pytest.mark.parametrize(
    "function", ["reward:score", "megatron_rl.reward.code_tests:score", "other:score"]
)
def test_the_dry_run_and_the_doctor_name_a_sandbox_that_does_not_work(
    function, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "reward.py").write_text((FOLDER / "reward.py").read_text())
    # a name that only looks like ours, and one that comes through another module
    (tmp_path / "other.py").write_text("import reward, megatron_rl.reward.sandboxes\nscore = 1\n")
    options = ["--reward.function", function, "--model.path", str(tmp_path)]
    cfg = load_config(FOLDER / "config.toml", options)
    monkeypatch.setattr(box, "problem_of", lambda name: f"{name} is not there")
    problems = list(sandbox_problems(cfg))
    assert needs_sandbox(function) == bool(problems) == (function != "other:score")
    for problem in problems:
        check = failed_check(problem)
        assert check.status == "FAIL" and check.name == "reward.function"
        assert "bubblewrap: bubblewrap is not there; unshare: unshare is not there" in check.found
        assert check.remedy.startswith("install bubblewrap, allow user namespaces")
    monkeypatch.setattr(box, "problem_of", lambda name: None)
    assert not list(sandbox_problems(cfg))


def require_sandbox():
    try:
        find_box()
    except SandboxError as error:
        pytest.skip(str(error))


def test_the_reward_is_1_for_code_that_passes_all_tests(monkeypatch):
    """By the file of the folder, in the worker that a run would start."""
    require_sandbox()
    monkeypatch.setenv("PYTHONPATH", f"{FOLDER}:{':'.join(filter(None, sys.path))}")
    tests = {"tests": ROWS[0]["test_list"], "setup": ""}
    codes = [ROWS[0]["code"], "def add(a, b): return 3", "exit()"]
    episodes = [Episode("p", f"So:\n```python\n{code}\n```", "", metadata=tests) for code in codes]
    with RewardPool(RewardConfig(function="reward:score", timeout_seconds=40)) as pool:
        (rewarded,) = pool.score_episodes([episodes])
    assert [each.reward for each in rewarded] == [1, 0, 0]
    assert [each.metrics["tests_passed_frac"] for each in rewarded] == [1, 0.5, 0]
