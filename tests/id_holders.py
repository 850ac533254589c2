"""Train as `megatron_rl.train` does, and record every file of the package that holds expert ids:

    python -m tests.id_holders OUT.json --config FILE.toml ...

OUT.json: file of megatron_rl -> functions that had an array of expert ids when they returned, as an
argument, a local variable or the result, or inside a record, list or mapping of these.  The model's
top k must be TOP_K: integer arrays of three dimensions, the last one of that size, are expert ids.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

import numpy as np
import torch

PACKAGE = Path(__file__).resolve().parents[1] / "megatron_rl"
TOP_K = 2
DEPTH = 6  # records inside records: step, group, rollout, array
ENTRIES = 4  # of a list or mapping; the others are alike
CALLS = 300  # of a function; after so many without ids it is taken to hold none


def are_ids(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        is_integer = not value.is_floating_point() and value.dtype != torch.bool
        return is_integer and value.ndim == 3 and value.shape[2] == TOP_K
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "iu" and value.ndim == 3 and value.shape[2] == TOP_K
    return False


def parts_of(value: object) -> Iterator[object]:
    if isinstance(value, Mapping):
        yield from [value[key] for key in list(value)[:ENTRIES]]
    elif isinstance(value, list | tuple):
        yield from value[:ENTRIES]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from (getattr(value, field.name, None) for field in dataclasses.fields(value))


def has_ids(value: object, depth: int = DEPTH) -> bool:
    return are_ids(value) or (
        depth > 0 and any(has_ids(part, depth - 1) for part in parts_of(value))
    )


class Holders:
    """The functions of the package that held expert ids, by file; `see` is a profiler."""

    def __init__(self) -> None:
        self.functions: dict[str, set[str]] = {}
        self._calls: dict[tuple[str, str], int] = {}
        self._thread = threading.local()

    def see(self, frame: FrameType, event: str, result: object) -> None:
        code = frame.f_code
        key = code.co_filename, code.co_qualname
        if event != "return" or not code.co_filename.startswith(f"{PACKAGE}/"):
            return
        self._calls[key] = self._calls.get(key, 0) + 1
        if self._calls[key] > CALLS or getattr(self._thread, "is_busy", False):
            return
        self._thread.is_busy = True  # properties of records are functions of the package, too
        try:
            values = [value for name, value in frame.f_locals.items() if name != "self"]
            if any(map(has_ids, [*values, result])):
                name = code.co_filename.removeprefix(f"{PACKAGE}/")
                self.functions.setdefault(name, set()).add(code.co_qualname)
                self._calls[key] = CALLS
        finally:
            self._thread.is_busy = False


def main() -> int:
    from megatron_rl.train import main as train

    out, holders = Path(sys.argv[1]), Holders()
    threading.setprofile(holders.see)
    sys.setprofile(holders.see)
    try:
        status = train(sys.argv[2:])
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        found = {name: sorted(functions) for name, functions in sorted(holders.functions.items())}
        out.write_text(json.dumps(found, indent=1) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
