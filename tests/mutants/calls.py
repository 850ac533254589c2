"""The unit tests that call a function: each test file runs once under sys.setprofile, and its notes
stay in build/mutants.

A test file is run again when it, a file of tests/ that it calls, or a mutated file that it called
has changed.  So a change of another file is not noticed; a test that began to call a function
through it is then missed, which can leave a mutant open, never kill one.  Code that runs at import
(constants, defaults, fields) has no callers: its tests are those that call a function of its file,
or of a file that imports it; importers of importers do not count.  What a test has another process
do is not seen, nor mutated there.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import pytest
from _pytest.runner import runtestprotocol

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("megatron_rl", "tests", "tools", "examples", "benchmarks")
TESTS = "tests/unit"


class Seconds(NamedTuple):
    clock: float
    cpu: float


class Calls:
    """The notes of all unit tests.  files: test file -> file that it calls -> digest; seconds: of
    each test that passes;
    callers: file -> function -> tests."""

    def __init__(self, folder: Path) -> None:
        self.digests: dict[tuple[str, str], str] = {}
        self.files: dict[str, dict[str, str]] = {}
        self.seconds: dict[str, Seconds] = {}
        self.callers: defaultdict[str, defaultdict[str, set[str]]] = defaultdict(
            lambda: defaultdict(set)
        )
        for path in folder.glob("*.json"):
            notes = json.loads(path.read_text())
            if not (ROOT / notes["file"]).is_file():
                path.unlink()
                continue
            self.files[notes["file"]] = notes["files"]
            self.seconds |= {test: Seconds(*seconds) for test, seconds in notes["seconds"].items()}
            tests = list(notes["seconds"])
            for file, functions in notes["calls"].items():
                for function, numbers in functions.items():
                    self.callers[file][function].update(tests[number] for number in numbers)

    def out_of_date(self, mutated: Sequence[Path]) -> list[str]:
        """Test files to run (again) before mutants of these files."""
        names = {relative(path) for path in mutated}
        stale = []
        for path in sorted((ROOT / TESTS).rglob("test_*.py")):
            files = self.files.get(relative(path))
            if files is None or any(
                digest([ROOT / file]) != noted
                for file, noted in files.items()
                if file.startswith("tests/") or file in names
            ):
                stale.append(relative(path))
        return stale

    def is_called(self, file: str, function: str) -> bool:
        return bool(self.callers.get(file, {}).get(function))

    def tests_of(self, file: str, function: str) -> set[str]:
        """Tests that call the function; where none does, or it is "", those that call the file or
        one that imports it.
        """
        if self.is_called(file, function):
            return self.callers[file][function]
        files = {file, *importers(file)} & self.callers.keys()
        return set().union(*(tests for each in files for tests in self.callers[each].values()))

    def digest(self, file: str, function: str) -> str:
        """Return the digest of the test files in question, and of what they call in tests/."""
        if (file, function) not in self.digests:
            tests = {test.partition("::")[0] for test in self.tests_of(file, function)}
            called = {
                name for test in tests for name in self.files[test] if name.startswith("tests/")
            }
            self.digests[file, function] = digest([ROOT / name for name in sorted(called)])
        return self.digests[file, function]


def note(items: Sequence[pytest.Item], path: Path) -> None:
    """Run the tests of one file and write down what each of them calls.

    What its first test calls is taken as called by all: that one sets up what they share.
    """
    seconds, failed, called = {}, [], []
    for item, after in zip(items, [*items[1:], None], strict=True):
        reports, taken, functions = note_one(item, after)
        if all(report.passed for report in reports):
            seconds[item.nodeid] = taken
            called.append(functions)
        elif any(report.failed for report in reports):
            failed.append(item.nodeid)
    numbers: defaultdict[str, defaultdict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, functions in enumerate(called):
        for file, function in functions | called[0]:
            numbers[file][function].append(number)
    test_file = relative(items[0].path)
    files = {file: digest([ROOT / file]) for file in (test_file, *numbers)}
    notes = dict(file=test_file, files=files, seconds=seconds, calls=numbers, failed=failed)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".part").write_text(json.dumps(notes))
    path.with_suffix(".part").rename(path)


def note_one(
    item: pytest.Item, after: pytest.Item | None
) -> tuple[list[pytest.TestReport], Seconds, set[tuple[str, str]]]:
    """(reports, seconds, the functions of this project that the test called)."""
    codes: dict[int, CodeType] = {}  # by id: the hash of a code object takes long

    def see(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            codes[id(frame.f_code)] = frame.f_code

    clock, cpu = time.monotonic(), time.process_time()
    sys.setprofile(see)
    threading.setprofile(see)
    reports = runtestprotocol(item, log=False, nextitem=after)
    sys.setprofile(None)
    taken = Seconds(time.monotonic() - clock, time.process_time() - cpu)
    return reports, taken, set(functions_of(list(codes.values())))


def functions_of(codes: Sequence[CodeType]) -> Iterator[tuple[str, str]]:
    """(file, qualified name) of those in this project, and of the functions around them."""
    for code in codes:
        path = code.co_filename.removeprefix(f"{ROOT}/")
        if path.startswith(SOURCES):
            yield from ((path, name) for name in enclosing(code.co_qualname))


def enclosing(name: str) -> Iterator[str]:
    """f.<locals>.g.<lambda> -> itself, f.<locals>.g, f: a lambda's mutants are its function's."""
    parts = name.split(".<locals>.")
    for end in range(len(parts), 0, -1):
        yield ".<locals>.".join(parts[:end])


def importers(file: str) -> set[str]:
    """Files of this project that import the module anywhere, in functions too."""
    module = file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    return imports().get(module, set()) - {file}


@cache
def imports() -> dict[str, set[str]]:
    """Module -> files that import it, or a name from it."""
    found = defaultdict(set)
    for path in (path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [
                    node.module or "",
                    *(f"{node.module}.{alias.name}" for alias in node.names),
                ]
            else:
                continue
            for name in names:
                found[name].add(relative(path))
    return found


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def digest(paths: Sequence[Path]) -> str:
    contents = (path.read_bytes() if path.is_file() else b"" for path in paths)
    return hashlib.sha256(b"\0".join(contents)).hexdigest()[:16]
