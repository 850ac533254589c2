"""megatron-core's top-k routing: native, with our override recording, replaying, and replaying
while it measures.

    OMP_NUM_THREADS=1 python benchmarks/router.py [--repeats 15] [--memory both|reused|fresh] \
[--device cpu|cuda]

8,192 tokens, softmax routing, forward, one thread; on a CPU the thread's CPU time (other processes
do not count).  The variants alternate.  A ratio is the median over rounds of time / native, in
brackets that of the minima.  "Routing" is core's complete
topk_routing_with_score_function: from logits to the dense probabilities and map [tokens, experts],
without the router's matrix product.  `choose` is only the part that replay replaces: ids and their
scores, ours / top-k.

Core makes six dense tensors per call.  If their pages are returned to the system after each call,
page faults cost more than all arithmetic except top-k.  `reused` makes glibc keep them, as CUDA's
allocator always does; `fresh` makes it return them every time (MALLOC_*_ below).  By default glibc
does sometimes the one, sometimes the other.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

from megatron_rl.replay.manager import ReplayManager, Routes, gather

TOKENS = 8192
SHAPES = ((128, 8), (512, 10))


MALLOC = {
    "reused": {"MMAP_THRESHOLD_": 1 << 32, "TRIM_THRESHOLD_": 1 << 34, "TOP_PAD_": 1 << 28},
    "fresh": {"MMAP_THRESHOLD_": 1 << 17},
}
"""Settings that glibc reads when a process starts, as MALLOC_..."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--memory", choices=("both", *MALLOC), default="both")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    if arguments.device == "cpu" and arguments.memory == "both":
        for memory in MALLOC:
            run_again(memory, arguments.repeats)
        return
    torch.set_num_threads(1)
    memory = arguments.memory if arguments.device == "cpu" else "CUDA's allocator"
    print(
        f"memory: {memory}\n| experts, top-k | native ms | record | replay | replay + measure |"
        f" choose |\n|{'---|' * 6}"
    )
    for experts, top_k in SHAPES:
        times = measure(experts, top_k, arguments.repeats, torch.device(arguments.device))
        ratios = [ratio(times[name], times["native"]) for name in ("record", "replay", "measure")]
        cells = [
            f"{experts}, {top_k}",
            f"{1e3 * min(times['native']):.2f}",
            *ratios,
            ratio(times["choose"], times["top-k"]),
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


def run_again(memory: str, repeats: int) -> None:
    command = [sys.executable, __file__, "--memory", memory, "--repeats", str(repeats)]
    settings = {f"MALLOC_{name}": str(value) for name, value in MALLOC[memory].items()}
    subprocess.run(command, check=True, env=os.environ | settings)


def ratio(times: list[float], to: list[float]) -> str:
    """Return the median of the ratios of each turn, and in brackets the ratio of the minima."""
    return (
        f"{statistics.median(a / b for a, b in zip(times, to, strict=True)):.3f}"
        f" ({min(times) / min(to):.3f})"
    )


@torch.no_grad()
def measure(experts: int, top_k: int, repeats: int, device: torch.device) -> dict[str, list[float]]:
    torch.manual_seed(0)
    logits = torch.randn(TOKENS, experts, device=device)
    ids = torch.rand(TOKENS, experts, device=device).topk(top_k).indices
    replayed = ids.to(torch.uint8 if experts <= 256 else torch.int16)[None]
    compared = torch.ones(TOKENS, dtype=torch.bool, device=device)
    config = SimpleNamespace(moe_router_fusion=False, moe_expert_capacity_factor=None)
    router = SimpleNamespace(config=config, routing_type="none", router_replay=None)
    manager = ReplayManager([(0, router)], num_experts=experts)

    def route(override: object) -> torch.Tensor:
        return topk_routing_with_score_function(
            logits, top_k, score_function="softmax", router_replay=override
        )[1]

    def in_pass(routes: Routes, record: bool = False) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            with manager.run_pass([routes], training=False, record=record), manager.forward(0):
                return route(router.router_replay)

        return run

    ways = {
        "native": lambda: route(None),
        "record": in_pass(Routes(), record=True),
        "replay": in_pass(Routes(replay=replayed)),
        "measure": in_pass(Routes(replay=replayed, reference=replayed, compared=compared)),
        "top-k": lambda: logits.topk(top_k, dim=1)[1],
        "choose": lambda: gather(logits, replayed[0].to(torch.int64))[0],
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
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    start = clock()
    way()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - start


if __name__ == "__main__":
    main()
