"""Settings that have no effect beside others are refused: a user who sets one expects an effect.

Only a value other than the default is an error: dump_config writes defaults too, and load_config must read them back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_rl.config.config import Config

FORMER = {"rollout.quantize_keep": ("*embed_tokens*", "*lm_head*", "*mlp.gate.*", "*norm*")}
"""Defaults of earlier versions, as in the config.toml of their runs: no user set them."""


def check_no_effect(cfg: Config) -> None:
    """Raise ValueError for the first setting without effect, with the setting that it needs."""
    for name, (is_read, because, fix) in needs(cfg).items():  # the first one: a fix often changes the next
        section, key = name.split(".")
        values = getattr(cfg, section)
        value, default = getattr(values, key), type(values).model_fields[key].get_default(call_default_factory=True)
        if not is_read and value not in (default, FORMER.get(name)):
            raise ValueError(f"{name} = {value} has no effect with {because}; remove it, or set {fix}")


def needs(cfg: Config) -> dict[str, tuple[bool, str, str]]:
    """Setting -> (whether it is read, what stops it, what to set)."""
    loss, batch, replay, rollout, evaluation = cfg.loss, cfg.batch, cfg.replay, cfg.rollout, cfg.eval
    is_custom_loss = ":" in loss.name  # it may read any setting of its section
    return {
        **{
            f"loss.{key}": (loss.kl_coef > 0 or is_custom_loss, "loss.kl_coef = 0", "loss.kl_coef above 0")
            for key in ("kl_estimator", "kl_weight")
        },
        "batch.max_sampling_rounds": (
            batch.dynamic_sampling, "batch.dynamic_sampling = false", "batch.dynamic_sampling = true",
        ),
        **{
            f"run.anomaly_{key}": (cfg.run.save_batches != "off", "run.save_batches = off", "run.save_batches = on_anomaly")
            for key in ("grad_norm", "kl")
        },
        "replay.missing_route_budget": (
            replay.on_missing_route != "error", "replay.on_missing_route = error, which stops at the first missing route",
            "replay.on_missing_route = live, mask_token or drop_sample",
        ),
        "rollout.verify_push_every": (
            rollout.verify_push == "checksum", "rollout.verify_push = version", "rollout.verify_push = checksum",
        ),
        "rollout.weight_sync_sources": (
            rollout.weight_sync == "distributed",
            f"rollout.weight_sync = {rollout.weight_sync}, which has its own sources",
            "rollout.weight_sync = distributed",
        ),
        "rollout.quantize_keep": (rollout.quantize != "none", "rollout.quantize = none", "rollout.quantize = fp8"),
        **{
            f"agent.{key}": (bool(cfg.agent.name), "no agent.function, agent.environment or agent.command", "one of these")
            for key in ("renderer", "on_error", "concurrency", "resume", "max_episode_tokens", "episode_timeout_seconds")
        },
        "agent.endpoint_host": (
            bool(cfg.agent.function or cfg.agent.command), "no agent.function or agent.command", "one of these",
        ),
        **{
            f"agent.{key}": (bool(cfg.agent.environment), "no agent.environment", "agent.environment")
            for key in ("max_turns", "step_timeout_seconds", "isolation")
        },
        "agent.process_memory_gib": (
            cfg.agent.isolation == "process", "agent.isolation = thread", "agent.isolation = process",
        ),
        **{
            f"rollout.parity_{key}_expert_overlap": (
                cfg.needs_routes, f"replay.mode = {replay.mode} without replay.measure", "replay.measure = true",
            ) for key in ("warn", "min")
        },
        "data.chat_template_kwargs": (
            cfg.data.chat_template, "data.chat_template = false", "data.chat_template = true",
        ),
        "eval.every": (bool(evaluation.sets), "eval.sets names no file", "eval.sets"),
        "model.recompute_layers": (
            cfg.model.recompute in ("full", "block"), f"model.recompute = {cfg.model.recompute}",
            "model.recompute = full or block",
        ),
    }  # fmt: skip
