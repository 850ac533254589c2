"""What [lora] refuses."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_rl.checkpoint.batches.bundle_sequences import BundleError
from megatron_rl.config import ConfigError, load_config
from megatron_rl_tools.replay_batch import batch_config

ADAPTER = ["--rollout.weight_sync", "adapter", "--lora.targets", "attention"]
BASE = ["--model.path", "unused", "--data.train", "unused"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model.provider", "bridge"], r"model\.provider = bridge"),
        (["--megatron.gradient_accumulation_fusion", "true"], "set it to false"),
        (["--megatron.moe_shared_expert_overlap", "true"], "on another stream"),
        (
            ["--rollout.server_args", "--enable-lora", "--rollout.allow_unproven", "enable_lora"],
            "merged weights, to which a slot would add another",
        ),
        (
            ["--lora.rank", "0", "--rollout.weight_sync", "adapter"],
            "no adapter is trained; set lora.rank",
        ),
        ([*ADAPTER, "--lora.targets", "all"], r"got \['all'\]: SGLang .* kernels for GPUs alone"),
        ([*ADAPTER, "--rollout.quantize", "fp8"], "servers of adapters keep the base"),
        ([*ADAPTER, "--rollout.server_args=--lora-backend=triton"], "the run sets these options"),
        ([*ADAPTER, "--rollout.verify_push_every", "3"], "verifies all in one call"),
        ([*ADAPTER, "--rollout.weight_sync_bucket_mb", "3"], "has no effect"),
        ([*ADAPTER, "--rollout.release_memory", "true"], "needs weight_sync = colocated"),
        (["--rollout.server_args", "--lora-paths=a=b"], "lora_paths = a=b is unproven"),
        (["--lora.targets"], "adapters need weights"),
        *(
            (
                ["--lora.rank", "0", *option],
                rf"{option[0][2:]} = .* has no effect with lora.rank = 0",
            )
            for option in (
                ("--lora.alpha", "64"),
                ("--lora.targets", "attention"),
                ("--lora.rslora", "true"),
                ("--lora.shared_pairs", "true"),
                ("--lora.path", "x"),
            )
        ),
        (["--lora.alpha", "0"], r"lora\.alpha"),
        (
            ["--lora.shared_pairs", "true", "--parallel.etp", "2"],
            r"shared_pairs = true with parallel.etp = 2 and tp = 1: .* set parallel.etp to 1 or to",
        ),
    ],
)
def test_what_adapters_exclude_is_named(options, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, [*BASE, "--lora.rank", "8", *options])
    load_config(None, [*BASE, "--lora.rank", "8"])
    load_config(None, [*BASE, "--lora.rank", "8", *ADAPTER])


@pytest.mark.parametrize("sizes", [(1, 1), (4, 1), (4, 4)])
def test_a_pair_is_shared_where_experts_are_whole_or_split_as_dense_weights(sizes):
    tp, etp = map(str, sizes)
    layout = ["--parallel.tp", tp, "--parallel.etp", etp, "--parallel.ep", "2"]
    load_config(None, [*BASE, "--lora.rank", "8", "--lora.shared_pairs", "true", *layout])


@pytest.mark.parametrize("field", ["gradient_accumulation_fusion", "moe_shared_expert_overlap"])
def test_a_field_of_core_that_is_off_is_allowed(field):
    load_config(None, [*BASE, "--lora.rank", "8", f"--megatron.{field}", "false"])


def test_a_batch_of_a_run_with_adapters_is_not_replayed():
    header = {"config": {"lora": {"rank": 8}}, "weights": "weights"}
    with pytest.raises(BundleError, match="is of a run with adapters"):
        batch_config(SimpleNamespace(bundle="b", weights=None), header)


@pytest.mark.parametrize(("config", "section"), [({"run": {}}, "model"), ({"model": {}}, "run")])
def test_a_batch_without_the_settings_of_its_run_is_not_replayed(config, section):
    header = {"config": config, "weights": "weights"}
    with pytest.raises(BundleError, match=rf"bundle.json: config has no \[{section}\]"):
        batch_config(SimpleNamespace(bundle=Path("b"), weights=None), header)
