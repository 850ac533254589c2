"""New weights reach a real SGLang server by every transport: it then samples what transformers
computes with them.
"""

import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.config import RolloutConfig
from megatron_rl.records import Prompt
from megatron_rl.rollout.client.client import RolloutClient
from megatron_rl.rollout.client.sampling import SampleRules
from megatron_rl.rollout.server.ports import free_port
from megatron_rl.rollout.server.process import launch_server
from megatron_rl.rollout.server.server_info import server_info
from megatron_rl.weights.hf.fp8 import dequantize_blocks, quantize_blocks
from megatron_rl.weights.sync.buckets import Bucket
from megatron_rl.weights.sync.push import WeightPusher, WeightPushError
from megatron_rl.weights.sync.pushed_weights import PushedWeights
from megatron_rl.weights.sync.servers import ServerAccess
from megatron_rl.weights.sync.transports import TransportSettings
from tests.e2e.reference import TINY_SPEC, assert_is_from
from tests.one_rank import given
from tests.tiny import random_checkpoint

SERVED_TENSORS = 3 + 4 * 9
"""Embedding, last norm and head; of each layer 2 + 2 norms, qkv, o, router, w13 and w2."""
WHOLE_TENSORS = 1 + 4 * 5
"""Of these, what every rank of a server has as a whole: norms and routers."""
PUSHES = int(os.environ.get("PUSHES", "20"))
PROMPT = Prompt(id="q", text="", token_ids=(5, 9, 13, 40, 7, 22, 31, 8), label="")


@pytest.fixture(scope="module")
def make_pusher(sglang_server, tiny_checkpoint, tmp_path_factory):
    """make_pusher(transport) -> WeightPusher; afterwards the server has its first weights again."""
    pushers = []

    def make(transport: str, *urls: str, timeout_seconds: float = 60.0) -> WeightPusher:
        pusher = WeightPusher(
            ServerAccess(
                urls or [sglang_server.url],
                timeout_seconds,
                settings={sglang_server.url: server_info(sglang_server.url).settings},
            ),
            PushedWeights(tiny_checkpoint, torch.float32),
            TransportSettings(
                transport,
                bucket_mb=1,
                device=torch.device("cpu"),
                disk_dir=tmp_path_factory.mktemp("push"),
            ),
            verify_every=1,
        )
        pushers.append(pusher)
        return pusher

    yield make
    pushers[0].push(lambda: given(load_weights(tiny_checkpoint)), next_version(sglang_server))
    for pusher in pushers:
        pusher.close()


def next_version(sglang_server) -> int:
    return int(server_info(sglang_server.url).weight_version) + 1


def load_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "model.safetensors")


def assert_serves(sglang_server, rollout_config, checkpoint: Path, version: int) -> None:
    """The same prompt as ever: a prefix cached under other weights would give other log-probs or
    routes.
    """
    client = RolloutClient(
        [sglang_server.url], rollout_config, SampleRules(TINY_SPEC, want_routes=True)
    )
    settings = {
        "temperature": 1.0,
        "max_tokens": 12,
        "stop_token_ids": (),
        "policy_version": version,
    }
    (group,) = client.generate([PROMPT], 4, **settings)
    for rollout in group.rollouts:
        assert_is_from(checkpoint, rollout)


def awkward(weights: dict[str, torch.Tensor]):
    """The stream as a trainer may yield it: float64, and every second matrix transposed in
    memory.
    """
    for i, (name, tensor) in enumerate(weights.items()):
        tensor = tensor.double()
        if i % 2 and tensor.dim() == 2:
            tensor = tensor.t().contiguous().t()
            assert not tensor.is_contiguous()
        yield name, tensor


@pytest.mark.parametrize("transport", ["distributed", "disk", "colocated"])
def test_a_push_replaces_every_weight_and_every_cached_prefix(
    transport, make_pusher, sglang_server, rollout_config, tmp_path
):
    pusher = make_pusher(transport)
    pusher.bucket_bytes = 100_000
    first = next_version(sglang_server)
    for seed in (1, 2):
        checkpoint = random_checkpoint(tmp_path / str(seed), seed=seed)
        weights = load_weights(checkpoint)
        report = pusher.push(partial(given, list(awkward(weights))), first + seed)
        assert report.num_bytes == sum(tensor.numel() * 4 for tensor in weights.values())
        assert report.num_buckets > 8 and report.verified == SERVED_TENSORS
        assert server_info(sglang_server.url).weight_version == str(first + seed)
        answer = httpx.post(f"{sglang_server.url}/end_weight_update", json={})
        assert answer.status_code == 400 and "no weight-update session is open" in answer.text, (
            answer.text
        )
        assert_serves(sglang_server, rollout_config, checkpoint, first + seed)
    if transport == "disk":
        assert [path.name for path in pusher.transport.folder.iterdir()] == [f"weights_{first + 2}"]


@pytest.mark.parametrize("transport", ["distributed", "disk"])
def test_fp8_rollouts_are_sampled_from_the_rounded_weights(
    transport, make_pusher, sglang_server, rollout_config, tmp_path
):
    weights = load_weights(random_checkpoint(tmp_path / "trained", seed=3))
    rounded = {
        name: tensor if any(word in name for word in ("norm", "embed", "lm_head", "mlp.gate.")) else
        dequantize_blocks(*quantize_blocks(tensor)) for name, tensor in weights.items()
    }  # fmt: skip
    assert sum(not torch.equal(rounded[name], tensor) for name, tensor in weights.items()) == 4 * (
        4 + 8 * 3
    )
    # config.json for the reference; its weights are replaced
    served = random_checkpoint(tmp_path / "served", seed=3)
    save_file(rounded, served / "model.safetensors", metadata={"format": "pt"})
    pusher = make_pusher(transport)
    pusher.weights = replace(pusher.weights, fp8_keep=RolloutConfig().quantize_keep)
    version = next_version(sglang_server)
    pusher.push(lambda: given(weights), version)
    assert_serves(sglang_server, rollout_config, served, version)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["distributed", "disk", "colocated"])
def test_after_every_push_the_server_is_the_new_model(
    transport, make_pusher, sglang_server, rollout_config, tmp_path
):
    """Log-probs within 1e-4 and every expert of transformers' forward; PUSHES (environment) of
    them.
    """
    pusher = make_pusher(transport)
    pusher.bucket_bytes = 100_000
    checkpoints = [random_checkpoint(tmp_path / str(seed), seed=seed) for seed in (1, 2, 3)]
    first, seconds = next_version(sglang_server), []
    for push in range(PUSHES):
        checkpoint = checkpoints[push % 3]
        seconds.append(pusher.push(partial(given, load_weights(checkpoint)), first + push).seconds)
        assert_serves(sglang_server, rollout_config, checkpoint, first + push)
    print(
        f"{transport}: {PUSHES} pushes to 1 server, median {sorted(seconds)[PUSHES // 2]:.3f} s,"
        f" max {max(seconds):.3f} s"
    )


def one_wrong_value(bucket: Bucket) -> None:
    index = bucket.names.index("model.layers.2.self_attn.o_proj.weight")
    bucket.parts[index] = bucket.parts[index].clone()
    bucket.parts[index][3, 5] += 1e-3


def swapped_experts(bucket: Bucket) -> None:
    one, two = (
        bucket.names.index(f"model.layers.1.mlp.experts.{expert}.up_proj.weight")
        for expert in (2, 6)
    )
    bucket.parts[one], bucket.parts[two] = bucket.parts[two], bucket.parts[one]


def rounded_router(bucket: Bucket) -> None:
    index = bucket.names.index("model.layers.3.mlp.gate.weight")
    bucket.parts[index] = bucket.parts[index].bfloat16().float()


def skipped_tensor(bucket: Bucket) -> None:
    index = bucket.names.index("model.layers.0.self_attn.k_proj.weight")
    bucket.num_bytes -= bucket.parts[index].nbytes
    del bucket.names[index], bucket.shapes[index], bucket.parts[index]


def send_with(fault, pusher: WeightPusher, patch: pytest.MonkeyPatch) -> None:
    """From now on `fault` changes what the pusher sends, which is all in one bucket."""
    pusher.bucket_bytes = 2**24
    send = pusher.transport.send

    def send_wrongly(servers, bucket, version, turn):
        fault(bucket)
        return send(servers, bucket, version, turn)

    patch.setattr(pusher.transport, "send", send_wrongly)


@pytest.mark.parametrize(
    ("fault", "tensor", "of"),
    [
        (one_wrong_value, "layers.2.self_attn.o_proj.weight", "layers.2.self_attn.o_proj.weight"),
        (
            swapped_experts,
            "layers.1.mlp.experts.w13_weight",
            "layers.1.mlp.experts.0.gate_proj.weight",
        ),
        (rounded_router, "layers.3.mlp.gate.weight", "layers.3.mlp.gate.weight"),
        (skipped_tensor, "layers.0.self_attn.qkv_proj.weight", "layers.0.self_attn.q_proj.weight"),
    ],
)
def test_a_server_that_holds_other_weights_is_named_with_the_tensor(
    fault, tensor, of, make_pusher, sglang_server, rollout_config, tmp_path, monkeypatch
):
    """What arrives at the server is changed on the way, once; the next push heals it."""
    pusher, version = make_pusher("distributed"), next_version(sglang_server)
    checkpoint = random_checkpoint(tmp_path / "new", seed=100 + version)  # not what it has
    with monkeypatch.context() as patch:
        send_with(fault, pusher, patch)
        with pytest.raises(
            WeightPushError, match=f"1 of {SERVED_TENSORS} tensors have another checksum"
        ) as caught:
            pusher.push(lambda: given(load_weights(checkpoint)), version)
    assert sglang_server.url in str(caught.value)
    assert f"model.{tensor} (of model.{of}" in str(caught.value)
    assert server_version(sglang_server) == f"updating to {version}"
    assert pusher.push(lambda: given(load_weights(checkpoint)), version).verified == SERVED_TENSORS
    assert_serves(sglang_server, rollout_config, checkpoint, version)


@pytest.mark.slow
def test_a_server_of_two_ranks_is_verified_where_each_rank_has_the_tensor_as_a_whole(
    rollout_config, tiny_checkpoint, tmp_path, monkeypatch
):
    """Its routers and norms.

    A server that is started again at the same address is joined and verified at once.
    """
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    cfg = rollout_config.model_copy(update={"server_args": ("--tp-size", "2"), "port": free_port()})
    new = load_weights(random_checkpoint(tmp_path / "new", seed=7))

    def start():
        return launch_server(
            tiny_checkpoint, cfg, device="cpu", log_path=tmp_path / "server.log", seed=0
        )

    with start() as server:
        pusher = WeightPusher(
            ServerAccess([server.url], 60, settings={server.url: server_info(server.url).settings}),
            PushedWeights(tiny_checkpoint, torch.float32),
            TransportSettings(
                "distributed", bucket_mb=1, device=torch.device("cpu"), disk_dir=tmp_path
            ),
            verify_every=20,
        )
        reports = [pusher.push(lambda: given(new), version).verified for version in (1, 2)]
    assert reports == [WHOLE_TENSORS, None]
    with start() as server:
        assert pusher.push(lambda: given(new), 3).verified == WHOLE_TENSORS
        assert pusher.push(lambda: given(new), 4).verified is None
        pusher.pushes_since_check = 0
        send_with(rounded_router, pusher, monkeypatch)
        with pytest.raises(
            WeightPushError,
            match=rf"1 of {WHOLE_TENSORS} tensors .*: model\.layers\.3\.mlp\.gate\.weight",
        ):
            pusher.push(lambda: given(new), 5)
        pusher.close()


def test_a_server_that_somebody_restarted_with_another_setting_is_named(
    make_pusher, sglang_server, tiny_checkpoint
):
    """As a restart would: what the server reports now is not what it reported when it was
    checked.
    """
    pusher, version = make_pusher("disk"), next_version(sglang_server)
    assert pusher.settings is not None
    pusher.settings[sglang_server.url] = {
        **pusher.settings[sglang_server.url],
        "enable_mixed_chunk": True,
    }
    with pytest.raises(
        WeightPushError, match="other settings: enable_mixed_chunk = false, was true"
    ) as caught:
        pusher.push(lambda: given(load_weights(tiny_checkpoint)), version)
    assert sglang_server.url in str(caught.value)
    httpx.post(f"{sglang_server.url}/continue_generation", json={}).raise_for_status()


def drop_last(weights):
    return list(weights.items())[:-1]


def rename(weights):
    return [
        (name.replace("layers.2.mlp.gate", "layers.2.mlp.router"), tensor)
        for name, tensor in weights.items()
    ]


def reshape(weights):
    return [(name, tensor[:-1] if "embed" in name else tensor) for name, tensor in weights.items()]


def repeat(weights):
    return [*weights.items(), next(iter(weights.items()))]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (drop_last, "were not exported, first"),
        (rename, "is not in"),
        (reshape, r"has shape \(63, 64\)"),
        (repeat, "occurs twice"),
    ],
)
def test_an_export_that_is_not_the_checkpoint_stops_and_the_next_push_heals(
    damage, words, make_pusher, sglang_server, rollout_config, tiny_checkpoint
):
    pusher = make_pusher("distributed")
    pusher.bucket_bytes = 100_000
    version = next_version(sglang_server)
    weights = load_weights(tiny_checkpoint)
    with pytest.raises(WeightPushError, match=words):
        pusher.push(lambda: given(damage(weights)), version)
    assert server_version(sglang_server) == f"updating to {version}"
    pusher.push(lambda: given(weights), version)
    assert_serves(sglang_server, rollout_config, tiny_checkpoint, version)


def server_version(sglang_server) -> str:
    return httpx.get(f"{sglang_server.url}/model_info").json()["weight_version"]


def test_a_server_that_is_not_there_is_named_at_once(make_pusher, tiny_checkpoint):
    pusher = make_pusher("distributed", "http://127.0.0.1:9", timeout_seconds=60)
    start = time.monotonic()
    with pytest.raises(
        WeightPushError, match=r"http://127\.0\.0\.1:9/pause_generation cannot be reached"
    ):
        pusher.push(lambda: given(load_weights(tiny_checkpoint)), 1)
    assert time.monotonic() - start < 50
