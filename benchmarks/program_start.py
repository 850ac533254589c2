"""CPU and clock of an agent.command that imports a package: started for each episode, and forked
(agent.preload).

    python -m benchmarks.program_start [--modules openai] [--episodes 20] [--python PYTHON]

The program does nothing else.  Episodes run one after the other; the CPU of `forked` includes that
of the import, once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import sys
import time

from megatron_rl.config import AgentConfig
from megatron_rl.rollout.agents.command import run_program
from megatron_rl.rollout.agents.rollout_function import user_processes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modules", nargs="+", default=["openai"])
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--python", default=sys.executable)
    args = parser.parse_args()
    command = (args.python, "-c", f"import {', '.join(args.modules)}")
    print("| program | episodes | CPU an episode, s | clock an episode, s |\n|---|---|---|---|")
    for name, preload in (("started", ()), ("forked", tuple(args.modules))):
        agent = AgentConfig(command=command, renderer="qwen3", preload=preload)
        cpu, clock = asyncio.run(measure(agent, args.episodes))
        print(f"| {name} | {args.episodes} | {cpu:.3f} | {clock:.3f} |", flush=True)


async def measure(agent: AgentConfig, episodes: int) -> tuple[float, float]:
    """Return seconds of CPU and of the clock for an episode."""
    processes = user_processes(agent, ())
    before, began = child_cpu(), time.monotonic()
    for _ in range(episodes):
        if processes is None:
            status, _, errors = await run_program(agent.command, os.environ, b"")
        else:
            status, _, errors = await processes.run(os.environ, "")
        assert status == 0, errors
    seconds = time.monotonic() - began
    if processes is not None:
        processes.close()
    return (child_cpu() - before) / episodes, seconds / episodes


def child_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
