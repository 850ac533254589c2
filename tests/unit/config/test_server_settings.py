"""Every setting of a server that touches expert ids, log-probs or weights has a verdict, and it is
enforced.
"""

import re
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron_rl.config import RolloutConfig, load_config
from megatron_rl.config.rules.rollout_rules import check_rollout
from megatron_rl.config.sglang_settings import (
    BY_NAME,
    CHECKED_BY_REQUEST,
    SETTINGS,
    accepted,
    differences,
    problems,
    read_options,
    read_settings,
)
from megatron_rl.config.versions import SGLANG_TESTED

ROOT = Path(__file__).parents[3]
SINCE_0_5_22 = {
    "attn_dp_size", "enable_amd_monokernel", "enable_cp_tp_group_sharing",
    "enable_kv_cache_sharding",
    "enable_megamoe_for_layernorm_sp", "enable_nvidia_megakernel", "enable_paged_experts",
    "enable_watermark",
    "qsa_indexer_dtype",
}  # fmt: skip
"""Settings with a verdict that SGLang 0.5.21 does not have, and 0.5.23 has."""
WITHOUT_EFFECT = (Path(__file__).parent / "settings_without_effect.txt").read_text().split()


def config(*args, replay="R3", **rollout):
    sections = {
        "model": {"path": "x"},
        "data": {"train": "x"},
        "replay": {"mode": replay, "measure": replay == "R3"},
    }
    return load_config(None, [], sections | {"rollout": {"server_args": list(args), **rollout}})


@pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed")
def test_every_setting_of_sglang_has_a_verdict_or_is_listed_as_without_effect():
    """A new version of SGLang fails here until each of its new settings is sorted."""
    source = (
        metadata.distribution("sglang")
        .locate_file("sglang/srt/arg_groups/field_order.py")
        .read_text()
    )
    settings = set(re.findall(r'^    "(\w+)",$', source, flags=re.MULTILINE))
    known = {*BY_NAME, *WITHOUT_EFFECT}
    assert len(settings) > 400 and not settings - known
    assert not set(WITHOUT_EFFECT) & set(BY_NAME) and sorted(set(WITHOUT_EFFECT)) == WITHOUT_EFFECT
    # the version, and a variable of the environment
    assert set(BY_NAME) - settings - SINCE_0_5_22 == {"version", "SGLANG_RETURN_ORIGINAL_LOGPROB"}


@pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed")
def test_backends_of_experts_are_refused_where_sglang_returns_before_it_captures_their_ids():
    files = metadata.distribution("sglang").locate_file("sglang/srt")
    text = (files / "arg_groups/choices.py").read_text()
    choices = text.split("\nMOE_RUNNER_BACKEND_CHOICES = [")[1].split("\n]")[0]
    names = set(re.findall(r'^    "(\w+)",', choices, flags=re.MULTILINE))
    topk = (files / "layers/moe/topk.py").read_text().split("    def forward_cuda(")[1]
    chooser = topk.split("if output_format == TopKOutputFormat.TRITON_KERNEL:")[0]
    asked = set(re.findall(r"get_moe_runner_backend\(\)\.is_(\w+)\(\)", chooser))
    refused = {name for name in names if name.removesuffix("s") in asked or f"{name}s" in asked}
    assert len(refused) == len(asked) == 4
    usual = set(BY_NAME["moe_runner_backend"].usual) - {None}
    assert refused == names - usual and usual < names, "a new backend must be sorted"


def test_the_table_names_tests_that_exist_and_the_guide_has_what_is_refused_or_proven():
    tests = "".join(path.read_text() for path in (ROOT / "tests" / "e2e").glob("test_*.py"))
    guide = (ROOT / "docs/guides/servers.md").read_text()
    lists = re.findall(r"^\| (refused|proven|unproven) \| (.+) \|$", guide, flags=re.MULTILINE)
    rows = {name: verdict for verdict, names in lists for name in re.findall(r"`(\w+)`", names)}
    verdicts = {setting.name: setting.verdict for setting in SETTINGS}
    assert rows.items() <= verdicts.items()
    assert all(name in rows or verdict == "unproven" for name, verdict in verdicts.items())
    assert len(SETTINGS) == len(BY_NAME)
    for setting in SETTINGS:
        assert setting.verdict != "proven" or f"def {setting.because}(" in tests, setting.name


def test_a_default_server_of_any_run_is_accepted():
    usual = {setting.name: setting.usual[0] for setting in SETTINGS if setting.usual}
    assert not list(problems(usual | {"version": SGLANG_TESTED[0]}, (), needs_routes=True))
    assert not list(
        problems(
            {"chunked_prefill_size": 16, "tp_size": 8, "disable_radix_cache": True},
            (),
            needs_routes=True,
        )
    )


@pytest.mark.parametrize(
    "setting", [each for each in SETTINGS if each.name not in CHECKED_BY_REQUEST], ids=str
)
def test_every_verdict_is_enforced(setting):
    values = {setting.name: "0.4.0" if setting.name == "version" else "other"}
    found = list(problems(values, (), needs_routes=True))
    allowed = list(problems(values, (setting.name,), needs_routes=True))
    lines = list(accepted(values, (setting.name,), needs_routes=True))
    if setting.verdict == "proven":
        assert found == allowed == lines == []
        return
    assert (
        len(found) == 1
        and found[0].startswith(f"{setting.name} = ")
        and setting.because in found[0]
    )
    if setting.verdict == "refused":
        assert allowed == found and not lines
    else:
        assert f'rollout.allow_unproven = ["{setting.name}"]' in found[0]
        assert not allowed and len(lines) == 1 and setting.because in lines[0]
    has_routes_only = setting.touches == ("routes",)
    assert bool(list(problems(values, (), needs_routes=False))) == (not has_routes_only)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--enable-hierarchical-cache"],
            "enable_hierarchical_cache = true is refused: .*sglang#26975",
        ),
        (["--enable-hier"], "enable_hierarchical_cache = true is refused"),
        (["--speculative-algo=EAGLE"], "speculative_algorithm = EAGLE is refused"),
        (["--pp", "2"], "pp_size = 2 is refused"),
        (["--ep-size", "2"], r'ep_size = 2 is unproven.*allow_unproven = \["ep_size"\]'),
        (["--moe_a2a_backend", "deepep"], "moe_a2a_backend = deepep is unproven"),
        (
            ["--kv-cache-dtype", "fp8_e4m3"],
            "kv_cache_dtype = fp8_e4m3 is unproven and may make log-probs wrong",
        ),
        (
            ["--chunked-prefill-size", "-1"],
            "chunked_prefill_size = -1 is unproven.*buffer of expert ids",
        ),
        (["--enable-watermark"], "enable_watermark = true is refused: a key chooses tokens"),
        (["--enable-lora"], "enable_lora = true is unproven"),
        (
            ["--moe-runner-backend", "flashinfer_trtllm"],
            "moe_runner_backend = flashinfer_trtllm is refused: .*--moe-runner-backend triton",
        ),
        (["--moe-runner=triton_kernel"], "moe_runner_backend = triton_kernel is refused"),
    ],
)
def test_options_of_the_command_line_are_checked_before_a_server_starts(args, message):
    with pytest.raises(ValueError, match=rf"rollout\.server_args = .*{message}"):
        config(*args)


def test_what_is_proven_or_accepted_or_touches_only_unused_routes_passes():
    config(
        "--chunked-prefill-size",
        "16",
        "--enable-mixed-chunk",
        "--disable-overlap-schedule",
        "--tp-size",
        "2",
    )
    config("--ep-size=2", "--quantization", "fp8", allow_unproven=["ep_size", "quantization"])
    config("--enable-hierarchical-cache", replay="none")
    assert read_options(
        ["--mem-fraction-static", "0.8", "--ep-size", "2", "--enable-mixed-chunk"]
    ) == {
        "ep_size": 2,
        "enable_mixed_chunk": True,
    }


def test_copies_and_stages_take_weights_from_the_disk_only():
    with pytest.raises(ValueError, match=r"dp_size = 2: it takes broadcast weights only"):
        config("--dp-size", "2", allow_unproven=["dp_size"])
    config("--dp-size", "2", allow_unproven=["dp_size"], weight_sync="disk")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ep_sise", r"'ep_sise', which has no verdict; did you mean 'ep_size'\?"),
        ("pp_size", "'pp_size', which is refused"),
        ("tp_size", "'tp_size', which is proven"),
    ],
)
def test_only_unproven_settings_can_be_accepted(name, message):
    with pytest.raises(ValueError, match=f"allow_unproven has {message}"):
        check_rollout(RolloutConfig(allow_unproven=(name,)))


def test_a_changed_setting_is_named_and_the_key_is_never_read():
    before = read_settings({"tp_size": 1, "ep_size": 1, "api_key": "sesame", "random_seed": 3})
    assert before == {"tp_size": 1, "ep_size": 1}
    assert list(differences({"tp_size": 1, "ep_size": 2}, before)) == ["ep_size = 2, was 1"]
    assert not list(differences(before | {"page_size": 1}, before))
