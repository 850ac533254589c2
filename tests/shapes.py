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


def enforce_shapes() -> None:
    """For modules that are imported from now on.  JAXTYPING_DISABLE=1 turns it off."""
    if not jaxtyping.config.jaxtyping_disable:
        jaxtyping.install_import_hook(CHECKED, "tests.shapes.typechecker")


def typechecker(function: F) -> F:
    """beartype for the hints with a shape only: tests may pass fakes for the others.

    `function` is not the package's function; jaxtyping makes it from the signature, for each check.
    """
    hints = function.__annotations__
    function.__annotations__ = {
        name: hint for name, hint in hints.items() if any(s in str(hint) for s in SHAPED)
    }
    return beartype(function)
