"""Checks of `package.module:function` by its source: an import would run the user's code."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from megatron_rl.config.base import nearest


def problem_of(name: str, *calls: Sequence[str]) -> str | None:
    """Return the problem of calling the function `name` with the positional arguments of one of
    `calls`; None where the source shows no problem.
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
    known = dict(definitions(tree.body))
    if attribute not in known:
        if "*" in known or "__getattr__" in known:
            return None  # the module may have it all the same
        callables = [
            name for name, node in known.items() if isinstance(node, ast.FunctionDef | ast.ClassDef)
        ]
        return f"{spec.origin} has no function {attribute!r}{nearest(attribute, callables)}"
    function = known[attribute]
    # a decorator may change the arguments
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) or function.decorator_list:
        return None
    if any(takes(function.args, len(arguments)) for arguments in calls):
        return None
    call = " or ".join(f"{attribute}({', '.join(arguments)})" for arguments in calls)
    return (
        f"{spec.origin}, line {function.lineno}: {attribute}({ast.unparse(function.args)}) is"
        f" called as {call}"
    )


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
    """Yield (name, statement that defines it) at a module's top level and inside if, try and with.

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
            for part in ("body", "orelse", "finalbody"):
                yield from definitions(getattr(node, part, ()))
            for handler in getattr(node, "handlers", ()):
                yield from definitions(handler.body)


def takes(arguments: ast.arguments, count: int) -> bool:
    """Return True if a function with these arguments can be called with `count` by position."""
    named = len(arguments.posonlyargs) + len(arguments.args)
    keyword_only = sum(default is None for default in arguments.kw_defaults)
    return (
        named - len(arguments.defaults) <= count
        and (arguments.vararg is not None or count <= named)
        and not keyword_only
    )
