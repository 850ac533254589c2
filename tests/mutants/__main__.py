"""Mutation testing (make mutants):

    python -m tests.mutants [loss rollout/client ...] [--sample 200] [--minutes 60] [--jobs 2]

A package is a folder of megatron_rl, without the folders in it; "." is megatron_rl itself.  A
mutant is the code with one change; it is killed where a unit test that calls the changed function
fails (calls.py).  A call continues where the last one stopped (build/mutants); a mutant runs again
when its file changed, one that survived also when one of its tests did. --sample takes as many
mutants of each package, the same ones in each call.  --minutes 0 runs nothing.

The first call runs all unit tests once, under a profiler, to learn which functions they call.  Code
that tests run in another process, ranks and servers among it, is not mutated there: such mutants
are listed as not called.  There were 35,840 mutants in 34 folders.  Computed from samples, 9,000
mutants take 1 to 4.5 hours on two idle cores.  On busy cores tests wait, and fewer of them fit into
the time of a mutant: run it alone.  Measured once, not kept: all 1,283 mutants of trainer took 0.4
s of CPU time each, all 1,044 of checkpoint 3 s, samples of loss 0.8 s and of reward 3.5 s, 1,000 of
rollout/client 2.2 s (on busy cores, with tests of 30 s instead of 60 s).  Tests of servers and
clients wait for most of their time: with --jobs 10 the cores are busy.

Prints a table per module, and the mutants that survived and are not in
tests/mutants/equivalent.toml with a reason. Exit status 1 where loss, replay or batch have such a
mutant.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from tests.mutants.calls import ROOT, Calls, digest, relative
from tests.mutants.source import Mutant, mutants_of

STATE = ROOT / "build/mutants"
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
STRICT = ("loss", "replay", "batch")
COLUMNS = ("mutants", "run", "killed", "timeout", "equivalent", "open", "not run")


@dataclass
class Results:
    """Verdicts on a package's mutants by (file, name), stored as one line each."""

    package: str
    calls: Calls
    verdicts: dict[tuple[str, str], dict] = field(default_factory=dict)

    def __post_init__(self) -> None:
        STATE.mkdir(parents=True, exist_ok=True)
        self.path = STATE / f"{self.package.replace('/', '.')}.jsonl"
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            entry = json.loads(line)
            self.verdicts[entry["file"], entry["name"]] = entry

    def verdict(self, file: Path, mutant: Mutant, code: str) -> str | None:
        """None: not run yet, or out of date."""
        entry = self.verdicts.get((relative(file), mutant.name))
        if entry is None or entry["code"] != code:
            return None
        if entry["verdict"] == "survived" and entry["tests"] != self.calls.digest(
            relative(file), mutant.where
        ):
            return None
        return entry["verdict"]

    def add(self, file: Path, mutant: Mutant, verdict: str, by: str) -> None:
        entry = dict(
            file=relative(file), name=mutant.name, verdict=verdict, by=by, code=digest([file]),
            tests=self.calls.digest(relative(file), mutant.where),
        )  # fmt: skip
        self.verdicts[entry["file"], entry["name"]] = entry
        with self.path.open("a") as lines:
            lines.write(json.dumps(entry) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "packages",
        nargs="*",
        choices=[[], *packages()],
        metavar="PACKAGE",
        help="all if none is named",
    )
    parser.add_argument(
        "--sample", type=int, help="so many mutants of each package, drawn once for all calls"
    )
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="no further mutant after so long"
    )
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    args = parser.parse_args()
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "JAXTYPING_DISABLE": "1",
    }
    until = time.monotonic() + 60 * args.minutes
    names = args.packages or packages()
    if args.minutes:
        note_calls([file for name in names for file in files_of(name)], args.jobs, until)
    calls = Calls(STATE / "calls")
    rows, survivors = [], []
    for name in names:
        every = in_random_order(name)
        sample = list(islice(filter(is_valid, every), args.sample)) if args.sample else every
        run_package(Results(name, calls), sample, args.jobs, until)
        its_rows, its_survivors = summary(Results(name, calls), every, sample)
        rows += its_rows
        survivors += its_survivors
    print("\nOpen:" if survivors else "\nNone open.", *survivors, sep="\n")
    print(f"\n| module | {' | '.join(COLUMNS)} |\n|---{'|---:' * len(COLUMNS)}|")
    for name, counts in rows:
        print(f"| {name} | {' | '.join(str(counts[column]) for column in COLUMNS)} |")
    return any(name in STRICT and counts["open"] for name, counts in rows)


def in_random_order(package: str) -> list[tuple[Path, Mutant]]:
    """All mutants of a package, in the order of a hash of their names: the first ones are a fair
    sample.
    """
    every = [(file, mutant) for file in files_of(package) for mutant in mutants_of(file)]
    return sorted(
        every, key=lambda one: hashlib.sha256(f"{relative(one[0])} {one[1].name}".encode()).digest()
    )


def is_valid(one: tuple[Path, Mutant]) -> bool:
    try:
        compile(one[1].text, str(one[0]), "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


def note_calls(mutated: Sequence[Path], jobs: int, until: float) -> None:
    """Run the test files whose notes are out of date."""
    files = Calls(STATE / "calls").out_of_date(mutated)
    if files:
        from tests.mutants.session import Observer

        print(f"{len(files)} test files run first: what do they call?", flush=True)
        run_session(files, lambda: Observer(STATE / "calls", jobs, until))


def run_package(
    results: Results, mutants: Sequence[tuple[Path, Mutant]], jobs: int, until: float
) -> None:
    """Run what was not run yet."""
    package, codes = results.package, {file: digest([file]) for file, _ in mutants}
    waiting = [
        (file, mutant)
        for file, mutant in mutants
        if results.verdict(file, mutant, codes[file]) is None
    ]
    if not waiting or time.monotonic() > until:
        return
    print(f"{package}: {len(waiting)} mutants to run", flush=True)
    from tests.mutants.session import MutantRunner

    done: Counter[str] = Counter()
    started, parent = time.monotonic(), os.getpid()

    def report(file: Path, mutant: Mutant, verdict: str, by: str) -> None:
        results.add(file, mutant, verdict, by)
        done[verdict] += 1
        if done.total() % 100 == 0 or done.total() == len(waiting):
            rate, used = (
                done.total() / (time.monotonic() - started) * 60,
                os.times(),
            )  # of a process whose children they are
            cpu = (used.children_user + used.children_system) / done.total()
            print(
                f"{package}: {done.total()} of {len(waiting)}, {rate:.0f} a minute, {cpu:.1f} s of"
                f" CPU each: {dict(done)}",
                flush=True,
            )

    places = {(relative(file), mutant.where) for file, mutant in waiting}
    tests = {test.partition("::")[0] for place in places for test in results.calls.tests_of(*place)}
    run_session(
        sorted(tests), lambda: MutantRunner(waiting, results.calls, report, jobs, until, parent)
    )


def run_session(tests: Sequence[str], plugin: Callable[[], object]) -> None:
    """In a separate process, which imports pytest and the tests once."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        return
    status = 1
    try:
        import pytest

        from tests.mutants.session import OPTIONS

        os.chdir(ROOT)
        status = int(pytest.main(["-q", *OPTIONS, *tests], plugins=[plugin()]))
    finally:
        sys.stdout.flush()
        os._exit(status)


def summary(
    results: Results, every: Sequence[tuple[Path, Mutant]], sample: Sequence[tuple[Path, Mutant]]
) -> tuple[list[tuple[str, Counter[str]]], list[str]]:
    """([(module or package, counts)], the open mutants); prints entries of equivalent.toml that no
    survivor has.

    The column mutants counts all, the others those of the sample.
    """
    reasons = tomllib.loads(EQUIVALENT.read_text())
    rows: dict[str, Counter[str]] = {
        relative(file): Counter() for file in files_of(results.package)
    }
    for file, _ in every:
        rows[relative(file)]["mutants"] += 1
    codes, survivors = {file: digest([file]) for file, _ in every}, []
    left = {file: set(reasons.get(file, {})) for file in rows}
    for path, mutant in sample:
        file = relative(path)
        verdict = results.verdict(path, mutant, codes[path]) or "not run"
        if verdict == "invalid":
            rows[file]["mutants"] -= 1
            continue
        if verdict == "survived":
            verdict = "equivalent" if mutant.name in left[file] else "open"
            left[file].discard(mutant.name)
        if verdict == "open":
            by = results.verdicts[file, mutant.name]["by"]
            survivors.append(f"{file}  {mutant.name}" + (f"  ({by})" if by else ""))
        rows[file][verdict] += 1
        rows[file]["run"] += verdict != "not run"
    for file, names in left.items():
        if names and rows[file]["run"] == rows[file]["mutants"]:
            print(f"{file}: in equivalent.toml, but killed or gone: {sorted(names)}")
    total = sum(rows.values(), Counter())
    return [
        *((file.removeprefix("megatron_rl/"), counts) for file, counts in rows.items()),
        (results.package, total),
    ], sorted(survivors)


def packages() -> list[str]:
    """Folders of megatron_rl."""
    folders = {path.parent for path in (ROOT / "megatron_rl").rglob("*.py") if path.stat().st_size}
    return sorted(folder.relative_to(ROOT / "megatron_rl").as_posix() for folder in folders)


def files_of(package: str) -> list[Path]:
    return sorted(
        path for path in (ROOT / "megatron_rl" / package).glob("*.py") if path.stat().st_size
    )


if __name__ == "__main__":
    sys.exit(main())
