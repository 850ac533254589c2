"""Cost of a save, and of checking its digests, on one rank:  python -m benchmarks.checkpoint [--mib
512]

save    a tiny model (0.3 M parameters, many small tensors) by megatron-core's
        dist_checkpointing.save and by ours, in the foreground and in the background (seconds until
        training continues, and until the checkpoint has its name)
digest  BLAKE2b of files in memory, on all cores, against one pass of memcpy over the same bytes
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=512, help="bytes to digest")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure_saves(Path(folder), args.repeats)
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if os.path.isdir("/dev/shm") else None
    ) as folder:
        measure_digests(Path(folder), args.mib)


def measure_saves(folder: Path, repeats: int) -> None:
    from megatron_rl.checkpoint.checkpointer import Checkpointer, Snapshot
    from megatron_rl.checkpoint.state import sharded_state
    from megatron_rl.engine.engine import Engine  # CPU support first
    from tests.dist.engines import make_engine
    from tests.tiny import random_checkpoint

    hf = random_checkpoint(folder / "hf")

    def seconds(asynchronous: bool) -> tuple[float, float]:
        engine: Engine = make_engine(hf, checkpoint={"async_save": asynchronous})
        writer = Checkpointer(engine, folder / str(asynchronous))
        writer.save(Snapshot(0, {}))
        times = []
        for step in range(1, repeats + 1):
            start = time.monotonic()
            writer.save(Snapshot(step, {}))
            returned = time.monotonic()
            writer.wait()
            times.append((returned - start, time.monotonic() - start))
        engine.parallel.destroy()
        return min(t[0] for t in times), min(t[1] for t in times)

    def core(engine: Engine) -> None:
        from megatron.core import dist_checkpointing

        target = Path(tempfile.mkdtemp(dir=folder))
        dist_checkpointing.save(sharded_state(engine), str(target))

    engine = make_engine(hf)
    first = fastest(lambda: core(engine), 1)
    print(
        f"core     first save {first:.2f} s, later ones"
        f" {fastest(lambda: core(engine), repeats):.2f} s"
    )
    engine.parallel.destroy()
    print(f"ours     {seconds(False)[1]:.2f} s")
    print(
        "ours     in the background: training continues after {:.2f} s, named after"
        " {:.2f} s".format(*seconds(True))
    )


def measure_digests(folder: Path, mib: int) -> None:
    from megatron_rl.checkpoint.manifest import digest_files

    content = np.random.default_rng(0).integers(0, 255, mib * 2**20 // 4, np.uint8)
    for index in range(4):
        (folder / str(index)).write_bytes(content)
    digest = fastest(lambda: digest_files(folder, map(str, range(4))), 3)
    target = np.empty_like(content)
    copy = fastest(lambda: [np.copyto(target, content) for _ in range(4)], 3)
    print(
        f"digest   {mib / 1024 / digest:.2f} GiB/s, memcpy {mib / 1024 / copy:.2f} GiB/s (one"
        f" core), {os.cpu_count()} cores"
    )


def fastest(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.monotonic()
        work()
        times.append(time.monotonic() - start)
    return min(times)


if __name__ == "__main__":
    main()
