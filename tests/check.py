"""Runs the unit tests of what a branch changed: `make check`, or python -m tests.check [BRANCH].

A branch changed every file that differs from the merge base with the main branch, committed or not,
and every new file that git does not ignore.  A change to megatron_rl/X selects tests/unit/X, one to
tools/ or viewer/ the tests of that package.  A test file selects itself, a helper the files that
import it.  A change that has no such place selects every unit test.  The quick tests of
tests/repo always run.  Tests of several processes are left to `make test`.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
MAIN = ("origin/main", "main")
UNIT, REPO = "tests/unit", "tests/repo"
SEVERAL_PROCESSES = ("tests/dist", "tests/e2e", "tests/te")
PACKAGES = {
    "tools/megatron_rl_tools": f"{UNIT}/tools",
    "viewer/megatron_rl_viewer": f"{UNIT}/viewer",
    "viewer/web": f"{UNIT}/viewer",
}
"""Folder of a package, or of its pages, and its unit tests."""
READ_BY_NAME = ("examples", "benchmarks")
"""Folders whose unit tests are the files that name them."""
TEXTS = (
    "docs", "results", ".github", ".ci", "LICENSE", "Makefile", "Dockerfile", "Dockerfile.sglang",
    "mkdocs.yml", "tools/image_packages.py", "tools/nccl_versions.py",
)  # fmt: skip
"""Files and folders that tests/repo alone reads; so are pages and shell scripts."""
TEXT_SUFFIXES = (".md", ".sh", ".sbatch", ".yaml")
SLOW_REPO = (
    f"{REPO}/test_packaging.py",
    f"{REPO}/test_scripts.py::test_a_benchmark_imports_and_its_docstring_has_its_command",
)
"""Tests of tests/repo that build wheels or import every benchmark."""
IMPORT = re.compile(r"^ *(?:from (tests[\w.]*) import (\([^)]*\)|.*)|import (tests[\w.]+))", re.M)


def git(*words: str, root: Path) -> list[str]:
    """Return the lines that a git command prints; raises CalledProcessError where it fails."""
    command = ["git", "-c", "core.quotePath=false", *words]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def changed_files(branches: Iterable[str], root: Path = ROOT) -> set[str]:
    """Return the paths that differ from the merge base with the first branch that exists."""
    for branch in branches:
        try:
            (base,) = git("merge-base", "HEAD", branch, root=root)
        except subprocess.CalledProcessError:
            continue
        differing = git("diff", "--name-only", "--no-renames", base, root=root)
        return {*differing, *git("ls-files", "--others", "--exclude-standard", root=root)}
    names = " or ".join(branches)
    raise ValueError(f"no merge base with {names}: name another branch, make check BASE=BRANCH")


def selected(paths: Iterable[str], root: Path = ROOT) -> list[str]:
    """Return the tests to run beside the quick ones of tests/repo."""
    tests: set[str] = set()
    for path in paths:
        selection = tests_of(PurePosixPath(path), root)
        if selection is None:
            print(f"check: {path} may change anything: every unit test is run, which takes minutes")
            return [REPO, UNIT]
        tests |= selection
    return sorted(test for test in tests if not is_inside(test, *(tests - {test})))


def tests_of(path: PurePosixPath, root: Path) -> set[str] | None:
    """Return the tests of one changed file; None: it may change anything."""
    name = path.as_posix()
    if is_inside(name, *SEVERAL_PROCESSES):
        print(f"check: {name} is left to make test")
        return set()
    if is_inside(name, UNIT, REPO):
        return tests_of_test(path, root)
    if path.parts[0] == "tests":
        return importers(path, root) or None
    if path.parts[0] == "megatron_rl":
        return mirrored(path, root)
    if path.parts[0] in READ_BY_NAME:
        return naming(path.parts[0], root) | {f"{REPO}/test_scripts.py"}
    if path.suffix in TEXT_SUFFIXES or is_inside(name, *TEXTS):
        return set()
    return next(({tests} for folder, tests in PACKAGES.items() if is_inside(name, folder)), None)


def tests_of_test(path: PurePosixPath, root: Path) -> set[str]:
    """Return a test file itself, unless it is gone; for a helper its folder and its importers."""
    if path.name.startswith("test_"):
        return {path.as_posix()} if (root / path).is_file() else set()
    return {path.parent.as_posix(), *importers(path, root)}


def is_inside(name: str, *folders: str) -> bool:
    """Return whether a path is one of these files or folders, or lies inside one."""
    return any(name == folder or name.startswith(f"{folder}/") for folder in folders)


def mirrored(path: PurePosixPath, root: Path) -> set[str] | None:
    """Return the deepest folder of tests for a file of megatron_rl, or its test_NAME.py."""
    inside = path.relative_to("megatron_rl")
    folders = [f"{UNIT}/{folder}" for folder in list(inside.parents)[:-1]]
    places = folders or [f"{UNIT}/test_{inside.name}"]
    return next(({place} for place in places if (root / place).exists()), None)


@cache
def sources(root: Path) -> dict[str, str]:
    """Return the text of every Python file of tests/, by its path."""
    paths = root.glob("tests/**/*.py")
    return {path.relative_to(root).as_posix(): path.read_text() for path in paths}


@cache
def naming(folder: str, root: Path) -> set[str]:
    """Return the unit tests that import from a folder or read its files."""
    name = re.compile(rf"""\b{folder}[./"]""")
    tests = {file: text for file, text in sources(root).items() if is_inside(file, UNIT)}
    return {file for file, text in tests.items() if name.search(text)}


def importers(path: PurePosixPath, root: Path) -> set[str]:
    """Return the unit tests that import a helper, themselves or through another helper."""
    waiting, seen = [path.as_posix()], {path.as_posix()}
    while waiting:
        module = waiting.pop().removesuffix(".py").replace("/", ".")
        users = {file for file, modules in imported(root).items() if module in modules} - seen
        seen |= users
        waiting += users
    return {file for file in seen - {path.as_posix()} if is_inside(file, UNIT)}


@cache
def imported(root: Path) -> dict[str, set[str]]:
    """Return the modules of tests/ that each file of tests/ imports."""
    modules: dict[str, set[str]] = {}
    for file, text in sources(root).items():
        statements = IMPORT.findall(text)
        modules[file] = set().union(*statements)
        for package, names, _ in statements:
            modules[file] |= {f"{package}.{name}" for name in re.findall(r"\w+", names)}
    return modules


def command(tests: list[str], jobs: str) -> list[str]:
    """Return the pytest command for the selected tests and the quick ones of tests/repo."""
    skipped = [test for test in SLOW_REPO if not is_inside(test.partition("::")[0], *tests)]
    words = ["-m", "not slow", "-n", jobs, *tests, *([] if REPO in tests else [REPO])]
    return [sys.executable, "-m", "pytest", *words, *(f"--deselect={test}" for test in skipped)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.check")
    parser.add_argument("branch", nargs="?", help=f"to compare with (default: {' or '.join(MAIN)})")
    parser.add_argument("-n", default="3", help="tests at a time (default: 3)")
    options = parser.parse_args(arguments)
    try:
        paths = changed_files([options.branch] if options.branch else MAIN)
    except ValueError as error:
        parser.error(str(error))
    tests = selected(sorted(paths))
    print(f"check: {len(paths)} changed files: {' '.join(tests) or 'no unit tests'}", flush=True)
    return subprocess.run(command(tests, options.n), cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
