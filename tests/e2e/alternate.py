"""megatron_rl.train with release_memory on the CPU, where a run is refused: its servers
answer and keep their memory.

The trainer's side, the order of the calls and the weights that arrive are those of a GPU.
"""

import sys

from megatron_rl.config import config
from megatron_rl.rollout.server import process


def allow() -> None:
    config.check_can_release = lambda cfg, device: None  # before build imports its own
    from megatron_rl.config.rules import server_rules

    server_rules.check_can_release = config.check_can_release
    command = process.server_command
    # torch_memory_saver needs CUDA
    process.server_command = lambda *args, **kwargs: [
        word
        for word in command(*args, **kwargs)
        if word not in ("--enable-memory-saver", "--enable-weights-cpu-backup")
    ]


if __name__ == "__main__":
    allow()
    from megatron_rl.train import main

    sys.exit(main())
