"""A server, rank 0 or another source is killed at any point of a weight sync: no server names a
version that it has not.
"""

import os
import re
import signal
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.dist.launch import run_ranks
from tests.fake_receiver import ReceiverProcess, fingerprint, receivers

TENSORS, BUCKETS = 12, 6
"""Of two sources, one after the other; a bucket has two tensors."""


def make_weights(folder: Path) -> list[Path]:
    """The weights of versions 0 to 3; every tensor of every version has other values."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    files = []
    for version in range(4):
        torch.manual_seed(version)
        place = folder / str(version)
        place.mkdir()
        (place / "config.json").write_text("{}")
        files.append(place / "model.safetensors")
        save_file(
            {f"layers.{index}.weight": torch.randn(20, 30) for index in range(TENSORS)}, files[-1]
        )
    return files


def make_pusher(files, urls):
    from megatron_rl.config import ParallelConfig
    from megatron_rl.distributed import make_parallel
    from megatron_rl.distributed.ranks import Ranks
    from megatron_rl.weights.sync.push import WeightPusher
    from megatron_rl.weights.sync.pushed_weights import PushedWeights
    from megatron_rl.weights.sync.servers import ServerAccess
    from megatron_rl.weights.sync.transports import TransportSettings

    parallel = make_parallel(ParallelConfig(pp=2), device="cpu", timeout_minutes=1)
    pusher = WeightPusher(
        ServerAccess(urls, 20),
        PushedWeights(files[0].parent, torch.float32),
        TransportSettings(
            "distributed",
            bucket_mb=1,
            device=torch.device("cpu"),
            disk_dir=files[0].parent / "push",
        ),
        ranks=Ranks.of(parallel),
    )
    pusher.bucket_bytes = 2 * 20 * 30 * 4
    return pusher


def export(file: Path, rank: int):
    from megatron_rl.weights.hf.export import HFTensor

    for index, (name, tensor) in enumerate(sorted(load_file(file).items())):
        source = index % 2
        yield HFTensor(
            name, tuple(tensor.shape), tensor.dtype, source, tensor if rank == source else None
        )


def push(files, urls, version):
    pusher = make_pusher(files, urls)
    pusher.push(partial(export, files[version], pusher.ranks.rank), version)
    pusher.close()


def content(file: Path) -> dict[str, str]:
    return {name: fingerprint(tensor) for name, tensor in load_file(file).items()}


POINTS = [
    "opened",
    "first turn",
    "first broadcast",
    "third loaded",
    "last loaded",
    "all sent",
    "one has the version",
    "after",
]
VICTIMS = ["rank 0", "rank 1", "server"]
QUICK = [
    ("first broadcast", "rank 1"),
    ("third loaded", "server"),
    ("one has the version", "rank 0"),
]


def kill_at(point: str, victim_pid: int) -> None:
    """Patch this rank so that it kills the victim when the push reaches the point."""
    from megatron_rl.weights.sync import bucket_order, buckets, push, servers

    fired = []

    def fire() -> None:
        if not fired:
            fired.append(True)
            os.kill(victim_pid, signal.SIGKILL)

    def before(owner, name, condition=lambda *args: True):
        original = getattr(owner, name)

        def patched(self, *args, **rest):
            if condition(self, *args):
                fire()
            return original(self, *args, **rest)

        setattr(owner, name, patched)

    def after(owner, name, condition=lambda *args: True):
        original = getattr(owner, name)

        def patched(self, *args, **rest):
            value = original(self, *args, **rest)
            if condition(self, *args):
                fire()
            return value

        setattr(owner, name, patched)

    def loaded(number):
        return lambda self: self.store.add(self.name, 0) >= number

    match point:
        case "opened":
            after(push.WeightPusher, "_open")
        case "first turn":
            after(bucket_order.BucketOrder, "wait", lambda self, number: number == 0)
        case "first broadcast":
            before(buckets.BucketSender, "send")
        case "third loaded":
            after(bucket_order.BucketOrder, "done", loaded(3))
        case "last loaded":
            after(bucket_order.BucketOrder, "done", loaded(BUCKETS))
        case "all sent":
            before(bucket_order.BucketOrder, "close")
        case "one has the version":
            after(
                servers.Servers,
                "call",
                lambda self, method, url, path, body=None: (body or {}).get("new_version") == "2",
            )
        case "after":
            after(push.WeightPusher, "serve")


def push_and_kill(files, urls, point, victim, server_pid, folder):
    """Version 1 arrives, then the victim is killed in the push of version 2; returns whether that
    raised on this rank.

    Where ranks live on, the server that is left gets version 3.
    """
    from megatron_rl.weights.sync.push import WeightPushError

    pusher = make_pusher(files, urls)
    rank = pusher.ranks.rank
    (folder / f"{rank}.tmp").write_text(str(os.getpid()))
    (folder / f"{rank}.tmp").rename(folder / f"{rank}")
    # both ranks have written their files before it returns
    pusher.push(partial(export, files[1], rank), 1)
    kill_at(
        point,
        server_pid
        if victim == "server"
        else int((folder / victim.removeprefix("rank ")).read_text()),
    )
    raised = False
    try:
        pusher.push(partial(export, files[2], rank), 2)
    except WeightPushError:
        raised = True
    if victim == "server":
        pusher.set_urls(urls[1:])
        pusher.push(partial(export, files[3], rank), 3)
    pusher.close()
    return raised


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_weights(tmp_path_factory.mktemp("weights") / "versions")


@pytest.fixture(scope="module")
def pool(files):
    """Two receivers; a killed one is replaced before the next test."""
    with receivers(files[0], 2) as processes:
        yield processes


def check_kill(point, victim, folder, files, pool):
    for index, each in enumerate(pool):
        if each.process.poll() is not None:
            pool[index] = ReceiverProcess(files[0])
            pool[index].wait_until_ready()
    urls = [each.url for each in pool]
    try:
        raised = run_ranks(
            push_and_kill, 2, files, urls, point, victim, pool[0].process.pid, folder, timeout=90
        )
    except RuntimeError as error:
        # the death itself, or the other rank's lost connection, whichever is seen first
        assert victim != "server" and re.search(
            "exit code -9|Connection (closed|reset)", str(error)
        ), error
    else:
        assert victim == "server" and (all(raised) or (point == "after" and not any(raised)))
    survivors = [each for each in pool if each.process.poll() is None]
    assert len(survivors) == 2 - (victim == "server")
    labels = [check_not_mixed(each.state(), files) for each in survivors]
    # the next job, on the servers that are left
    run_ranks(push, 2, files, [each.url for each in survivors], 0)
    for each in survivors:
        state = each.state()
        assert (state["held"], state["weight_version"], state["paused"]) == (
            content(files[0]),
            "0",
            False,
        )
    return labels


def check_not_mixed(state, files) -> str:
    """A server that names a version has all of it; any other is paused and names none."""
    label = state["weight_version"]
    if label.startswith("updating"):
        assert state["paused"], state
    else:
        assert state["held"] == content(files[int(label)]), f"version {label} with other tensors"
    return label


@pytest.mark.parametrize(("point", "victim"), QUICK)
def test_a_kill_leaves_the_old_or_the_new_version(point, victim, tmp_path, files, pool):
    check_kill(point, victim, tmp_path, files, pool)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "victim"), [case for case in product(POINTS, VICTIMS) if case not in QUICK]
)
def test_a_kill_anywhere_leaves_the_old_or_the_new_version(point, victim, tmp_path, files, pool):
    print(point, victim, check_kill(point, victim, tmp_path, files, pool))
