"""megatron-core's top-k routing: native, with our override recording, replaying, and replaying while it measures.

    OMP_NUM_THREADS=1 python benchmarks/router.py [--repeats 15] [--device cpu|cuda]

8,192 tokens, softmax routing, forward.  The four take turns; the ratio is the median over turns of time / native.  The
router's matrix multiplication is not part of it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

from megatron_rl.replay.manager import ReplayManager, Routes

TOKENS = 8192
SHAPES = ((128, 8), (512, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| experts, top-k | native ms | record / native | replay / native | replay + measure / native |")
    print("|---|---|---|---|---|")
    for experts, top_k in SHAPES:
        times = measure(experts, top_k, arguments.repeats, torch.device(arguments.device))
        ratios = {
            name: statistics.median(t / n for t, n in zip(times[name], times["native"], strict=True)) for name in times
        }
        print(
            f"| {experts}, {top_k} | {1e3 * min(times['native']):.2f} | {ratios['record']:.3f} | {ratios['replay']:.3f} | "
            f"{ratios['measure']:.3f} |"
        )


@torch.no_grad()
def measure(experts: int, top_k: int, repeats: int, device: torch.device) -> dict[str, list[float]]:
    torch.manual_seed(0)
    logits = torch.randn(TOKENS, experts, device=device)
    ids = torch.rand(TOKENS, experts, device=device).topk(top_k).indices
    given = ids.to(torch.uint8 if experts <= 256 else torch.int16)[None]
    compared = torch.ones(TOKENS, dtype=torch.bool, device=device)
    config = SimpleNamespace(moe_router_fusion=False, moe_expert_capacity_factor=None)
    router = SimpleNamespace(config=config, routing_type="none", router_replay=None)
    manager = ReplayManager([(0, router)], num_experts=experts)

    def route(override: object) -> torch.Tensor:
        return topk_routing_with_score_function(logits, top_k, score_function="softmax", router_replay=override)[1]

    def in_pass(routes: Routes, record: bool = False) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            with manager.run_pass([routes], training=False, record=record), manager.forward(0):
                return route(router.router_replay)

        return run

    ways = {
        "native": lambda: route(None),
        "record": in_pass(Routes(), record=True),
        "replay": in_pass(Routes(replay=given)),
        "measure": in_pass(Routes(replay=given, reference=given, compared=compared)),
    }
    assert torch.equal(ways["record"](), ways["native"]())
    assert torch.equal(ways["replay"](), torch.zeros_like(ways["native"]()).scatter(1, ids, True))
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            times[name].append(timed(way, device))
    return times


def timed(way: Callable[[], torch.Tensor], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    way()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
