"""Checks that the folder of --from-rollouts fits this run, by its config.toml, before anything is
read or built.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from megatron_rl.config import Config
from megatron_rl.config.run_paths import RunFolder

SAMPLED_WITH = ("temperature", "top_p", "top_k", "min_p")


def first_step_number(folder: Path) -> int:
    """Return the number of the first step in `folder`: 1, or 0 for a run of version 0.1, which is
    recognised by a former setting.
    """
    saved = tomllib.loads(RunFolder(folder).config.read_text())
    return 0 if "push" in saved.get("rollout", {}) else 1


def check_config(folder: Path, cfg: Config) -> None:
    """Raise ValueError unless `folder` is another run of the same model and sampling."""
    if folder.resolve() == cfg.run_dir.resolve():
        raise ValueError(
            f"--from-rollouts {folder} is this run's own directory: must be another one; set"
            " --run.name OTHER"
        )
    path = RunFolder(folder).config
    try:
        saved = tomllib.loads(path.read_text())
        # older files have no top_k and min_p
        sampling = {"top_p": 1.0, "top_k": -1, "min_p": 0.0} | saved["rollout"]
        theirs = {"model.path": Path(saved["model"]["path"])}
        theirs |= {f"rollout.{key}": sampling[key] for key in SAMPLED_WITH}
        saved_tensors = sampling.get("save_tensors", True)
    except (OSError, ValueError, KeyError) as error:
        why = getattr(error, "strerror", None) or str(error)
        if isinstance(error, KeyError):
            why = f"no {error}"
        raise ValueError(
            f"--from-rollouts {folder}: {path.name}: {why}; name a run directory with its"
            " config.toml"
        ) from error
    # false is no error here: without tensors, reading them reports the file that is missing
    if not isinstance(saved_tensors, bool) and saved_tensors < 1:
        raise ValueError(
            f"--from-rollouts {folder}: rollout.save_tensors = {saved_tensors} in {path}: only that"
            " share of each step's groups has tokens, log-probs and routes; training needs those"
            " of all: record with --only rollout or rollout.save_tensors = true"
        )
    ours = {
        "model.path": cfg.model.path,
        **{f"rollout.{key}": getattr(cfg.rollout, key) for key in SAMPLED_WITH},
    }
    for key, value in ours.items():
        same = (
            # links and relative paths may name the same folder
            value.resolve() == theirs[key].resolve()
            if isinstance(value, Path)
            else value == theirs[key]
        )
        if not same:
            raise ValueError(
                f"{key} = {value}: must be as in {path}, {theirs[key]}: log-probs and routes were"
                f" sampled with it; set --{key} {theirs[key]}"
            )
