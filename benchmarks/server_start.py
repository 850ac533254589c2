"""CPU time, clock and memory of an SGLang server on the CPU until it answers, with its scheduler
and detokenizer spawned, as SGLang has them, and forked (sglang_cpu.fork_children).

    python -m benchmarks.server_start [--repeats 3]

The ways alternate.  The model is a tiny random one: what is measured are imports.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import psutil

from megatron_rl.config import RolloutConfig
from megatron_rl.rollout.server import sglang_cpu
from megatron_rl.rollout.server.ports import free_port
from megatron_rl.rollout.server.process import Server, server_command, spawn

WAYS = ("spawned", "forked")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    from tests.tiny import random_checkpoint

    rows: dict[str, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        model = random_checkpoint(Path(folder) / "model")
        for _ in range(args.repeats):
            for way in WAYS:
                rows[way].append(measure(model, way, Path(folder)))
    print("| children | CPU, s | clock, s | memory of all processes, MiB |\n|---|---|---|---|")
    for way in WAYS:
        cpu, clock, memory = (median(column) for column in zip(*rows[way], strict=True))
        print(f"| {way} | {cpu:.1f} | {clock:.1f} | {memory:.0f} |")


def measure(model: Path, way: str, folder: Path) -> tuple[float, float, float]:
    """Return seconds of CPU and of the clock, and MiB (proportional set size)."""
    settings = RolloutConfig(dtype="float32", max_total_tokens=4096, max_running_requests=16)
    port = free_port()
    command = server_command(model, settings, port=port, device="cpu", seed=0)
    command[1:3] = [__file__, way]  # in place of -m MODULE
    began = time.monotonic()
    with open(folder / "log.txt", "ab") as log:
        started = spawn(command, "cpu", log)
    with Server(
        f"http://127.0.0.1:{port}", started, folder / "log.txt", start_timeout=300
    ) as server:
        server.wait_until_ready()
        clock = time.monotonic() - began
        parent = psutil.Process(started.pid)
        processes = [parent, *parent.children(recursive=True)]
        memory = sum(one.memory_full_info().pss for one in processes) / 2**20
        return server.cpu_seconds(), clock, memory


if __name__ in ("__main__", "__mp_main__") and sys.argv[1:2] in (["spawned"], ["forked"]):
    sglang_cpu.prepare(skip=("fork_children",) if sys.argv[1] == "spawned" else ())
    if __name__ == "__main__":
        sglang_cpu.main(sys.argv[2:])
elif __name__ == "__main__":
    main()
