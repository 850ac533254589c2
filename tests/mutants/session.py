"""One pytest session that runs mutants: tests are collected once, then one child per mutant is forked, changed and run.

The parent imports everything and runs no test.  A first child runs all tests and notes which functions each of them calls.
A mutant inside a function is put into its child by exchanging the code of the live function; one that takes effect at import
(constants, defaults) has its child import the package and collect the tests once more.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import math
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import Phase, settings

from tests.mutants.source import Mutant

ROOT = Path(__file__).resolve().parents[2]
MEMORY = 6 << 30  # bytes that a child may add to the address space: a mutant may ask for anything
PATIENCE, TIMES = 5.0, 5.0  # a child may take PATIENCE seconds of CPU time + TIMES x what its tests took unchanged
WAITING = 10.0  # and so many times that by the clock: it may sleep, and the machine may be busy

Report = Callable[[Path, Mutant, str, str], None]
"""(file, mutant, verdict, the test that failed): verdict is killed, survived, timeout or invalid."""


@dataclass(frozen=True)
class Child:
    file: Path
    mutant: Mutant
    pid: int
    pipe: int
    deadline: float
    folder: str


@dataclass
class MutantRunner:
    """A pytest plugin: its loop runs the tests on the mutants, not on the code itself.

    mutants: what to run, in order; tests: arguments of pytest; until: time.monotonic() after which none is started.
    """

    mutants: Sequence[tuple[Path, Mutant]]
    tests: Sequence[str]
    report: Report
    jobs: int
    until: float
    parent: int

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            return True  # collection failed, pytest says so
        self.session, self.items = session, {item.nodeid: item for item in session.items}
        for item in session.items:
            find_quickly(item)
        files = {str(file) for file, _ in self.mutants}
        functions = [f for f in gc.get_objects() if isinstance(f, FunctionType) and f.__code__.co_filename in files]
        self.functions = defaultdict(list)
        for function in functions:
            self.functions[function.__code__.co_filename].append(function)
        gc.collect()
        gc.freeze()  # children then share these pages
        self.seconds, self.callers = self.observe(files)
        self.killers: defaultdict[tuple[Path, str], list[str]] = defaultdict(list)
        running: list[Child] = []
        for file, mutant in self.mutants:
            if time.monotonic() > self.until or os.getppid() != self.parent:
                break  # also where the reporting process was stopped
            chosen = self.choose(file, mutant)
            if not chosen:
                self.report(file, mutant, "survived", "no test calls it")
                continue
            running.append(self.start(file, mutant, chosen))
            while len(running) >= self.jobs:
                running = list(self.wait(running))
        while running:
            running = list(self.wait(running))
        return True

    def observe(self, files: set[str]) -> tuple[dict[str, float], dict[tuple[str, str], set[str]]]:
        """(seconds of each test that passes, the tests that call a function): from one run in a child."""
        with tempfile.TemporaryDirectory() as folder:
            notes = Path(folder) / "notes.json"
            pid = os.fork()
            if pid == 0:
                run_child(self.session, folder, lambda: notes.write_text(json.dumps(watch(self.session.items, files))))
            os.waitpid(pid, 0)
            seconds, calls, failed = json.loads(notes.read_text())
        if failed:
            print(f"left out, they fail without any change: {failed}", flush=True)
        callers = defaultdict(set)
        for test, called in calls.items():
            for file, function in called:
                callers[file, function].add(test)
        return seconds, callers

    def choose(self, file: Path, mutant: Mutant) -> list[str]:
        """Tests that call the function, those that killed its other mutants first, then quick before slow."""
        if not mutant.where:
            return list(self.seconds)
        tests = self.callers[str(file), mutant.where] & self.seconds.keys()
        killers = self.killers[file, mutant.where]
        return sorted(tests, key=lambda test: (-killers.count(test), self.seconds[test]))

    def start(self, file: Path, mutant: Mutant, chosen: Sequence[str]) -> Child:
        read, write = os.pipe()
        folder = tempfile.mkdtemp()
        limit = PATIENCE + TIMES * sum(self.seconds[test] for test in chosen)
        pid = os.fork()
        if pid == 0:
            os.close(read)
            resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limit),) * 2)
            run_child(self.session, folder, lambda: os.write(write, self.run_mutant(file, mutant, chosen).encode()))
        os.close(write)
        return Child(file, mutant, pid, read, time.monotonic() + WAITING * limit, folder)

    def run_mutant(self, file: Path, mutant: Mutant, chosen: Sequence[str]) -> str:
        """In the child: "survived", "invalid", or "killed" and the test that failed."""
        try:
            code = compile(mutant.text, str(file), "exec", dont_inherit=True)
        except SyntaxError:
            return "invalid"
        if mutant.where and exchange_code(self.functions[str(file)], code):
            failed = first_failure([self.items[test] for test in chosen])
            return f"killed {failed}" if failed else "survived"
        return "killed import" if run_in_new_import(file, mutant.text, self.tests) else "survived"

    def wait(self, running: Sequence[Child]) -> Iterator[Child]:
        """Take what has come in or is overdue; yields the children that still run."""
        ready, _, _ = select.select([child.pipe for child in running], [], [], 0.5)
        for child in running:
            if child.pipe not in ready and time.monotonic() < child.deadline:
                yield child
                continue
            answer = os.read(child.pipe, 4096).decode() if child.pipe in ready else "timeout"
            os.close(child.pipe)
            if not answer:
                answer = "timeout" if os.WTERMSIG(os.waitpid(child.pid, 0)[1]) == signal.SIGXCPU else "killed crash"
            else:
                kill_group(child.pid)
                os.waitpid(child.pid, 0)
            shutil.rmtree(child.folder, ignore_errors=True)
            verdict, _, by = answer.partition(" ")
            if verdict == "killed":
                self.killers[child.file, child.mutant.where].append(by)
            self.report(child.file, child.mutant, verdict, by)


def run_child(session: pytest.Session, folder: str, work: Callable[[], object]) -> None:
    """Do the work in this forked process, silently, and end it."""
    status = 1
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


def watch(items: Sequence[pytest.Item], files: set[str]) -> tuple[dict[str, float], dict[str, list], list[str]]:
    """Run all; (seconds of each that passes, the functions that each calls, those that fail).

    What a test's set-up calls is taken as called by all tests of its file: fixtures are shared.
    """
    calls: set[tuple[str, str]] = set()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename in files:
            calls.update((frame.f_code.co_filename, name) for name in enclosing(frame.f_code.co_qualname))

    seconds, called, failed = {}, {}, []
    shared: defaultdict[Path, set] = defaultdict(set)
    for item, after in zip(items, [*items[1:], None], strict=True):
        calls.clear()
        started = time.process_time()
        sys.setprofile(note)
        threading.setprofile(note)
        reports = runtestprotocol(item, log=False, nextitem=after)
        sys.setprofile(None)
        if all(report.passed for report in reports):
            seconds[item.nodeid] = time.process_time() - started
        elif any(report.failed for report in reports):
            failed.append(item.nodeid)
        called[item.nodeid] = list(calls)
        shared[item.path] |= calls if is_first_of_file(item, items) else set()
    return seconds, {item.nodeid: [*called[item.nodeid], *shared[item.path]] for item in items}, failed


def is_first_of_file(item: pytest.Item, items: Sequence[pytest.Item]) -> bool:
    """Fixtures of a module run in its first test."""
    return next(other for other in items if other.path == item.path) is item


def enclosing(name: str) -> Iterator[str]:
    """f.<locals>.g.<lambda> -> itself, f.<locals>.g, f: a lambda's mutants are its function's."""
    parts = name.split(".<locals>.")
    for end in range(len(parts), 0, -1):
        yield ".<locals>.".join(parts[:end])


def first_failure(items: Sequence[pytest.Item]) -> str | None:
    for item, after in zip(items, [*items[1:], None], strict=True):
        if any(report.failed for report in runtestprotocol(item, log=False, nextitem=after)):
            return item.nodeid
    return None


def exchange_code(functions: Sequence[FunctionType], module: CodeType) -> bool:
    """Give live functions their code in `module`; False where one cannot take it (another set of closed-over names)."""
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


def run_in_new_import(file: Path, text: str, tests: Sequence[str]) -> bool:
    """Whether a test fails when the package is imported with this text in place of `file`."""
    name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")

    class Loader(SourceFileLoader):
        def get_code(self, fullname: str) -> CodeType:
            return compile(text, str(file), "exec", dont_inherit=True)

    class Finder:
        @staticmethod
        def find_spec(fullname: str, path: object = None, target: object = None) -> object:
            is_it = fullname == name
            return importlib.util.spec_from_file_location(name, file, loader=Loader(name, str(file))) if is_it else None

    for loaded, module in list(sys.modules.items()):
        place = getattr(module, "__file__", None) or ""
        if loaded.partition(".")[0] in ("megatron_rl", "tests", "tools") or place.startswith(str(ROOT / "tests")):
            del sys.modules[loaded]
    sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
    return pytest.main(["-x", "-q", *OPTIONS, *tests]) != 0


OPTIONS = ("--capture=no", "--no-header", "--no-summary", "-p", "no:cacheprovider", "-m", "not slow")


def find_quickly(item: pytest.Item) -> None:
    """Hypothesis: the same examples each time, and no search for the smallest one that fails."""
    test = getattr(item, "obj", None)
    if (own := getattr(test, "_hypothesis_internal_use_settings", None)) is not None:
        phases = (Phase.explicit, Phase.generate)
        quick = settings(own, phases=phases, database=None, derandomize=True)
        getattr(test, "__func__", test)._hypothesis_internal_use_settings = quick


def kill_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
