"""config/: TOML plus command line, errors that name key, value, rule and the nearest name, a dump
that reads back.
"""

import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config import Config, ConfigError, dump_config, load_config
from megatron_rl.config.arguments import section_values

ROOT = Path(__file__).resolve().parents[3]
MINIMAL = {"model": {"path": "checkpoint"}, "data": {"train": "train.jsonl"}}


@pytest.fixture
def toml(tmp_path):
    """Write a TOML file on top of the two required keys; returns its path."""

    def write(text: str = "") -> Path:
        path = tmp_path / "run.toml"
        path.write_text('[model]\npath = "checkpoint"\n[data]\ntrain = "train.jsonl"\n' + text)
        return path

    return write


def message(path: Path | None, *overrides: str, **sections) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, list(overrides), sections)
    return str(caught.value)


def loaded(path: Path, **sections) -> Config:
    return load_config(path, [], sections)


def dry_run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "megatron_rl.cli", "train", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


# Unknown names ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wrong", "right"),
    [
        ("[optin]\nlr = 1.0", "[optin]", "'optim'"),
        ("[optim]\nlearning_rat = 1.0\nlrr = 1.0", "optim.learning_rat", ""),
        ("[optim]\nwarmup_update = 1", "optim.warmup_update", "'warmup_updates'"),
        ("[loss]\nclip_hi = 0.3", "loss.clip_hi", "'clip_high'"),
    ],
)
def test_unknown_name_is_refused_with_the_nearest_one(toml, text, wrong, right):
    error = message(toml(text))
    assert wrong in error
    assert right in error


def test_unknown_name_without_a_near_one_lists_the_known_names(toml):
    assert "known: every, resume, require, load" in message(toml("[checkpoint]\nzzzzzz = 1"))


def test_section_must_have_keys(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("run = 3\n" + toml_text())
    assert "[run] must be a section with keys, got 3" in message(path)


def toml_text() -> str:
    return '[model]\npath = "checkpoint"\n[data]\ntrain = "train.jsonl"\n'


def test_misspelt_option_is_refused_like_a_misspelt_key(toml):
    assert message(toml(), "--optim.warmup_update", "3").endswith("did you mean 'warmup_updates'?")


# Bad values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "key", "value", "rule"),
    [
        ("run", "num_steps", 0, "greater than 0"),
        ("run", "group_size", 0, "greater than or equal to 1"),
        ("run", "device", "gpu", "'auto', 'cpu' or 'cuda'"),
        ("replay", "mode", "R4", "'none', 'R2' or 'R3'"),
        ("replay", "on_missing_route", "zero", "'error', 'live', 'mask_token' or 'drop_sample'"),
        ("replay", "missing_route_budget", 1.5, "less than or equal to 1"),
        ("rollout", "top_p", 1.5, "less than or equal to 1"),
        ("rollout", "top_p", 0.0, "greater than 0"),
        ("rollout", "min_p", 1.0, "less than 1"),
        ("rollout", "top_k", 70_000, "less than or equal to 65535"),
        ("rollout", "temperature", 0.0, "greater than 0"),
        ("optim", "lr", -1.0, "greater than or equal to 0"),
        ("loss", "weight_high", 0.0, "greater than 0"),
        ("run", "seed", "one", "valid integer"),
    ],
)
def test_bad_value_names_key_value_and_rule(toml, section, key, value, rule):
    error = message(toml(), **{section: {key: value}})
    assert f"{section}.{key}" in error
    assert repr(value) in error
    assert rule in error


@pytest.mark.parametrize(
    "key", ["repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"]
)
def test_sampling_settings_outside_the_trainers_distribution_are_refused(toml, key):
    error = message(toml(), rollout={key: 0.9})
    assert f"rollout.{key}" in error and "0.9" in error
    assert (
        "softmax(logits / rollout.temperature) over the whole vocabulary" in error
        and "remove the key" in error
    )


@pytest.mark.parametrize(
    "keys", [{"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 1}, {"top_k": 0}, {"top_p": 0.9, "top_k": 1}]
)
def test_kept_sets_need_a_top_k_of_at_least_2(toml, keys):
    error = message(toml(), rollout=keys)
    assert f"rollout.top_k = {keys.get('top_k', -1)} with top_p = {keys.get('top_p', 1)}" in error
    assert "must be at least 2" in error and "set top_k" in error


@pytest.mark.parametrize(
    "option", [["--sampling-mask-max-tokens=30"], ["--sampling-mask-max-tokens", "30"]]
)
def test_top_k_is_at_most_what_the_servers_return(toml, option):
    assert loaded(toml(), rollout={"top_p": 0.9, "top_k": 20}).rollout.truncation == (0.9, 20, 0.0)
    assert loaded(toml()).rollout.truncation is None
    assert loaded(toml(), rollout={"top_k": 30, "server_args": option}).rollout.top_k == 30
    error = message(toml(), rollout={"top_k": 31, "server_args": option})
    assert "rollout.top_k = 31" in error and "--sampling-mask-max-tokens = 30" in error
    assert "=4097" in message(toml(), rollout={"top_k": 4097})
    assert loaded(toml(), rollout={"top_k": 4097, "urls": ["http://a:1"]}).rollout.top_k == 4097
    spec = {"top_k": 20, "server_args": ["--speculative-algorithm", "EAGLE"]}
    assert "no kept sets under speculative decoding" in message(toml(), rollout=spec)


def test_all_bad_values_are_reported_together(toml):
    error = message(toml("[run]\nnum_steps = 0\n[optim]\nlr = -1.0"))
    assert len(error.splitlines()) == 2


def test_missing_required_key_is_named(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[model]\npath = "checkpoint"\n[data]\n')
    assert message(path).startswith("data.train: required")


def test_missing_file(tmp_path):
    assert "no such file" in message(tmp_path / "none.toml")


def test_broken_toml_names_file_and_line(toml):
    error = message(toml("[run\n"))
    assert "run.toml" in error
    assert "line 5" in error


@pytest.mark.parametrize(
    ("sections", "names"),
    [
        (
            {"run": {"prompts_per_step": 10, "num_mini_batches": 4}},
            ("prompts_per_step = 10", "num_mini_batches = 4"),
        ),
        (
            {"advantage": {"kind": "leave_one_out"}, "run": {"group_size": 1}},
            ("leave_one_out", "got 1"),
        ),
        ({"run": {"group_size": 1}}, ("advantage.kind = mean", "got 1", "batch_whitened")),
        (
            {
                "advantage": {"kind": "batch_whitened"},
                "run": {"group_size": 1},
                "batch": {"dynamic_sampling": True},
            },
            ("batch.dynamic_sampling", "got 1"),
        ),
        (
            {"advantage": {"kind": "batch_whitened"}, "batch": {"dynamic_sampling": True}},
            ("batch.dynamic_sampling", "advantage.kind = batch_whitened"),
        ),
        ({"parallel": {"vp": 2}}, ("parallel.vp = 2", "parallel.pp > 1")),
        (
            {"parallel": {"pp": 2, "vp": 2, "layers_per_stage": [3, 4]}},
            ("parallel.layers_per_stage = [3, 4]", "4 stages", "parallel.pp x vp"),
        ),
        (
            {"parallel": {"pp": 2, "layers_per_stage": [0, 4]}},
            ("parallel.layers_per_stage", "greater than 0"),
        ),
        (
            {"model": {"recompute_layers": 2}},
            ("model.recompute_layers = 2", "no effect with model.recompute = none"),
        ),
        (
            {"megatron": {"recompute_modules": ["moe"]}},
            ("recompute_modules has no effect with model.recompute = none", "= selective"),
        ),
        (
            {"loss": {"kl_estimator": "k1"}},
            ("kl_estimator = k1 has no effect with loss.kl_coef = 0", "set loss.kl_coef"),
        ),
        (
            {"batch": {"max_sampling_rounds": 9}},
            ("max_sampling_rounds = 9 has no effect", "dynamic_sampling = false"),
        ),
        (
            {"replay": {"missing_route_budget": 0.5}},
            ("missing_route_budget = 0.5 has no effect", "set replay.on_missing_route = live"),
        ),
        (
            {"rollout": {"quantize_keep": ["*"]}},
            ("rollout.quantize_keep", "quantize = none", "set rollout.quantize = fp8"),
        ),
        ({"eval": {"every": 5}}, ("eval.every = 5", "eval.sets names no file")),
        (
            {"parallel": {"tp": 2, "ep": 2, "sequence_parallel": False}},
            ("sequence_parallel = false", "tp > 1"),
        ),
        (
            {"parallel": {"tp": 2, "sequence_parallel": False}},
            ("sequence_parallel = false", "tp > 1"),
        ),
        (
            {"replay": {"mode": "R2", "measure": False, "on_missing_route": "live"}},
            ("replay.on_missing_route = live", "asks for no routes"),
        ),
        (
            {"replay": {"mode": "R2", "on_missing_route": "mask_token"}},
            ("replay.on_missing_route = mask_token", "replay.mode = R3, got R2"),
        ),
        (
            {"run": {"device": "cpu"}, "model": {"path": "c", "layer_spec": "transformer_engine"}},
            ("layer_spec", "GPU"),
        ),
    ],
)
def test_illegal_combination_names_both_sides(toml, sections, names):
    error = message(toml(), **sections)
    assert all(name in error for name in names), error


@pytest.mark.parametrize(
    "sections",
    [
        {"run": {"prompts_per_step": 12, "num_mini_batches": 4}},
        {"advantage": {"kind": "leave_one_out"}, "run": {"group_size": 2}},
        {"parallel": {"vp": 2, "pp": 2}},
        {"parallel": {"vp": 2, "pp": 2, "layers_per_stage": [1, 2, 2, 1]}},
        {"model": {"recompute": "block", "recompute_layers": 2}},
        {"parallel": {"tp": 2, "etp": 1, "sequence_parallel": False}},
        {"replay": {"mode": "R2", "on_missing_route": "drop_sample"}},
        {
            "replay": {
                "mode": "R3",
                "measure": False,
                "on_missing_route": "mask_token",
                "missing_route_budget": 0.0,
            }
        },
        {"run": {"device": "cuda"}, "model": {"path": "c", "layer_spec": "transformer_engine"}},
        {"loss": {"kl_estimator": "k1", "kl_coef": 0.1}},
        {
            "loss": {"kl_estimator": "k3"},
            "batch": {"max_sampling_rounds": 4},
        },  # the defaults, as dump_config writes them
        {"loss": {"kl_estimator": "k1", "name": "examples.losses.sapo:sapo"}},
        {"loss": {"name": "drpo"}, "rollout": {"max_staleness": 1}},
        {"loss": {"name": "sapo", "clip_anchor": "rollout"}, "rollout": {"max_staleness": 1}},
        {"batch": {"dynamic_sampling": True, "max_sampling_rounds": 9}},
        {"rollout": {"quantize": "fp8", "quantize_keep": ["*"]}},
        # a former default
        {"rollout": {"quantize_keep": ["*embed_tokens*", "*lm_head*", "*mlp.gate.*", "*norm*"]}},
        {"eval": {"every": 5, "sets": {"a": "a.jsonl"}}},
        {
            "eval": {"sets": {"a/b": "a.jsonl"}},
            "checkpoint": {"keep_last": 1, "best_metric": "eval/a/b/avg@4"},
        },
        {
            "eval": {"sets": {"a": "a.jsonl"}},
            "checkpoint": {"keep_last": 1, "best_metric": "eval/a/reward/format"},
        },
        {
            "eval": {"sets": {"a": "a.jsonl"}, "every": 10},
            "run": {"num_steps": 31},
            "checkpoint": {"keep_last": 1, "best_metric": "eval/a/avg@4", "every": 15},
        },
        # no checkpoint before the last one
        {
            "eval": {"sets": {"a": "a.jsonl"}, "every": 10},
            "run": {"num_steps": 5},
            "checkpoint": {"keep_last": 1, "best_metric": "eval/a/avg@4", "every": 7},
        },
        {
            "eval": {"sets": {"a": "a.jsonl"}, "pass_at": [2]},
            "checkpoint": {"keep_last": 1, "best_metric": "eval/a/pass@2_low"},
        },
    ],
)
def test_legal_combinations_pass(toml, sections):
    load_config(toml(), [], sections)


# Sources and their order --------------------------------------------------------------------------


def test_command_line_beats_sections_beats_file(toml):
    path = toml("[run]\nseed = 1\nnum_steps = 1\ngroup_size = 3")
    config = load_config(path, ["--run.seed", "9"], {"run": {"seed": 5, "num_steps": 5}})
    assert (config.run.seed, config.run.num_steps, config.run.group_size) == (9, 5, 3)


def test_command_line_types(toml):
    config = load_config(
        toml('[rollout]\nurls = ["http://a:1"]\n'),
        [
            "--rollout.urls", "http://b:2", "http://c:3", "--eval.sets", "new", "new.jsonl",
            "--parallel.etp", "1",
            "--parallel.pp", "2",
            "--parallel.layers_per_stage", "3", "4", "--loss.weight_high", "inf",
            "--replay.no_measure",
            "--model.path", "elsewhere",
        ],
    )  # fmt: skip
    assert config.rollout.urls == ("http://b:2", "http://c:3")
    assert config.eval.sets == {"new": Path("new.jsonl")}
    assert (config.parallel.etp, config.parallel.tp) == (1, 1)
    assert config.parallel.layers_per_stage == (3, 4)
    assert config.loss.weight_high == math.inf
    assert config.replay.measure is False
    assert config.model.path == Path("elsewhere")


def test_rules_apply_to_file_and_command_line_together(toml):
    assert "parallel.vp = 2" in message(toml(), "--parallel.vp", "2")
    assert load_config(toml("[parallel]\nvp = 2"), ["--parallel.pp", "2"]).parallel.vp == 2


def test_command_line_spellings(toml):
    """= and -, flags with and without a value, None, empty lists, values as TOML reads them; the
    last of repeated options.
    """
    config = load_config(
        toml("[rollout]\nurls = ['http://a:1']\n[parallel]\netp = 1\n[eval.sets]\na = 'a.jsonl'\n"),
        [
            "--run.num-steps=7", "--rollout.top_k", "8", "--rollout.top_k", "-1", "--rollout.urls",
            "--parallel.etp", "None",
            "--replay.measure", "false", "--batch.dynamic_sampling", "--data.chat_template_kwargs",
            "enable_thinking", "false",
            "budget", "3", "mode", "deep", "--run.name", "5", "--loss.clip", "none", "--loss.name",
            "reinforce",
            "--eval.sets.b-c.d", "3", "--data.chat_template_kwargs.mode", "5",
        ],
    )  # fmt: skip
    assert (config.run.num_steps, config.rollout.top_k, config.run.name) == (7, -1, "5")
    assert (config.rollout.urls, config.parallel.etp, config.replay.measure) == ((), None, False)
    assert config.batch.dynamic_sampling is True and config.loss.clip == "none"
    assert config.data.chat_template_kwargs == {"enable_thinking": False, "budget": 3, "mode": 5}
    assert config.eval.sets == {"a": Path("a.jsonl"), "b-c.d": Path("3")}


def test_derived_settings(toml):
    plain = load_config(toml(), [])
    assert (plain.parallel.expert_tp, plain.parallel.use_sequence_parallel) == (1, False)
    wide = load_config(
        toml("[parallel]\ntp = 2\n[run]\nname = 'x'\n[replay]\nmode = 'R2'\nmeasure = false"), []
    )
    assert (wide.parallel.expert_tp, wide.parallel.use_sequence_parallel) == (2, True)
    assert wide.run_dir == Path("runs/x")
    assert (plain.needs_routes, wide.needs_routes) == (True, False)


def test_config_is_frozen(toml):
    with pytest.raises(ValueError, match="frozen"):
        load_config(toml(), []).run.seed = 3


# Dump ---------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    name=st.text(min_size=1, max_size=20).filter(lambda text: text.isprintable()),
    seed=st.integers(0, 2**31 - 1),
    lr=st.floats(0, 1, allow_nan=False),
    weight_high=st.one_of(st.just(math.inf), st.floats(1e-3, 1e3)),
    etp=st.one_of(st.none(), st.integers(1, 8)),
    urls=st.lists(st.sampled_from(["http://a:1", "http://b:2"]), max_size=2, unique=True),
    sets=st.dictionaries(
        st.text(min_size=1, max_size=8), st.sampled_from(["a.jsonl", "b/c.jsonl"]), max_size=3
    ),
)
def test_dump_reads_back_to_an_equal_config(
    tmp_path_factory, name, seed, lr, weight_high, etp, urls, sets
):
    values = MINIMAL | {
        "run": {"name": name, "seed": seed}, "optim": {"lr": lr},
        "loss": {"weight_high": weight_high},
        "parallel": {"etp": etp}, "rollout": {"urls": urls}, "eval": {"sets": sets},
    }  # fmt: skip
    config = Config.model_validate(values)
    path = tmp_path_factory.mktemp("dump") / "config.toml"
    path.write_text(dump_config(config))
    assert load_config(path, []) == config


# Program ------------------------------------------------------------------------------------------


def test_config_imports_no_torch():
    code = (
        "import sys, megatron_rl.config; print({'torch', 'megatron', 'sglang', 'transformers'} &"
        " set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


def test_program_refuses_a_bad_configuration_with_status_2(toml):
    done = dry_run("--config", str(toml("[run]\nnum_step = 3")), "--dry-run")
    assert done.returncode == 2
    assert "unknown key run.num_step = 3; did you mean 'num_steps'?" in done.stderr
    assert "Traceback" not in done.stderr


# Colocated weight sync ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            'weight_sync = "colocated"\nurls = ["http://127.0.0.1:1"]',
            "weight_sync = colocated cannot be used with urls",
        ),
        (
            'weight_sync = "colocated"\nhost = "0.0.0.0"\napi_key_env = "KEY"',
            "weight_sync = colocated cannot be used with host = '0.0.0.0'",
        ),
        (
            "release_memory = true",
            "release_memory = true needs weight_sync = colocated, got distributed",
        ),
        (
            'weight_sync = "colocated"\nrelease_memory = true\nport = 30000',
            "needs port = 0, got 30000",
        ),
        (
            'weight_sync = "colocated"\nrelease_memory = true',
            "needs max_server_restarts = 0, got 3",
        ),
        (
            'weight_sync = "colocated"\nrelease_memory = true\nmax_server_restarts = 0\n'
            '[run]\ndevice = "cpu"',
            "rollout.release_memory = true needs a GPU",
        ),
    ],
)
def test_colocated_weight_sync_is_refused_where_it_cannot_work(toml, text, words):
    assert words in message(toml("[rollout]\n" + text))


def test_a_colocated_run_parses(toml):
    text = '[rollout]\nweight_sync = "colocated"\nrelease_memory = true\nmax_server_restarts = 0'
    assert load_config(toml(text), []).rollout.release_memory


def test_fields_of_megatron_core_are_kept_as_written(tmp_path):
    """Names and types are core's; this package does not import it."""
    path = tmp_path / "run.toml"
    path.write_text(
        '[model]\npath = "m"\n[data]\ntrain = "t"\n[megatron]\nmoe_permute_fusion ='
        " true\nbucket_size = 7\n"
    )
    options = ["--megatron.overlap_grad_reduce", "--megatron.recompute_modules", "moe", "core_attn"]
    options += ["--model.recompute", "selective"]
    config = load_config(path, [*options, "--megatron.bucket_size=9"])
    assert config.megatron.fields == {
        "moe_permute_fusion": True, "bucket_size": "9", "overlap_grad_reduce": True,
        "recompute_modules": "moe core_attn",
    }  # fmt: skip
    path.write_text(dump_config(config))
    assert load_config(path) == config


def test_options_of_other_programs_are_values():
    words = [
        "--teachers.a.path", "t", "--teachers.a.server_args", "--tp-size", "2",
        "--agent.command", "python", "x.py", "--verbose", "--run.seed", "3",
    ]  # fmt: skip
    assert section_values(words) == {
        "teachers": {"a.path": "t", "a.server_args": ["--tp-size", "2"]},
        "agent": {"command": ["python", "x.py", "--verbose"]},
        "run": {"seed": "3"},
    }


@pytest.mark.parametrize("key", ["rollout.gpus", "teachers.a.gpus"])
def test_a_gpu_below_0_is_refused(toml, key):
    assert "must be greater than or equal to 0" in message(toml(), f"--{key}", "-1")
