"""Seconds of a step's sampling and scoring where complete groups are scored while others are
sampled, and where all are after.

    OMP_NUM_THREADS=1 python -m benchmarks.scoring [--repeats 5]

One replica, a fake server and a real reward pool of one worker: 8 groups of 4 responses, of which
group i is complete after 0.2 (i + 1) s; a reward takes 50 ms.  Sampling alone takes 1.6 s, scoring
1.6 s.
"""

from __future__ import annotations

import argparse
import time
from types import SimpleNamespace

GROUPS, GROUP, ANSWER_SECONDS, REWARD_SECONDS = 8, 4, 0.2, 0.05


def slow(prompt: str, response: str, label: str) -> float:
    time.sleep(REWARD_SECONDS)
    return 1.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for name, early in (("after", False), ("while sampling", True)):
        seconds = [step(early=early) for _ in range(repeats)]
        print(f"{name:15s}", "  ".join(f"{value:.2f} s" for value in seconds), flush=True)


def step(*, early: bool) -> float:
    from megatron_rl.config import RewardConfig
    from megatron_rl.reward.pool import RewardPool
    from tests import sampling_loop

    sampling_loop.PER_STEP, sampling_loop.GROUP = GROUPS, GROUP
    sampling_loop.TOKENIZER.batch_decode = lambda rows, **_: [str(list(row)) for row in rows]
    with (
        sampling_loop.training("ok") as (trainer, server),
        RewardPool(RewardConfig(function=f"{__spec__.name}:slow")) as pool,
    ):
        model = server.source

        def answer(body: dict, tokens: list[int], sample_id: str) -> dict:
            if sample_id.endswith("_0"):
                time.sleep(ANSWER_SECONDS * (tokens[1] - 3))
            return model(body, tokens, sample_id)

        server.source = answer
        trainer.rollouts.leader = SimpleNamespace(client=trainer.inference.client, rewards=pool)
        trainer.rollouts.missing_routes = SimpleNamespace(check=lambda *_, **__: None)
        if not early:
            trainer.scheduler.score = lambda groups: None
        start = time.monotonic()
        trainer.rollouts.draw(trainer.scheduler.take, 0)
        return time.monotonic() - start


if __name__ == "__main__":
    main()
