"""Import of the Megatron-Bridge package: its version, and its layers on machines without
TransformerEngine.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING

import torch

from megatron_rl.engine import te_layers
from megatron_rl.models.spec import ModelError

if TYPE_CHECKING:
    from megatron.bridge import AutoBridge

VERSION = "0.6.2"
INSTALL = (
    f"pip install --no-deps megatron-bridge=={VERSION} omegaconf einops antlr4-python3-runtime"
)
TRANSFORMER_ENGINE = "transformer_engine"


def open_package(*, te: bool) -> type[AutoBridge]:
    """Import Megatron-Bridge, with TransformerEngine's layers (te) or those of te_layers.py.

    Raises ModelError where it is absent or of another version, and where this process has chosen
    the other layers.
    """
    check_installed()
    # before the import, in which Bridge's modules take the classes from core
    te_layers.choose_layers(te=te)
    if importlib.util.find_spec(TRANSFORMER_ENGINE) is None:
        add_placeholder_transformer_engine()
    from megatron.bridge import AutoBridge

    return AutoBridge


def check_installed() -> None:
    """Raise ModelError, with the install command, unless the tested version is installed."""
    try:
        installed = metadata.version("megatron-bridge")
    except metadata.PackageNotFoundError:
        installed = "not installed"
    if installed != VERSION:
        python = ".".join(map(str, sys.version_info[:2]))
        raise ModelError(
            f"model.provider = bridge: needs Megatron-Bridge {VERSION}, found: {installed}; install"
            f" it (Python 3.12, here {python}): {INSTALL}"
        )


def first_line(error: Exception | str) -> str:
    """Return the first line of an error in ASCII, at most 300 characters.

    Bridge's messages are pages long, with symbols.  An error without text gives its class's name.
    """
    lines = str(error).encode("ascii", "ignore").decode().strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def add_placeholder_transformer_engine() -> None:
    """Add a placeholder module: Megatron-Bridge imports TransformerEngine for layers that are never
    made here.

    megatron-core has already been imported, and continues to run without TransformerEngine.
    """
    modules = {}
    for name in (TRANSFORMER_ENGINE, f"{TRANSFORMER_ENGINE}.pytorch"):
        module = modules[name] = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        module.__version__ = "0.0.0"  # type: ignore[attr-defined]  # core compares it
        module.__getattr__ = partial(getattr, Absent)  # type: ignore[method-assign]  # PEP 562
    package, pytorch = modules.values()
    package.pytorch = pytorch  # type: ignore[attr-defined]
    sys.modules.update(modules)


class _AnyName(type):
    """Gives a class every attribute, as a nested class: `Absent.x.y` is Absent."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Absent(torch.nn.Module, metaclass=_AnyName):
    """The placeholder of every layer of TransformerEngine."""
