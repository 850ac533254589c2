"""The tokens that both engines compute: random prompts for a server, or the saved ones of a run."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_rl.checkpoint.batches.bundle_header import Header, read_header
from megatron_rl.checkpoint.batches.bundle_sequences import BundleError, SavedSequences
from megatron_rl.config import Config, load_config
from megatron_rl.config.rules.adapter_rules import check_adapter_is_merged
from megatron_rl.config.run_paths import RunFolder, writer_name
from megatron_rl.records import Rollout
from megatron_rl.rollout.saved.recorded_rollouts import RecordedRollout, to_rollout
from megatron_rl.rollout.saved.rollout_tensors import read_tensors
from megatron_rl.rollout.saved.saved_steps import read_replicas
from megatron_rl.rollout.server.process import server_dtype
from megatron_rl_tools.explain_mismatch.server_side import ServerFacts

MakeConfig = Callable[[Config, int], Config]
"""(the run's configuration, longest sequence) -> the trainer's."""
MOST_ROLLOUTS = 24
"""The most sequences that are compared of a step or a mini-batch."""


@dataclass(frozen=True)
class Saved:
    """The rollouts of a server, with the weights that sampled them."""

    checkpoint: Path
    cfg: Config
    """The trainer's configuration."""
    rollouts: Sequence[Rollout]
    server_dtype: str
    """The dtype that the server reports, or that the run has set."""


def make_prompts(
    count: int, longest: int, vocab_size: int, facts: ServerFacts, *, seed: int
) -> list[list[int]]:
    """Make prompts of random ids with lengths from 4 to `longest`, some of them at and after the
    borders of pages and prefill chunks.

    The same seed gives the same prompts: a second call of the command finds them in the prefix
    cache, and shows whether that is stale.
    """
    rng = np.random.default_rng(seed)
    borders = [
        size + off
        for size in (facts.page_size, facts.chunk_size or 0)
        for off in (0, 1)
        if 4 <= size + off <= longest
    ]
    # long prompts and borders first: these are kept if `count` is small
    even = [int(length) for length in np.linspace(4, longest, max(2, count))]
    lengths = [
        length
        for pair in itertools.zip_longest(reversed(even), borders)
        for length in pair
        if length is not None
    ]
    return [rng.integers(0, vocab_size, length).tolist() for length in lengths[:count]]


def read_run(folder: Path, make_config: MakeConfig, model: Path | None) -> Saved | None:
    """Read the rollouts of the first recorded step, whose weights are those of model.path.

    Takes equally many of every replica, which may have had another server, and only those with
    tensors (rollout.save_tensors may be a share); of a step that a restarted run wrote again, the
    last attempt.  Returns None if there are none.  Raises ValueError for a folder without
    config.toml, and for a run that began with an adapter unless --model names merged weights.
    """
    base = run_config(folder)
    check_adapter_is_merged(base, model or base.model.path, "--model")
    replicas = read_replicas(folder)
    first = min((step for steps in replicas.values() for step in steps), default=0)
    parts = [
        saved_sequences(folder, first, dp_rank, steps.get(first, []))
        for dp_rank, steps in replicas.items()
    ]
    saved = [
        rollout for row in itertools.zip_longest(*parts) for rollout in row if rollout is not None
    ]
    fresh = [rollout for rollout in saved if not rollout.policy_versions.any()]
    # the weights of a resumed run's first step are known only if --model names them
    if not saved or (not fresh and model is None):
        return None
    rollouts = (fresh or saved)[:MOST_ROLLOUTS]
    cfg = make_config(base, longest(rollouts))
    return Saved(base.model.path, cfg, rollouts, dtype_of_engine(base, model))


def saved_sequences(
    folder: Path, step: int, dp_rank: int, records: Sequence[RecordedRollout]
) -> list[Rollout]:
    """Return the sequences of a replica's `step` that have tensors.

    Two replicas may have the same ids, so those of all replicas but the first become ID@FILE.
    """
    if not records or not RunFolder(folder).tensors_of("rollouts", step, dp_rank).is_file():
        return []
    tensors = read_tensors(folder, step, dp_rank)
    sequences = [
        single_sequence(record, tensors) for record in records if f"{record.id}:tokens" in tensors
    ]
    if dp_rank == 0:
        return sequences
    writer = writer_name("rollouts", dp_rank)
    return [rollout.named(f"{rollout.id}@{writer}") for rollout in sequences]


def run_config(folder: Path) -> Config:
    path = RunFolder(folder).config
    try:
        return load_config(None, [], tomllib.loads(path.read_text()))
    except OSError as error:
        raise ValueError(
            f"{folder}: no config.toml ({error.strerror}); name the folder of a run"
        ) from error


def single_sequence(record: RecordedRollout, tensors: dict[str, np.ndarray]) -> Rollout:
    """Return the record's sequence alone.

    It has no digest of its episode, whose other sequences are compared separately.
    """
    rollout = to_rollout(record, lambda kind: tensors.get(f"{record.id}:{kind}"))
    return rollout.with_episode(digest=None)


def read_bundle(folder: Path, make_config: MakeConfig, model: Path | None) -> Saved:
    """Read the sequences of a saved mini-batch.

    Raises BundleError if the weights that sampled them are unknown, or if none of this project's
    servers sampled.
    """
    header = read_header(folder)
    base = load_config(None, [], {name: dict(keys) for name, keys in header["config"].items()})
    if base.is_sft:
        raise BundleError(
            f"{folder} is of megatron-rl sft, whose responses no server sampled; name a mini-batch"
            " of megatron-rl train"
        )
    weights = model or folder / header["weights"]
    if not (weights / "config.json").is_file():
        raise BundleError(
            f"{folder} has no weights, it needs those {header['weights']}; name an HF checkpoint of"
            " them with --model"
        )
    samples = SavedSequences(folder, header["replicas"], header["ranks"]).samples(with_record=False)
    rollouts = [
        sample.rollout.with_episode(earlier=(), digest=None) for sample in samples[:MOST_ROLLOUTS]
    ]
    check_sampled_by(folder, header, rollouts, model)
    base = base.model_copy(update={"model": base.model.model_copy(update={"path": weights})})
    return Saved(weights, make_config(base, longest(rollouts)), rollouts, dtype_of_engine(base))


def check_sampled_by(
    folder: Path, header: Header, rollouts: Sequence[Rollout], model: Path | None
) -> None:
    """Raise BundleError unless one version of the weights sampled all, and these are those of the
    bundle, or named with --model.
    """
    if model is None and header.get("rollouts_of"):
        raise BundleError(
            f"{folder}: rollouts_of = {header['rollouts_of']}: weights of that run sampled its"
            " tokens, not those of the bundle; name an HF checkpoint of the version that sampled"
            " with --model"
        )
    sampled = sorted({int(value) for rollout in rollouts for value in rollout.policy_versions})
    # runs with rollout.max_staleness = 0 record none: all their tokens are of the step's version
    recorded = header.get("policy_version")
    version = header["step"] if recorded is None else recorded
    if len(sampled) > 1 or (model is None and (header["update"] > 0 or sampled != [version])):
        raise BundleError(
            f"{folder}: update = {header['update']}, policy_version = {version}, its tokens are of"
            f" versions {sampled}: the weights of a bundle sampled its tokens only where update = 0"
            " and all versions are equal to policy_version; name such a bundle, or where one"
            " version sampled all, an HF checkpoint of that version with --model"
        )


def longest(rollouts: Sequence[Rollout]) -> int:
    return max(len(rollout.tokens) for rollout in rollouts)


def dtype_of_engine(cfg: Config, model: Path | None = None) -> str:
    """Return the dtype of a run's servers according to its configuration."""
    if cfg.rollout.dtype != "auto":
        return cfg.rollout.dtype
    return server_dtype(model or cfg.model.path, "auto")
