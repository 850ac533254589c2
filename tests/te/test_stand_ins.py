"""The stand-ins that a rehearsal uses without TransformerEngine have the real one's names and
arguments.
"""

import importlib
import inspect

import pytest

from megatron_rl_tools.rehearse.layers.base import WITHOUT_EFFECT
from megatron_rl_tools.rehearse.layers.package import MODULES

CALLED = ("__init__", "forward", "step", "initialize_state", "set_context_parallel_group")
"""Methods that core calls on an object that it makes."""
NAMES = [(path, name) for path, names in MODULES.items() for name in names if name != "__version__"]


def real(path: str, name: str):
    return getattr(importlib.import_module(f"transformer_engine.{path}"), name)


@pytest.mark.parametrize(("path", "name"), NAMES)
def test_arguments_are_those_of_transformer_engine(path, name):
    ours, theirs = MODULES[path][name], real(path, name)
    if not inspect.isclass(ours):
        return check_arguments(ours, theirs)
    for method in CALLED:
        if method in vars(ours):
            check_arguments(getattr(ours, method), getattr(theirs, method))


def check_arguments(ours, theirs) -> None:
    """Every argument of the stand-in exists, with the same default; where it lists all of them, it
    has those without a default.
    """
    try:
        expected = inspect.signature(theirs).parameters
    except ValueError:  # a C++ function has none
        assert callable(theirs)
        return
    kinds = inspect.Parameter
    rest = {kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL}
    takes_more = any(parameter.kind in rest for parameter in expected.values())
    parameters = inspect.signature(ours).parameters
    for name, parameter in parameters.items():
        if parameter.kind in rest:
            continue
        assert name in expected or takes_more, name
        if name in expected:
            assert parameter.default == expected[name].default, name
    if not any(parameter.kind in rest for parameter in parameters.values()):
        required = {
            name
            for name, parameter in expected.items()
            if parameter.default is kinds.empty and parameter.kind not in rest
        }
        assert required <= parameters.keys()


def test_ignored_arguments_exist():
    layers = [real("pytorch", name) for name in ("Linear", "LayerNormLinear", "GroupedLinear")]
    known = {name for layer in layers for name in inspect.signature(layer.__init__).parameters}
    assert set(WITHOUT_EFFECT) <= known
