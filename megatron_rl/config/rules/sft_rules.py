"""Rules of supervised training: nothing is sampled, so that settings of sampling must be off."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_rl.config.all_sections import AllSections
from megatron_rl.config.base import ConfigError
from megatron_rl.config.loss_presets import SFT, SUPERVISED

DEFAULTS: dict[str, dict[str, object]] = {
    "loss": {"name": SFT},
    "run": {"group_size": 1},
    "replay": {"mode": "none", "measure": False},
}
"""Values of `megatron-rl sft` for keys that the user does not set."""
NEEDED: dict[str, tuple[object, str]] = {
    "run.group_size": (1, "a row has one response"),
    "replay.mode": ("none", "rows have no expert ids"),
    "replay.measure": (False, "rows have no expert ids"),
    "rollout.temperature": (1.0, "the loss is that of the model's own distribution"),
    "rollout.max_staleness": (0, "nothing is sampled"),
    "rollout.save_tensors": (False, "nothing is sampled"),
    "data.sampling": ("uniform", "rows have no pass rate"),
    "data.label_key": ("auto", "rows have no label"),
    "data.chat_template_kwargs": ({}, "agent.renderer writes the messages"),
    "agent.history": ("keep", "a row is one sequence"),
    "advantage.kind": ("auto", "every row counts 1"),
    "advantage.weight": (1.0, "every row counts 1"),
    "batch.dynamic_sampling": (False, "nothing is sampled"),
    "batch.filter_truncated": (False, "rows are complete"),
    "batch.overlong_cache": (0, "rows have no reward"),
    "batch.length_penalty": (0.0, "rows have no reward"),
    "loss.kl_coef": (0.0, "there is no pass over a reference"),
}
"""Key -> (the value that supervised training needs, why)."""
AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum")


def sft_problems(cfg: AllSections) -> Iterator[str]:
    """Yield what is wrong with a configuration of supervised training; nothing for any other."""
    if not cfg.is_sft:
        return
    for name, (needed, why) in NEEDED.items():
        section, _, key = name.partition(".")
        value = getattr(getattr(cfg, section), key)
        if value != needed:
            yield f"{name} = {value} with loss.name = sft: must be {needed}, as {why}; set it"
    if cfg.agent.name:
        yield f"{cfg.agent.setting} has no effect with loss.name = sft: remove it"
    if cfg.rollout.truncation is not None:
        yield (
            "rollout.top_p, top_k or min_p with loss.name = sft: rows have no kept sets; remove"
            " them"
        )
    if replace(cfg.loss.switches, aggregation="token_mean") != SUPERVISED[SFT]:
        yield (
            "loss.name = sft reads no ratio: of the switches of [loss] only aggregation may be set;"
            " remove the others"
        )
    if cfg.loss.switches.aggregation not in AGGREGATIONS:
        yield (
            f"loss.aggregation = {cfg.loss.switches.aggregation} with loss.name = sft: must be one"
            f" of {', '.join(AGGREGATIONS)}; change it"
        )
    if cfg.sft.epochs is not None and cfg.data.source_names:
        yield (
            f"sft.epochs = {cfg.sft.epochs:g} with tables [[data.train]]: sources have epochs of"
            " their own; set run.num_steps, and when_used_up = stop for a source that may not"
            " repeat"
        )
    best = cfg.checkpoint.best_metric or ""
    if best.startswith("eval/") and best not in {f"eval/{name}/loss" for name in cfg.eval.sets}:
        yield (
            f"checkpoint.best_metric = {best} is never measured: supervised training measures"
            " eval/NAME/loss of a NAME of eval.sets; write that, with best_mode = min"
        )


def check_is_rl(cfg: AllSections) -> None:
    """Raise ConfigError for supervised training, which another command runs."""
    if cfg.is_sft:
        raise ConfigError("loss.name = sft: RL needs another loss; for SFT run megatron-rl sft")


def check_has_rollouts(cfg: AllSections, command: str) -> None:
    """Raise ConfigError for supervised training, whose steps `command` does not compute."""
    if cfg.is_sft:
        raise ConfigError(
            f"loss.name = sft: megatron-rl {command} computes steps of RL, with rollouts and an"
            " old-logprob pass; for the memory of this model and layout remove [sft] and loss.name"
            " from a copy, and set data.max_prompt_tokens + rollout.max_response_tokens to"
            " sft.max_row_tokens; to train, run megatron-rl sft"
        )


def check_is_sft(cfg: AllSections) -> None:
    """Raise ConfigError for anything but supervised training."""
    if not cfg.is_sft:
        raise ConfigError(
            f"loss.name = {cfg.loss.name}: megatron-rl sft trains with loss.name = sft; remove it,"
            " or run megatron-rl train"
        )
