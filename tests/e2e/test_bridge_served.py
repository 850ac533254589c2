"""A real SGLang server of models that Megatron-Bridge builds: after a weight sync it samples what
the trainer computes.

They need Megatron-Bridge: make test-bridge.
"""

from pathlib import Path

import pytest
import torch

from tests.bridge_families import bridge_checkpoint, needs_bridge
from tests.dist.launch import run_ranks

pytestmark = [needs_bridge, pytest.mark.slow]

SERVED = ("glm4_moe",)
"""Families that SGLang can run on a CPU without AMX; results/families.md says why others are not
among them.
"""


@pytest.mark.parametrize("name", SERVED)
def test_after_a_weight_sync_the_server_is_the_trainers_model(name: str, tmp_path: Path) -> None:
    bridge_checkpoint(tmp_path / "served", name, seed=0)
    bridge_checkpoint(tmp_path / "trained", name, seed=1)
    run_ranks(check_served, 1, tmp_path, timeout=600)


def check_served(root: Path) -> None:
    from megatron_rl.engine.parity import compare
    from megatron_rl.records import Prompt
    from megatron_rl.rollout.client.client import RolloutClient
    from megatron_rl.rollout.client.sampling import SampleRules
    from megatron_rl.rollout.server.process import launch_server
    from megatron_rl.weights.sync.push import WeightPusher
    from megatron_rl.weights.sync.pushed_weights import PushedWeights
    from megatron_rl.weights.sync.servers import ServerAccess
    from megatron_rl.weights.sync.transports import TransportSettings
    from tests.dist.engines import make_engine

    rollout = {"dtype": "float32", "max_total_tokens": 4096, "max_running_requests": 16}
    engine = make_engine(root / "trained", model={"provider": "bridge"}, rollout=rollout)
    cfg, spec = engine.cfg, engine.spec
    with launch_server(
        root / "served", cfg.rollout, device="cpu", seed=0, log_path=root / "server.log"
    ) as server:
        pusher = WeightPusher(
            ServerAccess([server.url], 60),
            PushedWeights(root / "trained", torch.float32),
            TransportSettings(
                "distributed", bucket_mb=1, device=torch.device("cpu"), disk_dir=root
            ),
            verify_every=1,
        )
        report = pusher.push(lambda: engine.export_parts(1), 1)
        client = RolloutClient([server.url], cfg.rollout, SampleRules(spec, bool(spec.moe_layers)))
        prompts = [
            Prompt(id=f"q{i}", text="", token_ids=(5, 9, 2 + i, 40, 7, 22, 31, 8), label="")
            for i in range(4)
        ]
        groups = client.generate(
            prompts, 4, temperature=1.0, max_tokens=24, stop_token_ids=(), policy_version=1
        )
        parity = compare(engine, groups, cfg)
        print(f"{spec.architecture}: {report.verified} tensors verified, {parity}")
        pusher.close()
    assert parity.logprob_diff_max <= 1e-4 and parity.experts_equal == 1.0
    assert report.verified
    engine.parallel.destroy()
