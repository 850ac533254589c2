"""[megatron] fields that matter on GPUs: each constructs in core's configurations, or is refused
with the reason.

Nothing here runs on a GPU.  docs/guides/layout.md has the same verdicts.
"""

import importlib.util
import re
from pathlib import Path

import pytest

from megatron_rl.config import load_config
from megatron_rl.engine.core_fields import (
    KINDS,
    check_reference,
    check_released_memory,
    field_types,
    untested,
)
from megatron_rl.engine.model import TransformerConfig
from megatron_rl.models.known import find_spec
from megatron_rl.plan.refusals import check_core

HAS_TE = importlib.util.find_spec("transformer_engine") is not None
ALLOWED, UNTESTED = "allowed", "untested with replay"
REFUSED = "refused: "
VERDICTS = [
    ({"moe_permute_fusion": True}, ALLOWED),
    (
        {"moe_token_dispatcher_type": "flex"},
        REFUSED + "derives the experts again from the gate weights",
    ),
    ({"moe_enable_deepep": True}, REFUSED + "only supported with flex token dispatcher"),
    ({"overlap_grad_reduce": True}, ALLOWED),
    ({"overlap_param_gather": True}, REFUSED + "weights that are not gathered yet"),
    ({"use_precision_aware_optimizer": True, "exp_avg_dtype": "bfloat16"}, ALLOWED),
    ({"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}, ALLOWED),
    ({"optimizer_offload_fraction": 0.5}, REFUSED + "has no effect; set"),
    ({"use_torch_optimizer_for_cpu_offload": True}, REFUSED + "core ignores it for adam"),
    ({"cpu_offloading": True, "cpu_offloading_num_layers": 4}, UNTESTED),
    ({"fp8": "hybrid"}, UNTESTED),
    ({"recompute_modules": ["moe"]}, ALLOWED),
    ({"recompute_modules": ["moe", "layernorm"]}, ALLOWED),
    ({"cuda_graph_impl": "local"}, REFUSED + "a captured router keeps using the experts"),
    ({"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn"]}, UNTESTED),
    ({"gradient_accumulation_fusion": True}, ALLOWED),
    ({"tp_comm_overlap": True}, UNTESTED),
    ({"moe_shared_expert_overlap": True}, UNTESTED),
    ({"moe_router_fusion": True}, REFUSED + "returns before the replay hook"),
    ({"overlap_moe_expert_parallel_comm": True}, REFUSED + "combined 1F1B"),
    ({"use_megatron_fsdp": True}, REFUSED + "wrapped in core's DistributedDataParallel"),
    ({"num_distributed_optimizer_instances": 2}, REFUSED + "groups are those of one instance"),
    (
        {"use_layer_wise_distributed_optimizer": True},
        REFUSED + "it is of optimizers other than adam",
    ),
    ({"optimizer_cuda_graph": True}, REFUSED + "core's own training loop captures that graph"),
    ({"loss_scale": 2.0}, REFUSED + "core would divide the gradients by it"),
    ({"mtp_num_layers": 1}, REFUSED + "neither loaded nor trained"),
    ({"window_size": [64, 0]}, REFUSED + "another model than the checkpoint's"),
    ({"softmax_scale": 0.1}, REFUSED + "another model than the checkpoint's"),
    ({"moe_router_force_biased": 0.5}, REFUSED + "another random bias"),
    ({"use_mup": True}, REFUSED + "another model than the checkpoint's"),
    ({"qk_l2_norm": True}, REFUSED + "another model than the checkpoint's"),
    ({"moe_router_topk_limited_devices": 2}, REFUSED + "another model than the checkpoint's"),
]
NEEDS_TE = ("moe_permute_fusion", "fp8", "use_precision_aware_optimizer")


def settings(fields, **rollout):
    recompute = {"recompute": "selective"} if "recompute_modules" in fields else {}
    sections = {
        "model": {"path": "qwen3-30b-a3b", "layer_spec": "transformer_engine"} | recompute,
        "data": {"train": "x"},
        "parallel": {"tp": 2, "ep": 4, "etp": 1},
        "rollout": rollout,
        "megatron": fields,
    }
    return load_config(None, [], sections)


@pytest.mark.parametrize(
    ("fields", "verdict"), VERDICTS, ids=["+".join(fields) for fields, _ in VERDICTS]
)
def test_verdict(fields, verdict):
    spec, cfg = find_spec("qwen3-30b-a3b"), settings(fields)
    if verdict.startswith(REFUSED):
        # core 0.16 lacks some
        is_here = any(name in field_types(kind) for name in fields for kind in KINDS)
        reason = verdict.removeprefix(REFUSED) if is_here else "megatron-core has no such field"
        with pytest.raises(ValueError, match=re.escape(reason)):
            check_core(spec, cfg)
        return
    notes = check_core(spec, cfg)
    assert bool(notes) == (not HAS_TE and any(name in fields for name in NEEDS_TE)), notes
    assert all("TransformerEngine is not installed here" in note for note in notes)
    reaches_forward = [name for name in fields if name in field_types(TransformerConfig)]
    assert untested(fields) == (reaches_forward if verdict == UNTESTED else [])


@pytest.mark.parametrize(
    "fields",
    [{"cuda_graph_impl": "local"}, {"nccl_ub": True}, {"fp8_param": "true"}, {"fp4_param": True}],
    ids=lambda fields: next(iter(fields)),
)
def test_fields_that_hold_on_to_memory_are_refused_where_it_is_released(fields):
    with pytest.raises(
        ValueError, match=r"megatron\.\w+ = .* with rollout\.release_memory = true: .*; remove one"
    ):
        check_released_memory(fields)
    check_released_memory(
        {name: "none" if isinstance(value, str) else False for name, value in fields.items()}
    )


@pytest.mark.parametrize("name", ["fp8_param", "fp4_param"])
def test_weights_of_several_parts_are_refused_with_a_reference_policy(name):
    cfg = settings({name: True})
    with_kl = cfg.model_copy(update={"loss": cfg.loss.model_copy(update={"kl_coef": 0.1})})
    message = rf"megatron\.{name} = True with loss\.kl_coef > 0: .*; remove one of them"
    with pytest.raises(ValueError, match=message):
        check_core(find_spec("qwen3-30b-a3b"), with_kl)
    check_reference({name: False})


def test_the_guide_has_every_verdict():
    guide = (Path(__file__).parents[3] / "docs/guides/layout.md").read_text()
    for fields, verdict in VERDICTS:
        name = next(iter(fields))
        rows = [line for line in guide.splitlines() if line.startswith("|") and f"`{name}`" in line]
        kind = "refused" if verdict.startswith(REFUSED) else verdict
        assert any(f"| {kind}" in row for row in rows), (name, kind)
