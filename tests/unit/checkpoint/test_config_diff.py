"""Which settings may differ between a checkpoint and the run that continues it; others are refused
with both values.
"""

from fnmatch import fnmatchcase

import pytest

from megatron_rl.checkpoint.config_diff import (
    FREE,
    FREE_IF_CONSTANT,
    FREE_IF_PLAIN,
    check_changes,
    flat_settings,
)
from megatron_rl.config import ConfigError, load_config


def config(**sections):
    return load_config(None, [], {"model": {"path": "m"}, "data": {"train": "x.jsonl"}, **sections})


def saved(**sections):
    return config(**sections).model_dump(mode="json")


def test_every_free_key_exists():
    one = {"urls": ["http://a:1"]}
    keys, patterns = (
        flat_settings(saved(teachers={"math": one})),
        (*FREE, *FREE_IF_CONSTANT, *FREE_IF_PLAIN),
    )
    assert not [
        pattern for pattern in patterns if not any(fnmatchcase(key, pattern) for key in keys)
    ]


def test_a_teacher_may_move_to_other_servers_and_nothing_else_of_it_may_change():
    before = saved(teachers={"math": {"urls": ["http://a:1"], "beta": 0.5}})
    moved = config(teachers={"math": {"urls": ["http://b:1"], "beta": 0.5}})
    assert check_changes(before, moved, "here") == ["teachers.math.urls"]
    with pytest.raises(ValueError, match=r"teachers.math.beta: 0.5 -> 1.0"):
        check_changes(before, config(teachers={"math": {"urls": ["http://a:1"]}}), "here")
    with pytest.raises(ValueError, match=r"teachers.math.beta: 0.5 -> None"):
        check_changes(before, config(), "here")


def test_a_teacher_may_begin_to_share_its_gpus():
    """A checkpoint from before the setting existed has no value of it."""
    before = saved(teachers={"math": {"path": "t"}})
    del before["teachers"]["math"]["release_memory"]
    check_changes(before, config(teachers={"math": {"path": "t"}}), "here")
    now = config(teachers={"math": {"path": "t", "release_memory": True, "gpus": [1]}})
    assert "teachers.math.release_memory" in check_changes(before, now, "here")


def test_place_layout_and_order_of_summation_are_free():
    now = config(
        run={"name": "other", "num_steps": 99, "max_tokens_per_micro_batch": 7},
        parallel={"tp": 2},
        checkpoint={"every": 5},
        rollout={"urls": ["http://a:1"], "request_timeout_seconds": 5.0},
    )
    assert set(check_changes(saved(), now, "here")) == {
        "run.name", "run.num_steps", "run.max_tokens_per_micro_batch", "parallel.tp",
        "checkpoint.every", "rollout.urls",
        "rollout.request_timeout_seconds",
    }  # fmt: skip
    assert check_changes(saved(), config(), "here") == []


def test_what_matters_is_refused_with_both_values_unless_it_is_accepted():
    changed = {"optim": {"lr": 0.5}, "loss": {"name": "grpo"}, "run": {"seed": 3}}
    with pytest.raises(ValueError) as error:
        check_changes(saved(), config(**changed), "runs/a/step_000001")
    text = str(error.value)
    assert "runs/a/step_000001" in text and "optim.lr: 1e-06 -> 0.5" in text
    assert "loss.name: minirl -> grpo" in text and "run.seed: 0 -> 3" in text
    assert "--checkpoint.allow_changes loss.name optim.lr run.seed" in text
    accepted = config(**changed, checkpoint={"allow_changes": ["optim.*", "loss.name", "run.seed"]})
    assert check_changes(saved(), accepted, "here") == [
        "checkpoint.allow_changes",
        "loss.name",
        "optim.lr",
        "run.seed",
    ]


def test_a_schedule_over_all_steps_fixes_their_number():
    linear = {"optim": {"schedule": "linear"}}
    with pytest.raises(ValueError, match=r"run\.num_steps: 60 -> 99"):
        check_changes(saved(**linear), config(**linear, run={"num_steps": 99}), "here")


def test_what_is_left_unrounded_matters_only_where_something_is_rounded():
    older = saved()
    older["rollout"]["quantize_keep"] = ["*norm*"]  # another version's default
    assert check_changes(older, config(), "here") == ["rollout.quantize_keep"]
    older["rollout"]["quantize"] = "fp8"
    with pytest.raises(ValueError, match=r"rollout\.quantize_keep: \['\*norm\*'\] -> "):
        check_changes(older, config(rollout={"quantize": "fp8"}), "here")


def test_a_key_that_one_side_does_not_know_has_its_default_there():
    older = saved()
    del older["optim"]["beta2"]
    older["optim"]["gone"] = 1
    with pytest.raises(ValueError, match=r"optim\.gone: 1 -> None"):
        check_changes(older, config(), "here")
    del older["optim"]["gone"]
    assert check_changes(older, config(), "here") == []
    required = {"model": {"path": "m"}, "data": {"train": "x.jsonl"}}
    assert check_changes(required, config(), "here") == []
    with pytest.raises(ValueError, match=r"optim\.beta2: 0\.95 -> 0\.5"):
        check_changes(older, config(optim={"beta2": 0.5}), "here")


@pytest.mark.parametrize(
    ("keys", "rule"),
    [
        ({"resume": False, "require": True}, "resume = false contradicts require = true"),
        ({"resume": False, "load": "x"}, "resume = false contradicts load = x"),
        ({"keep_every": 5}, "keep_every = 5 has no effect: keep_last = 0 keeps all"),
        ({"best_metric": "train/loss"}, "best_metric = train/loss has no effect"),
    ],
)
def test_settings_that_contradict_one_another_are_refused(keys, rule):
    with pytest.raises(ConfigError, match=rule):
        config(checkpoint=keys)


@pytest.mark.parametrize(
    ("section", "key", "before", "after"),
    [("rollout", "weight_sync_sources", 16, 1), ("optim", "measure_cosine", False, True)],
)
def test_what_only_sends_or_measures_may_change(section, key, before, after):
    check_changes(saved(**{section: {key: before}}), config(**{section: {key: after}}), "a")
