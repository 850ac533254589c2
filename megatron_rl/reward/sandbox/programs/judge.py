"""Runs tests against the model's code, which runs in another box (candidate.py).

    judge.py IN OUT    the ends of the pipes to candidate.py, as numbers of descriptors

Reads {"code", "setup", "tests"} from standard input and writes JSON texts to standard output, one a
line, when they are known: why the code could not be run, "" if it could, then for each test why it
failed, "" if it passed.  The names that tests use and do not define are asked of the candidate: a
function becomes a Remote, whose calls cross as plain data.  Expected values never leave this
process, and no code of the model runs in it.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import sys
import traceback
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from megatron_rl.reward.sandbox.programs.plain_values import (
    NotPlain,
    decode,
    encode,
    read_message,
    write_message,
)

BUILTINS = frozenset(dir(builtins))
AROUND_RESULTS = frozenset((
    "abs", "all", "any", "bool", "dict", "enumerate", "filter", "float", "int", "isinstance",
    "iter", "len", "list", "map", "range", "reversed", "round", "set", "sorted", "str", "tuple",
    "type", "zip",
))  # fmt: skip
"""Built-in names that tests put around a result to compare it, abs(sum(10, 15) - 6) < 1e-6, and
those that make arguments."""
UNUSUAL = (AssertionError, StopIteration, StopAsyncIteration)


class Gone(BaseException):
    """The candidate has ended, or answers what is no answer: no further test can pass."""


class Remote:
    """An object of the candidate, perhaps a function.  It equals only itself."""

    def __init__(self, candidate: Candidate, number: int) -> None:
        self._candidate, self._number = candidate, number

    def __call__(self, *arguments: object, **keywords: object) -> object:
        return self._candidate.call(self._number, arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy, pickle and others ask for these
            raise AttributeError(name)
        return self._candidate.ask({"attribute": self._number, "name": name})

    def __bool__(self) -> bool:  # else that of __len__, which few objects have
        return True

    def __len__(self) -> Any:
        return self._candidate.operate("len", self)

    def __str__(self) -> Any:
        return self._candidate.operate("str", self)

    def __iter__(self) -> Iterator[object]:
        entries: Any = self._candidate.operate("iter", self)
        return iter(entries)

    def __getitem__(self, key: object) -> object:
        return self._candidate.operate("getitem", self, key)


class Candidate:
    """The connection to candidate.py."""

    def __init__(self, answers: int, messages: int) -> None:
        self.answers, self.messages = os.fdopen(answers, "rb"), os.fdopen(messages, "wb")
        self.remotes: dict[int, Remote] = {}
        self.end = ""
        """Why no answer is expected any more."""

    def gone(self, why: str) -> Gone:
        self.end = why
        return Gone(why)

    def exchange(self, message: dict) -> dict:
        """Send a message; return the answer, or raise the exception that it names."""
        if self.end:
            raise Gone(self.end)
        try:
            write_message(self.messages, message)
            answer = read_message(self.answers)
        except (EOFError, OSError, NotPlain) as error:
            raise self.gone(str(error)) from None
        if isinstance(answer, dict) and "raised" in answer:
            try:
                kind, text = map(str, answer["raised"])
            except (TypeError, ValueError):
                raise self.gone("not an answer") from None
            error_type: Any = getattr(builtins, kind, None)
            # an exit of the code is no exit of the tests, and what ends a loop ends none of theirs:
            # all(map(...)) would be true
            is_usual = isinstance(error_type, type) and issubclass(error_type, Exception)
            if not is_usual or issubclass(error_type, UNUSUAL):
                error_type = RuntimeError
            try:
                raise error_type(text)
            except TypeError:  # an exception that takes more arguments, such as UnicodeError
                raise RuntimeError(text) from None
        if not isinstance(answer, dict) or "value" not in answer:
            raise self.gone("not an answer")
        return answer

    def ask(self, message: dict) -> object:
        return self.read(self.exchange(message)["value"])

    def operate(self, name: str, *arguments: object) -> object:
        encoded = [encode(value, sendable) for value in arguments]
        return self.ask({"operator": name, "arguments": encoded})

    def read(self, content: object) -> object:
        try:
            return decode(content, self.find)
        except NotPlain as error:
            raise self.gone(str(error)) from None

    def find(self, number: int) -> Remote:
        if type(number) is not int:
            raise NotPlain("an object without a number")
        return self.remotes.setdefault(number, Remote(self, number))

    def call(self, number: int, arguments: tuple, keywords: dict) -> object:
        message = {
            "call": number,
            "arguments": [encode(value, sendable) for value in arguments],
            "keywords": {name: encode(value, sendable) for name, value in keywords.items()},
        }
        answer = self.exchange(message)
        after = answer.get("arguments")
        if isinstance(after, list) and len(after) == len(arguments):
            for argument, content in zip(arguments, after, strict=True):
                replace_content(argument, None if content is None else self.read(content))
        return self.read(answer["value"])


def sendable(value: object) -> object:
    if isinstance(value, Remote):
        return ["object", value._number]
    raise TypeError(f"a {type(value).__name__} cannot be passed to the code")


def replace_content(argument: Any, content: Any) -> None:
    """Do to a list, dict or set of the tests what the code did to its copy."""
    if type(argument) is list and type(content) is list:
        argument[:] = content
    elif type(argument) in (dict, set) and type(content) is type(argument):
        argument.clear()
        argument.update(content)


def names_of_modules(nodes: list[ast.AST]) -> set[str]:
    """Return the modules of the standard library whose attributes a test reads.  They are imported
    here: the code's own `math` would make every math.isclose true.

    A name of which the test reads what the module does not have is one of the code: queue.size().
    """
    attributes: dict[str, set[str]] = {}
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            attributes.setdefault(node.value.id, set()).add(node.attr)
    names = attributes.keys() & sys.stdlib_module_names
    return {name for name in names if attributes[name] <= names_in_module(name)}


def names_in_module(name: str) -> set[str]:
    """Return the names in a module; none for one of another operating system."""
    try:
        return set(dir(import_module(name)))
    except ImportError:
        return set()


def tested_builtin(setup: str, tests: list[str]) -> str | None:
    """Return the built-in name that the code must define, such as `sum` for `assert sum(10, 15) ==
    6`; None where tests ask for another name of the code, and built-in names mean what they do in
    Python.
    """
    try:
        parsed = [list(ast.walk(ast.parse(f"{setup}\n{test}"))) for test in tests]
    except (SyntaxError, ValueError):  # the test will fail with it
        return None
    if any(set(asked_names(nodes)) - names_of_modules(nodes) for nodes in parsed):
        return None
    names, after = BUILTINS - defined_names(parsed[0]), setup.count("\n") + 1
    # breadth first: the outermost call
    for node in parsed[0]:
        if isinstance(node, ast.Name) and node.lineno > after and node.id in names:
            inner = called_within(node, parsed[0])
            return next((name for name in inner if name in names - AROUND_RESULTS), node.id)
    return None


def called_within(name: ast.Name, nodes: list[ast.AST]) -> list[str]:
    """Return the functions that the arguments of a call of AROUND_RESULTS call."""
    calls = (node for node in nodes if isinstance(node, ast.Call) and node.func is name)
    inner = (part for call in calls for entry in call.args for part in ast.walk(entry))
    functions = (part.func for part in inner if isinstance(part, ast.Call))
    is_around = name.id in AROUND_RESULTS
    return [name.id for name in functions if is_around and isinstance(name, ast.Name)]


def asked_names(nodes: list[ast.AST], tested: str | None = None) -> Iterator[str]:
    """Yield the names that a test reads and neither defines nor finds among the built-in ones.

    tested: a built-in name that is asked for all the same.
    """
    known = defined_names(nodes) | (BUILTINS - {tested})
    names = (node.id for node in nodes if isinstance(node, ast.Name))
    yield from dict.fromkeys(name for name in names if name not in known)


def defined_names(nodes: list[ast.AST]) -> set[str]:
    """Return the names that a test defines."""
    defined = set()
    for node in nodes:
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            defined.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            defined.add(node.name)
    return defined


def run_test(test: str, setup: str, candidate: Candidate, tested: str | None) -> str:
    """Return "" where the test passes, else why it does not.  Raises Gone.

    tested: see asked_names.
    """
    source = f"{setup}\n{test}"
    try:
        nodes = list(ast.walk(ast.parse(source)))
        modules = names_of_modules(nodes)
        names: dict = {"__name__": "tests"}
        for name in asked_names(nodes, tested):
            is_module = name in modules
            names[name] = import_module(name) if is_module else candidate.ask({"get": name})
        program = compile(source, "tests.py", "exec", dont_inherit=True)
        exec(program, names)  # noqa: S102
        why = ""
    except AssertionError as error:
        why = "wrong: " + text_of(error).removeprefix("AssertionError").removeprefix(": ")
    except (Exception, SystemExit) as error:
        why = text_of(error)
    if candidate.end:  # also where the test has caught that
        raise Gone(candidate.end)
    return why


def text_of(error: BaseException) -> str:
    """Return "TYPE: MESSAGE", also where str(error) raises, as for an int of 5,000 digits."""
    return traceback.format_exception_only(error)[-1].strip()[:200]


def judge(candidate: Candidate, code: str, setup: str, tests: list[str]) -> Iterator[str]:
    """Yield why the code could not be run, "" if it could, then the same of each test."""
    try:
        candidate.exchange({"code": code})
    except Gone as error:
        yield f"the code ended: {error}"[:200]
        return
    except Exception as error:
        yield text_of(error)
        return
    yield ""
    tested = tested_builtin(setup, tests)
    for test in tests:
        try:
            yield run_test(test, setup, candidate, tested)
        except Gone as error:
            yield f"no answer: {error}"[:200]


def main() -> None:
    answers, messages = (int(number) for number in sys.argv[1:3])
    request = json.load(sys.stdin)
    # a test may print what the code returned, which must not be read as a result
    results = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    candidate = Candidate(answers, messages)
    for why in judge(candidate, request["code"], request["setup"], request["tests"]):
        print(json.dumps(why), file=results, flush=True)


if __name__ == "__main__":
    main()
