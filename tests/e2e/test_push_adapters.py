"""A real SGLang server gets the merged weights of adapters: all tensors once, then those that
changed; each push is verified against the complete export, tensor by tensor.
"""

import logging
from functools import partial
from pathlib import Path

import httpx
import torch
from safetensors.torch import load_file

from megatron_rl.weights.sync.push import WeightPusher
from megatron_rl.weights.sync.pushed_weights import PushedWeights, adapted_tensors
from megatron_rl.weights.sync.servers import ServerAccess
from megatron_rl.weights.sync.transports import TransportSettings
from tests.dist.launch import run_ranks

TENSORS = 39
LORA = {"rank": 4, "targets": ["attention"]}


def test_a_server_holds_the_merged_weights_when_it_got_the_changed_ones_alone(
    sglang_server, tiny_checkpoint, tmp_path
):
    version = int(httpx.get(f"{sglang_server.url}/model_info").json()["weight_version"])
    weights = load_file(tiny_checkpoint / "model.safetensors")
    whole = sum(tensor.nbytes for tensor in weights.values())
    part = sum(weights[name].nbytes for name in weights if "_proj" in name and "self_attn" in name)
    assert part < 0.3 * whole
    for parallel in ({"tp": 2}, {"ep": 2}):
        reports = run_ranks(
            push_three_times, 2, tiny_checkpoint, parallel, sglang_server.url, version, tmp_path
        )
        version += 3
        assert reports[0] == reports[1] == [(whole, TENSORS), (part, TENSORS), (part, TENSORS)]


def push_three_times(
    base: Path, parallel: dict, url: str, version: int, folder: Path
) -> list[tuple[int, int | None]]:
    """Bytes and verified tensors of pushes with random adapters; the last is the base again."""
    from megatron_rl.distributed.ranks import Ranks
    from tests.dist.engines import make_engine

    logging.disable(logging.WARNING)
    engine = make_engine(base, parallel=parallel, lora=LORA)
    changing = adapted_tensors(base, LORA["targets"])
    pusher = WeightPusher(
        ServerAccess([url], 60),
        PushedWeights(base, torch.float32, changing=changing),
        TransportSettings(
            "distributed", bucket_mb=1, device=torch.device("cpu"), disk_dir=folder / "weights"
        ),
        verify_every=1,
        ranks=Ranks.of(engine.parallel),
    )
    reports = []
    for number, size in enumerate((0.2, 0.3, 0.0), 1):
        for adapter in engine.adapters.all:
            # the same on ranks that hold a copy
            torch.manual_seed(sum(adapter.entry.name.encode()) + number)
            adapter.b.data.copy_(torch.randn(adapter.b.shape) * size)
        report = pusher.push(partial(engine.export_parts, 2), version + number)
        reports.append((report.num_bytes, report.verified))
    pusher.close()
    engine.parallel.destroy()
    return reports
