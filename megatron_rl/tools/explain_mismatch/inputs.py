"""The tokens that both engines compute: random prompts for a server, or what a run has saved.

Shapes: S tokens of a sequence.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megatron_rl.batch.codec import from_arrays
from megatron_rl.checkpoint.bundle import read_header
from megatron_rl.checkpoint.bundle_sequences import BundleError, SavedSequences
from megatron_rl.config import Config, load_config
from megatron_rl.records import Rollout
from megatron_rl.rollout.recorder import RecordedRollout, read_rollouts, read_tensors, tensors_path
from megatron_rl.rollout.server.process import server_dtype
from megatron_rl.tools.explain_mismatch.server_side import Facts

MakeConfig = Callable[[Config, int], Config]
"""(the run's configuration, longest sequence) -> the trainer's."""
MOST_ROLLOUTS = 24
"""Of a step or a mini-batch."""


@dataclass(frozen=True)
class Saved:
    """What a server sampled, and the weights that it had.  server_dtype: as reported, or as the run has set it."""

    checkpoint: Path
    cfg: Config
    rollouts: Sequence[Rollout]
    server_dtype: str


def make_prompts(count: int, longest: int, vocab_size: int, facts: Facts, *, seed: int) -> list[list[int]]:
    """Random ids; lengths from 4 to `longest`, some at and around the borders of pages and prefill chunks.

    The same seed gives the same prompts: a second call finds them in the prefix cache, and shows whether it is stale.
    """
    rng = np.random.default_rng(seed)
    borders = [
        size + off for size in (facts.page_size, facts.chunk_size or 0) for off in (0, 1) if 4 <= size + off <= longest
    ]
    even = [int(length) for length in np.linspace(4, longest, max(2, count))]
    lengths = [
        length for pair in itertools.zip_longest(reversed(even), borders) for length in pair if length is not None
    ]
    return [rng.integers(0, vocab_size, length).tolist() for length in lengths[:count]]


def read_run(folder: Path, make_config: MakeConfig, model: Path | None) -> Saved | None:
    """The rollouts of the first recorded step, whose weights are those of model.path; None where none were saved.

    Those with tensors (rollout.save_tensors may be a share); of a step that a restarted run wrote again, the last attempt.
    Raises ValueError for a folder without config.toml.
    """
    base = run_config(folder)
    path = folder / "rollouts.jsonl"
    if not path.is_file():
        return None
    first = next(iter(read_rollouts(path)), None)
    if first is None or not tensors_path(folder, first.step).is_file():
        return None
    tensors = read_tensors(folder, first.step)
    lines = (line for line in read_rollouts(path) if line.step == first.step and f"{line.id}:tokens" in tensors)
    records = list({line.id: line for line in lines}.values())
    fresh = [record for record in records if {version for version, _ in record.policy_versions} == {0}]
    if not records or (not fresh and model is None):
        return None  # the latter: a resumed run, whose weights are not known
    rollouts = [to_rollout(record, tensors) for record in (fresh or records)[:MOST_ROLLOUTS]]
    return Saved(base.model.path, make_config(base, longest(rollouts)), rollouts, dtype_of(base, model))


def run_config(folder: Path) -> Config:
    path = folder / "config.toml"
    try:
        return load_config(None, [], tomllib.loads(path.read_text()))
    except OSError as error:
        raise ValueError(f"{folder}: no config.toml ({error.strerror}); name the folder of a run") from error


def to_rollout(record: RecordedRollout, tensors: dict[str, np.ndarray]) -> Rollout:
    header = {
        "id": record.id,
        "prompt_length": record.prompt_length,
        "finish_reason": record.finish_reason,
        "versions": record.policy_versions,
        "turn_rewards": record.turn_rewards,
        "metrics": record.metrics,
        "reward_metrics": record.reward_metrics,
    }
    rollout = from_arrays(header, lambda kind: tensors.get(f"{record.id}:{kind}"))
    return replace(rollout, episode_digest=None)  # its other sequences are compared as sequences of their own


def read_bundle(folder: Path, make_config: MakeConfig, model: Path | None) -> Saved:
    """The sequences of a saved mini-batch.  Raises BundleError where its weights are not known."""
    header = read_header(folder)
    base = load_config(None, [], {name: dict(keys) for name, keys in header["config"].items()})
    weights = model or folder / header["weights"]
    if not (weights / "config.json").is_file():
        raise BundleError(
            f"{folder} has no weights, it needs those {header['weights']}; name an HF checkpoint of them with --model"
        )
    samples = SavedSequences(folder, header["replicas"], header["ranks"]).samples(with_record=False)
    rollouts = [replace(sample.rollout, earlier=(), episode_digest=None) for sample in samples[:MOST_ROLLOUTS]]
    base = base.model_copy(update={"model": base.model.model_copy(update={"path": weights})})
    return Saved(weights, make_config(base, longest(rollouts)), rollouts, dtype_of(base))


def longest(rollouts: Sequence[Rollout]) -> int:
    return max(len(rollout.tokens) for rollout in rollouts)


def dtype_of(cfg: Config, model: Path | None = None) -> str:
    """Of the servers of a run, as far as its configuration says."""
    if cfg.rollout.dtype != "auto":
        return cfg.rollout.dtype
    return server_dtype(model or cfg.model.path, "auto")
