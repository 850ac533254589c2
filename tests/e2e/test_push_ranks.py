"""Weights from every rank: each source sends its part to a real SGLang server, which then holds the
HF export, tensor by tensor.

The trainer's weights are those of a checkpoint that the server was not started on, so its files say
what must arrive.
"""

import logging
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.weights.sync.checksums import ExportDigests
from megatron_rl.weights.sync.push import WeightPusher
from megatron_rl.weights.sync.pushed_weights import PushedWeights
from megatron_rl.weights.sync.servers import ServerAccess
from megatron_rl.weights.sync.transports import TransportSettings
from tests.dist.launch import build, run_ranks
from tests.one_rank import given
from tests.tiny import random_checkpoint

LAYOUTS = [
    ({"tp": 2, "etp": 2}, 2, {0}),
    ({"pp": 2}, 2, {0, 1}),
    ({"ep": 2}, 2, {0, 1}),
    ({"tp": 2, "ep": 2, "etp": 1}, 2, {0, 1}),
    ({"pp": 2, "ep": 2}, 4, {0, 1, 2, 3}),
    ({"pp": 2, "tp": 2, "ep": 2, "etp": 1}, 4, {0, 1, 2, 3}),
]
PUSHES = 2


@pytest.fixture(scope="module", autouse=True)
def restored(sglang_server, tiny_checkpoint, tmp_path_factory):
    """Other tests expect the checkpoint's weights on the server."""
    yield
    pusher = WeightPusher(
        ServerAccess([sglang_server.url], 60),
        PushedWeights(tiny_checkpoint, torch.float32),
        TransportSettings(
            "distributed",
            bucket_mb=1,
            device=torch.device("cpu"),
            disk_dir=tmp_path_factory.mktemp("weights"),
        ),
    )
    version = int(httpx.get(f"{sglang_server.url}/model_info").json()["weight_version"])
    pusher.push(lambda: given(load(tiny_checkpoint)), version + 1)
    pusher.close()


@pytest.mark.parametrize(
    "transport",
    [
        "distributed",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("disk", "colocated")),
    ],
)
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_the_server_holds_what_every_rank_sent(
    world, transport, sglang_server, tiny_checkpoint, tmp_path
):
    version = int(httpx.get(f"{sglang_server.url}/model_info").json()["weight_version"])
    for layout, size, sources in LAYOUTS:
        if size != world:
            continue
        trained = random_checkpoint(tmp_path / str(version), seed=1000 + version)
        found = run_ranks(
            push_from_every_rank,
            size,
            trained,
            layout,
            sglang_server.url,
            transport,
            version,
            tmp_path,
        )
        version += PUSHES
        assert_holds(sglang_server.url, trained, version)
        for reports in found:
            assert reports == found[0], "the same on every rank"
        for num_bytes, sent_bytes, _ in found[0]:
            assert {rank for rank, size in enumerate(sent_bytes) if size} == sources
            assert sum(sent_bytes) == num_bytes == sum(t.nbytes for t in load(trained).values())
            assert max(sent_bytes) <= 1.1 * num_bytes / len(sources)
        assert [verified for _, _, verified in found[0]] == [39, None]


def load(checkpoint: Path):
    return load_file(checkpoint / "model.safetensors")


def assert_holds(url: str, checkpoint: Path, version: int) -> None:
    """Every tensor of the server is made of the checkpoint's, and it says so."""
    weights = load(checkpoint)
    digests = ExportDigests(weights)
    for name, tensor in weights.items():
        digests.add(name, tensor)
    body = {"action": "checksum", "selector": "target"}
    (rank,) = httpx.post(f"{url}/weights_checker", json=body, timeout=60).json()["ranks"]
    expected = digests.digests()
    assert {name: rank["checksums"][name] for name in expected} == expected and len(expected) == 39
    assert httpx.get(f"{url}/model_info").json()["weight_version"] == str(version)


def push_from_every_rank(
    checkpoint: Path, layout: dict, url: str, transport: str, version: int, folder: Path
) -> list:
    from functools import partial

    from megatron_rl.distributed.ranks import Ranks
    from megatron_rl.weights.hf.export import export_planned, plan_export

    logging.disable(logging.WARNING)
    chunks, spec, _, parallel = build(checkpoint, **layout)
    pusher = WeightPusher(
        ServerAccess([url], 60),
        PushedWeights(checkpoint, torch.float32),
        TransportSettings(
            transport, bucket_mb=1, device=torch.device("cpu"), disk_dir=folder / "weights"
        ),
        verify_every=PUSHES,
        ranks=Ranks.of(parallel),
    )
    pusher.bucket_bytes = 100_000
    export = partial(export_planned, plan_export(chunks, spec, parallel), chunks, spec, parallel)
    reports = [pusher.push(export, version + 1 + number) for number in range(PUSHES)]
    pusher.close()
    return [(report.num_bytes, report.sent_bytes, report.verified) for report in reports]
