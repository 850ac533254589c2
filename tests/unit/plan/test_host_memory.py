"""Host memory of a node's ranks, and of a rank's GPU: what is where."""

from dataclasses import replace

import pytest

from megatron_rl.config import load_config
from megatron_rl.models.known import find_spec
from megatron_rl.plan import memory
from megatron_rl.plan.dry_run import report
from megatron_rl.plan.hardware import HARDWARE, Assumptions, read_assumptions
from megatron_rl.plan.host_memory import REMEDIES, HostBytes, check_host_memory, host_bytes
from megatron_rl.plan.phases import fullest

SPEC = find_spec("qwen3-30b-a3b")
H100 = HARDWARE["h100"]


def config(*overrides, **sections):
    base = {
        "model": {"path": "qwen3-30b-a3b", "recompute": "full"},
        "data": {"train": "x", "max_prompt_tokens": 2048},
        "run": {"device": "cuda", "max_tokens_per_micro_batch": 36_864},
        "rollout": {"urls": ["http://a:1"], "max_response_tokens": 32_768},
        "parallel": {"tp": 2, "cp": 4, "ep": 8, "etp": 1},
    }
    return load_config(None, list(overrides), base | sections)


def test_the_kl_reference_takes_host_memory_and_none_of_the_gpu():
    plain, with_kl = config(), config("--loss.kl_coef", "0.001")
    on_gpu = memory.rank_memory(SPEC, plain, 8, 0)
    assert memory.rank_memory(SPEC, with_kl, 8, 0) == on_gpu
    without, on_host = host_bytes(SPEC, plain, 8, 8), host_bytes(SPEC, with_kl, 8, 8)
    # the reference, and the place of the weights during its pass
    assert on_host == replace(without, reference=2 * on_gpu.weights) and without.reference == 0
    assert f"8 ranks x (reference {2 * on_gpu.weights / 2**30:.2f} + routes" in report(with_kl, 8)


def test_the_host_has_routes_a_save_and_what_is_offloaded():
    cfg = config("--replay.mode", "none", "--replay.measure", "false")
    share = memory.checkpoint_bytes_of_rank(SPEC, cfg, 8, 0)
    assert host_bytes(SPEC, cfg, 8, 8) == HostBytes(0, 0, share, 0, 0)
    tokens = config().run.prompts_per_step * config().run.group_size * (2048 + 32_768)
    # 1 byte for each of 8 experts in 48 layers; all ranks are one replica
    assert host_bytes(SPEC, config(), 8, 8).routes == tokens * 48 * 8 // 8
    released = config(
        rollout={
            "weight_sync": "colocated",
            "release_memory": True,
            "gpus": list(range(8)),
            "max_server_restarts": 0,
            "max_response_tokens": 32_768,
        }
    )
    on_gpu = memory.rank_memory(SPEC, released, 8, 0)
    assert host_bytes(SPEC, released, 8, 8).offload == on_gpu.weights + on_gpu.optimizer
    stages = config(parallel={"pp": 2, "layers_per_stage": (1, 47), "ep": 8, "etp": 1})
    assert host_bytes(SPEC, stages, 16, 8).checkpoint == memory.checkpoint_bytes_of_rank(
        SPEC, stages, 16, 1
    ), "of the rank that needs most"


def test_a_node_without_the_host_memory_is_refused_where_its_memory_is_known():
    cfg = config("--loss.kl_coef", "0.001")
    rank = host_bytes(SPEC, cfg, 8, 8)
    fits = replace(H100, host_memory=8.0 * rank.total)
    assert "host memory of a node: 8 ranks x " in report(cfg, 8, fits)
    lacks = replace(H100, host_memory=8.0 * rank.total - 1)
    with pytest.raises(
        ValueError, match=r"^host memory of a node: 8 ranks x \(reference .* \+ routes"
    ):
        report(cfg, 8, lacks)
    check_host_memory(rank, 8, replace(H100, host_memory=0.0))
    for name, remedy in (
        ("reference", "loss.kl_coef = 0"), ("routes", "run.prompts_per_step"),
        ("checkpoint", "optim.distributed"), ("adam", "optimizer_cpu_offload = false"),
        ("offload", "rollout.release_memory = false"),
    ):  # fmt: skip
        one = HostBytes(**dict.fromkeys(REMEDIES, 1))
        with pytest.raises(ValueError, match=remedy):
            check_host_memory(replace(one, **{name: 2}), 1, replace(H100, host_memory=5.0))


def test_experts_with_more_rows_than_the_mean_take_more_memory():
    """Rows of the experts: dispatched (h), gate, up and their product (3 f).  Returned rows are
    those of the rank's tokens.
    """
    cfg = config()
    rows = 36_864 // 4 // 2
    routed = rows * 8 * (2048 + 3 * 768) * 2
    even = memory.rank_memory(SPEC, cfg, 8, 0)
    uneven = fullest(SPEC, cfg, 8, read_assumptions(["skew=8"]))
    layer, more = (memory.layer_bytes(SPEC, cfg, is_moe=True, skew=skew) for skew in (1.0, 8.0))
    assert [b - a for a, b in zip(layer, more, strict=True)] == [7 * routed] * 2
    assert even == fullest(SPEC, cfg, 8, Assumptions())
    passing = 3 * 8 * rows * 8 * 2048 * 2  # permuted, sorted and returning rows, 8 times the mean
    assert uneven.working == more[0] + passing + memory.WORKSPACE
    assert uneven.activations == even.activations
    kept = config(model={"path": "qwen3-30b-a3b"})
    more_kept = memory.rank_memory(SPEC, kept, 8, 0, skew=3.0)
    assert more_kept.activations - memory.rank_memory(SPEC, kept, 8, 0).activations == (
        48 * 2 * routed
    )
    assert report(cfg, 8) != report(cfg, 8, None, read_assumptions(["skew=8"]))


def test_the_gradient_of_the_head_is_beside_the_logits():
    def head(*overrides, **fields):
        return memory.head_gradient_bytes(SPEC, config(*overrides, megatron=fields))

    plain = head()
    assert plain == 151_936 // 2 * 2048 * 2
    logits = memory.logits_bytes(SPEC, config())
    working = memory.rank_memory(SPEC, config(), 8, 0).working
    assert working == logits + plain + memory.WORKSPACE
    assert head(gradient_accumulation_fusion=True) == 0
    fused = ("--model.fused_lm_head", "true")
    assert head(*fused) == 0 and head(*fused, overlap_grad_reduce=True) == 2 * plain
