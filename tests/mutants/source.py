"""The mutants of one source file: mutmut's operators and a few for tensor code, at every place that
a test can check.

Never mutated, because no test should check them: annotations, decorators, imports, type aliases,
docstrings, assertions, `if TYPE_CHECKING`, `strict=` of zip, the arguments of errors and log lines,
texts with spaces, arguments that set the device of a tensor, names of threads and type variables,
whether a thread is a daemon. Nor "a = None" and "f(None)": they crash wherever the line runs, and
the forced conditions find branches that never run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import libcst as cst
import libcst.matchers as m
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider
from mutmut.mutation import mutators

CONTEXT = 28  # characters of the line shown on either side of a change
SILENT = {"print", "say", "log", "logger", "logging", "warnings"}
PLACING = {"strict", "device", "non_blocking", "pin_memory", "thread_name_prefix"}
OF_THREADS = {"name", "daemon"}
OPPOSITES = {
    "max": "min", "amax": "amin", "maximum": "minimum", "any": "all", "all": "any",
    "argmax": "argmin", "ones": "zeros",
    "ones_like": "zeros_like", "zeros_like": "ones_like", "mean": "sum", "append": "appendleft",
    "popleft": "pop",
}  # fmt: skip
OPPOSITES |= {
    b: a for a, b in OPPOSITES.items() if b not in ("sum", "zeros", "pop", "appendleft")
} | {"zeros": "ones"}
WRAPPERS = {
    "detach",
    "clamp",
    "clone",
    "copy",
    "contiguous",
    "double",
    "float",
    "long",
    "exp",
    "abs",
    "sum",
    "astype",
}

NEVER = (
    cst.Annotation,
    cst.ConcatenatedString,
    cst.Decorator,
    cst.Import,
    cst.ImportFrom,
    cst.Assert,
    cst.Raise,
    cst.FormattedString,
)
EQUALITY = m.Comparison(
    comparisons=[
        m.ComparisonTarget(
            operator=~(m.LessThan() | m.LessThanEqual() | m.GreaterThan() | m.GreaterThanEqual())
        )
    ]
)
"""As a condition, forced both ways: whatever fails there, fails where it is negated or compares
with something else.
"""


@dataclass(frozen=True)
class Mutant:
    """One change.

    where: qualified name of the function whose body it is in, "" where it takes effect at import.
    """

    where: str
    change: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.where or 'module'}: {self.change}"


def mutants_of(path: Path) -> list[Mutant]:
    """Every mutant, with names that are unique in the file and outlive edits of other lines."""
    source = path.read_text()
    wrapper = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
    places = Places(source, wrapper.resolve(PositionProvider))
    wrapper.module.visit(places)
    names: Counter[str] = Counter()
    found = {}
    for where, start, stop, replacement in places.changes:
        text = source[:start] + replacement + source[stop:]
        if text not in found and text != source:
            change = shown_change(source, start, stop, replacement)
            names[f"{where}: {change}"] += 1
            repeat = names[f"{where}: {change}"]
            found[text] = Mutant(where, change + (f" #{repeat}" if repeat > 1 else ""), text)
    return list(found.values())


def shown_change(source: str, start: int, stop: int, replacement: str) -> str:
    """E.g. "ratio > 1 + clip -> ratio > 1 - clip": what differs, with a little of its lines."""
    old = source[start:stop]
    same = 0
    while same < min(len(old), len(replacement)) and old[same] == replacement[same]:
        same += 1
    end = 0
    while end < min(len(old), len(replacement)) - same and old[-1 - end] == replacement[-1 - end]:
        end += 1
    first, last = start + same, stop - end
    before = source[max(source.rfind("\n", 0, first) + 1, first - CONTEXT) : first]
    after = source[last : last + CONTEXT].partition("\n")[0].partition("  # ")[0]
    middles = source[first:last], replacement[same : len(replacement) - end]
    return " -> ".join(" ".join((before + middle + after).split()) for middle in middles)


class Places(cst.CSTVisitor):
    """Collects (function, start, stop, replacement) of all changes."""

    def __init__(self, source: str, positions: dict[cst.CSTNode, CodeRange]) -> None:
        self.source, self.positions = source, positions
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.changes: list[tuple[str, int, int, str]] = []
        self.scopes: list[str] = []
        self.in_body = 0

    def on_visit(self, node: cst.CSTNode) -> bool:
        if is_skipped(node) or (not self.in_body and is_type_alias(node)):
            return False
        if isinstance(node, cst.FunctionDef | cst.ClassDef):
            self.visit_scope(node)
            return False
        if isinstance(node, cst.If | cst.While):
            self.add(node.test, cst.Name("True"))
            self.add(node.test, cst.Name("False"))
        for kind, operator in OPERATORS:
            if isinstance(node, kind):
                for changed in operator(node):
                    self.add(node, changed)
        if isinstance(node, cst.Call):
            node.func.visit(self)
            for argument in node.args:
                if not is_silent(node, argument):
                    argument.visit(self)
            return False
        if isinstance(node, cst.If | cst.While | cst.IfExp) and m.matches(node.test, EQUALITY):
            for part in (node.body, node.orelse):
                if part is not None:
                    part.visit(self)
            return False
        return True

    def visit_scope(self, node: cst.FunctionDef | cst.ClassDef) -> None:
        is_function = isinstance(node, cst.FunctionDef)
        if isinstance(node, cst.FunctionDef):
            for parameter in [*node.params.params, *node.params.kwonly_params]:
                if parameter.default is not None:
                    parameter.default.visit(self)
        self.scopes += [node.name.value, "<locals>"] if is_function else [node.name.value]
        self.in_body += is_function
        node.body.visit(self)
        self.in_body -= is_function
        del self.scopes[-2 if is_function else -1 :]

    def add(self, node: cst.CSTNode, changed: cst.CSTNode) -> None:
        """Cut out the node, with its own parentheses, which its position leaves out."""
        place = self.positions[node]
        start, stop = (self.starts[at.line - 1] + at.column for at in (place.start, place.end))
        bare = code_of(node)
        if squeezed(self.source[start:stop]) != squeezed(bare):
            depth = len(getattr(node, "lpar", ()))
            start = self.source.rindex("(", 0, start) if depth else start
            stop = self.source.index(")", stop) + 1 if depth else stop
        assert squeezed(self.source[start:stop]) == squeezed(bare), (
            f"{self.source[start:stop]!r} is not {bare!r}"
        )
        self.changes.append((self.where, start, stop, code_of(changed)))

    @property
    def where(self) -> str:
        return ".".join(self.scopes[:-1]) if self.in_body else ""


def code_of(node: cst.CSTNode) -> str:
    return cst.Module([]).code_for_node(node)


def squeezed(code: str) -> str:
    return "".join(code.split())


def is_skipped(node: cst.CSTNode) -> bool:
    """The rules of the module's docstring."""
    if isinstance(node, NEVER):
        return True
    if isinstance(node, cst.Expr) and isinstance(
        node.value, cst.SimpleString | cst.ConcatenatedString
    ):
        return True
    if isinstance(node, cst.If) and code_of(node.test) == "TYPE_CHECKING":
        return True
    return isinstance(node, cst.Call) and bool(SILENT & set(code_of(node.func).split(".")))


def is_silent(call: cst.Call, argument: cst.Arg) -> bool:
    """An argument that no test should check."""
    name = argument.keyword.value if argument.keyword is not None else ""
    return name in PLACING or (name in OF_THREADS and code_of(call.func).endswith("Thread"))


def is_type_alias(node: cst.CSTNode) -> bool:
    """X = Callable[...], X = A | B, X = TypeVar("X"), __all__."""
    if not isinstance(node, cst.Assign):
        return False
    union = m.BinaryOperation(
        operator=m.BitOr(), left=m.Name() | m.Attribute(), right=m.Name() | m.Attribute()
    )
    variable = m.Call(func=m.Name("TypeVar"))
    return (
        m.matches(node.value, m.Subscript() | union | variable)
        or code_of(node.targets[0].target) == "__all__"
    )


def one_string(node: cst.SimpleString) -> Iterator[cst.CSTNode]:
    if " " not in node.value:  # else it is for people
        yield from list(mutators.operator_string(node))[:1]


def without_argument(node: cst.Call) -> Iterator[cst.CSTNode]:
    """A keyword argument is left out."""
    for at, argument in enumerate(node.args):
        if argument.keyword is not None and not is_silent(node, argument):
            yield node.with_changes(args=[*node.args[:at], *node.args[at + 1 :]])


def opposite_name(node: cst.Call) -> Iterator[cst.CSTNode]:
    name = node.func.attr if isinstance(node.func, cst.Attribute) else node.func
    if isinstance(name, cst.Name) and name.value in OPPOSITES:
        yield node.with_deep_changes(name, value=OPPOSITES[name.value])


def without_call(node: cst.Call) -> Iterator[cst.CSTNode]:
    """x.detach() -> x."""
    if not isinstance(node.func, cst.Attribute) or code_of(node.func.value) in ("torch", "np"):
        return
    if node.func.attr.value in WRAPPERS:
        yield node.func.value


def without_statement(node: cst.Expr) -> Iterator[cst.CSTNode]:
    if isinstance(node.value, cst.Call) and not is_skipped(node.value):
        yield cst.Pass()


def negated(node: cst.Comparison) -> Iterator[cst.CSTNode]:
    """The opposite of an order, beside mutmut's < -> <=."""
    swap = {cst.LessThan: cst.GreaterThanEqual, cst.GreaterThan: cst.LessThanEqual}
    for target in node.comparisons[:1]:
        if type(target.operator) in swap:
            yield node.with_deep_changes(target, operator=swap[type(target.operator)]())


REPLACED = (
    mutators.operator_string,
    mutators.operator_arg_removal,
    mutators.operator_dict_arguments,
    mutators.operator_assignment,
)
OPERATORS: list[tuple[type, Callable]] = [
    *(
        (kind, operator)
        for kind, operator in mutators.mutation_operators
        if operator not in REPLACED
    ),
    (cst.SimpleString, one_string),
    (cst.Call, without_argument),
    (cst.Call, opposite_name),
    (cst.Call, without_call),
    (cst.Expr, without_statement),
    (cst.Comparison, negated),
]
