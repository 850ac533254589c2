"""Host memory of a step's rollouts on a node of 8 ranks, which are one replica:

    OMP_NUM_THREADS=1 python benchmarks/node_memory.py

The leader has all responses of a step in private memory, as threads decoded them; then it closes
the groups and shares them, once with parallel.share_host_memory and once without.  Bytes are the
memory of all ranks beyond that before: private pages (RssAnon) and shared ones (RssShmem), which
count on the leader alone where the others map its pages.  "at most" adds the largest values of the
ranks while groups are closed and shared.
The last column multiplies the bytes per token with the tokens of a step of
examples/qwen3_30b_a3b/off_policy_n8_r3.toml, where one replica has a node of 8 GPUs.
"""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch.distributed as dist

from megatron_rl.batch.codec import layer_major, to_arrays
from megatron_rl.batch.transfer import share_groups
from megatron_rl.config import ParallelConfig, load_config
from megatron_rl.distributed import make_parallel
from megatron_rl.records import Prompt, Rollout, RolloutGroup
from megatron_rl.rollout.group import Group
from megatron_rl.rollout.scheduler import Scheduler
from tests.dist.launch import run_ranks

RANKS, GROUPS, GROUP_SIZE, TOKENS, LAYERS, TOP_K = 8, 64, 4, 4096, 48, 8
PROMPT = 512
RECIPE = Path(__file__).parents[1] / "examples/qwen3_30b_a3b/off_policy_n8_r3.toml"
GIB = 1 << 30


def main() -> None:
    run = load_config(RECIPE, [])
    longest = run.data.max_prompt_tokens + run.rollout.max_response_tokens
    step = run.run.prompts_per_step * run.run.group_size * longest
    tokens = GROUPS * GROUP_SIZE * TOKENS
    print(
        f"{RANKS} ranks, {GROUPS} x {GROUP_SIZE} responses of {TOKENS:,} tokens, {LAYERS} layers,"
        f" top-{TOP_K}; one copy is {copy_bytes() / tokens:.0f} bytes per token,"
        f" {LAYERS * TOP_K} of them routes\n"
    )
    print("| share_host_memory | bytes per token after | at most | recipe, GiB after | at most |")
    print("|---|---|---|---|---|")
    for share in (False, True):
        ranks = run_ranks(share_a_step, RANKS, share)
        after = sum(after for after, _ in ranks) / tokens
        peak = sum(largest for _, largest in ranks) / tokens
        print(
            f"| {str(share).lower()} | {after:.0f} | {peak:.0f} | {after * step / GIB:.0f} |"
            f" {peak * step / GIB:.0f} |"
        )


def share_a_step(share: bool) -> tuple[int, int]:
    """On a rank: return (growth after sharing, largest growth meanwhile) in bytes."""
    parallel = make_parallel(ParallelConfig(tp=RANKS, share_host_memory=share), device="cpu")
    prompts = [Prompt(f"p{n}", "", tuple(range(PROMPT)), "") for n in range(GROUPS)]
    is_mapped = share and not parallel.is_replica_leader
    kinds = ("RssAnon",) if is_mapped else ("RssAnon", "RssShmem")
    before, peak, ended = memory(), 0, threading.Event()
    groups = None
    scheduler = Scheduler(*[None] * 6)  # type: ignore[arg-type]  # only its `close` is called
    scheduler.parallel = SimpleNamespace(node=parallel.node)  # type: ignore[assignment]
    if parallel.is_replica_leader:
        with ThreadPoolExecutor(4) as pool:
            open_groups = list(pool.map(make_group, prompts))

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.002):
            now = memory()
            peak = max(peak, sum(now[kind] - before[kind] for kind in kinds))

    watcher = threading.Thread(target=watch)
    watcher.start()
    if parallel.is_replica_leader:
        closed = [scheduler.rollout_group(group) for group in open_groups]
        groups = [
            RolloutGroup(group.prompt, group.rollouts, np.zeros(GROUP_SIZE, np.float32))
            for group in closed
        ]
        del closed
    shared = share_groups(groups, prompts, parallel.node)
    # every rank reads all of it, as passes over all micro-batches do together
    total = sum(int(r.routed_experts.sum()) for group in shared for r in group.rollouts)  # type: ignore[union-attr]
    assert total > 0
    gc.collect()
    dist.barrier()
    after = sum(memory()[kind] - before[kind] for kind in kinds)
    ended.set()
    watcher.join()
    parallel.destroy()
    return after, peak


def make_group(prompt: Prompt) -> Group:
    """Return a complete group whose arrays are private memory of this thread's heap."""
    group = Group(prompt, GROUP_SIZE)
    for index in range(GROUP_SIZE):
        group.put(index, make_rollout(f"{prompt.id}/{index}"))
    return group


def make_rollout(name: str) -> Rollout:
    rng = np.random.default_rng(hash(name) % 2**32)
    rows = TOKENS - 1
    ids = np.frombuffer(rng.bytes(LAYERS * rows * TOP_K), np.uint8).reshape(LAYERS, rows, TOP_K)
    return Rollout(
        id=name,
        tokens=rng.integers(0, 150_000, TOKENS),
        prompt_length=PROMPT,
        rollout_logprobs=-rng.random(TOKENS - PROMPT).astype(np.float32),
        routed_experts=layer_major((ids % 128).transpose(1, 0, 2)),
        finish_reason="stop",
        policy_versions=np.zeros(TOKENS - PROMPT, np.int32),
    )


def copy_bytes() -> int:
    """Return the bytes of all arrays of a step, once."""
    one = sum(array.nbytes for array in to_arrays(make_rollout("p/0")).values())
    return GROUPS * GROUP_SIZE * one


def memory() -> dict[str, int]:
    """Return the private and shared bytes of this process."""
    found = {}
    with open("/proc/self/status") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name in ("RssAnon", "RssShmem"):
                found[name] = 1024 * int(value.split()[0])
    return found


if __name__ == "__main__":
    main()
