"""The order of a push, what happens when a server misbehaves, and what goes over the wire."""

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from megatron_rl.models.families import make_spec
from megatron_rl.models.spec import load_hf_config
from megatron_rl.weights.hf.entries import entries
from megatron_rl.weights.hf.export import batches
from megatron_rl.weights.hf.fp8 import QuantizeError, dequantize_blocks, quantize_blocks
from megatron_rl.weights.sync import buckets
from megatron_rl.weights.sync.buckets import BroadcastError, Bucket, connect
from megatron_rl.weights.sync.push import WeightPusher, WeightPushError
from megatron_rl.weights.sync.pushed_weights import PushedWeights, checked_stream, expected_tensors
from megatron_rl.weights.sync.servers import ServerAccess
from megatron_rl.weights.sync.transports import Distributed, TransportSettings
from tests.families import family_checkpoint
from tests.one_rank import given

CPU = torch.device("cpu")
FUSED = ("q_a_proj", "kv_a_proj_with_mqa")
ORDER = [
    "/pause_generation",
    "/flush_cache",
    "/server_info",
    "/update_weight_version",
    "/model_info",
    "/model_info",
    "/update_weights_from_disk",
    "/model_info",
    "/update_weight_version",
    "/model_info",
    "/continue_generation",
]


class ControlServer:
    """SGLang's control endpoints; `faults` maps a path to the (status, seconds) of its first
    answers.
    """

    def __init__(self, *, forgets_version: bool = False, **faults: list[tuple[int, float]]) -> None:
        self.faults = {"/" + path: list(answers) for path, answers in faults.items()}
        self.calls: list[tuple[str, dict]] = []
        self.version = "0"
        self.startup_time = {"load_weight": 1.25}
        control = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                body = json.loads(self.rfile.read(length)) if length else {}
                control.calls.append((self.path, body))
                status, seconds = (
                    control.faults[self.path].pop(0)
                    if control.faults.get(self.path)
                    else (200, 0.0)
                )
                time.sleep(seconds)
                if self.path == "/update_weight_version" and not forgets_version:
                    control.version = body["new_version"]
                answer = {
                    "weight_version": control.version, "message": f"answer {status}", "tp_size": 1,
                    "startup_time": control.startup_time, **control.more(self.path, body),
                }  # fmt: skip
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = answer

            def log_message(self, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(
            target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()

    def __enter__(self) -> "ControlServer":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.http.shutdown()
        self.http.server_close()

    def more(self, path: str, body: dict) -> dict:
        """Further fields of an answer."""
        return {}

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """bfloat16 weights, one float32 router bias."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    torch.manual_seed(0)
    weights = {f"layers.{i}.weight": torch.randn(4, 6).bfloat16() for i in range(3)}
    save_file(weights | {"layers.0.bias": torch.randn(5)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def make_pusher(
    checkpoint: Path,
    *urls: str,
    dtype=torch.bfloat16,
    timeout_seconds: float = 5.0,
    fp8_keep: tuple[str, ...] | None = None,
    transport: str = "disk",
    run: str = "",
) -> WeightPusher:
    return WeightPusher(
        ServerAccess(urls, timeout_seconds),
        PushedWeights(checkpoint, dtype, fp8_keep=fp8_keep),
        TransportSettings(transport, bucket_mb=1, device=CPU, disk_dir=checkpoint.parent / "push"),
        run=run,
    )


def stream(checkpoint: Path, dtype=torch.float32):
    return given(
        (name, tensor.to(dtype))
        for name, tensor in load_file(checkpoint / "model.safetensors").items()
    )


def test_the_order_is_the_safe_one_on_every_server(checkpoint):
    with ControlServer() as one, ControlServer() as two:
        report = make_pusher(checkpoint, one.url, two.url).push(lambda: stream(checkpoint), 4)
    assert one.paths == two.paths == ORDER
    bodies = dict(one.calls)
    versions = [body["new_version"] for path, body in one.calls if path == "/update_weight_version"]
    assert versions == ["updating to 4", "4"], (
        "half-updated weights must have a version that no sample may have"
    )
    assert bodies["/pause_generation"] == {"mode": "abort"}
    assert bodies["/update_weights_from_disk"]["flush_cache"] is False
    assert (report.num_bytes, report.refused_flushes) == (3 * 24 * 2 + 5 * 4, 0)


@pytest.mark.parametrize("moment", ["send", "finish"])
def test_two_runs_that_push_to_one_server_at_the_same_time_leave_it_with_a_version_of_neither(
    moment, checkpoint
):
    """It has tensors of both: the other run, which may be sampling already, drops what it gets."""
    with ControlServer() as server:
        ours, theirs = (make_pusher(checkpoint, server.url, run=run) for run in ("ours", "theirs"))
        ours.push(lambda: stream(checkpoint), 4)
        assert server.version == "4@ours"
        call = getattr(ours.transport, moment)

        def beside_another_push(*args):
            theirs.push(lambda: stream(checkpoint), 5)
            return call(*args)

        setattr(ours.transport, moment, beside_another_push)
        with pytest.raises(
            WeightPushError,
            match=r"'5@theirs' after .* 'updating to 5@ours': another run pushes to it",
        ):
            ours.push(lambda: stream(checkpoint), 5)
        assert server.version == "mixed with 5@ours"


def test_the_other_run_fails_too_if_it_still_pushes(checkpoint):
    with ControlServer() as server:
        ours, theirs = (make_pusher(checkpoint, server.url, run=run) for run in ("ours", "theirs"))
        send, send_theirs = ours.transport.send, theirs.transport.send

        def begin_theirs(*args):
            ours.transport.send = send
            with pytest.raises(
                WeightPushError,
                match=r"'mixed with 5@ours' after .* 'updating to 5@theirs': another run",
            ):
                theirs.push(lambda: stream(checkpoint), 5)
            return send(*args)

        def end_ours(*args):
            theirs.transport.send = send_theirs
            with pytest.raises(
                WeightPushError, match=r"'updating to 5@theirs' after .* 'updating to 5@ours'"
            ):
                ours._check_alone(5)
            return send_theirs(*args)

        ours.transport.send, theirs.transport.send = begin_theirs, end_ours
        with pytest.raises(
            WeightPushError, match=r"'mixed with 5@theirs' after it was set to 'updating to 5@ours'"
        ):
            ours.push(lambda: stream(checkpoint), 5)


def test_requests_that_are_kept_are_paused_in_place_and_nothing_is_flushed(checkpoint):
    """A server with running requests refuses a flush, and a flush in the update would kill it."""
    with ControlServer() as server:
        report = make_pusher(checkpoint, server.url).push(
            lambda: stream(checkpoint), 4, keep_requests=True
        )
    assert server.paths == [path for path in ORDER if path != "/flush_cache"]
    assert (
        dict(server.calls)["/pause_generation"] == {"mode": "in_place"}
        and report.refused_flushes == 0
    )
    assert dict(server.calls)["/update_weights_from_disk"]["flush_cache"] is False


@pytest.mark.parametrize("transport", ["distributed", "colocated"])
@pytest.mark.parametrize("has_sessions", [True, False])
def test_buckets_are_sent_in_a_session_where_the_server_has_them(
    transport, has_sessions, checkpoint, monkeypatch
):
    sender = SimpleNamespace(
        group_name="group", send=lambda flat, loading, timeout: None, close=lambda: None
    )
    # a broadcast needs a real server
    monkeypatch.setattr(Distributed, "_connect", lambda self, servers: sender)
    with ControlServer(begin_weight_update=[] if has_sessions else [(404, 0.0)]) as server:
        report = make_pusher(checkpoint, server.url, transport=transport).push(
            lambda: stream(checkpoint), 4
        )
    update = (
        "/update_weights_from_" + {"distributed": "distributed", "colocated": "tensor"}[transport]
    )
    sent = [
        "/begin_weight_update",
        *[update] * report.num_buckets,
        ORDER[5],
        *["/end_weight_update"] * has_sessions,
    ]
    assert report.num_buckets > 1
    asked_by_transport = [path for path in server.paths[5:] if path != "/server_info"]
    assert server.paths[:5] + asked_by_transport == [*ORDER[:5], *sent, *ORDER[7:]]


def test_a_server_that_was_started_again_is_connected_to_and_verified_at_once(checkpoint, caplog):
    with ControlServer() as one, ControlServer() as two:
        pusher = make_pusher(checkpoint, one.url, two.url)
        pusher.verify_every = 20
        verified, left = [], []
        pusher.transport.leave = lambda servers, urls: left.append(urls)
        for version in range(1, 6):
            if version == 4:
                two.startup_time = {"load_weight": 1.26}
            before = one.paths.count("/weights_checker")
            pusher.push(lambda: stream(checkpoint), version)
            verified.append(one.paths.count("/weights_checker") - before)
    assert verified == [1, 0, 0, 1, 0]
    assert left == [[one.url]], "the other one knows nothing of the group"
    assert f"started again since the last weight sync: {two.url}" in caplog.text


def test_the_first_push_to_a_set_of_servers_and_every_nth_one_is_verified(checkpoint):
    with ControlServer() as one, ControlServer() as two:
        pusher = make_pusher(checkpoint, one.url)
        pusher.verify_every = 4  # with 3 a step of 2 would do the same

        def is_verified(version):
            before = one.paths.count("/weights_checker")
            report = pusher.push(lambda: stream(checkpoint), version)
            assert (one.paths.count("/weights_checker") > before) == (report.verified is not None)
            return report.verified is not None

        verified = [version for version in range(1, 11) if is_verified(version)]
        assert verified == [1, 5, 9]
        pusher.set_urls([one.url])
        assert not is_verified(11), "the same servers"
        pusher.set_urls([one.url, two.url])
        assert [version for version in range(12, 18) if is_verified(version)] == [12, 16]
        pusher.set_urls([one.url])
        assert is_verified(18), "fewer servers"


def test_a_refused_flush_is_repeated_before_anything_is_sent(checkpoint):
    with ControlServer(flush_cache=[(400, 0.0)] * 3) as server:
        report = make_pusher(checkpoint, server.url).push(lambda: stream(checkpoint), 4)
    assert server.paths == [ORDER[0]] + ["/flush_cache"] * 4 + ORDER[2:]
    assert report.refused_flushes == 3


def test_a_flush_that_is_always_refused_ends_in_an_error(checkpoint):
    with ControlServer(flush_cache=[(400, 0.0)] * 1000) as server:
        with pytest.raises(
            WeightPushError, match=r"/flush_cache answered 400 \(\d+ times\): .*answer 400"
        ):
            make_pusher(checkpoint, server.url, timeout_seconds=0.5).push(
                lambda: stream(checkpoint), 4
            )
    assert "/update_weights_from_disk" not in server.paths


@pytest.mark.parametrize(
    "path", sorted({path.removeprefix("/") for path in ORDER} - {"flush_cache"})
)
def test_a_server_that_fails_is_named_and_all_stay_paused(path, checkpoint):
    with ControlServer() as good, ControlServer(**{path: [(500, 0.0)]}) as bad:
        with pytest.raises(WeightPushError, match="answer 500") as caught:
            make_pusher(checkpoint, good.url, bad.url).push(lambda: stream(checkpoint), 4)
    assert f"{bad.url}/{path}" in str(caught.value)
    if path != "continue_generation":
        assert "/continue_generation" not in good.paths + bad.paths


def test_a_server_that_hangs_is_named_at_the_deadline(checkpoint):
    with ControlServer(update_weights_from_disk=[(200, 20.0)]) as server:
        start = time.monotonic()
        with pytest.raises(WeightPushError, match=r"did not answer within 0\.5 s") as caught:
            make_pusher(checkpoint, server.url, timeout_seconds=0.5).push(
                lambda: stream(checkpoint), 4
            )
        assert time.monotonic() - start < 10
    assert f"{server.url}/update_weights_from_disk" in str(caught.value)


def test_a_version_that_did_not_arrive_stops_before_continuing(checkpoint):
    with ControlServer() as good, ControlServer(forgets_version=True) as bad:
        with pytest.raises(
            WeightPushError,
            match="reports weight version '0' after it was set to 'updating to 4': it was",
        ) as caught:
            make_pusher(checkpoint, good.url, bad.url).push(lambda: stream(checkpoint), 4)
    assert bad.url in str(caught.value)
    assert "/continue_generation" not in good.paths + bad.paths


def test_tensors_go_out_in_the_servers_dtype_except_those_stored_wider(checkpoint):
    with ControlServer() as server:
        pusher = make_pusher(checkpoint, server.url)
        pusher.push(lambda: stream(checkpoint, torch.float64), 4)
        (folder,) = pusher.transport.folder.iterdir()
        sent = {
            name: tensor
            for file in folder.glob("*.safetensors")
            for name, tensor in load_file(file).items()
        }
        pusher.close()
        assert not folder.exists()
    assert_close(sent, load_file(checkpoint / "model.safetensors"), rtol=0, atol=0)
    in_float32 = expected_tensors(checkpoint, torch.float32)
    assert {dtype for _, dtype in in_float32.values()} == {torch.float32}


def test_an_expert_selection_bias_is_sent_as_stored(tmp_path):
    """Also where the whole checkpoint is float32: servers keep it so, and would select others."""
    bias = "model.layers.0.mlp.gate.e_score_correction_bias"
    tensors = {"model.norm.weight": torch.zeros(4), bias: torch.zeros(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    expected = expected_tensors(tmp_path, torch.bfloat16)
    assert {name: dtype for name, (_, dtype) in expected.items()} == {
        "model.norm.weight": torch.bfloat16, bias: torch.float32,
    }  # fmt: skip


def test_fp8_rounds_what_the_servers_get_and_only_that(checkpoint):
    with ControlServer() as server:
        pusher = make_pusher(checkpoint, server.url, fp8_keep=("layers.1.*",))
        pusher.push(lambda: stream(checkpoint), 4)
        (folder,) = pusher.transport.folder.iterdir()
        sent = {
            name: tensor
            for file in folder.glob("*.safetensors")
            for name, tensor in load_file(file).items()
        }
        pusher.close()
    before = load_file(checkpoint / "model.safetensors")
    rounded = {
        name: dequantize_blocks(*quantize_blocks(before[name])).bfloat16()
        for name in ("layers.0.weight", "layers.2.weight")
    }
    assert all(not torch.equal(tensor, before[name]) for name, tensor in rounded.items())
    assert_close(sent, before | rounded, rtol=0, atol=0)


def test_fp8_of_a_diverged_model_stops_the_push_with_the_servers_paused(checkpoint):
    with ControlServer() as server:
        weights = [each._replace(tensor=each.tensor * float("nan")) for each in stream(checkpoint)]
        with pytest.raises(QuantizeError, match=r"layers\.\d\.weight"):
            make_pusher(checkpoint, server.url, fp8_keep=()).push(lambda: weights, 4)
    assert server.paths == ORDER[:5]


def test_a_quantised_checkpoint_is_refused(tmp_path):
    save_file({"weight": torch.zeros(4, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightPushError, match="dtype I8"):
        expected_tensors(tmp_path, torch.bfloat16)


def test_a_bucket_is_the_tensors_bytes_end_to_end():
    torch.manual_seed(0)
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7, 4).t(), "c": torch.tensor(2.5)}
    assert not tensors["b"].is_contiguous()
    bucket = Bucket(CPU)
    for name, tensor in tensors.items():
        bucket.add(name, tensor, torch.bfloat16)
    assert bucket.describe() == {
        "names": ["a", "b", "c"],
        "dtypes": ["bfloat16"] * 3,
        "shapes": [[3, 5], [4, 7], []],
    }
    # as FlattenedTensorBucket.reconstruct_tensors cuts it
    values = bucket.flat().view(torch.bfloat16)
    assert bucket.num_bytes == values.nbytes == 2 * (15 + 28 + 1)
    assert_close(values[:15].view(3, 5), tensors["a"].bfloat16(), rtol=0, atol=0)
    assert_close(values[15:43].view(4, 7), tensors["b"].bfloat16(), rtol=0, atol=0)
    assert values[43] == 2.5


# joins as an SGLang worker does and says so; receives a bucket and prints its sum where asked to,
# else just sits there
PEER = """
import json, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _new_process_group_helper
print("ready", flush=True)
body = json.loads(sys.stdin.readline())
minute = timedelta(seconds=60)
store = dist.TCPStore(
    body["master_address"], body["master_port"], body["world_size"], False, minute)
name = body["group_name"]
store = dist.PrefixStore(name, store)
group, _ = _new_process_group_helper(
    2, 1, [], body["backend"], store, group_name=name, timeout=minute)
print("joined", flush=True)
if len(sys.argv) > 1:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    flat = torch.zeros(int(sys.argv[1]), dtype=torch.uint8)
    time.sleep(float(sys.argv[2]) if len(sys.argv) > 2 else 0)
    group.broadcast([flat], options).wait()
    print(flat.view(torch.float32).sum().item(), flush=True)
time.sleep(120)
"""


class Peer:
    """A process that has imported torch, so that it joins a group as fast as a server does."""

    def __init__(self, *args: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PEER, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.line() == "ready"

    def line(self) -> str:
        return self.process.stdout.readline().strip()

    def join(self, body: dict) -> list:
        self.process.stdin.write(json.dumps(body) + "\n")
        self.process.stdin.flush()
        return []

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start_peer():
    """start_peer(num_bytes, seconds_before_receiving) -> a Peer."""
    peers = []

    def start(*args):
        peers.append(Peer(*args))
        return peers[-1]

    yield start
    for peer in peers:
        peer.kill()


def connect_to(peer, timeout=60):
    return connect(
        ["http://127.0.0.1:1"], world_size=2, device=CPU, timeout=timeout, join=peer.join
    )


@pytest.mark.parametrize("fate", ["hangs", "dies"])
def test_a_broadcast_whose_receiver_is_gone_ends_at_the_deadline_or_before(fate, start_peer):
    peer = start_peer()
    bucket = Bucket(CPU)
    bucket.add("weight", torch.zeros(2**24), torch.float32)  # more than socket buffers hold
    sender = connect_to(peer)
    assert peer.line() == "joined"
    start = time.monotonic()
    if fate == "dies":
        peer.kill()
    with pytest.raises(
        BroadcastError, match="did not end within 1 s" if fate == "hangs" else "broadcast failed"
    ):
        sender.send(bucket.flat(), [], timeout=1.0 if fate == "hangs" else 30.0)
    assert time.monotonic() - start < 10


def test_a_broadcast_may_take_as_long_as_a_weight_sync_although_joining_may_not(
    start_peer, monkeypatch
):
    """On GPUs torch's watchdog would end the process when the time of the group is over."""
    monkeypatch.setattr(buckets, "CONNECT_TIMEOUT_SECONDS", 8.0)
    peer = start_peer(str(4 * 2**22), "12")  # more than socket buffers hold
    bucket = Bucket(CPU)
    bucket.add("weight", torch.full((2**22,), 0.5), torch.float32)
    sender = connect_to(peer)
    sender.send(bucket.flat(), [], timeout=60)
    assert peer.line() == "joined"
    assert float(peer.line()) == 2**21
    sender.close()


def test_the_group_lives_beside_the_groups_of_a_torchrun_job(start_peer, monkeypatch):
    """torchrun sets a variable that makes torch's own rendezvous look for the agent's store."""
    peer = start_peer(str(4 * 1000))  # a server does not run under torchrun
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    bucket = Bucket(CPU)
    bucket.add("weight", torch.full((10, 100), 0.5), torch.float32)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sender = connect_to(peer)
        sender.send(bucket.flat(), [], timeout=30)
        assert peer.line() == "joined"
        assert float(peer.line()) == 500.0
        sender.close()
    finally:
        dist.destroy_process_group()


def test_a_server_that_refuses_to_join_is_quoted():
    def join(body):
        future: Future = Future()
        future.set_exception(WeightPushError("server http://x answered 400: no"))
        return [future]

    start = time.monotonic()
    with pytest.raises(BroadcastError, match="answered 400: no"):
        connect(["http://127.0.0.1:1"], world_size=2, device=CPU, timeout=2, join=join)
    assert time.monotonic() - start < 10


def test_tensors_that_servers_fuse_share_a_bucket(tmp_path: Path) -> None:
    """However small buckets are: apart, SGLang would keep the old ones without a word."""
    path = family_checkpoint(tmp_path, "deepseek_v3")
    pusher = WeightPusher(
        ServerAccess(["http://127.0.0.1:9"], 1),
        PushedWeights(path, torch.float32),
        TransportSettings("distributed", bucket_mb=0, device=CPU, disk_dir=tmp_path),
    )
    tensors = load_file(path / "model.safetensors")
    names = [name for entry in entries(make_spec(load_hf_config(path))) for name in entry.hf_names]
    stream = checked_stream(given((name, tensors[name]) for name in names), pusher.expected, path)
    buckets = [
        [each.name for each in batch.tensors]
        for batch in batches(stream, pusher.bucket_bytes, of_one_dtype=True)
    ]
    pusher.close()
    pairs = [
        [f"model.layers.{layer}.self_attn.{part}.weight" for part in FUSED] for layer in range(3)
    ]
    assert [bucket for bucket in buckets if len(bucket) > 1] == pairs
    assert sorted(name for bucket in buckets for name in bucket) == sorted(names)
