"""Load a .pt file without running code in it: only tensors, NumPy arrays and plain values.

No other file of the checks needs torch, so it is imported when a file is loaded.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

ARRAY_TYPES = (
    np.bool_, np.uint8, np.int8, np.int16, np.int32, np.int64,
    np.float16, np.float32, np.float64,
)  # fmt: skip
Allowed = Callable[..., object] | tuple[Callable[..., object], str]


def allowed_globals() -> list[Allowed]:
    """Return the classes and functions that make a NumPy array of numbers, with their names in
    NumPy 1 and 2.
    """
    names: list[Allowed] = [np.ndarray, np.dtype, *{type(np.dtype(kind)) for kind in ARRAY_TYPES}]
    for value, name in ((np.zeros(1), "_reconstruct"), (np.float64(0), "scalar")):
        # typed as str
        function: Callable[..., object] = value.__reduce__()[0]  # type: ignore[assignment]
        names += [
            (function, f"{module}.{name}")
            for module in ("numpy.core.multiarray", "numpy._core.multiarray")
        ]
    return names


def load_tensors(path: Path) -> object:
    """Load a file with torch.load(weights_only=True).

    Raises ValueError, which names the file and its classes, if the file needs more than that.
    """
    try:
        import torch
    except ImportError as error:
        raise ValueError(
            f"{path}: .pt files are read by torch, which is missing: pip install torch"
        ) from error
    try:
        with torch.serialization.safe_globals(allowed_globals()):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path}: holds {classes_of(path) or 'objects that are not plain data'}, which only"
            " code in the file could rebuild; it is never run here. Save it without them: tensors,"
            f" arrays, numbers, text, lists and dicts ({brief(error)})"
        ) from error
    except (RuntimeError, OSError, EOFError, BadZipFile) as error:
        raise ValueError(f"{path}: truncated or damaged ({brief(error)})") from error


def classes_of(path: Path) -> str:
    """Return the names of the classes that weights_only=True refuses, as text."""
    import torch

    try:
        with torch.serialization.safe_globals(allowed_globals()):
            names = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    # not in torch's zip format
    except (pickle.UnpicklingError, RuntimeError, ValueError, BadZipFile):
        return ""
    return "objects of " + ", ".join(sorted(names)) if names else ""


def brief(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]


def is_tensor(value: object) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def to_numpy(value: object, where: str, dims: int | None = None) -> np.ndarray:
    """Convert a tensor, an array or a list of numbers with `dims` dimensions (None: any number).

    where: the file and the key.  Raises ValueError that names it for any other value.
    """
    import torch

    wanted = "numbers" if dims is None else f"numbers in {dims} dimensions"
    try:
        if isinstance(value, torch.Tensor):
            value = value.detach()
            # NumPy has no bfloat16
            is_short = value.is_floating_point() and value.itemsize < torch.float32.itemsize
            array = (value.float() if is_short else value).numpy()
        else:
            array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:  # rows of several lengths, sparse
        raise ValueError(f"{where}: must be {wanted} ({brief(error)})") from error
    if array.dtype.kind not in "biuf" or dims not in (None, array.ndim):
        raise ValueError(f"{where}: must be {wanted}, got {type(value).__name__} {value!r:.80}")
    return array
