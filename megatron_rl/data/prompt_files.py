"""The files of prompts that a configuration names.  Imports no torch: a dry run uses it."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.config import Config, DataConfig

PromptPlace = tuple[Path, DataConfig, str]
"""A file, the way to read it, and the source of its prompts."""


def train_files(config: DataConfig) -> dict[str, PromptPlace]:
    """Return the file of every source of data.train by its name, "" where there is one file."""
    if isinstance(config.train, Path):
        return {"": (config.train, config, "")}
    return {
        source.name: (source.path, config.of_source(source.name), source.name)
        for source in config.train
    }


def eval_file(config: Config, name: str) -> PromptPlace:
    """Return the file of an evaluation set.  Its prompts have a source where those of training
    have.
    """
    source = name if config.data.source_names else ""
    return config.eval.sets[name], config.data_of_set(name), source
