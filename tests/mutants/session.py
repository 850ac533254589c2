"""Pytest sessions that fork: tests are collected once, then a child notes what a test file calls,
or runs one mutant.

The parent imports everything and runs no test.  A mutant inside a function is put into its child by
exchanging the code of the live function; one that takes effect at import (constants, defaults) has
its child import the package and collect its tests once more.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from itertools import accumulate, groupby
from pathlib import Path
from types import CodeType, FrameType, FunctionType

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import Phase, settings

from tests.mutants.calls import Calls, Seconds, functions_of, note, relative
from tests.mutants.source import Mutant

ROOT = Path(__file__).resolve().parents[2]
# bytes of address space that a child may add, with its threads: a mutant may ask for anything
MEMORY = 16 << 30
# a test may take PATIENCE seconds of CPU time + TIMES x what it took unchanged
PATIENCE, TIMES = 2.0, 5.0
# by the clock, so many times PATIENCE and what it took: it may sleep; on a busy machine in
# proportion
WAITING = 10.0
# what an import mutant's child may need for the import, unchanged
IMPORT = Seconds(clock=30.0, cpu=30.0)
FILE = 900.0  # seconds by the clock for the notes of a test file
# exit status: of faulthandler's watchdog; of a child that fails outside a test
LATE, CRASHED = 1, 3
# seconds of tests, by the clock, that a mutant is tried on: those that killed its neighbours, then
# the quick ones
MOST = 60.0

Report = Callable[[Path, Mutant, str, str], None]
"""(file, mutant, verdict, the test that failed): verdict is killed, survived, timeout or invalid.
"""


@dataclass(frozen=True)
class Child:
    file: Path
    mutant: Mutant
    pid: int
    pipe: int
    folder: str


@dataclass
class Observer:
    """A pytest plugin: in place of its loop, a child for each test file notes what the tests call
    (calls.py).
    """

    notes: Path
    jobs: int
    until: float

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        gc.collect()
        gc.freeze()
        for item in session.items:
            find_quickly(item)
        running: dict[int, tuple[str, str]] = {}
        for path, items in groupby(session.items, key=lambda item: item.path):
            if time.monotonic() > self.until:
                break
            folder = tempfile.mkdtemp()
            running[self.start(session, relative(path), list(items), folder)] = (
                relative(path),
                folder,
            )
            self.wait(running, self.jobs - 1)
        self.wait(running, 0)
        return True

    def start(
        self, session: pytest.Session, file: str, items: Sequence[pytest.Item], folder: str
    ) -> int:
        notes = self.path_of(file)
        notes.unlink(missing_ok=True)
        pid = os.fork()
        if pid == 0:
            faulthandler.dump_traceback_later(FILE, exit=True)
            run_child(session, folder, lambda: note(items, notes))
        return pid

    def path_of(self, file: str) -> Path:
        return self.notes / f"{file.replace('/', '.')}.json"

    def wait(self, running: dict[int, tuple[str, str]], most: int) -> None:
        while len(running) > most:
            pid, status = os.wait()
            if pid in running:
                file, folder = running.pop(pid)
                kill_group(pid)
                shutil.rmtree(folder, ignore_errors=True)
                failed = [file] if status else json.loads(self.path_of(file).read_text())["failed"]
                if failed:
                    print(
                        f"left out, for it fails without any change: {', '.join(failed)}",
                        flush=True,
                    )


@dataclass
class MutantRunner:
    """A pytest plugin: its loop runs the tests on the mutants, not on the code itself.

    mutants: what to run, in order; until: time.monotonic() after which none is started.
    """

    mutants: Sequence[tuple[Path, Mutant]]
    calls: Calls
    report: Report
    jobs: int
    until: float
    parent: int

    def __post_init__(self) -> None:
        """Note which functions run at import: no test kills their mutants without a new import."""
        self.imported: dict[int, CodeType] = {}
        self.sound: dict[Path, bool] = {}

        def see(frame: FrameType, event: str, _: object) -> None:
            if event == "call":
                self.imported[id(frame.f_code)] = frame.f_code

        sys.setprofile(see)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        sys.setprofile(None)
        if session.testsfailed:
            return True  # collection failed, pytest says so
        self.session, self.items = session, {item.nodeid: item for item in session.items}
        self.numbers = {test: number for number, test in enumerate(self.items)}
        for item in session.items:
            find_quickly(item)
        files = {str(file) for file, _ in self.mutants}
        functions = [
            f
            for f in gc.get_objects()
            if isinstance(f, FunctionType) and f.__code__.co_filename in files
        ]
        self.functions = defaultdict(list)
        for function in functions:
            self.functions[function.__code__.co_filename].append(function)
        self.at_import = set(functions_of(list(self.imported.values())))
        gc.collect()
        gc.freeze()  # children then share these pages
        self.killers: defaultdict[tuple[Path, str], list[str]] = defaultdict(list)
        running: list[Child] = []
        for file, mutant in self.mutants:
            if time.monotonic() > self.until or os.getppid() != self.parent:
                break  # also where the reporting process was stopped
            chosen = self.choose(file, mutant)
            if not chosen:
                self.report(file, mutant, "survived", "no unit test calls it in its own process")
                continue
            if not self.is_called(file, mutant) and not self.passes_unchanged(
                file, self.affordable(chosen)
            ):
                self.report(file, mutant, "survived", "its tests cannot be imported a second time")
                continue
            running.append(self.start(file, mutant, chosen))
            while len(running) >= self.jobs:
                running = list(self.wait(running))
        while running:
            running = list(self.wait(running))
        return True

    def choose(self, file: Path, mutant: Mutant) -> list[str]:
        """Its tests: those that killed its neighbours first, then file by file, the quick ones
        before the slow.
        """
        place = relative(file), mutant.where
        if mutant.where and not self.is_called(file, mutant) and place not in self.at_import:
            return []
        tests = self.calls.tests_of(*place) & self.items.keys()
        seconds: defaultdict[Path, float] = defaultdict(float)
        for test in tests:
            seconds[self.items[test].path] += self.calls.seconds[test].clock
        killers = self.killers[file, mutant.where]

        def rank(test: str) -> tuple:
            path = self.items[test].path
            return -killers.count(test), seconds[path], path, self.numbers[test]

        return sorted(tests, key=rank)

    def affordable(self, tests: Sequence[str]) -> Sequence[str]:
        """The first of them, of MOST seconds together, but at least one."""
        ends = accumulate(self.calls.seconds[test].clock for test in tests)
        return tests[: max(sum(end <= MOST for end in ends), 1)]

    def passes_unchanged(self, file: Path, chosen: Sequence[str]) -> bool:
        """Check that its tests pass in a new import of the file as it is.

        Else all its import mutants would seem killed.
        """
        if file not in self.sound:
            folder, text = tempfile.mkdtemp(), file.read_text()
            pid = os.fork()
            if pid == 0:
                limit(IMPORT)
                run_child(
                    self.session,
                    folder,
                    lambda: run_in_new_import(file, text, chosen, self.calls) and os._exit(LATE),
                )
            self.sound[file] = os.waitpid(pid, 0)[1] == 0
            kill_group(pid)
            shutil.rmtree(folder, ignore_errors=True)
        return self.sound[file]

    def start(self, file: Path, mutant: Mutant, chosen: Sequence[str]) -> Child:
        read, write = os.pipe()
        folder = tempfile.mkdtemp()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            run_child(
                self.session,
                folder,
                lambda: os.write(write, self.run_mutant(file, mutant, chosen).encode()),
            )
        os.close(write)
        return Child(file, mutant, pid, read, folder)

    def run_mutant(self, file: Path, mutant: Mutant, chosen: Sequence[str]) -> str:
        """In the child: "survived", "invalid", or "killed" and the test that failed."""
        try:
            code = compile(mutant.text, str(file), "exec", dont_inherit=True)
        except SyntaxError:
            return "invalid"
        tests = self.affordable(chosen)
        survived = (
            f"survived {more} slower tests were not run"
            if (more := len(chosen) - len(tests))
            else "survived"
        )
        if self.is_called(file, mutant) and exchange_code(self.functions[str(file)], code):
            failed = self.first_failure([self.items[test] for test in tests])
            return f"killed {failed}" if failed else survived
        limit(IMPORT)
        return (
            "killed import" if run_in_new_import(file, mutant.text, tests, self.calls) else survived
        )

    def is_called(self, file: Path, mutant: Mutant) -> bool:
        """By a test.  Else it takes effect at import, if at all."""
        return bool(mutant.where) and self.calls.is_called(relative(file), mutant.where)

    def first_failure(self, items: Sequence[pytest.Item]) -> str | None:
        for item, after in zip(items, [*items[1:], None], strict=True):
            limit(self.calls.seconds[item.nodeid])
            if any(report.failed for report in runtestprotocol(item, log=False, nextitem=after)):
                return item.nodeid
        return None

    def wait(self, running: Sequence[Child]) -> Iterator[Child]:
        """Take the answers of those that have ended; yields the children that still run."""
        ready, _, _ = select.select([child.pipe for child in running], [], [], 0.5)
        for child in running:
            answer = os.read(child.pipe, 4096).decode() if child.pipe in ready else ""
            if answer:
                kill_group(child.pid)
            pid, status = os.waitpid(child.pid, 0 if child.pipe in ready else os.WNOHANG)
            if not pid:
                yield child
                continue
            kill_group(child.pid)  # processes that its tests started
            os.close(child.pipe)
            shutil.rmtree(child.folder, ignore_errors=True)
            if not answer:
                answer = (
                    "timeout"
                    if os.waitstatus_to_exitcode(status) in (-signal.SIGPROF, LATE)
                    else "killed crash"
                )
            verdict, _, by = answer.partition(" ")
            if verdict == "killed":
                self.killers[child.file, child.mutant.where].append(by)
            self.report(child.file, child.mutant, verdict, by)


def run_child(session: pytest.Session, folder: str, work: Callable[[], object]) -> None:
    """Do the work in this forked process, silently, and end it."""
    status = CRASHED
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)
        session.config._tmp_path_factory._basetemp = Path(folder)  # type: ignore[attr-defined]
        os.environ["TMPDIR"], tempfile.tempdir = folder, folder
        work()
        status = 0
    finally:
        os._exit(status)


def exchange_code(functions: Sequence[FunctionType], module: CodeType) -> bool:
    """Give live functions their code in `module`; False where one cannot take it (another set of
    closed-over names).
    """
    changed = {(code.co_qualname, code.co_firstlineno): code for code in codes_in(module)}
    try:
        for function in functions:
            key = function.__code__.co_qualname, function.__code__.co_firstlineno
            if key in changed:
                function.__code__ = changed[key]
    except ValueError:
        return False
    return True


def codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from codes_in(inner)


@dataclass
class Only:
    """A pytest plugin: these tests, in this order, with limits."""

    tests: Sequence[str]
    calls: Calls

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        found = {item.nodeid: item for item in items}
        items[:] = [found[test] for test in self.tests if test in found]
        for item in items:
            find_quickly(item)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        limit(self.calls.seconds[item.nodeid])


def run_in_new_import(file: Path, text: str, tests: Sequence[str], calls: Calls) -> bool:
    """Return True where a test fails, or cannot be collected, when the package is imported with
    this text in place of `file`.
    """
    name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")

    class Loader(SourceFileLoader):
        def get_code(self, fullname: str) -> CodeType:
            return compile(text, str(file), "exec", dont_inherit=True)

    class Finder:
        @staticmethod
        def find_spec(fullname: str, path: object = None, target: object = None) -> object:
            is_it = fullname == name
            return (
                importlib.util.spec_from_file_location(name, file, loader=Loader(name, str(file)))
                if is_it
                else None
            )

    for loaded, module in list(sys.modules.items()):
        place = getattr(module, "__file__", None) or ""
        if loaded.partition(".")[0] in ("megatron_rl", "tests", "tools") or place.startswith(
            str(ROOT / "tests")
        ):
            del sys.modules[loaded]
    sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
    files = sorted({test.partition("::")[0] for test in tests})
    status = pytest.main(["-x", "-q", *OPTIONS, *files], plugins=[Only(tests, calls)])
    return status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


OPTIONS = (
    "--capture=no",
    "--no-header",
    "--no-summary",
    "-p",
    "no:cacheprovider",
    "-m",
    "not slow",
)


def find_quickly(item: pytest.Item) -> None:
    """Hypothesis: the same examples each time, and no search for the smallest one that fails."""
    test = getattr(item, "obj", None)
    if (own := getattr(test, "_hypothesis_internal_use_settings", None)) is not None:
        phases = (Phase.explicit, Phase.generate)
        quick = settings(own, phases=phases, database=None, derandomize=True)
        getattr(test, "__func__", test)._hypothesis_internal_use_settings = quick


def limit(unchanged: Seconds) -> None:
    """End this process where it takes much longer than that from here on."""
    busy = max(os.getloadavg()[0] / (os.cpu_count() or 1), 1.0)
    signal.setitimer(signal.ITIMER_PROF, PATIENCE + TIMES * unchanged.cpu)
    faulthandler.dump_traceback_later(WAITING * (PATIENCE + unchanged.clock) * busy, exit=True)


def kill_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
