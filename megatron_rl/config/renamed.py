"""Names of settings and metrics that changed, old -> new: the one table of them.

A configuration that a person writes must use the new names.  Files of earlier versions are read with the new ones: the
config.toml of a run, the state.json of a checkpoint, metrics.jsonl.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SETTINGS = {
    "replay.on_gap": "replay.on_missing_route",
    "replay.gap_budget": "replay.missing_route_budget",
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
"""Beginnings of names: gap/share was renamed to logratio/share."""


def new_metric(name: str) -> str:
    """The present name of a metric; `name` itself where it never changed."""
    for old, new in METRICS.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def with_new_names(sections: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration that an earlier version wrote ({"section": {"key": value}}), under the present names."""
    renamed: dict[str, Any] = {}
    for section, keys in sections.items():
        if not isinstance(keys, Mapping):
            renamed[section] = keys
            continue
        renamed.setdefault(section, {})
        for key, value in keys.items():
            new_section, _, new_key = SETTINGS.get(f"{section}.{key}", f"{section}.{key}").partition(".")
            is_metric = f"{section}.{key}" == "checkpoint.best_metric" and isinstance(value, str)
            renamed.setdefault(new_section, {})[new_key] = new_metric(value) if is_metric else value
    return renamed


def refusals(sections: Mapping[str, Any]) -> list[str]:
    """One line for each key of `sections` that was renamed."""
    names = [f"{section}.{key}" for section, keys in sections.items() if isinstance(keys, Mapping) for key in keys]
    return [f"{name} was renamed to {SETTINGS[name]}; use the new name" for name in names if name in SETTINGS]
