"""Settings of supervised training: defaults, and what is refused by name."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl import sft, train
from megatron_rl.config import ConfigError, dump_config, load_config, load_rl_or_sft
from megatron_rl.config.rules.no_effect import check_read_by_sft
from megatron_rl.config.rules.sft_rules import DEFAULTS, NEEDED
from megatron_rl.plan import dry_run

BASE = {"model": {"path": "m"}, "data": {"train": "rows.jsonl"}}


def load(**sections):
    merged = {name: BASE.get(name, {}) | sections.get(name, {}) for name in {**BASE, **sections}}
    return load_config(None, [], merged, defaults=DEFAULTS)


def test_defaults_give_way_to_the_users_settings(tmp_path):
    assert load().is_sft and load().run.group_size == 1
    assert load(sft={"max_row_tokens": 9000}).longest_sequence == 9000
    assert load(loss={"aggregation": "sequence_mean"}).loss.switches.aggregation == "sequence_mean"
    assert load(loss={"name": "grpo"}, run={"group_size": 8}).loss.name == "grpo"
    path = tmp_path / "config.toml"
    path.write_text(dump_config(load(sft={"epochs": 2.0}, agent={"renderer": "qwen3"})))
    assert load_config(path) == load(sft={"epochs": 2.0}, agent={"renderer": "qwen3"})


WRONG = {
    "advantage.weight": 0.5,
    "run.group_size": 2, "replay.mode": "R3", "replay.measure": True, "rollout.temperature": 0.7,
    "rollout.save_tensors": True, "data.sampling": "pass_rate", "data.label_key": "x",
    "data.chat_template_kwargs": {"a": 1}, "advantage.kind": "std",
    "batch.dynamic_sampling": True, "batch.filter_truncated": True, "batch.overlong_cache": 4,
    "batch.length_penalty": 0.5, "loss.kl_coef": 0.1,
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_settings_of_sampling_are_refused(name):
    section, _, key = name.partition(".")
    with pytest.raises(ConfigError, match=rf"{name} = .* with loss.name = sft"):
        load(**{section: {key: WRONG[name]}})


def test_every_needed_value_is_tested_or_refused_elsewhere():
    # without a loss that corrects for age, and without an agent, other rules refuse these first
    assert set(NEEDED) - set(WRONG) == {"rollout.max_staleness", "agent.history"}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"rollout": {"top_p": 0.9, "top_k": 8}}, "rows have no kept sets"),
        ({"agent": {"function": "a:b"}}, "agent.function = 'a:b' has no effect"),
        ({"loss": {"penalty": "square", "penalty_coef": 0.1}}, "only aggregation may be set"),
        ({"loss": {"aggregation": "kept_mean"}}, "loss.aggregation = kept_mean with loss.name"),
        ({"checkpoint": {"keep_last": 1, "best_metric": "eval/a/avg@4"}}, "eval/NAME/loss"),
        (
            {"data": {"train": [{"name": "a", "path": "b"}]}, "sft": {"epochs": 1.0}},
            "sft.epochs = 1 with tables",
        ),
    ],
)
def test_what_has_no_meaning_is_refused(sections, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(**sections)


def test_the_best_checkpoint_may_be_that_of_a_held_out_loss():
    best = {"keep_last": 1, "best_metric": "eval/a/loss", "best_mode": "min"}
    assert load(eval={"sets": {"a": "x.jsonl"}}, checkpoint=best).checkpoint.keep_last == 1


def test_settings_of_sft_are_refused_in_rl():
    with pytest.raises(
        ConfigError, match=r"sft.epochs = 2.0 has no effect with loss.name = minirl"
    ):
        load_config(None, [], BASE | {"sft": {"epochs": 2.0}})


@pytest.mark.parametrize("command", ["dry-run", "plan", "rehearse"])
def test_commands_that_compute_steps_of_rl_refuse_sft_by_its_name(tmp_path, command):
    """Not by rules of RL, of which a file of megatron-rl sft breaks several."""
    path = tmp_path / "config.toml"
    path.write_text('[data]\ntrain = "x"\n[model]\npath = "qwen3-30b-a3b"\n[sft]\nepochs = 1.0\n')
    options = ["--model", "qwen3-30b-a3b"] * (command == "plan")
    done = subprocess.run(
        [
            sys.executable, "-m", "megatron_rl.cli", command, "--config", path, "--gpus", "8",
            *options,
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert f"loss.name = sft: megatron-rl {command} computes steps of RL" in done.stderr


def test_a_loss_by_name_decides_before_a_section(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text('[data]\ntrain = "x"\n[model]\npath = "x"\n[loss]\nname = "sft"\n')
    assert load_rl_or_sft(path).is_sft
    assert not load_rl_or_sft(path, ["--loss.name", "grpo"]).is_sft
    assert load_rl_or_sft(None, ["--data.train=x", "--model.path=x", "--sft.epochs=2"]).is_sft


UNREAD = {
    "data.max_prompt_tokens": 512, "data.max_metadata_bytes": 1, "eval.samples": 8,
    "eval.pass_at": (2,), "eval.temperature": 0.5, "eval.top_p": 0.9, "eval.top_k": 5,
    "eval.min_p": 0.1, "eval.max_response_tokens": 9, "eval.label_key": "x",
    "reward.function": "a:b", "reward.num_workers": 2, "rollout.urls": ("http://x:1",),
    "rollout.max_response_tokens": 77, "rollout.num_servers": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", UNREAD)
def test_the_command_refuses_settings_that_it_does_not_read(tmp_path, capsys, name):
    section, _, key = name.partition(".")
    cfg = load(**{section: {key: UNREAD[name]}})  # megatron-rl evaluate reads it
    path = tmp_path / "config.toml"
    path.write_text(dump_config(cfg))
    assert sft.run(["--config", str(path)]) == 2
    assert f"{name} = {UNREAD[name]} has no effect with megatron-rl sft" in capsys.readouterr().err


def test_the_settings_of_the_guide_and_of_the_recipes_are_read_by_the_command():
    for path in [Path("examples/coding_agent/sft.toml"), *Path("megatron_rl").rglob("*sft.toml")]:
        check_read_by_sft(load_config(path, defaults=DEFAULTS))
    check_read_by_sft(load(sft={"epochs": 2.0}, eval={"sets": {"a": "b"}, "max_prompts": 4}))


def test_each_command_refuses_the_other_ones_loss(tmp_path, capsys):
    path = tmp_path / "config.toml"
    path.write_text(dump_config(load()))
    assert train.run(["--config", str(path)]) == 2
    assert "run megatron-rl sft" in capsys.readouterr().err
    arguments, overrides = dry_run_options(path)
    assert dry_run.print_report(arguments, overrides) == 2
    assert "run megatron-rl sft" in capsys.readouterr().err
    options = ["--loss.name", "grpo", "--run.group_size", "8"]
    assert sft.run(["--config", str(path), *options]) == 2
    assert "megatron-rl train" in capsys.readouterr().err


def dry_run_options(path):
    from megatron_rl.options import parse

    return parse(["--config", str(path), "--dry-run"])
