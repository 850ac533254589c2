"""gpu-check frees an engine before it makes the next one, also after an update: core's hooks are in
a cycle through autograd, which Python's collector cannot see.
"""

import gc
import subprocess
import sys
from pathlib import Path

import torch
from megatron.core.distributed import DistributedDataParallel

from megatron_rl_tools.gpu_check.material import (
    QWEN3_MOE,
    check_batch,
    check_samples,
    check_step_config,
    engine_of,
)
from megatron_rl_tools.gpu_check.memory_steps import step
from megatron_rl_tools.verify_replay.random_checkpoint import write_random_checkpoint

ROOT = Path(__file__).resolve().parents[2]


def test_nothing_of_an_engine_is_left(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.dist.test_engine_freed", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.endswith("with an engine: 1, after it: 0\n"), done.stdout + done.stderr


def train(folder: Path) -> int:
    """Run one update, and return the number of wrapped models."""
    spec = write_random_checkpoint(
        QWEN3_MOE | {"num_hidden_layers": 1}, folder, dtype=torch.bfloat16
    )
    with engine_of(check_step_config(folder, "cpu")) as engine:
        step(engine, check_batch(engine, check_samples(spec, (20, 30))), "R3")
        return alive()


def alive() -> int:
    gc.collect()
    return sum(isinstance(thing, DistributedDataParallel) for thing in gc.get_objects())


if __name__ == "__main__":
    print(f"with an engine: {train(Path(sys.argv[1]))}, after it: {alive()}")
