"""The mutation tool: which changes it makes and which not, and that a live function takes a mutant's code."""

from pathlib import Path

import pytest

from tests.mutants import __main__ as command
from tests.mutants.session import enclosing, exchange_code
from tests.mutants.source import Mutant, mutants_of

SOURCE = '''"""Docstring 1."""
from typing import Callable
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
    """None in docstrings, annotations, assertions, errors, log lines, imports, aliases and strict=."""
    found = mutants_of(file)
    assert sorted((mutant.where, mutant.change) for mutant in found) == sorted(CHANGES)
    assert all(mutant.text != SOURCE and compile(mutant.text, "x", "exec") for mutant in found)


def test_equal_changes_have_names_of_their_own(tmp_path):
    path = tmp_path / "module.py"
    path.write_text("def f(x):\n    g(x)\n    g(x)\n")
    assert [mutant.change for mutant in mutants_of(path)] == ["g(x) -> pass", "g(x) -> pass #2"]


def test_a_live_function_takes_the_code_of_its_mutant():
    """Also a method, and a function that others already hold; one that closes over other names cannot."""
    half, double = compile("def f(x): return x / 2", "x", "exec"), compile("def f(x): return x * 2", "x", "exec")
    space: dict = {}
    held = load(half, space)["f"]
    assert exchange_code([held], double) and held(4) == 8
    outer = "def make(a):\n    def f(x):\n        return {}\n    return f"
    inner = load(compile(outer.format("a + x"), "x", "exec"), {})["make"](1)
    assert not exchange_code([inner], compile(outer.format("x"), "x", "exec")) and inner(1) == 2


def load(code, space):
    exec(code, space)  # noqa: S102
    return space


def test_a_nested_function_is_its_outer_functions():
    assert list(enclosing("f.<locals>.g.<locals>.<lambda>")) == ["f.<locals>.g.<locals>.<lambda>", "f.<locals>.g", "f"]


def test_a_verdict_holds_until_its_file_changes_and_a_survivors_until_the_tests_do(file, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "STATE", tmp_path / "state")
    monkeypatch.setattr(command, "ROOT", tmp_path)
    test = tmp_path / "test_it.py"
    test.write_text("1")
    monkeypatch.setitem(command.PACKAGES, "loss", ("module.py", ["test_it.py"]))
    killed, survived = Mutant("f", "a", ""), Mutant("f", "b", "")
    results = command.Results("loss")
    results.add(file, killed, "killed", "test")
    results.add(file, survived, "survived", "")

    def verdicts():
        again = command.Results("loss")
        return [again.verdict(file, mutant, command.digest([file])) for mutant in (killed, survived)]

    assert verdicts() == ["killed", "survived"]
    test.write_text("2")
    assert verdicts() == ["killed", None]
    file.write_text(SOURCE + "\n")
    assert verdicts() == [None, None]


def test_listed_mutants_belong_to_files_that_exist():
    import tomllib

    listed = tomllib.loads(command.EQUIVALENT.read_text())
    assert all((command.ROOT / name).is_file() for name in listed)
    assert all(reason for names in listed.values() for reason in names.values())
    assert {Path(name).parts[1] for name in listed} <= {*command.PACKAGES, "scheduler.py"}


@pytest.mark.parametrize("package", ["loss", "replay", "batch", "engine", "weights", "rollout"])
def test_files_of_nested_packages_are_mutated_too(package):
    every = {path for path in (command.ROOT / "megatron_rl" / package).rglob("*.py") if path.stat().st_size}
    assert every == set(command.files_of(package))
