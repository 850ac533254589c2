"""Many open sessions of agents with long histories: memory of each, and the longest block of the
event loop.

    OMP_NUM_THREADS=1 python benchmarks/agent_sessions.py [--memory 32] [--block 4096]

The server is a process of its own (benchmarks/agent_length.py).  Token ids are those of a
vocabulary of VOCABULARY, so that no two of them share an object in Python.

memory  so many sessions of KNOWN tokens with 48 x 8 routes are open at the same time: a prompt,
        then turns of 256 sampled tokens and observations of 1,024.  What the process holds more
        than before they began (resident memory), in all and by the arrays: tokens (int64),
        log-probs (float32), versions (int32) and routes (uint8).  In use: what is left of it when
        the C library has returned what it keeps free
block   so many sessions begin with KNOWN tokens and have two turns, without routes, all at the same
        time.  The longest CPU time of one callback in the event loop's thread while sessions are
        open: nothing else of the loop runs meanwhile.  After the last session: that of the callback
        that closes all connections
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import logging
import sys
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.agent_length import EXPERTS, LAYERS, OBSERVED, SAMPLED, TOP_K, server

KNOWN = 32_768
VOCABULARY = 150_000
FIRST = 100_000
"""A token id."""


async def replaced(session: Any, prompt: Any) -> Any:
    """The name that the configuration needs: `make_client` sets the function."""


def make_client(url: str, rollout: Any, *, routes: bool) -> Any:
    from benchmarks.agent_turns import loaded_tokenizer
    from megatron_rl.config import AgentConfig, RolloutConfig
    from megatron_rl.models.spec import ModelSizes
    from megatron_rl.rollout.agents.runner import EpisodeRunner
    from megatron_rl.rollout.client.client import RolloutClient
    from megatron_rl.rollout.client.sampling import SampleRules

    logging.disable(logging.WARNING)
    tokenizer = loaded_tokenizer()
    spec = ModelSizes(
        num_layers=LAYERS, moe_layers=tuple(range(LAYERS)), top_k=TOP_K, num_experts=EXPERTS,
        vocab_size=VOCABULARY,
    )  # fmt: skip
    runner = EpisodeRunner(
        AgentConfig(function=f"{Path(__file__).stem}:replaced"), tokenizer, VOCABULARY, 0
    )
    runner.function = rollout
    cfg = RolloutConfig(max_concurrency=8192)
    return RolloutClient([url], cfg, SampleRules(spec, routes), episodes=runner)


async def run(client: Any, count: int, prompt_tokens: int) -> list[Any]:
    """Return the groups."""
    from megatron_rl.records import Prompt
    from megatron_rl.rollout.client.sampling import Sampling
    from megatron_rl.rollout.group import Group

    ids = tuple(range(FIRST, FIRST + prompt_tokens))
    groups = [Group(Prompt(str(index), "", ids, ""), 8) for index in range(count // 8)]
    sampling = Sampling(1.0, 1 << 20, [VOCABULARY - 1], policy_version=0)
    await client._generate(groups, sampling, len(groups), None, None)
    return groups


def measure_memory(url: str, count: int) -> str:
    """Return the line of memory."""
    process, full, arrays = psutil.Process(), asyncio.Event(), [0]
    waiting: list[Any] = []
    resident = [0, 0]

    async def rollout(session: Any, prompt: Any) -> Any:
        while True:
            await session.generate()
            if len(session.token_ids) >= KNOWN:
                break
            session.observe(list(range(FIRST, FIRST + OBSERVED)))
        waiting.append(session)
        sampled = SAMPLED * len(session.turns)
        length = len(session.token_ids)
        arrays[0] += length * 8 + sampled * 8 + (length - 1) * LAYERS * TOP_K
        if len(waiting) == count:
            gc.collect()
            resident[0] = process.memory_info().rss
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
            if trim is not None:
                trim(0)
            resident[1] = process.memory_info().rss
            full.set()
        await full.wait()
        return session.finish(1.0)

    client = make_client(url, rollout, routes=True)
    gc.collect()
    before = process.memory_info().rss
    asyncio.run(run(client, count, 400))
    least = arrays[0] / count / 2**20
    cells = [
        f"{value:.2f} | {value / least:.2f}"
        for value in ((after - before) / count / 2**20 for after in resident)
    ]
    return f"| {count} | {least:.2f} | {' | '.join(cells)} |"


def measure_block(url: str, count: int) -> str:
    """Return the line of the longest block."""
    from megatron_rl.rollout.garbage_collection import postpone_full_collections

    open_sessions = 0

    async def rollout(session: Any, prompt: Any) -> Any:
        nonlocal open_sessions
        await session.generate()
        session.observe(list(range(FIRST, FIRST + OBSERVED)))
        await session.generate()
        open_sessions -= 1
        return session.finish(1.0)

    client = make_client(url, rollout, routes=False)
    longest: dict[bool, tuple[float, str]] = {True: (0.0, ""), False: (0.0, "")}
    original = asyncio.events.Handle._run

    def timed(handle: Any) -> None:
        are_open, begin = open_sessions > 0, time.thread_time()
        original(handle)
        seconds = time.thread_time() - begin
        if seconds > longest[are_open][0]:
            longest[are_open] = seconds, repr(handle)

    async def both() -> float:
        nonlocal open_sessions
        await run(client, 16, KNOWN)  # loads modules and starts threads
        gc.collect()
        postpone_full_collections()
        open_sessions = count
        asyncio.events.Handle._run = timed  # type: ignore[method-assign]
        await asyncio.sleep(0)  # what follows is in a callback that is measured
        begin = time.process_time()
        groups = await run(client, count, KNOWN)
        seconds = time.process_time() - begin
        asyncio.events.Handle._run = original  # type: ignore[method-assign]
        del groups  # in no callback that is measured
        return seconds

    seconds = asyncio.run(both())
    print(longest[True][1][:300], longest[False][1][:300], sep="\n", file=sys.stderr)
    blocks = " | ".join(f"{1e3 * longest[are_open][0]:.1f}" for are_open in (True, False))
    return f"| {count} | {blocks} | {1e3 * seconds / (2 * count):.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--memory", type=int, default=32, metavar="SESSIONS")
    parser.add_argument("--block", type=int, default=4096, metavar="SESSIONS")
    args = parser.parse_args()
    with server(FIRST, VOCABULARY - 1) as url:
        if args.memory:
            print("| sessions | arrays, MiB each | resident | ratio | in use | ratio |")
            print("|---|---|---|---|---|---|")
            print(measure_memory(url, args.memory), flush=True)
        if args.block:
            print("\n| sessions | longest block, ms | after the last, ms | CPU ms per turn |")
            print("|---|---|---|---|")
            print(measure_block(url, args.block), flush=True)


if __name__ == "__main__":
    main()
