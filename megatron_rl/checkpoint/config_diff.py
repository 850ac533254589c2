"""Settings that may differ between a checkpoint and the run that continues it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from megatron_rl.config import Config, plain_values
from megatron_rl.config.redact import Redactor
from megatron_rl.config.renamed import with_new_names

Sections = Mapping[str, Mapping[str, object]]
"""A configuration as plain values: {"section": {"key": value}}."""
FREE = (
    # where and on what it runs
    "run.name", "run.dir", "run.device", "run.collective_timeout_minutes",
    "run.silence_timeout_seconds", "parallel.*", "track.*", "run.log_format", "checkpoint.*",
    "eval.*", "run.save_batches", "run.anomaly_*", "run.trace", "reward.num_workers",
    "reward.concurrency", "reward.memory_gib", "reward.timeout_seconds", "data.train",
    "rollout.urls", "rollout.num_servers", "rollout.max_server_restarts", "rollout.gpus",
    "rollout.python", "rollout.api_key_env", "rollout.host", "rollout.port", "rollout.server_args",
    "rollout.max_total_tokens", "rollout.max_running_requests",
    "agent.*_seconds", "agent.concurrency", "agent.resume", "agent.isolation",
    "agent.process_memory_gib", "agent.endpoint_host", "agent.pass_env", "agent.preload",
    "rollout.*_seconds", "rollout.max_retries", "rollout.max_concurrency", "rollout.save_tensors",
    "rollout.weight_sync", "rollout.weight_sync_bucket_mb", "rollout.weight_sync_sources",
    "rollout.release_memory", "rollout.allow_unproven", "rollout.verify_push*",
    "teachers.*.urls", "teachers.*.api_key_env", "teachers.*.gpus", "teachers.*.server_args",
    "teachers.*.release_memory",
    # how the same numbers are computed
    "run.max_tokens_per_micro_batch",
    "model.layer_spec", "model.batch_format", "model.recompute", "model.recompute_layers",
    "model.fused_lm_head", "model.token_dispatcher",
    # what is measured
    "replay.measure", "replay.missing_route_budget", "optim.measure_cosine",
    "optim.max_skipped_updates", "rollout.parity_*",
)  # fmt: skip
"""Keys (shell patterns) that may change freely: another place, layout or order of summation of the
same training.  data.train is only a path: the prompts are compared by their content.
"""
FREE_IF_CONSTANT = ("run.num_steps",)
"""Keys that are free while optim.schedule = constant; other schedules are stretched over all steps.
"""
FREE_IF_PLAIN = ("rollout.quantize_keep",)
"""Keys that are free while rollout.quantize = none.  Then nothing is rounded, and only the default
of this version is accepted.
"""


def check_changes(saved: Sections, cfg: Config, where: str) -> list[str]:
    """Return the keys that changed and may; `saved` is the checkpoint's configuration.

    `saved` may have former names.  A key that one side does not know has its default there.  Raises
    ValueError listing every key that changed and may not, with both values, unless
    checkpoint.allow_changes names it.
    """
    required = {"model": {"path": cfg.model.path}, "data": {"train": cfg.data.train}}
    # defaults of this version, for keys that one side does not know
    fresh = type(cfg)(**required)  # type: ignore[arg-type]
    defaults = flat_settings(fresh.model_dump(mode="json"))
    # an older checkpoint's may hold secrets, which would differ from what hides them now
    saved = Redactor(hidden=cfg.key_variables).tree(with_new_names(saved))
    before, now = defaults | flat_settings(saved), defaults | flat_settings(plain_values(cfg))
    changed = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    if refused := [
        key for key in matters(changed, cfg) if not matches(key, cfg.checkpoint.allow_changes)
    ]:
        title = (
            "was made with other settings, which matter for what is trained (checkpoint -> now):"
        )
        lines = [
            f"{where} {title}",
            *(f"  {key}: {before.get(key)} -> {now.get(key)}" for key in refused),
            f"set them back, or accept them: --checkpoint.allow_changes {' '.join(refused)}",
        ]
        raise ValueError("\n".join(lines))
    return changed


def check_steps(finished: int, cfg: Config, where: object) -> None:
    """Raise ValueError for a checkpoint with more finished steps than run.num_steps: the run would
    end at once, and save these weights as those of an earlier step.
    """
    if finished > cfg.run.num_steps:
        raise ValueError(
            f"run.num_steps = {cfg.run.num_steps}: {where} has {finished} finished steps; raise it"
            " to at least that, or choose another checkpoint by checkpoint.load"
        )


def matters(changed: Sequence[str], cfg: Config) -> list[str]:
    """Return those of the changed keys that matter for what is trained."""
    free = [*FREE, *(FREE_IF_CONSTANT if cfg.optim.schedule == "constant" else ())]
    free += FREE_IF_PLAIN if cfg.rollout.quantize == "none" else ()
    return [key for key in changed if not matches(key, free)]


def matches(key: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def flat_settings(sections: Sections) -> dict[str, object]:
    """Return {"section.key": value}, and {"teachers.NAME.key": value}."""
    flat: dict[str, object] = {}
    for section, keys in sections.items():
        for key, value in keys.items():
            if section == "teachers" and isinstance(value, Mapping):
                flat |= {f"{section}.{key}.{name}": entry for name, entry in value.items()}
            else:
                flat[f"{section}.{key}"] = value
    return flat
