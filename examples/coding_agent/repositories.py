"""Small repositories, each with one test that fails, and their reward.

A repository is a module of about ten lines and test.py.  One function does not do what its
docstring says, and one token mends it.
"""

from __future__ import annotations

import operator
import random
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import product

from megatron_rl.reward.code_tests import default_tests
from megatron_rl.reward.sandbox.workspace import Workspace, WorkspaceError

WORDS = {"+": "plus", "-": "minus", "*": "times", ">": "above", "<": "below", "==": "equal to"}
VALUES = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    ">": operator.gt,
    "<": operator.lt,
    "==": operator.eq,
}
KINDS = (("+", "-", "*"), (">", "<", "=="))
"""Signs that are mistaken for one another."""
DIGITS = range(3, 10)
NAMES = ("price", "rent", "herd", "cost")
PATH = "main.py"
MODULE = '''"""One of many modules."""

NAME = "{function}"


{broken}

def title():
    return NAME.title()
'''
BROKEN = '''def {function}(x):
    """Return x {word} {digit}."""
    return {wrong}
'''


@dataclass(frozen=True)
class Repository:
    """A repository with a function that is wrong."""

    function: str
    sign: str
    digit: int
    wrong: str
    """The expression in the module."""
    others: tuple[str, ...]
    """Expressions in which one token of `wrong` is another one, without the right one."""

    @property
    def right(self) -> str:
        return f"x {self.sign} {self.digit}"

    @property
    def broken(self) -> str:
        word = WORDS[self.sign]
        return BROKEN.format(function=self.function, word=word, digit=self.digit, wrong=self.wrong)

    @property
    def arguments(self) -> tuple[int, ...]:
        """The arguments of the test that fails: no wrong expression has the values of the right one
        on them."""
        near = (self.digit - 1, self.digit, self.digit + 1)
        return near if self.sign in KINDS[1] else (self.digit + 4,)

    @property
    def tests(self) -> list[str]:
        values = [(x, VALUES[self.sign](x, self.digit)) for x in self.arguments]
        calls = [f"{self.function}({x}) == {value}" for x, value in values]
        return [f'assert title() == "{self.function.title()}"', f"assert {' and '.join(calls)}"]

    @property
    def files(self) -> dict[str, str]:
        imports = f"from main import {self.function}, title"
        return {
            PATH: MODULE.format(function=self.function, broken=self.broken),
            "test.py": "\n".join([imports, "", *self.tests, ""]),
        }

    @property
    def task(self) -> str:
        return f"test.py fails. In {PATH}:\n{self.broken}"


@cache
def repositories() -> tuple[Repository, ...]:
    """Return all of them, in an order that is the same in every process."""
    made = []
    for function, signs, digit in product(NAMES, KINDS, DIGITS):
        for sign in signs:
            other_signs = [f"x {other} {digit}" for other in signs if other != sign]
            other_digits = [f"x {sign} {other}" for other in DIGITS if other != digit]
            for wrong in (*other_signs, *other_digits):
                others = other_signs if wrong in other_signs else other_digits
                made.append(Repository(function, sign, digit, wrong, tuple(others)))
    random.Random(0).shuffle(made)
    return tuple(made)


def passed_frac(repository: Repository, workspace: Workspace) -> float:
    """Return the share of the repository's tests that its module passes."""
    try:
        return judged(repository, workspace.read(PATH))
    except WorkspaceError:  # no such file
        return 0.0


@lru_cache(4096)  # half of the episodes of a group write the same
def judged(repository: Repository, module: str) -> float:
    """Return the share of the tests that a module passes.

    The tests are those of the repository, whatever the episode has written, and run in a sandbox of
    their own.
    """
    passed = default_tests().judge(module, repository.tests).passed
    return sum(passed) / len(passed)
