"""Scores Python that the model has written by tests of its problem, in a sandbox.

    [reward]
    function = "megatron_rl.reward.code_tests:score"
    timeout_seconds = 15     # above the seconds of the tests, 10

A row has the column `tests`, a list of texts, each of which passes where it runs without an
exception: assertions, as in MBPP, or a function `check(candidate)` and its call, as in HumanEval.
A column `setup` is put before each of them.

The code and the tests run in two boxes.  The tests call the code's functions through pipes, and
compare what comes back as plain data, so code that exits, patches names, overrides == or looks for
the expected values scores nothing.  A test gives the code the arguments of its calls, and what it
passes to methods of the code's objects, nothing else.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from megatron_rl.reward.failures import LabelError
from megatron_rl.reward.sandbox.box import Box, Limits, Outcome, end, exchange, find_box, module
from megatron_rl.reward.scored_response import Episode, Score

FENCE = re.compile(r"\s*(`{3,}|~{3,})\s*(\w*)([^`]*)")
MARKS = ("python", "py", "python3")
"""First words after the opening fence of a block of Python."""
MOST_CODE = 100_000
"""Characters of code that are run."""
MOST_WHY = 2_600
"""Bytes that the reason of a failed test takes as JSON."""


@dataclass(frozen=True)
class Verdict:
    """The results of the tests of one problem."""

    passed: tuple[bool, ...]
    why: tuple[str, ...] = ()
    """For each test why it failed, "" where it passed."""
    compiled: bool = True
    """The code ran to its end before the tests."""
    is_late: bool = False
    """The tests were stopped after Limits.seconds: the later ones have failed."""

    @property
    def is_right(self) -> bool:
        return bool(self.passed) and all(self.passed)


class CodeTests:
    """The reward function: 1 where all tests pass, else 0.

    Metrics: tests_passed_frac, compiled, timed_out.
    """

    def __init__(self, limits: Limits | None = None, box: Box | None = None) -> None:
        """limits: of each of the two boxes.

        box: starts the programs; default: find_box(limits).  Raises SandboxError where no sandbox
        works on this machine.
        """
        self.box = box or find_box(limits)

    def __call__(self, episode: Episode) -> Score:
        tests, setup = tests_of(episode)
        verdict = self.judge(code_of(episode.response), tests, setup)
        metrics = {
            "tests_passed_frac": sum(verdict.passed) / len(tests),
            "compiled": float(verdict.compiled),
            "timed_out": float(verdict.is_late),
        }
        return Score(float(verdict.is_right), metrics)

    def judge(self, code: str, tests: list[str], setup: str = "") -> Verdict:
        """Return the results of `tests` on `code`."""
        failed = (False,) * len(tests)
        if len(code) > MOST_CODE:
            return Verdict(failed, (f"longer than {MOST_CODE} characters",) * len(tests), False)
        request = json.dumps({"code": code, "setup": setup, "tests": tests}).encode()
        most = self.box.limits.output_bytes + MOST_WHY * len(tests)
        outcome = self._run(request, replace(self.box.limits, output_bytes=most))
        # without the last one: "", or a line that was not written to its end
        lines = [json.loads(line) for line in outcome.output.split(b"\n")[:-1]]
        problem, results = (lines[0], lines[1:]) if lines else ("", [])
        why = "late" if outcome.is_late else f"the tests ended with status {outcome.status}"
        missing = [problem or why] * (len(tests) - len(results))
        passed = (*(not result for result in results), *(False for _ in missing))
        return Verdict(passed, (*results, *missing), not problem, outcome.is_late)

    def _run(self, request: bytes, limits: Limits) -> Outcome:
        """Run both programs, and return what judge.py wrote.

        limits: of the reading.
        """
        to_code, from_tests = os.pipe()
        to_tests, from_code = os.pipe()
        keep = (to_tests, from_tests)
        judge = [*module("judge"), *map(str, keep)]
        processes: list[subprocess.Popen[bytes]] = []
        start, pipe = self.box.start, subprocess.PIPE
        try:
            try:
                processes.append(start(module("candidate"), stdin=to_code, stdout=from_code))
                processes.append(start(judge, stdin=pipe, stdout=pipe, keep=keep))
            finally:
                # also where a program does not start; and a program whose other end has died would
                # wait for ever
                for number in (to_code, from_tests, to_tests, from_code):
                    os.close(number)
            return exchange(processes[1], request, limits)
        finally:
            for process in processes:
                end(process)


def code_of(response: str) -> str:
    """Return the last block of code that is marked as Python, else the last one without a mark,
    else the whole response.
    """
    blocks = list(blocks_of(response))
    marked = [code for mark, code in blocks if mark in MARKS]
    unmarked = [code for mark, code in blocks if not mark]
    return [response, *unmarked, *marked][-1]


def blocks_of(response: str) -> Iterator[tuple[str, str]]:
    """Yield the first word after the opening fence and the code of each block of Markdown.  A
    response that was cut ends its last block.
    """
    fence, mark = "", ""
    lines: list[str] = []
    for line in re.split(r"\r?\n", response):
        match = FENCE.fullmatch(line)
        if not fence:
            if match:
                fence, mark, lines = match[1], match[2].lower(), []
        elif match and match[1].startswith(fence) and not (match[2] + match[3]).strip():
            yield mark, textwrap.dedent("".join(lines))
            fence = ""
        else:
            lines.append(f"{line}\n")
    if fence:
        yield mark, textwrap.dedent("".join(lines))


def tests_of(episode: Episode) -> tuple[list[str], str]:
    """Return the tests of a row and what comes before each.  Raises LabelError."""
    tests, setup = episode.metadata.get("tests"), episode.metadata.get("setup", "")
    if not isinstance(tests, list) or not tests or not all(isinstance(t, str) for t in tests):
        raise LabelError(
            f"column 'tests' = {tests!r:.80}: must be a list of texts with at least one test; set"
            " data.max_metadata_bytes above its size"
        )
    if not isinstance(setup, str):
        raise LabelError(f"column 'setup' = {setup!r:.80}: must be text")
    for test in tests:
        try:
            compile(f"{setup}\n{test}", "tests.py", "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            raise LabelError(f"test {test[:80]!r} is not Python: {error}") from error
    return tests, setup


@cache
def default_tests() -> CodeTests:
    """Return the function with default limits, which tries the sandbox of this machine first."""
    return CodeTests()


def __getattr__(name: str) -> CodeTests:
    """Make `score` when a worker asks for it: a run without a sandbox stops before it trains."""
    if name == "score":
        return default_tests()
    raise AttributeError(name)
