"""Checks of `package.module:function` by its source: an import would run the user's code."""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from megatron_rl.config.base import nearest

Known = dict[str, list[ast.stmt]]
"""Name -> statements of a module's top level that define it."""
NO_PARAMETERS = ast.arguments([], [], None, [], [], None, [])
LITERALS = (ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.JoinedStr, ast.UnaryOp)
TYPE_CHECKING = ("TYPE_CHECKING", "typing.TYPE_CHECKING")
LISTS = ("list", "List", "Sequence")


def problem_of(name: str, *calls: Sequence[str]) -> str | None:
    """Return the problem of calling the function `name` with the positional arguments of one of
    `calls`, such as "text" or, where the annotation counts, "batch: package.Type"; None where the
    source shows no problem.
    """
    module, _, attribute = name.partition(":")
    spec = find_module(module)
    if isinstance(spec, str):
        return spec
    try:
        tree = source_of(spec)
    except (OSError, SyntaxError) as error:
        return f"{spec.origin} cannot be read as Python: {error}"
    if tree is None:
        return None  # only an import could check it
    known: Known = {}
    for defined, node in definitions(tree.body):
        known.setdefault(defined, []).append(node)
    if attribute not in known:
        if "*" in known or "__getattr__" in known:
            return None  # the module may have it all the same
        callables = [
            name
            for name, nodes in known.items()
            if isinstance(nodes[-1], ast.FunctionDef | ast.ClassDef)
        ]
        return f"{spec.origin} has no function {attribute!r}{nearest(attribute, callables)}"
    problems = [call_problem(node, attribute, known, calls) for node in known[attribute]]
    # of several definitions, as in try and except, the source does not show which one counts
    return None if None in problems else f"{spec.origin}, {problems[-1]}"


def imports_of(name: str) -> set[str]:
    """Return the modules, and the names of modules as "module.name", that the source of the module
    of `package.module:function` imports; the empty set where its source cannot be read.
    """
    spec = find_module(name.partition(":")[0])
    try:
        tree = None if isinstance(spec, str) else source_of(spec)
    except (OSError, SyntaxError):
        return set()
    imported: set[str] = set()
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imported |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return imported


def source_of(spec: ModuleSpec) -> ast.Module | None:
    """Return the parsed source of a module; None for a module that is compiled or frozen.

    Raises OSError or SyntaxError.
    """
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return ast.parse(Path(spec.origin).read_bytes())


def find_module(module: str) -> ModuleSpec | str:
    """Return the module's spec as an import would find it, without running its packages; else the
    reason why there is none.
    """
    name, *parts = module.split(".")
    # editable installs add finders, which know top-level packages only
    finders = (finder.find_spec for finder in sys.meta_path if hasattr(finder, "find_spec"))
    spec = next((spec for find in finders if (spec := find(name, None)) is not None), None)
    for part in parts:
        if spec is None:
            break
        if spec.submodule_search_locations is None:
            return f"{name!r} is not a package, so it has no module {part!r}"
        name = f"{name}.{part}"
        # by its short name: a namespace package would look up its parent in sys.modules
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
    missing = (
        f"there is no module {name!r}; modules are looked for in {Path.cwd()}, PYTHONPATH and"
        " installed packages"
    )
    return spec or missing


def definitions(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Yield (name, statement that defines it) at a module's top level and inside if, try and with,
    except what only type checkers read.

    A star import has the name "*".
    """
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (
                ((alias.asname or alias.name).partition(".")[0], node) for alias in node.names
            )
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = (name for target in targets for name in ast.walk(target))
            yield from ((name.id, node) for name in names if isinstance(name, ast.Name))
        else:
            is_for_types = isinstance(node, ast.If) and ast.unparse(node.test) in TYPE_CHECKING
            for part in ("orelse",) if is_for_types else ("body", "orelse", "finalbody"):
                yield from definitions(getattr(node, part, ()))
            for handler in getattr(node, "handlers", ()):
                yield from definitions(handler.body)


def call_problem(
    node: ast.stmt, name: str, known: Known, calls: Sequence[Sequence[str]]
) -> str | None:
    """Return the problem of calling what `node` defines as `name`; None where it shows none."""
    parameters = parameters_of(node, known)
    if isinstance(parameters, str):
        return f"line {node.lineno}: {name} is {parameters}, which is not callable"
    if parameters is None or any(takes(parameters, arguments, known) for arguments in calls):
        return None
    call = " or ".join(f"{name}({', '.join(arguments)})" for arguments in calls)
    return f"line {node.lineno}: {name}({ast.unparse(parameters)}) is called as {call}"


def parameters_of(node: ast.AST, known: Known) -> ast.arguments | str | None:
    """Return the parameters of the callable that `node` defines; in words what it is where that is
    not callable; None where only an import could tell.
    """
    match node:
        # a decorator may change the arguments
        case ast.FunctionDef(decorator_list=[]) | ast.AsyncFunctionDef(decorator_list=[]):
            return node.args
        case ast.Lambda():
            return node.args
        case ast.ClassDef():
            return method_parameters(node, "__init__", NO_PARAMETERS)
        case ast.Assign(targets=[ast.Name()], value=value):
            return parameters_of(value, known)
        case ast.Call(func=ast.Name(id=name)) if isinstance(
            (made := known.get(name, [node])[-1]), ast.ClassDef
        ):
            return method_parameters(made, "__call__", f"an object of class {name}")
        case ast.Import():
            return "a module"
    return f"the value {ast.unparse(node):.40}" if isinstance(node, LITERALS) else None


def method_parameters(
    node: ast.ClassDef, name: str, absent: ast.arguments | str
) -> ast.arguments | str | None:
    """Return the parameters of a method without `self`; `absent` where the class has none; None
    where a base, a metaclass or a decorator may define another.
    """
    methods = dict(definitions(node.body))
    if node.bases or node.keywords or node.decorator_list or "__new__" in methods:
        return None
    parameters = parameters_of(methods[name], {}) if name in methods else absent
    if name not in methods or not isinstance(parameters, ast.arguments):
        return parameters
    # `self` is the first of those by position
    positional = "posonlyargs" if parameters.posonlyargs else "args"
    bound = ast.arguments(**dict(ast.iter_fields(parameters)))
    setattr(bound, positional, getattr(parameters, positional)[1:])
    return bound


def takes(parameters: ast.arguments, arguments: Sequence[str], known: Known) -> bool:
    """Return True if a function with these parameters can be called with `arguments` by position.
    One of "NAME: package.TYPE" needs a parameter with that annotation.
    """
    named = [*parameters.posonlyargs, *parameters.args]
    keyword_only = sum(default is None for default in parameters.kw_defaults)
    if len(named) - len(parameters.defaults) > len(arguments) or keyword_only:
        return False
    named += [parameters.vararg] * len(arguments) if parameters.vararg else []
    types = [argument.partition(": ")[2] for argument in arguments]
    return len(named) >= len(arguments) and all(
        may_be(parameter.annotation, ast.parse(type_, mode="eval").body, known)
        for parameter, type_ in zip(named, types, strict=False)
        if type_
    )


def may_be(annotation: ast.expr | None, wanted: ast.expr, known: Known) -> bool:
    """Return False where the source shows that `annotation` is not the type `wanted`, which is
    package.TYPE or list[package.TYPE].
    """
    match annotation, wanted:
        case ast.Constant(value=str(text)), _:
            try:
                return may_be(ast.parse(text, mode="eval").body, wanted, known)
            except SyntaxError:
                return False
        case ast.Subscript(), ast.Subscript():
            container = ast.unparse(annotation.value).rpartition(".")[2]
            # a text inside is not evaluated
            is_text = isinstance(annotation.slice, ast.Constant)
            return (
                container in LISTS and not is_text and may_be(annotation.slice, wanted.slice, known)
            )
        case ast.Attribute(attr=name), ast.Attribute():
            return name == wanted.attr
        case ast.Name(id=name), _:
            match known.get(name, [annotation])[-1]:
                case ast.ImportFrom(names=aliases) if isinstance(wanted, ast.Attribute):
                    imported = {alias.asname or alias.name: alias.name for alias in aliases}
                    return imported[name] == wanted.attr
                case ast.Assign() | ast.AnnAssign():
                    return True  # a name for a type
            return "*" in known and not hasattr(builtins, name)
    return False
