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
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from itertools import accumulate, groupby
from pathlib import Path
from statistics import fmean
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
# proportion.  A mutant that waits for what never comes costs that much, and no CPU time.
WAITING = 4.0
# what an import mutant's child may need for the import, unchanged
IMPORT = Seconds(clock=30.0, cpu=30.0)
FILE = 900.0  # seconds by the clock for the notes of a test file
# exit status: of faulthandler's watchdog; of a child that fails outside a test
LATE, CRASHED = 1, 3
# seconds of tests, by the clock, that a mutant is tried on: those that killed its neighbours, then
# the quick ones
MOST = 60.0
# of these, an import mutant's child collects and runs so many before it collects the others
FIRST = 10
OURS = ("megatron_rl", "megatron_rl_tools", "megatron_rl_viewer", "tests", "tools", "examples")
UNCHANGED = "unchanged"

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
        # what happens to the tests of a file in a new import of it as it is: unless they survive
        # it, all its import mutants would seem killed
        self.unchanged: dict[Path, str] = {}

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
        self.means = {
            path: fmean(self.calls.seconds[item.nodeid].clock for item in items)
            for path, items in groupby(
                (item for item in session.items if item.nodeid in self.calls.seconds),
                key=lambda item: item.path,
            )
        }
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
        self.running: list[Child] = []
        for file, mutant in self.in_order():
            if time.monotonic() > self.until or os.getppid() != self.parent:
                break  # also where the reporting process was stopped
            chosen = self.choose(file, mutant)
            if not chosen:
                self.end(file, mutant, "survived", "no unit test calls it in its own process")
                continue
            if mutant.change != UNCHANGED and not self.is_called(file, mutant):
                self.wait_until(lambda file=file: file in self.unchanged)
                if self.unchanged[file]:
                    why = f"the file as it is, imported once more: {self.unchanged[file]}"
                    self.end(file, mutant, "survived", why)
                    continue
            self.running.append(self.start(file, mutant, chosen))
            self.wait_until(lambda: len(self.running) < self.jobs)
        self.wait_until(lambda: not self.running)
        return True

    def in_order(self) -> list[tuple[Path, Mutant]]:
        """The mutants, those of an import last, so that no one waits for the unchanged files that
        come first.
        """
        called = [one for one in self.mutants if self.is_called(*one)]
        at_import = [one for one in self.mutants if not self.is_called(*one)]
        files = dict.fromkeys(file for file, mutant in at_import if self.choose(file, mutant))
        unchanged = [(file, Mutant("", UNCHANGED, file.read_text())) for file in files]
        return [*unchanged, *called, *at_import]

    def choose(self, file: Path, mutant: Mutant) -> list[str]:
        """Its tests: those that killed mutants of its function first, then the quick before the
        slow, sooner where they killed others of its file.
        """
        place = relative(file), mutant.where
        if mutant.where and not self.is_called(file, mutant) and place not in self.at_import:
            return []
        tests = self.calls.tests_of(*place) & self.items.keys()
        killers, in_file = self.killers[file, mutant.where], self.killers[file, ""]

        def rank(test: str) -> tuple:
            # with the mean of its file: other tests of that may have set up what it needs
            seconds = self.calls.seconds[test].clock + self.means[self.items[test].path]
            return -killers.count(test), seconds / (1 + in_file.count(test)), self.numbers[test]

        return sorted(tests, key=rank)

    def affordable(self, tests: Sequence[str]) -> Sequence[str]:
        """The first of them, of MOST seconds together, but at least one."""
        ends = accumulate(self.calls.seconds[test].clock for test in tests)
        return tests[: max(sum(end <= MOST for end in ends), 1)]

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
        failed = run_in_new_import(file, mutant.text, tests, self.calls)
        return f"killed {failed}" if failed else survived

    def is_called(self, file: Path, mutant: Mutant) -> bool:
        """By a test.  Else it takes effect at import, if at all."""
        return bool(mutant.where) and self.calls.is_called(relative(file), mutant.where)

    def first_failure(self, items: Sequence[pytest.Item]) -> str | None:
        watch = Watch(self.calls)
        for item, after in zip(items, [*items[1:], None], strict=True):
            watch.limit(item.nodeid)
            if any(report.failed for report in runtestprotocol(item, log=False, nextitem=after)):
                return item.nodeid
        return None

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self.running = list(self.wait(self.running))

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
                for where in {child.mutant.where, ""}:
                    self.killers[child.file, where].append(by)
            self.end(child.file, child.mutant, verdict, by)

    def end(self, file: Path, mutant: Mutant, verdict: str, by: str) -> None:
        if mutant.change == UNCHANGED:
            self.unchanged[file] = "" if verdict == "survived" else f"{verdict} {by}".rstrip()
        else:
            self.report(file, mutant, verdict, by)


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
    """A pytest plugin: these tests, in this order, with limits.  failed: the first that fails."""

    tests: Sequence[str]
    calls: Calls
    failed: str | None = None

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        found = {item.nodeid: item for item in items}
        items[:] = [found[test] for test in self.tests if test in found]
        for item in items:
            find_quickly(item)
        self.watch = Watch(self.calls)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        self.watch.limit(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid


def run_in_new_import(file: Path, text: str, tests: Sequence[str], calls: Calls) -> str | None:
    """Return the test that fails when the package is imported with this text in place of `file`,
    "import" where tests cannot be collected, None where all pass.
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
        # the other packages, too: they hold functions and classes of the first import
        if loaded.partition(".")[0] in OURS or place.startswith(str(ROOT / "tests")):
            del sys.modules[loaded]
    sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
    for part in filter(None, (tests[:FIRST], tests[FIRST:])):
        files = sorted({test.partition("::")[0] for test in part})
        only = Only(part, calls)
        limit(IMPORT)
        status = pytest.main(["-x", "-q", *OPTIONS, *files], plugins=[only])
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return only.failed or "import"
    return None


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


@dataclass
class Watch:
    """Ends this process where a test, or all so far together, take much longer than unchanged."""

    calls: Calls
    unchanged: float = 0.0  # seconds by the clock of the tests so far
    started: float = field(default_factory=time.monotonic)

    def limit(self, test: str) -> None:
        seconds = self.calls.seconds[test]
        late = time.monotonic() - self.started - WAITING * busy() * self.unchanged
        self.unchanged += seconds.clock
        limit(seconds, max(late, 0.0))


def limit(unchanged: Seconds, late: float = 0.0) -> None:
    """End this process where it takes much longer than that from here on.

    late: the seconds, by the clock, that are used up already.
    """
    signal.setitimer(signal.ITIMER_PROF, PATIENCE + TIMES * unchanged.cpu)
    left = WAITING * busy() * (PATIENCE + unchanged.clock) - late
    faulthandler.dump_traceback_later(max(left, 0.1), exit=True)


def busy() -> float:
    """Factor by which work may take longer than on idle cores."""
    return max(os.getloadavg()[0] / (os.cpu_count() or 1), 1.0)


def kill_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
