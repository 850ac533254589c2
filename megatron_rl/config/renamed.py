"""Former names of settings and metrics, with the present ones.

Configurations that users write must use the new names.  Files of earlier versions are read with the
former ones: config.toml of a run, state.json of a checkpoint, metrics.jsonl.
"""

from __future__ import annotations

from collections.abc import Mapping

SETTINGS = {
    "replay.on_gap": "replay.on_missing_route",
    "replay.gap_budget": "replay.missing_route_budget",
    "loss.reject_negative_only": "loss.reject_only",
    "rollout.push": "rollout.weight_sync",
    "rollout.push_bucket_mb": "rollout.weight_sync_bucket_mb",
    "rollout.push_timeout_seconds": "rollout.weight_sync_timeout_seconds",
}

METRICS = {
    "gap/": "logratio/",
    "validity/": "first_order/",
    "replay/gap_frac": "replay/missing_route_frac",
    "replay/prompt_gap_frac": "replay/prompt_missing_route_frac",
    "replay/gap_rows_total": "replay/missing_rows_total",
    "train/mismatch_abs_": "train/logratio_abs_",
    "rollout/unwanted_": "rollout/cancelled_",
    "time/push": "time/weight_sync",
}
"""Prefixes of names: gap/share was renamed to logratio/share."""


def new_metric(name: str) -> str:
    """Return the present name of a metric."""
    for old, new in METRICS.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def with_new_names(sections: Mapping[str, Mapping[str, object]]) -> dict[str, dict[str, object]]:
    """Replace former names in a configuration that an earlier version wrote.

    It is {"section": {"key": value}}.
    """
    renamed: dict[str, dict[str, object]] = {}
    for section, keys in sections.items():
        for key, value in keys.items():
            name = f"{section}.{key}"
            if name == "checkpoint.best_metric" and isinstance(value, str):  # None: not set
                value = new_metric(value)
            if name == "loss.reject_negative_only":
                # it was true or false, and is a word now; None where it was not set
                value = None if value is None else "negative" if value else "all"
            new_section, _, new_key = SETTINGS.get(name, name).partition(".")
            renamed.setdefault(new_section, {})[new_key] = value
    return renamed
