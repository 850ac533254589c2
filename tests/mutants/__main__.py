"""Mutation testing of the stages:  python -m tests.mutants [loss replay ...] [--minutes 60] [--jobs 2]     (make mutants)

Each mutant is the code with one change; it is killed where a test of its package fails.  A call continues where the last one
stopped (build/mutants); a mutant runs again when its file changed, one that survived also when a test file of its package
did.  Prints a table per module, and the mutants that survived and are not in tests/mutants/equivalent.toml with a reason.
Exit status 1 where loss, replay or batch have such a mutant.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.mutants.source import Mutant, mutants_of

ROOT = Path(__file__).resolve().parents[2]
STATE = ROOT / "build/mutants"
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
STRICT = ("loss", "replay", "batch")
OUTSIDE = (
    "tests/unit/loss/test_alone.py::test_the_example_of_the_documentation_runs_without_megatron_or_sglang",
    "tests/unit/loss/test_alone.py::test_the_block_is_real",
)
"""Tests that start another Python, which imports the code as it is on disk."""

PACKAGES = {
    "loss": ("megatron_rl/loss/*.py", ["tests/unit/loss", *(f"--deselect={test}" for test in OUTSIDE)]),
    "replay": ("megatron_rl/replay/*.py", ["tests/unit/replay"]),
    "batch": ("megatron_rl/batch/*.py", ["tests/unit/batch"]),
    "scheduler": (
        "megatron_rl/rollout/scheduler.py",
        ["tests/unit/rollout/test_scheduler.py", "tests/unit/rollout/test_scheduler_model.py"],
    ),
    "engine": ("megatron_rl/engine/*.py", ["tests/unit/engine"]),
    "weights": ("megatron_rl/weights/**/*.py", ["tests/unit/weights"]),
    "rollout": ("megatron_rl/rollout/**/*.py", ["tests/unit/rollout"]),
}
"""Package -> its files and their tests: quick ones, of one process."""

COLUMNS = ("mutants", "killed", "timeout", "equivalent", "open", "not run")


@dataclass
class Results:
    """Verdicts on a package's mutants by (file, name), stored as one line each."""

    package: str
    verdicts: dict[tuple[str, str], dict] = field(default_factory=dict)

    def __post_init__(self) -> None:
        STATE.mkdir(parents=True, exist_ok=True)
        self.path = STATE / f"{self.package}.jsonl"
        self.tests = digest(sorted(path for test in PACKAGES[self.package][1] for path in test_files(test)))
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            entry = json.loads(line)
            self.verdicts[entry["file"], entry["name"]] = entry

    def verdict(self, file: Path, mutant: Mutant, code: str) -> str | None:
        """None: not run yet, or out of date."""
        entry = self.verdicts.get((relative(file), mutant.name))
        if entry is None or entry["code"] != code or (entry["verdict"] == "survived" and entry["tests"] != self.tests):
            return None
        return entry["verdict"]

    def add(self, file: Path, mutant: Mutant, verdict: str, by: str) -> None:
        entry = dict(
            file=relative(file), name=mutant.name, verdict=verdict, by=by, code=digest([file]), tests=self.tests
        )  # fmt: skip
        self.verdicts[entry["file"], entry["name"]] = entry
        with self.path.open("a") as lines:
            lines.write(json.dumps(entry) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", choices=[[], *PACKAGES], help="all where none is named")
    parser.add_argument("--minutes", type=float, default=60.0, help="no further mutant after so long")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "JAXTYPING_DISABLE": "1"}
    until = time.monotonic() + 60 * args.minutes
    rows, survivors = [], []
    for package in args.packages or PACKAGES:
        run_package(package, args.jobs, until)
        its_rows, its_survivors = summary(package)
        rows += its_rows
        survivors += its_survivors
    print("\nOpen:" if survivors else "\nNone open.", *survivors, sep="\n")
    print(f"\n| module | {' | '.join(COLUMNS)} |\n|---{'|---:' * len(COLUMNS)}|")
    for name, counts in rows:
        print(f"| {name} | {' | '.join(str(counts[column]) for column in COLUMNS)} |")
    return any(name in STRICT and counts["open"] for name, counts in rows)


def run_package(package: str, jobs: int, until: float) -> None:
    """Run what was not run yet, in a separate process that imports pytest and the package once."""
    results = Results(package)
    waiting = [
        (file, mutant)
        for file in files_of(package)
        for code in [digest([file])]
        for mutant in mutants_of(file)
        if results.verdict(file, mutant, code) is None
    ]
    waiting.sort(
        key=lambda each: hashlib.sha256(each[1].name.encode()).digest()
    )  # in random order: those that run first are a fair sample
    if not waiting or time.monotonic() > until:
        return
    print(f"{package}: {len(waiting)} mutants to run", flush=True)
    parent, pid = os.getpid(), os.fork()
    if pid:
        os.waitpid(pid, 0)
        return
    status = 1
    try:
        import pytest

        from tests.mutants.session import OPTIONS, MutantRunner

        done: Counter[str] = Counter()

        def report(file: Path, mutant: Mutant, verdict: str, by: str) -> None:
            results.add(file, mutant, verdict, by)
            done[verdict] += 1
            if done.total() % 100 == 0:
                print(f"{package}: {done.total()} of {len(waiting)}: {dict(done)}", flush=True)

        os.chdir(ROOT)
        tests = PACKAGES[package][1]
        status = int(
            pytest.main(["-q", *OPTIONS, *tests], plugins=[MutantRunner(waiting, tests, report, jobs, until, parent)])
        )
    finally:
        sys.stdout.flush()
        os._exit(status)


def summary(package: str) -> tuple[list[tuple[str, Counter[str]]], list[str]]:
    """([(module or package, counts)], the open mutants); prints entries of equivalent.toml that no survivor has."""
    results, reasons = Results(package), tomllib.loads(EQUIVALENT.read_text())
    rows, survivors = [], []
    total: Counter[str] = Counter()
    for file in files_of(package):
        counts: Counter[str] = Counter()
        listed, code = reasons.get(relative(file), {}), digest([file])
        left = set(listed)
        for mutant in mutants_of(file):
            verdict = results.verdict(file, mutant, code) or "not run"
            if verdict == "invalid":
                continue
            if verdict == "survived":
                verdict = "equivalent" if mutant.name in listed else "open"
                left.discard(mutant.name)
            if verdict == "open":
                survivors.append(f"{relative(file)}  {mutant.name}")
            counts["mutants"] += 1
            counts[verdict] += 1
        if left and not counts["not run"]:
            print(f"{relative(file)}: in equivalent.toml, but killed or gone: {sorted(left)}")
        rows.append((relative(file).removeprefix("megatron_rl/"), counts))
        total += counts
    return [*rows, (package, total)], survivors


def files_of(package: str) -> list[Path]:
    return sorted(path for path in ROOT.glob(PACKAGES[package][0]) if path.stat().st_size)


def test_files(argument: str) -> list[Path]:
    place = ROOT / argument
    return sorted(place.rglob("*.py")) if place.is_dir() else [place] if place.exists() else []


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def digest(paths: Sequence[Path]) -> str:
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in paths)).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
