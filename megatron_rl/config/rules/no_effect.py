"""Settings that have no effect beside others are refused: a user who sets one expects an effect."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.all_sections import AllSections
from megatron_rl.config.base import ConfigError
from megatron_rl.config.sections import AgentConfig, RewardConfig, RolloutConfig

FORMER = {"rollout.quantize_keep": ("*embed_tokens*", "*lm_head*", "*mlp.gate.*", "*norm*")}
"""Defaults of earlier versions, as in the config.toml of their runs: no user set them."""
Need = tuple[str, bool, str, str]
"""Settings of a section, whether they are read, what stops that, what to set."""


def check_no_effect(cfg: AllSections) -> None:
    """Raise ValueError for the first setting without effect, with the setting that it needs."""
    for problem in problems(cfg, needs(cfg)):
        raise ValueError(problem)


def check_read_by_sft(cfg: AllSections) -> None:
    """Raise ConfigError for settings without effect in `megatron-rl sft`.

    Not when a configuration is loaded: `megatron-rl evaluate --run` reads them from that of the
    run, and from its own options.
    """
    if lines := list(problems(cfg, sft_needs())):
        raise ConfigError("\n".join(lines))


def problems(cfg: AllSections, rows: list[Need]) -> Iterator[str]:
    """Yield what is wrong with the settings that `rows` name."""
    for names, is_read, because, fix in rows:
        section, _, keys = names.partition(".")
        values = getattr(cfg, section)
        for key in keys.split():
            name, value = f"{section}.{key}", getattr(values, key)
            default = type(values).model_fields[key].get_default(call_default_factory=True)
            # a default passes: dump_config writes defaults too, and load_config reads them back
            if not is_read and value not in (default, FORMER.get(name)):
                yield f"{name} = {value} has no effect with {because}; remove it, or set {fix}"


def needs(cfg: AllSections) -> list[Need]:
    """Return what settings need, in the order of reports: a fix often changes the next."""
    batch, replay, rollout = cfg.batch, cfg.replay, cfg.rollout
    is_custom_loss = ":" in cfg.loss.name  # it may read any setting of its section
    return [
        (
            "loss.kl_estimator kl_weight",
            cfg.loss.kl_coef > 0 or is_custom_loss, "loss.kl_coef = 0", "loss.kl_coef above 0",
        ),
        (
            "batch.max_sampling_rounds", batch.dynamic_sampling,
            "batch.dynamic_sampling = false", "batch.dynamic_sampling = true",
        ),
        *advantage_needs(cfg),
        (
            "run.anomaly_grad_norm anomaly_kl", cfg.run.save_batches != "off",
            "run.save_batches = off", "run.save_batches = on_anomaly",
        ),
        (
            "replay.missing_route_budget", replay.on_missing_route != "error",
            "replay.on_missing_route = error, which stops at the first missing route",
            "replay.on_missing_route = live, mask_token or drop_sample",
        ),
        (
            "rollout.verify_push_every", rollout.verify_push == "checksum",
            "rollout.verify_push = version", "rollout.verify_push = checksum",
        ),
        (
            "rollout.weight_sync_sources", rollout.weight_sync == "distributed",
            f"rollout.weight_sync = {rollout.weight_sync}, which has its own sources",
            "rollout.weight_sync = distributed",
        ),
        (
            "rollout.weight_sync_bucket_mb verify_push_every", rollout.weight_sync != "adapter",
            "rollout.weight_sync = adapter, which sends and verifies all in one call",
            "rollout.weight_sync = distributed",
        ),
        (
            "rollout.quantize_keep", rollout.quantize != "none",
            "rollout.quantize = none", "rollout.quantize = fp8",
        ),
        *agent_needs(cfg.agent, is_sft=cfg.is_sft),
        (
            "rollout.parity_warn_expert_overlap parity_min_expert_overlap", cfg.needs_routes,
            f"replay.mode = {replay.mode} without replay.measure", "replay.measure = true",
        ),
        *data_needs(cfg),
        ("eval.every", bool(cfg.eval.sets), "eval.sets names no file", "eval.sets"),
        (
            "lora.alpha rslora targets shared_pairs path", cfg.lora.rank > 0,
            "lora.rank = 0, as no adapter is trained, but all weights are", "lora.rank above 0",
        ),
        (
            "model.recompute_layers", cfg.model.recompute in ("full", "block"),
            f"model.recompute = {cfg.model.recompute}", "model.recompute = full or block",
        ),
    ]  # fmt: skip


def advantage_needs(cfg: AllSections) -> list[Need]:
    """Return what settings need that only advantages read."""
    because, fix = "advantage.weight = 0, as only advantages read it", "advantage.weight above 0"
    return [
        (names, cfg.advantage.weight > 0, because, fix)
        for names in ("batch.overlong_cache length_penalty", "advantage.rewards")
    ]


def data_needs(cfg: AllSections) -> list[Need]:
    """Return what settings of [data] and [sft] need."""
    return [
        (
            "sft.epochs response_key max_row_tokens min_reward", cfg.is_sft,
            f"loss.name = {cfg.loss.name}", "loss.name = sft, for megatron-rl sft",
        ),
        (
            "data.chat_template_kwargs", cfg.data.chat_template,
            "data.chat_template = false", "data.chat_template = true",
        ),
        (
            "data.least_chance", cfg.data.sampling == "pass_rate",
            f"data.sampling = {cfg.data.sampling}", "data.sampling = pass_rate",
        ),
        (
            "data.pass_reward",
            cfg.data.sampling == "pass_rate" or bool(cfg.data.source_names)
            or any(teacher.teach == "failures" for teacher in cfg.teachers.by_name.values()),
            "data.sampling = uniform, one file in data.train and no teacher of failures",
            "data.sampling = pass_rate, tables [[data.train]], or teach = failures of a teacher",
        ),
    ]  # fmt: skip


def sft_needs() -> list[Need]:
    """Return the settings that `megatron-rl sft` does not read."""
    evaluate = "it for megatron-rl evaluate, as an option --section.key VALUE"
    return [
        (
            "data.max_prompt_tokens", False,
            "megatron-rl sft, where a prompt is a part of a row", "sft.max_row_tokens",
        ),
        (
            "data.max_metadata_bytes", False,
            "megatron-rl sft, which keeps no metadata", "it for megatron-rl train",
        ),
        (
            "eval.samples pass_at temperature top_p top_k min_p max_response_tokens label_key",
            False, "megatron-rl sft, whose evaluation is a loss", evaluate,
        ),
        (
            f"reward.{' '.join(RewardConfig.model_fields)}", False,
            "megatron-rl sft, which scores nothing", evaluate,
        ),
        (
            f"rollout.{' '.join(RolloutConfig.model_fields)}", False,
            "megatron-rl sft, which has no servers", evaluate,
        ),
    ]  # fmt: skip


def agent_needs(agent: AgentConfig, *, is_sft: bool) -> list[Need]:
    """Return what settings of [agent] need."""
    return [
        (
            "agent.renderer", bool(agent.name) or is_sft,
            "no agent.function, agent.environment or agent.command", "one of these",
        ),
        (
            "agent.on_error concurrency resume max_episode_tokens episode_timeout_seconds",
            bool(agent.name),
            "no agent.function, agent.environment or agent.command", "one of these",
        ),
        (
            "agent.endpoint_host", bool(agent.function or agent.command),
            "no agent.function or agent.command", "one of these",
        ),
        (
            "agent.max_turns step_timeout_seconds isolation", bool(agent.environment),
            "no agent.environment", "agent.environment",
        ),
        (
            "agent.process_memory_gib", agent.isolation == "process" or bool(agent.preload),
            "agent.isolation = thread and no agent.preload", "agent.isolation = process",
        ),
    ]  # fmt: skip
