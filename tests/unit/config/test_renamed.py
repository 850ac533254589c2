"""Renamed settings and metrics: refused with the new name in configurations of users, read in files
of earlier versions.
"""

import tomllib
from pathlib import Path

import pytest

from megatron_rl.checkpoint.config_diff import check_changes
from megatron_rl.config import Config, ConfigError, dump_config, load_config
from megatron_rl.config.renamed import METRICS, SETTINGS, new_metric
from megatron_rl.config.schema import SECTIONS
from megatron_rl.metrics.sinks import read_metrics
from megatron_rl.rollout.saved.saved_config import check_config

OLD_RUN = Path(__file__).parents[2] / "fixtures/run_0_1_0"
"""config.toml of version 0.1.0 with every setting that was renamed since; a hand-written
metrics.jsonl with every such metric.
"""
REQUIRED = ["--model.path", "moe", "--data.train", "train.jsonl"]
NOW = {
    "loss.reject_only": "negative",
    "replay.on_missing_route": "live",
    "replay.missing_route_budget": 0.05,
    "rollout.weight_sync": "disk",
    "rollout.weight_sync_bucket_mb": 64,
    "rollout.weight_sync_timeout_seconds": 30.0,
    "checkpoint.best_metric": "first_order/total_median",
}


def value_of(cfg: Config, name: str) -> object:
    section, key = name.split(".")
    return getattr(getattr(cfg, section), key)


def test_renamed_settings_map_removed_names_to_existing_ones():
    for old, new in SETTINGS.items():
        section, key = new.split(".")
        assert key in SECTIONS[section].model_fields, new
        section, key = old.split(".")
        assert key not in SECTIONS[section].model_fields, old
    for new in METRICS.values():
        assert new_metric(new + "x") == new + "x", "a present name is not itself a former one"


@pytest.mark.parametrize("old", SETTINGS)
def test_a_former_name_is_refused_with_the_new_one(tmp_path, old):
    words = f"{old} was renamed to {SETTINGS[old]}; use the new name"
    with pytest.raises(ConfigError, match=words):
        load_config(None, [*REQUIRED, f"--{old}", "1"])
    section, key = old.split(".")
    (tmp_path / "run.toml").write_text(f"[{section}]\n{key} = 1\n")
    with pytest.raises(ConfigError, match=words):
        load_config(tmp_path / "run.toml", REQUIRED)


def test_all_former_names_of_a_file_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        load_config(OLD_RUN / "config.toml")
    lines = str(caught.value).splitlines()
    assert all(" was renamed to " in line for line in lines)
    assert len(lines) == len(SETTINGS) + 1, "and the former metric in checkpoint.best_metric"


def test_a_former_metric_is_refused_with_the_new_one():
    with pytest.raises(
        ConfigError, match=r"best_metric = gap/share: the metric was renamed to logratio/share"
    ):
        load_config(
            None,
            [*REQUIRED, "--checkpoint.keep_last", "1", "--checkpoint.best_metric", "gap/share"],
        )


def test_the_configuration_of_an_earlier_version_is_read(tmp_path):
    cfg = load_config(OLD_RUN / "config.toml", of_a_run=True)
    assert {name: value_of(cfg, name) for name in NOW} == NOW
    (tmp_path / "config.toml").write_text(dump_config(cfg))
    assert load_config(tmp_path / "config.toml") == cfg


def test_a_checkpoint_of_an_earlier_version_is_continued():
    """Its state.json holds the same names as its config.toml; what changed and matters is still
    found.
    """
    saved = tomllib.loads((OLD_RUN / "config.toml").read_text())
    cfg = load_config(OLD_RUN / "config.toml", of_a_run=True)
    assert check_changes(saved, cfg, "old") == []
    with pytest.raises(ValueError, match=r"replay\.on_missing_route: live -> mask_token"):
        check_changes(
            saved,
            load_config(
                OLD_RUN / "config.toml", ["--replay.on_missing_route", "mask_token"], of_a_run=True
            ),
            "",
        )


def test_rollouts_of_an_earlier_version_are_trained_on():
    check_config(OLD_RUN, load_config(None, [*REQUIRED, "--run.name", "new"]))


def test_metrics_of_an_earlier_version_are_read():
    (result,) = read_metrics(OLD_RUN / "metrics.jsonl")
    assert set(result.metrics) == {
        "rollout/reward_mean", "train/logratio_abs_mean", "logratio/train_infer_p99",
        "first_order/total_median",
        "replay/missing_route_frac", "replay/prompt_missing_route_frac",
        "replay/missing_rows_total",
        "rollout/cancelled_groups_total", "time/weight_sync", "time/step",
    }  # fmt: skip
    written = (OLD_RUN / "metrics.jsonl").read_text()
    assert all(f'"{old}' in written for old in METRICS), "every renamed metric is in the file"
    assert result.metrics["replay/missing_rows_total"] == 3.0
