"""A weight sync's memory on the servers' GPUs: counted, shown, and refused if it does not fit."""

import pytest

from megatron_rl.config import load_config
from megatron_rl.models.known import find_spec
from megatron_rl.plan.dry_run import report
from megatron_rl.plan.grid import weight_sources
from megatron_rl.plan.hardware import GIB, HARDWARE, Assumptions
from megatron_rl.plan.phases import SYNC, broadcast_bytes, phases

SPEC = find_spec("qwen3-30b-a3b")
EMBEDDING = 2 * SPEC.vocab_size * SPEC.hidden_size
EIGHT = ["--parallel.ep", "8", "--model.dtype", "bfloat16", "--run.device", "cuda"]
SEPARATE = ["--rollout.gpus", "4", "5"]
REACHED = ["--rollout.host", "10.0.0.1", "--rollout.api_key_env", "KEY"]  # by ranks of other nodes


def config(*overrides):
    sections = {
        "model": {"path": "qwen3-30b-a3b", "recompute": "full"},
        "data": {"train": __file__},
        "run": {"prompts_per_step": 64, "group_size": 16},
    }
    return load_config(None, [*EIGHT, *overrides], sections)


@pytest.fixture(autouse=True)
def first_four_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def sync_phase(*overrides):
    made = phases(SPEC, config(*SEPARATE, *overrides), 8, HARDWARE["h100"], Assumptions(), 0)
    return next((phase for phase in made if phase.name == SYNC), None)


def test_one_source_sends_by_default_and_one_bucket_is_at_most_512_mib():
    cfg = config()
    assert cfg.rollout.weight_sync_sources == weight_sources(cfg) == 1
    assert cfg.rollout.weight_sync_bucket_mb == 512
    assert weight_sources(config("--rollout.weight_sync_sources", "16")) == 8, "pp 1 x ep 8"


def test_a_broadcast_takes_a_communicator_for_each_source_and_a_bucket_twice():
    one, eight = (
        broadcast_bytes(SPEC, config("--rollout.weight_sync_sources", most), Assumptions())
        for most in ("1", "8")
    )
    assert EMBEDDING > 512 << 20, "a tensor that is larger than a bucket is a bucket alone"
    assert one == int(0.6 * GIB) + 2 * EMBEDDING
    assert eight - one == pytest.approx(7 * 0.6 * GIB, abs=8)
    large = broadcast_bytes(SPEC, config("--rollout.weight_sync_bucket_mb", "2048"), Assumptions())
    assert large == int(0.6 * GIB) + 2 * (2048 << 20)


def test_it_comes_on_top_of_what_sglang_allocates_and_keeps():
    phase = sync_phase("--rollout.max_total_tokens", "100000000")
    static = 0.8 * HARDWARE["h100"].memory
    assert phase.exact == pytest.approx(static, rel=1e-6) and phase.trainer == 0
    assert phase.servers - phase.exact == 2 * GIB + broadcast_bytes(SPEC, config(), Assumptions())
    more = sync_phase("--rollout.max_total_tokens=100000000", "--rollout.server_args",
                      "--mem-fraction-static=0.9")  # fmt: skip
    assert more.exact == pytest.approx(static / 0.8 * 0.9, rel=1e-6)
    assert sync_phase("--rollout.weight_sync", "disk") is None


def test_what_does_not_fit_beside_the_static_memory_is_refused():
    large = ("--rollout.max_total_tokens", "700000")  # about 61 of 79.6 GiB with the weights
    args = (*SEPARATE, *REACHED, *large, "--data.max_prompt_tokens", "512")
    text = report(config(*args), 8)
    assert f"{SYNC}: 0.00 MiB of the trainer + " in text and "WARNING, more" not in text
    assert "beside --mem-fraction-static, computed: 1 source with 0.6 GiB" in text
    many = ("--rollout.weight_sync_sources", "8", "--rollout.weight_sync_bucket_mb", "8192")
    with pytest.raises(
        ValueError,
        match=r"rollout\.weight_sync_sources = 8, weight_sync_bucket_mb = 8192: a weight sync and"
        r" SGLang itself would take 22\.8 GiB on a GPU beside 6\d\.\d GiB.*--mem-fraction-static",
    ):
        report(config(*args, *many), 8)
    assert "8 sources with 0.6 GiB" in report(config("--rollout.urls", "http://a:1", *many), 8), (
        "attached servers may have other GPUs: shown, not refused"
    )
    assert "computed: 1 source" not in report(config("--run.device", "cpu"), 8)
