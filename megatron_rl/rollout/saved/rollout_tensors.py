"""The safetensors files of rollout.save_tensors: one per step and replica, for tools.

The tensors are "ID:KIND" for every sequence's id, with the kinds, shapes and dtypes of
batch/codec.to_arrays: the servers' half of docs/reference/token_data.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from megatron_rl.batch.codec import to_spans
from megatron_rl.config.run_paths import RunFolder
from megatron_rl.records import check_digest

SCHEMA = "1"
"""Version of the files of tensors and of the lines in trained/; docs/reference/token_data.md."""


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write `path`, complete or not at all; without tensors remove the file of an earlier attempt
    at the step.
    """
    if not tensors:
        path.unlink(missing_ok=True)
        return
    temporary = path.with_suffix(".part")
    path.parent.mkdir(exist_ok=True)
    try:
        save_file(dict(tensors), temporary, metadata={"schema": SCHEMA})
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_tensors(folder: Path, step: int, dp_rank: int = 0) -> dict[str, np.ndarray]:
    """Return the servers' half of the tensors of `step` that a replica wrote into a run's folder.

    Raises ValueError for expert ids without a digest, or that belong to other tokens.
    """
    tensors = load_file(RunFolder(folder).tensors_of("rollouts", step, dp_rank))
    for key, routes in tensors.items():
        rollout, kind = key.rsplit(":", 1)
        if kind == "routed_experts":
            digest = tensors.get(f"{rollout}:routes_digest")
            environment = to_spans(tensors.get(f"{rollout}:environment"))
            expected = None if digest is None else digest.tobytes()
            check_digest(rollout, tensors[f"{rollout}:tokens"], routes, expected, environment)
    return tensors
