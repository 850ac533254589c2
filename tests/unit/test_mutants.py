"""The mutation tool: which changes it makes and which not, how it finds tests, and a run of it on a
small project.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants import __main__ as command
from tests.mutants import calls, session
from tests.mutants.calls import Calls, Seconds, enclosing
from tests.mutants.session import WAITING, Watch, exchange_code
from tests.mutants.source import Mutant, mutants_of

SOURCE = '''"""Docstring 1."""
from typing import TYPE_CHECKING, Callable
if TYPE_CHECKING:
    import os
LIMIT = 20
Draw = Callable[[int], int]

def keep(x: list[0], low=0.5):
    """Docstring 2."""
    assert x > 3, "text"
    if low == 1:
        raise ValueError("text", x + 1)
    log.info("text", x + 1)
    check(x)
    def inner(y):
        return y.detach() < low  # a comment
    return [a for a, b in zip(x, inner(x), strict=True) if max(a, b)]
'''
CHANGES = [
    ("", "LIMIT = 20 -> LIMIT = 21"),
    ("", "def keep(x: list[0], low=0.5): -> def keep(x: list[0], low=1.5):"),
    ("keep", "if low == 1: -> if True:"),
    ("keep", "if low == 1: -> if False:"),
    ("keep", "check(x) -> pass"),
    ("keep.<locals>.inner", "return y.detach() < low -> return y.detach() >= low"),
    ("keep.<locals>.inner", "return y.detach() < low -> return y.detach() <= low"),
    ("keep.<locals>.inner", "return y.detach() < low -> return y < low"),
    ("keep", "inner(x), strict=True) if max(a, b)] -> inner(x), strict=True) if min(a, b)]"),
]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(SOURCE)
    return path


def test_changes_are_made_where_a_test_can_check_them(file):
    """None in docstrings, annotations, assertions, errors, log lines, imports, aliases,
    TYPE_CHECKING and strict=.
    """
    found = mutants_of(file)
    assert sorted((mutant.where, mutant.change) for mutant in found) == sorted(CHANGES)
    assert all(mutant.text != SOURCE and compile(mutant.text, "x", "exec") for mutant in found)


def test_names_of_threads_and_of_type_variables_are_for_people(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        'T = TypeVar("T")\nthreading.Thread(target=f, name="name",'
        ' daemon=True)\ncall(name="name")\n'
    )
    changes = {
        'call(name="name") -> call()',
        'call(name="name") -> call(name="XXnameXX")',
        'call(name="name") -> pass',
    }
    changes |= {
        'threading.Thread(target=f, name="name", daemon=True) -> threading.Thread(name="name",'
        " daemon=True)"
    }
    changes |= {'threading.Thread(target=f, name="name", daemon=True) -> pass'}
    assert {mutant.change for mutant in mutants_of(path)} == changes


def test_equal_changes_have_names_of_their_own(tmp_path):
    path = tmp_path / "module.py"
    path.write_text("def f(x):\n    g(x)\n    g(x)\n")
    assert [mutant.change for mutant in mutants_of(path)] == ["g(x) -> pass", "g(x) -> pass #2"]


def test_a_live_function_takes_the_code_of_its_mutant():
    """Also a method, and a function that others already hold; one that closes over other names
    cannot.
    """
    half, double = (
        compile("def f(x): return x / 2", "x", "exec"),
        compile("def f(x): return x * 2", "x", "exec"),
    )
    space: dict = {}
    held = load(half, space)["f"]
    assert exchange_code([held], double) and held(4) == 8
    outer = "def make(a):\n    def f(x):\n        return {}\n    return f"
    inner = load(compile(outer.format("a + x"), "x", "exec"), {})["make"](1)
    assert not exchange_code([inner], compile(outer.format("x"), "x", "exec")) and inner(1) == 2


def load(code, space):
    exec(code, space)  # noqa: S102
    return space


def test_tests_that_each_wait_a_little_are_late_together(monkeypatch, tmp_path):
    """A test that took longer than WAITING times its noted time shortens the limit of the next."""
    now, limits = [0.0], []
    monkeypatch.setattr(session, "busy", lambda: 1.0)
    monkeypatch.setattr(session.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(session.signal, "setitimer", lambda *_: None)
    monkeypatch.setattr(
        session.faulthandler, "dump_traceback_later", lambda left, exit: limits.append(left)
    )
    notes = Calls(tmp_path)
    notes.seconds = {"quick": Seconds(clock=1.0, cpu=0.1), "slow": Seconds(clock=9.0, cpu=0.1)}
    watch = Watch(notes, started=0.0)
    for test, taken in [("quick", 1.0), ("quick", WAITING + 5.0), ("slow", 0.0)]:
        watch.limit(test)
        now[0] += taken
    first, second, third = limits
    assert first == second, "a test in time leaves the next one its whole time"
    assert third - first == pytest.approx(8 * WAITING - (1 + WAITING + 5 - 2 * WAITING))


def test_a_nested_function_is_its_outer_functions():
    assert list(enclosing("f.<locals>.g.<locals>.<lambda>")) == [
        "f.<locals>.g.<locals>.<lambda>",
        "f.<locals>.g",
        "f",
    ]


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project of one module and one test of it, which has run: its notes."""
    monkeypatch.setattr(command, "STATE", tmp_path / "state")
    for module in (command, calls):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    calls.imports.cache_clear()
    tested = "megatron_rl/loss/module.py"
    write(
        tmp_path,
        {
            tested: SOURCE,
            "tests/unit/test_it.py": "1",
            "tests/helper.py": "1",
            "megatron_rl/other.py": "1",
        },
    )
    files = ("tests/unit/test_it.py", "tests/helper.py", tested, "megatron_rl/other.py")
    text = dict(
        file=files[0], files={name: calls.digest([tmp_path / name]) for name in files},
        seconds={"tests/unit/test_it.py::test": (0.1, 0.1)}, calls={tested: {"f": [0]}},
    )  # fmt: skip
    write(tmp_path, {"state/calls/test_it.json": json.dumps(text)})
    yield tmp_path / tested
    calls.imports.cache_clear()


def test_a_verdict_holds_until_its_file_changes_and_a_survivors_until_its_tests_do(
    project, tmp_path
):
    killed, survived = Mutant("f", "a", ""), Mutant("f", "b", "")

    def results():
        return command.Results("loss", Calls(tmp_path / "state/calls"))

    results().add(project, killed, "killed", "test")
    results().add(project, survived, "survived", "")

    def verdicts():
        return [
            results().verdict(project, mutant, calls.digest([project]))
            for mutant in (killed, survived)
        ]

    assert verdicts() == ["killed", "survived"]
    write(tmp_path, {"tests/unit/test_other.py": "2"})
    assert verdicts() == ["killed", "survived"]
    write(tmp_path, {"tests/unit/test_it.py": "2"})
    assert verdicts() == ["killed", None]
    project.write_text(SOURCE + "\n")
    assert verdicts() == [None, None]


@pytest.mark.parametrize(
    ("changed", "stale"),
    [
        ("tests/unit/test_it.py", True),
        ("tests/helper.py", True),
        ("megatron_rl/loss/module.py", True),
        ("megatron_rl/other.py", False),  # no mutant of it is run
        ("tests/unit/test_it.md", False),
    ],
)
def test_a_test_file_runs_again_when_what_it_calls_has_changed(project, tmp_path, changed, stale):
    assert Calls(tmp_path / "state/calls").out_of_date([project]) == []
    write(tmp_path, {changed: "2", "tests/unit/area/test_new.py": ""})
    expected = ["tests/unit/area/test_new.py", *(["tests/unit/test_it.py"] if stale else [])]
    assert Calls(tmp_path / "state/calls").out_of_date([project]) == expected


SMALL = {
    "megatron_rl/area/first.py": """
LIMIT = 20

def name():
    return "short"

NAME = name()

def half(x):
    return x / 2

def big(x):
    return x > 9

def shrink(x):
    while big(x):
        x = half(x)
    return x

def unused(x):
    return -x
""",
    "megatron_rl/area/second.py": """
from megatron_rl.area import first

def is_allowed(x):
    return x < first.LIMIT
""",
    "megatron_rl/area/below/third.py": "MANY = 3\n",
    "megatron_rl/area/once.py": "SIZE = 5\n",
    "tests/unit/elsewhere/test_once.py": """
import builtins
from megatron_rl.area.once import SIZE

assert not hasattr(builtins, "imported"), "a second time"
builtins.imported = True

def test_size():
    assert SIZE == 5
""",
    "tests/unit/elsewhere/test_of_all.py": """
from megatron_rl.area.first import NAME, shrink

def test_shrink():
    assert shrink(10) == 5 and shrink(9) == 9

def test_name():
    assert NAME == "short"
""",
    "tests/unit/elsewhere/test_of_second.py": """
from megatron_rl.area.second import is_allowed

def test_limit():
    assert is_allowed(19) and not is_allowed(20)
""",
}


@pytest.mark.slow
def test_mutants_of_a_folder_are_run_on_the_tests_that_call_them(tmp_path):
    """Also those of a constant that another module reads, of a function that runs at import, and
    one that never ends.
    """
    write(tmp_path, SMALL)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(command.EQUIVALENT.parent, tmp_path / "tests/mutants", ignore=ignored)

    def run(*arguments: str) -> tuple[str, dict[tuple[str, str], str]]:
        words = [sys.executable, "-m", "tests.mutants", "area", *arguments]
        env = os.environ | {"PYTHONPATH": str(tmp_path)}
        done = subprocess.run(
            words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=True
        )
        entries = map(json.loads, (tmp_path / "build/mutants/area.jsonl").read_text().splitlines())
        found = [
            ((entry["file"].rpartition("/")[2], entry["name"]), entry["verdict"])
            for entry in entries
        ]
        assert len(dict(found)) == len(found), "none is run twice"
        return re.search(r"^\| area \| (.*) \|$", done.stdout, re.M)[1], dict(found)

    row, sample = run("--sample", "3")
    assert row.startswith("13 | 3 | ") and row.endswith(" | 0") and len(sample) == 3
    row, every = run()
    assert every.items() > sample.items() and row == "13 | 13 | 9 | 2 | 0 | 2 | 0"
    others = {name: verdict for name, verdict in every.items() if verdict != "killed"}
    assert others == {
        ("first.py", "half: return x / 2 -> return x * 2"): "timeout",
        ("first.py", "shrink: while big(x): -> while True:"): "timeout",
        ("first.py", "unused: return -x -> return +x"): "survived",
        # its test fails in any second import
        ("once.py", "module: SIZE = 5 -> SIZE = 6"): "survived",
    }


def test_listed_mutants_belong_to_files_that_exist():
    import tomllib

    listed = tomllib.loads(command.EQUIVALENT.read_text())
    assert all((command.ROOT / name).is_file() for name in listed)
    assert all(reason for names in listed.values() for reason in names.values())


def test_every_file_is_in_one_package():
    every = [path for path in (command.ROOT / "megatron_rl").rglob("*.py") if path.stat().st_size]
    found = [path for package in command.packages() for path in command.files_of(package)]
    assert sorted(found) == sorted(every) and {
        ".",
        "rollout",
        "rollout/client",
        "weights/hf",
    } <= set(command.packages())
