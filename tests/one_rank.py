"""The Inference of a one-rank job with its own servers, and given weights in place of an engine."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.config import Config, load_config
from megatron_rl.models.spec import ModelSizes
from megatron_rl.rollout.client.client import RolloutClient
from megatron_rl.rollout.client.sampling import SampleRules
from megatron_rl.rollout.inference import Inference
from megatron_rl.rollout.server.server_pool import ServerPool
from megatron_rl.weights.hf.export import HFStream, HFTensor
from megatron_rl.weights.sync.push import WeightPusher
from megatron_rl.weights.sync.pushed_weights import PushedWeights
from megatron_rl.weights.sync.servers import ServerAccess
from megatron_rl.weights.sync.transports import TransportSettings


def given(tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> HFStream:
    """What an engine exports, of which rank 0 has every tensor."""
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    return (HFTensor(name, tuple(tensor.shape), tensor.dtype, 0, tensor) for name, tensor in pairs)


def one_rank_config(checkpoint: Path, **rollout) -> Config:
    sections = {
        "run": {"device": "cpu", "dir": str(checkpoint.parent / "runs")},
        "model": {"path": str(checkpoint), "dtype": "float32"},
        "data": {"train": "none.jsonl"},
        "rollout": {"dtype": "float32", "request_timeout_seconds": 60.0, "max_retries": 2}
        | rollout,
    }
    return load_config(None, [], sections)


@contextmanager
def one_rank_inference(
    cfg: Config,
    spec: ModelSizes,
    export: Callable[[], Iterable[tuple[str, torch.Tensor]]],
    server_pool: ServerPool | None,
) -> Iterator[Inference]:
    """`export` yields what the trainer's engine would: HF names and tensors.

    Enter `server_pool` first.
    """
    urls = cfg.rollout.urls if server_pool is None else server_pool.take()
    pusher = WeightPusher(
        ServerAccess(urls, cfg.rollout.request_timeout_seconds),
        PushedWeights(cfg.model.path, torch.float32),
        TransportSettings(
            cfg.rollout.weight_sync,
            bucket_mb=1,
            device=torch.device("cpu"),
            disk_dir=cfg.run_dir / "weights",
        ),
    )
    client = RolloutClient(urls, cfg.rollout, SampleRules(spec, want_routes=True))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield Inference(
            lambda: given(export()),
            client=client,
            pusher=pusher,
            server_pool=server_pool,
            urls=urls,
            log=print,
        )
    finally:
        pusher.close()
        dist.destroy_process_group()


def make_server_pool(cfg: Config, log: Callable[[str], None] = print) -> ServerPool:
    return ServerPool(
        cfg.model.path,
        cfg.rollout,
        device="cpu",
        log_dir=cfg.run_dir,
        seed=0,
        want_routes=True,
        log=log,
    )
