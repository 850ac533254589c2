"""Whether `package.module:function` exists, read from source: importing it would run the user's
code.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from megatron_rl.config.base import nearest


def problem_of(name: str, *calls: Sequence[str]) -> str | None:
    """What is wrong with `name` as a function called with the positional arguments of one of
    `calls`; None: nothing that the source shows."""
    module, _, attribute = name.partition(":")
    found = find_module(module)
    if isinstance(found, str):
        return found
    if found.origin is None or not found.origin.endswith(".py"):
        return None  # compiled or frozen: only an import could check it
    try:
        tree = ast.parse(Path(found.origin).read_bytes())
    except (OSError, SyntaxError) as error:
        return f"{found.origin} cannot be read as Python: {error}"
    known = dict(definitions(tree.body))
    if attribute not in known:
        if "*" in known or "__getattr__" in known:
            return None
        own = [
            name for name, node in known.items() if isinstance(node, ast.FunctionDef | ast.ClassDef)
        ]
        return f"{found.origin} has no function {attribute!r}{nearest(attribute, own)}"
    function = known[attribute]
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) or function.decorator_list:
        return None
    if any(takes(function.args, len(arguments)) for arguments in calls):
        return None
    call = " or ".join(f"{attribute}({', '.join(arguments)})" for arguments in calls)
    return (
        f"{found.origin}, line {function.lineno}: {attribute}({ast.unparse(function.args)}) is"
        f" called as {call}"
    )


def find_module(module: str) -> ModuleSpec | str:
    """The module's spec, as import would find it, without running its packages; or why there is
    none.
    """
    name, *parts = module.split(".")
    # editable installs add finders of their own, which know top-level packages only
    finders = (finder.find_spec for finder in sys.meta_path if hasattr(finder, "find_spec"))
    spec = next((spec for find in finders if (spec := find(name, None)) is not None), None)
    for part in parts:
        if spec is None:
            break
        if spec.submodule_search_locations is None:
            return f"{name!r} is not a package, so it has no module {part!r}"
        # under its short name: a namespace package would look its parent up in sys.modules
        name, spec = (
            f"{name}.{part}",
            PathFinder.find_spec(part, list(spec.submodule_search_locations)),
        )
    missing = (
        f"there is no module {name!r}; modules are looked for in {Path.cwd()}, PYTHONPATH and"
        " installed packages"
    )
    return spec or missing


def definitions(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """(name, statement that gives it) at the module's top level, inside if, try and with too; "*"
    for a star import.
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
            yield from (
                (each.id, node)
                for target in targets
                for each in ast.walk(target)
                if isinstance(each, ast.Name)
            )
        else:
            for part in ("body", "orelse", "finalbody"):
                yield from definitions(getattr(node, part, ()))
            for handler in getattr(node, "handlers", ()):
                yield from definitions(handler.body)


def takes(arguments: ast.arguments, count: int) -> bool:
    """Whether a function with these arguments can be called with `count` by position."""
    named = len(arguments.posonlyargs) + len(arguments.args)
    keyword_only = sum(default is None for default in arguments.kw_defaults)
    return (
        named - len(arguments.defaults) <= count
        and (arguments.vararg is not None or count <= named)
        and not keyword_only
    )
