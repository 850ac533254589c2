"""Checks jaxtyping's shapes and dtypes at every call of a function whose signature has them.

tests/conftest.py installs this before anything imports the package; ranks that a test spawns, and
mutants, run without it.
"""

from collections.abc import Callable
from typing import TypeVar

import jaxtyping
from beartype import beartype

F = TypeVar("F", bound=Callable)

CHECKED = (
    "megatron_rl.loss",
    "megatron_rl.replay",
    "megatron_rl.batch",
    "megatron_rl.metrics",
    "megatron_rl.engine.fused_logprobs",
    "megatron_rl.engine.kept_logprobs",
    "megatron_rl.engine.logprobs",
    "megatron_rl.engine.shards",
    "megatron_rl.engine.statistics",
)
SHAPED = ("Float[", "Int[", "Integer[", "Bool[", "Shaped[")

check_all = jaxtyping.jaxtyped


def enforce_shapes() -> None:
    """For modules that are imported from now on.  JAXTYPING_DISABLE=1 turns it off."""
    if not jaxtyping.config.jaxtyping_disable:
        jaxtyping.jaxtyped = check_shaped
        jaxtyping.install_import_hook(CHECKED, "tests.shapes.typechecker")


def check_shaped(**options: object) -> Callable[[F], F]:
    """Check functions and records whose signature has a shape, and leave all others as they are:
    a check takes longer than most functions.
    """

    def decorate(function: F) -> F:
        return check_all(**options)(function) if shaped_names(function) else function

    return decorate


def shaped_names(function: Callable) -> set[str]:
    """Return the names of the parameters or fields that have a shape."""
    hints = getattr(function, "__annotations__", {})
    return {name for name, hint in hints.items() if any(text in str(hint) for text in SHAPED)}


def typechecker(function: F) -> F:
    """beartype for the hints with a shape only: tests may pass fakes for the others.

    `function` is not the package's function; jaxtyping makes it from the signature, for each check.
    """
    shaped = shaped_names(function)
    function.__annotations__ = {
        name: hint for name, hint in function.__annotations__.items() if name in shaped
    }
    return beartype(function)
