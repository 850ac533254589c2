"""The switches as configuration: presets, overrides, refusal of keys without effect, dump and reload."""

from dataclasses import fields

import pytest

from megatron_rl.config import ConfigError, LossConfig, dump_config, load_config
from megatron_rl.config.loss_presets import PRESETS, LossSpec

NEEDED = {"model": {"path": "checkpoint"}, "data": {"train": "train.jsonl"}}


def load(*overrides, **sections):
    return load_config(None, list(overrides), {**NEEDED, **sections})


def test_every_switch_is_a_key_and_none_by_default():
    """So that a new switch cannot be forgotten in the configuration (advantage has a section of its own)."""
    switches = {field.name for field in fields(LossSpec)} - {"advantage"}
    keys = {name for name, field in LossConfig.model_fields.items() if field.default is None}
    assert switches == keys


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_is_its_line_and_can_be_dumped(name, tmp_path):
    config = load("--loss.name", name, "--run.group_size", "2")
    assert config.loss.switches == PRESETS[name] and config.advantage_kind == PRESETS[name].advantage
    path = tmp_path / "config.toml"
    path.write_text(dump_config(config))
    assert load_config(path, []) == config
    explicit = LossConfig(name="custom:loss", **{k: v for k, v in vars(PRESETS[name]).items() if k != "advantage"})
    assert vars(explicit.switches) == {**vars(PRESETS[name]), "advantage": "mean"}, "every position can be written out"


def test_keys_override_the_preset():
    switches = load(loss={"name": "minirl", "clip_high": 0.5, "weight": "train_infer"}).loss.switches
    assert (switches.clip_high, switches.clip_low, switches.weight, switches.weight_high) == (
        0.5,
        0.2,
        "train_infer",
        5.0,
    )
    assert load("--loss.name", "grpo", "--loss.dual_clip", "3").loss.switches.dual_clip == 3.0
    assert load(advantage={"kind": "std"}).advantage_kind == "std"


@pytest.mark.parametrize(
    ("loss", "names"),
    [
        ({"name": "grop"}, ("'grop'", "'grpo'")),
        ({"name": "grpo", "weight_high": 5.0}, ("loss.weight_high = 5.0", "loss.weight_mode")),
        ({"name": "minirl", "weight_low": 0.5}, ("loss.weight_low = 0.5", "clip or mask")),
        ({"name": "minirl_no_clip", "clip_high": 0.3}, ("loss.clip_high = 0.3", "loss.clip")),
        ({"name": "minirl", "dual_clip": 3.0}, ("loss.dual_clip = 3.0", "loss.form = ratio")),
        ({"name": "reinforce", "weight_mode": "mask"}, ("loss.weight_mode = mask", "loss.weight")),
        ({"name": "minirl", "reject_low": 0.9}, ("loss.reject_low = 0.9", "loss.reject")),
        ({"name": "minirl", "reject": "total"}, ("loss.reject = total", "loss.reject_low or loss.reject_high")),
        ({"name": "icepop", "weight_low": 9.0}, ("weight_low = 9.0", "weight_high = 5.0")),
        ({"name": "reinforce", "clip": "ratio", "clip_low": 0.1}, ("loss.clip = ratio", "clip_low and loss.clip_high")),
        ({"name": "grpo", "clip": "tv"}, ("loss.clip = tv", "loss.form = logp")),
        ({"name": "minirl", "dual_clip": 1.0}, ("loss.dual_clip", "greater than 1")),
        ({"name": "minirl", "clip_low": -0.1}, ("loss.clip_low", "greater than or equal to 0")),
        ({"name": "minirl", "kl_estimator": "k4"}, ("loss.kl_estimator", "'k1', 'k2' or 'k3'")),
    ],
)
def test_what_cannot_take_effect_is_refused(loss, names):
    with pytest.raises(ConfigError) as caught:
        load(loss=loss)
    assert all(name in str(caught.value) for name in names), caught.value


def test_the_advantage_of_a_preset_is_checked_too():
    with pytest.raises(ConfigError, match=r"leave_one_out needs run.group_size >= 2"):
        load(loss={"name": "rloo"}, run={"group_size": 1})
