"""With adapters the base never changes: which tensors a push sends, and when it sends all."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megatron_rl.distributed.ranks import Ranks
from megatron_rl.weights.hf.export import HFTensor
from megatron_rl.weights.sync.push import WeightPusher, WeightPushError
from megatron_rl.weights.sync.pushed_weights import PushedWeights, adapted_tensors
from megatron_rl.weights.sync.servers import ServerAccess, keeps_unsent
from megatron_rl.weights.sync.transports import TransportSettings
from tests.fake_receiver import fingerprint
from tests.families import family_checkpoint
from tests.thread_ranks import run_thread_ranks

SOURCES, NAMES = 2, [f"layers.{index}.weight" for index in range(8)]
CHANGING = frozenset(NAMES[2:4])
SHAPE = (20, 30)
NBYTES = 20 * 30 * 4


@pytest.fixture
def base(tmp_path) -> Path:
    """NAMES by value 0; version v of a trained model has v in those that change."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    file = tmp_path / "base" / "model.safetensors"
    save_file({name: torch.zeros(SHAPE) for name in NAMES}, file)
    return file


def export(version: int, rank: int):
    for index, name in enumerate(NAMES):
        values = torch.full(SHAPE, float(version if name in CHANGING else 0))
        source = index % SOURCES
        yield HFTensor(name, SHAPE, values.dtype, source, values if rank == source else None)


def make_pusher(base, servers, rank, group, store, transport="distributed", verify_every=20):
    pusher = WeightPusher(
        ServerAccess([server.url for server in servers], 20),
        PushedWeights(base.parent, torch.float32, changing=CHANGING),
        TransportSettings(
            transport, bucket_mb=1, device=torch.device("cpu"), disk_dir=base.parent.parent / "push"
        ),
        verify_every=verify_every,
        ranks=Ranks(rank, group, store),
    )
    # a second export for hashes would move tensors between real ranks; these are threads
    pusher.verifier.any_on_cpu = lambda servers: False
    return pusher


def assert_all_hold(servers, version: int) -> None:
    for server in servers:
        digests = server.state()["held"]
        for name in NAMES:
            expected = torch.full(SHAPE, float(version if name in CHANGING else 0))
            assert digests[name] == fingerprint(expected), (name, version)


def run(base, servers, steps, **settings):
    """Bytes of each push; steps are called between them with the pusher, on every rank."""
    store = dist.HashStore()

    def push(group, rank):
        pusher = make_pusher(base, servers, rank, group, store, **settings)
        sizes = []
        for version, step in enumerate(steps, 1):
            step(pusher)
            sizes.append(pusher.push(partial(export, version, rank), version).num_bytes)
        pusher.close()
        return sizes

    first, second = run_thread_ranks(push, SOURCES)
    assert first == second
    assert_all_hold(servers, len(steps))
    return [size // NBYTES for size in first]


def nothing(pusher: WeightPusher) -> None: ...


def fail(pusher: WeightPusher) -> None:
    """A push that does not reach its end: the servers have a mixture."""

    def damaged():
        for tensor in export(9, pusher.ranks.rank):
            yield tensor._replace(shape=(1,)) if tensor.name == NAMES[3] else tensor

    with pytest.raises(WeightPushError, match="has shape"):
        pusher.push(damaged, 9)


def release(pusher: WeightPusher) -> None:
    """Mark the servers as release_memory does, which frees their weights, too."""
    pusher.is_whole = False


def replace_server(pusher: WeightPusher) -> None:
    urls = list(pusher.servers.urls)
    pusher.set_urls(urls[:1])
    pusher.set_urls(urls)


@pytest.mark.parametrize("step", [fail, release, replace_server])
def test_only_what_changes_is_sent_until_a_server_may_lack_the_rest(step, base, servers):
    whole, part = len(NAMES), len(CHANGING)
    sizes = run(base, servers, [nothing, nothing, nothing, step, nothing])
    assert sizes == [whole, part, part, whole, part]


def test_a_server_that_was_started_again_gets_everything(base, servers, monkeypatch):
    def restart(pusher: WeightPusher) -> None:
        pusher.server_starts = {url: {"startup_time": -1} for url in pusher.servers.urls}

    assert run(base, servers, [nothing, nothing, restart]) == [8, 2, 8]


def test_a_folder_or_servers_without_verification_get_everything(base, servers):
    assert run(base, servers, [nothing, nothing], transport="disk") == [8, 8]
    assert run(base, servers, [nothing, nothing], verify_every=0) == [8, 8]


def test_the_first_push_of_a_part_is_verified(base, servers):
    due = []

    def note(pusher: WeightPusher) -> None:
        if pusher.ranks.rank == 0:
            pusher.verifier.verify = lambda *values: due.append(values[-1])

    assert run(base, servers, [note, nothing, nothing, nothing]) == [8, 2, 2, 2]
    assert due == ["version 1", "version 2"]


@pytest.mark.parametrize(
    ("info", "keeps"),
    [
        ({"device": "cpu"}, True),
        ({"device": "cuda", "moe_runner_backend": "triton"}, True),
        ({"device": "cuda", "moe_runner_backend": "auto"}, False),
        ({"device": "cuda", "moe_runner_backend": "flashinfer_trtllm"}, False),
        ({"device": "cpu", "quantization": "fp8"}, False),
    ],
)
def test_servers_that_process_unsent_weights_again_get_everything(info, keeps):
    assert keeps_unsent(info) == keeps


def test_tensors_that_servers_fuse_travel_together(tmp_path):
    base = family_checkpoint(tmp_path / "base", "deepseek_v3")
    names = adapted_tensors(base, ["linear_q_down_proj"])
    ends = {name.rpartition("self_attn.")[2] for name in names}
    assert ends == {"q_a_proj.weight", "kv_a_proj_with_mqa.weight"}
    attention = adapted_tensors(base, ["attention"])
    assert attention < load_file(base / "model.safetensors").keys()
    assert not any(".mlp." in name or "norm" in name for name in attention)
