"""Open sessions with slow tools: is anything lost, how long is the event loop's longest block, how
much memory does it take?

    python -m tests.faults.sessions [--sessions 1000] [--turns 3] [--shortest 0.1] [--longest 10]

The fake server is a process of its own.  A block is one callback of the event loop, in CPU time of
its thread: time of other processes does not count.
"""

from __future__ import annotations

import argparse
import asyncio
import asyncio.events
import gc
import multiprocessing
import random
import resource
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from megatron_rl.config import AgentConfig, RolloutConfig
from megatron_rl.records import Prompt, Rollout
from megatron_rl.rollout.agents import Episode, Session
from megatron_rl.rollout.agents.runner import EpisodeRunner
from megatron_rl.rollout.client.client import RolloutClient
from megatron_rl.rollout.client.sampling import SampleRules
from megatron_rl.rollout.garbage_collection import postpone_full_collections
from tests.fake_model import TurnModel, assert_turn_fingerprints
from tests.fake_server import SPEC, FakeServer
from tests.words import word_tokenizer

GROUP = 20
VERSION = 3
latency, turns = [0.1, 10.0], [3]
"""Of a tool, in seconds; of an episode."""


async def slow_tool(session: Session, prompt: Prompt) -> Episode:
    """Every observation follows from the turn."""
    for number in range(turns[0]):
        turn = await session.generate(max_tokens=5)
        if number < turns[0] - 1:
            await asyncio.sleep(random.Random(zlib.crc32(bytes(turn.token_ids))).uniform(*latency))
            session.observe([2 + sum(turn.token_ids) % 60, 9])
    return session.finish(1.0)


@dataclass
class Measured:
    """lost, duplicated, wrong: episodes; block: of the event loop, in seconds of CPU time; memory:
    more than before, in bytes.
    """

    episodes: int
    lost: int
    duplicated: int
    wrong: int
    seconds: float
    cpu_seconds: float
    blocks: list[float] = field(repr=False)
    memory: int

    def __str__(self) -> str:
        blocks = sorted(self.blocks)
        return (
            f"{self.episodes} sessions of {turns[0]} turns, tools of {latency[0]:g} to"
            f" {latency[1]:g} s: {self.seconds:.1f} s,"
            f" {self.cpu_seconds / self.episodes / turns[0] * 1e3:.1f} ms of CPU time per turn;"
            f" lost {self.lost}, duplicated {self.duplicated}, wrong {self.wrong}; longest block"
            f" {blocks[-1] * 1e3:.1f} ms (99.9 %: {blocks[int(len(blocks) * 0.999)] * 1e3:.1f} ms"
            f" of {len(blocks)}); memory + {self.memory / 2**20:.0f} MiB"
        )


def measure(sessions: int) -> Measured:
    cfg = RolloutConfig(max_concurrency=sessions)
    agent = AgentConfig(function=f"{__name__}:slow_tool")
    runner = EpisodeRunner(agent, word_tokenizer(), SPEC.vocab_size, cfg.max_retries)
    prompts = [
        Prompt(f"q{i}", "", (3, 4 + i % 50, 5 + i // 50), "") for i in range(sessions // GROUP)
    ]
    with fake_server() as url, timed_callbacks() as blocks:
        client = RolloutClient([url], cfg, SampleRules(SPEC, want_routes=True), episodes=runner)
        postpone_full_collections()  # as a run does before its first step
        before, cpu, started = memory(), time.process_time(), time.monotonic()
        groups = client.generate(
            prompts,
            GROUP,
            policy_version=VERSION,
            temperature=1.0,
            max_tokens=64,
            stop_token_ids=(1,),
        )
        seconds, cpu_seconds, used = (
            time.monotonic() - started,
            time.process_time() - cpu,
            memory() - before,
        )
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return Measured(
        episodes=sessions,
        lost=sessions - len(rollouts),
        duplicated=len(rollouts)
        - len({(rollout.id, rollout.tokens.tobytes()) for rollout in rollouts}),
        wrong=sum(not is_right(rollout) for rollout in rollouts),
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        blocks=blocks,
        memory=used,
    )


def is_right(rollout: Rollout) -> bool:
    try:
        assert_turn_fingerprints(rollout)
    except AssertionError:
        return False
    return len(rollout.episode.turns) == turns[0]


def memory() -> int:
    """The most bytes that this process had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def timed_callbacks() -> Iterator[list[float]]:
    """CPU seconds of every callback of every event loop meanwhile."""
    blocks: list[float] = []
    run = asyncio.events.Handle._run

    def timed(handle: asyncio.events.Handle) -> None:
        started = time.thread_time()
        run(handle)
        blocks.append(time.thread_time() - started)

    asyncio.events.Handle._run = timed
    try:
        yield blocks
    finally:
        asyncio.events.Handle._run = run
        gc.unfreeze()


@contextmanager
def fake_server() -> Iterator[str]:
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=(theirs,), daemon=True
    )
    process.start()
    try:
        if not ours.poll(60):
            raise RuntimeError("the fake server does not start")
        yield ours.recv()
    finally:
        process.kill()
        process.join()


def serve(connection: Connection) -> None:
    with FakeServer("ok", source=TurnModel(version=VERSION)) as server:
        connection.send(server.url)
        connection.poll(None)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--shortest", type=float, default=0.1)
    parser.add_argument("--longest", type=float, default=10.0)
    args = parser.parse_args()
    from tests.faults import sessions

    sessions.turns[:], sessions.latency[:] = [args.turns], [args.shortest, args.longest]
    found = sessions.measure(args.sessions)
    print(found)
    return 0 if not (found.lost or found.duplicated or found.wrong) else 1


if __name__ == "__main__":
    sys.exit(main())
