"""The switches as configuration: presets, overrides, refusal of keys without effect, dump and
reload.
"""

import math
from dataclasses import fields

import pytest

from megatron_rl.config import ConfigError, LossConfig, dump_config, load_config
from megatron_rl.config.loss_presets import PRESETS, LossSwitches
from megatron_rl.config.renamed import with_new_names

NEEDED = {"model": {"path": "checkpoint"}, "data": {"train": "train.jsonl"}}


def load(*overrides, **sections):
    return load_config(None, list(overrides), {**NEEDED, **sections})


def test_every_switch_is_a_key_and_none_by_default():
    """So that a new switch cannot be forgotten in the configuration (advantage has a section of its
    own).
    """
    switches = {field.name for field in fields(LossSwitches)} - {"advantage"}
    keys = {name for name, field in LossConfig.model_fields.items() if field.default is None}
    assert switches == keys


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_is_its_line_and_can_be_dumped(name, tmp_path):
    config = load("--loss.name", name, "--run.group_size", "2", "--run.num_mini_batches", "2")
    assert (
        config.loss.switches == PRESETS[name] and config.advantage_kind == PRESETS[name].advantage
    )
    path = tmp_path / "config.toml"
    path.write_text(dump_config(config))
    assert load_config(path, []) == config
    explicit = LossConfig(
        name="custom:loss", **{k: v for k, v in vars(PRESETS[name]).items() if k != "advantage"}
    )
    assert vars(explicit.switches) == {**vars(PRESETS[name]), "advantage": "mean"}, (
        "every position can be written out"
    )


def test_keys_override_the_preset():
    switches = load(
        loss={"name": "minirl", "clip_high": 0.5, "weight": "train_infer"}
    ).loss.switches
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
        (
            {"name": "minirl", "reject": "total"},
            ("loss.reject = total", "loss.reject_low or loss.reject_high"),
        ),
        (
            {"name": "grpo", "weight": "train_infer", "weight_mode": "truncate"},
            ("weight_mode = truncate", "weight_high"),
        ),
        (
            {"name": "grpo", "weight": "train_infer", "weight_mode": "mask"},
            ("weight_mode = mask", "weight_high"),
        ),
        (
            {"name": "geo_rs", "reject_level": "mean_k3"},
            ("reject_low = 0.999", "least divergence", "reject_high"),
        ),
        (
            {"name": "opsm", "reject_level": "mean_kl"},
            ("reject_level = mean_kl", "loss.reject_low = 0"),
        ),
        (
            {"name": "dapo", "weight": "total"},
            ("weight = total", "twice", "loss.weight = train_infer, or loss.form = logp"),
        ),
        (
            {"name": "sapo", "weight": "staleness"},
            ("weight = staleness", "form = sigmoid", "loss.weight = train_infer"),
        ),
        (
            {"name": "drpo", "weight": "train_infer"},
            ("clip_anchor = rollout", "set loss.weight = none"),
        ),
        (
            {"name": "clip_cov", "cov_low": math.nan},
            ("cov_low = nan", "must be below loss.cov_high"),
        ),
        ({"name": "clip_cov", "cov_high": math.nan}, ("loss.cov_high = nan",)),
        ({"name": "icepop", "weight_low": 9.0}, ("weight_low = 9.0", "weight_high = 5.0")),
        (
            {"name": "reinforce", "clip": "ratio", "clip_low": 0.1},
            ("loss.clip = ratio", "clip_low and loss.clip_high"),
        ),
        ({"name": "grpo", "clip": "tv"}, ("loss.clip = tv", "loss.form = logp")),
        ({"name": "minirl", "dual_clip": 1.0}, ("loss.dual_clip", "greater than 1")),
        ({"name": "minirl", "clip_low": -0.1}, ("loss.clip_low", "greater than or equal to 0")),
        ({"name": "grpo", "mask_high": 2.0}, ("loss.mask_high = 2.0", "loss.mask")),
        (
            {"name": "kpop", "mask_low": 0.5},
            ("loss.mask_low = 0.5", "no effect", "loss.mask_kind = ratio"),
        ),
        (
            {"name": "grpo", "mask_kind": "kl", "mask_high": 2.0},
            ("loss.mask_kind = kl", "no effect", "set loss.mask"),
        ),
        (
            {"name": "grpo", "mask": "train_infer", "mask_kind": "kl"},
            ("loss.mask = train_infer", "masks nothing", "loss.mask_high"),
        ),
        ({"name": "kpop", "mask_kind": "tv"}, ("loss.mask_kind", "'ratio' or 'kl'")),
        ({"name": "kpop", "mask_high": -1.0}, ("loss.mask_high", "greater than or equal to 0")),
        (
            {"name": "kpop", "mask": "total", "aggregation": "kept_mean"},
            ("loss.mask = total", "loss.aggregation = kept_mean", "loss.mask = train_infer"),
        ),
        ({"name": "dis", "weight_low": 2.0}, ("weight_low = 2.0", "weight_high = 1.28")),
        (
            {"name": "grpo", "mask": "train_infer"},
            ("loss.mask = train_infer", "masks nothing", "loss.mask_low or loss.mask_high"),
        ),
        (
            {"name": "grpo", "veto": "total", "veto_low": 2.0, "veto_high": 1.0},
            ("veto_low = 2.0", "veto_high = 1.0"),
        ),
        ({"name": "grpo", "veto_low": 1e-4}, ("loss.veto_low = 0.0001", "loss.veto")),
        (
            {"name": "minirl", "reject_only": "diverging"},
            ("loss.reject_only = diverging", "loss.reject"),
        ),
        (
            {"name": "sapo", "clip": "ratio", "clip_low": 0.2, "clip_high": 0.2},
            ("form = sigmoid", "loss.clip = none"),
        ),
        (
            {"name": "grpo", "form": "quadratic", "delta": 0.1},
            ("form = quadratic", "loss.clip = none"),
        ),
        ({"name": "drpo", "clip_level": "geometric"}, ("single tokens", "loss.clip_level = token")),
        ({"name": "grpo", "delta": 0.1}, ("loss.delta = 0.1", "loss.form = quadratic")),
        ({"name": "drpo", "tau_positive": 2.0}, ("loss.tau_positive = 2.0", "loss.form = sigmoid")),
        ({"name": "sapo", "tau_negative": 0}, ("loss.tau_negative", "greater than 0")),
        (
            {"name": "gspo", "form_level": "geometric"},
            ("form_level = geometric", "token by token", "loss.clip_level = token"),
        ),
        (
            {"name": "minirl", "form_level": "geometric"},
            ("loss.form_level = geometric", "loss.form = ratio"),
        ),
        ({"name": "gmpo", "clip_low": 1.0}, ("loss.clip_low = 1.0", "below 1")),
        ({"name": "gmpo", "dual_clip": 3.0}, ("loss.dual_clip = 3.0", "loss.form_level = token")),
        (
            {"name": "grpo", "penalty": "square"},
            ("loss.penalty = square", "loss.penalty_coef above 0"),
        ),
        ({"name": "grpo", "penalty_coef": 0.1}, ("loss.penalty_coef = 0.1", "loss.penalty")),
        (
            {"name": "grpo", "shift_floor": 0.5},
            ("loss.shift_floor = 0.5", "loss.router_shift = true"),
        ),
        ({"name": "minirl", "router_shift": True}, ("router_shift = true", "loss.form = ratio")),
        ({"name": "sapo", "router_shift": True}, ("router_shift = true", "loss.form = ratio")),
        (
            {"name": "rspo", "clip_anchor": "rollout"},
            ("router_shift = true", "loss.clip_anchor = old"),
        ),
        ({"name": "rspo", "shift_floor": 1.5}, ("loss.shift_floor", "less than or equal to 1")),
        (
            {"name": "grpo", "select": "cov_top"},
            ("select = cov_top", "loss.penalty and loss.penalty_coef"),
        ),
        ({"name": "grpo", "select_share": 0.1}, ("loss.select_share = 0.1", "loss.select")),
        (
            {"name": "dppo_tau", "penalty_dead_zone": 0.1},
            ("loss.penalty_dead_zone = 0.1", "loss.penalty = abs"),
        ),
        ({"name": "kl_cov", "cov_low": 1.0}, ("loss.cov_low = 1.0", "loss.select = cov_band")),
        (
            {"name": "clip_cov", "cov_low": 5.0},
            ("cov_low = 5.0", "must be below loss.cov_high = 5.0"),
        ),
        (
            {"name": "grpo", "select": "cov_band"},
            ("select = cov_band", "loss.cov_low or loss.cov_high"),
        ),
        ({"name": "clip_cov", "select_share": 0.0}, ("loss.select_share", "greater than 0")),
        (
            {"name": "grpo", "kl_weight": "total"},
            ("loss.kl_weight = total", "loss.kl_coef above 0"),
        ),
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


GDPO = {"kind": "per_reward", "rewards": {"correct": 1.0, "format": 0.5}}


@pytest.mark.parametrize(
    ("sections", "names"),
    [
        (
            {"advantage": {"kind": "remax"}},
            ("advantage.kind = 'remax'", "greedy response", "kind = leave_one_out"),
        ),
        (
            {"advantage": {"kind": "per_reward"}},
            ("advantage.kind = per_reward", "at least 2 names"),
        ),
        (
            {"advantage": {"kind": "per_reward", "rewards": {"correct": 1.0}}},
            ("at least 2 names", "kind = std"),
        ),
        (
            {"advantage": {"rewards": {"a": 1.0, "b": 1.0}}},
            ("advantage.rewards", "kind = per_reward"),
        ),
        ({"advantage": GDPO}, ("reward.on_error = 0.0", "drop or raise")),
        (
            {"advantage": GDPO, "reward": {"on_error": "drop"}},
            ("reward.function = math", "returns no metrics", "returns correct, format"),
        ),
        (
            {"advantage": GDPO | {"rewards": {"correct": 0.0, "format": 0.0}}},
            ("advantage.rewards = {'correct': 0.0, 'format': 0.0}", "every weight is 0"),
        ),
        (
            {
                "advantage": GDPO,
                "reward": {"on_error": "drop"},
                "batch": {"dynamic_sampling": True},
            },
            ("batch.dynamic_sampling",),
        ),
        (
            {"advantage": GDPO, "reward": {"on_error": "drop"}, "batch": {"length_penalty": 0.1}},
            ("batch.length_penalty",),
        ),
    ],
)
def test_rewards_by_name_are_checked(sections, names):
    with pytest.raises(ConfigError) as caught:
        load(**sections)
    assert all(name in str(caught.value) for name in names), caught.value


def test_rewards_by_name_are_read():
    reward = {"on_error": "drop", "function": "rewards:score"}
    config = load(advantage=GDPO, reward=reward, loss={"name": "grpo"})
    assert config.advantage_kind == "per_reward" and config.advantage.rewards == {
        "correct": 1.0,
        "format": 0.5,
    }
    # metrics of an agent, which may give the reward, too
    load(advantage=GDPO, reward={"on_error": "drop"}, agent={"function": "agents:play"})


def test_the_former_name_of_reject_only_is_read_from_earlier_runs():
    for old, new in ((True, "negative"), (False, "all")):
        assert with_new_names({"loss": {"reject_negative_only": old}}) == {
            "loss": {"reject_only": new}
        }
