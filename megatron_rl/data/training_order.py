"""The order of prompts that [data] asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megatron_rl.config import DataConfig, RunConfig
from megatron_rl.data.mixture import MixedPrompts, Part
from megatron_rl.data.pass_rates import PassRates
from megatron_rl.data.prompt_stream import PromptStream
from megatron_rl.data.prompts import PromptSource
from megatron_rl.records import Prompt


def make_stream(
    config: DataConfig, prompts: Mapping[str, Sequence[Prompt]], seed: int
) -> PromptStream:
    """Return the order of the prompts of every source.

    prompts: by the names of prompt_files.train_files.
    """
    least_chance = config.least_chance if config.sampling == "pass_rate" else None
    if isinstance(config.train, Path):
        rows = prompts[""]
        rates = None if least_chance is None else PassRates(len(rows), least_chance)
        return PromptSource(rows, seed=seed, shuffle=config.shuffle, rates=rates)
    parts = [
        Part(source.name, prompts[source.name], source.weight, source.when_used_up)
        for source in config.train
    ]
    return MixedPrompts(parts, seed=seed, shuffle=config.shuffle, least_chance=least_chance)


def source_line(config: DataConfig, name: str) -> str:
    """Return the beginning of the log's line about a source; "" where data.train is one file."""
    if isinstance(config.train, Path):
        return ""
    total = sum(source.weight for source in config.train)
    (source,) = (source for source in config.train if source.name == name)
    share = f"weight {source.weight:g}, {source.weight / total:.1%} of the prompts"
    return f"source {name} ({share}; when used up: {source.when_used_up}): "


def used_up_line(stream: PromptStream, run: RunConfig) -> Iterator[str]:
    """Yield a warning where the prompts are used up before run.num_steps."""
    needed = run.num_steps * run.prompts_per_step
    left = stream.num_available(needed)
    if left < needed:
        yield (
            f"WARNING data.train is used up after {left // run.prompts_per_step} steps at most,"
            " as a source has when_used_up = stop or drop: the run ends there, before"
            f" run.num_steps = {run.num_steps}, over which optim.schedule is stretched"
        )
