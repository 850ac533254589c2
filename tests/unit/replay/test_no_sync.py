"""No router call makes the host wait for the device, in any mode: one wait per layer would drain
the GPU's queue each time.

Without a GPU the tensors are on torch's meta device, which holds no values: whatever would read one
(.item(), bool(), .tolist(), nonzero, a copy to the host) raises.  With one, CUDA's own check of
synchronising calls raises.
"""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

from megatron_rl.replay.manager import ReplayManager, Routes

E, K, ROWS = 8, 2, 6
DEVICES = [
    "meta",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    ),
]
ROUTERS = {
    "softmax": {"score_function": "softmax"},
    "softmax first": {"score_function": "softmax", "use_pre_softmax": True},
    "sigmoid, bias, groups": {
        "score_function": "sigmoid",
        "num_groups": 2,
        "group_topk": 1,
        "expert_bias": True,
    },
}


def make_routes(mode, device):
    ids = torch.arange(ROWS * K, device=device).remainder(E).view(1, ROWS, K).to(torch.uint8)
    live_rows = torch.tensor([1, 5]).to(device)
    compared = torch.ones(ROWS, dtype=torch.bool, device=device)
    return {
        "none": Routes(),
        "record": Routes(),
        "replay": Routes(replay=ids, live_rows=live_rows),
        "replay, measured": Routes(
            replay=ids, live_rows=live_rows, reference=ids, compared=compared
        ),
        "live, measured": Routes(reference=ids, compared=compared),
    }[mode]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("settings", ROUTERS.values(), ids=ROUTERS)
@pytest.mark.parametrize("mode", ["none", "record", "replay", "replay, measured", "live, measured"])
def test_router_call_reads_nothing_from_the_device(mode, settings, device):
    config = SimpleNamespace(moe_router_fusion=False, moe_expert_capacity_factor=None)
    router = SimpleNamespace(config=config, routing_type="none", router_replay=None)
    manager = ReplayManager([(3, router)], num_experts=E)
    routes = make_routes(mode, device)
    logits = torch.randn(ROWS, E, device=device).requires_grad_()
    settings = dict(settings)
    if settings.get("expert_bias"):
        settings["expert_bias"] = torch.zeros(E, device=device)
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        with manager.run_pass([routes], training=True, record=mode == "record"):
            with manager.forward(0), torch.no_grad():  # a checkpointed forward
                topk_routing_with_score_function(
                    logits, K, router_replay=router.router_replay, **settings
                )
            probs, _ = topk_routing_with_score_function(
                logits, K, router_replay=router.router_replay, **settings
            )
            probs.sum().backward()  # the recompute has gradient
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert logits.grad is not None and logits.grad.shape == logits.shape


def test_a_read_would_be_detected():
    for read in (
        torch.Tensor.item,
        bool,
        torch.Tensor.tolist,
        torch.Tensor.nonzero,
        torch.Tensor.cpu,
    ):
        with pytest.raises((RuntimeError, NotImplementedError)):
            read(torch.ones(1, device="meta"))
