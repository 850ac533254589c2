"""slime's own weight update, UpdateWeightFromDistributed, run from a source checkout over gloo, for
comparison in push.py.

Its gathers, conversion, buckets and broadcasts are unchanged, over megatron-core's own groups.
Replaced, as they need Ray or a
GPU: ray.get and the engines' methods (a thread with an HTTP call each), the lock actor (the job's
store), the accelerator module (the CPU), and two imports of which only a type and one function are
used.  Its names of parameters are TransformerEngine's.
"""

from __future__ import annotations

import importlib
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes

from benchmarks.peers import make_packages
from megatron_rl.distributed import Parallel
from megatron_rl.models.spec import ModelSpec

LOCK = "slime_lock"


def slime_push(
    checkout: Path,
    chunks: list[torch.nn.Module],
    spec: ModelSpec,
    parallel: Parallel,
    urls: list[str],
    bucket_bytes: int,
) -> Callable[[], None]:
    """Push one weight update to the servers at `urls`.  Collective."""
    module = load(checkout)
    importlib.import_module("slime.utils.distributed_utils").init_gloo_group()
    args = Namespace(
        num_experts=spec.num_experts, vocab_size=spec.vocab_size, kv_channels=spec.head_dim,
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_heads, num_query_groups=spec.num_kv_heads, q_lora_rank=None,
        update_weight_buffer_size=bucket_bytes, rollout_num_gpus_per_engine=1,
    )  # fmt: skip
    model = [Renamed(chunk) for chunk in chunks]
    update = module.UpdateWeightFromDistributed(
        args, model, dict, model_name="qwen3_moe", quantization_config=None
    )
    store = dist.distributed_c10d._get_default_store()
    if parallel.rank == 0:
        store.set(LOCK, "free")
    dist.barrier()
    threads = ThreadPoolExecutor(len(urls) + 1)
    me = f"rank {parallel.rank}"
    lock = SimpleNamespace(
        acquire=Remote(threads, lambda: store.compare_set(LOCK, "free", me) == me.encode()),
        release=Remote(threads, lambda: store.set(LOCK, "free")),
    )
    for rank in range(parallel.world_size):
        if rank == parallel.rank:
            update.connect_rollout_engines([Engine(url, threads) for url in urls], lock)
        # two sources at once can wait for each other: a server joins one group after the other
        dist.barrier()
    return update.update_weights


class Renamed:
    """A model chunk under the names that slime reads: those of layers of TransformerEngine."""

    def __init__(self, chunk: torch.nn.Module) -> None:
        self.chunk = chunk
        self.config = chunk.config

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for name, parameter in self.chunk.named_parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
            name = re.sub(
                r"local_experts\.(\d+)\.(\w+)\.weight", r"\2.weight\1", name.removeprefix("module.")
            )
            name = name.replace(
                "input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"
            )
            yield f"module.module.{name}", parameter

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.chunk.named_buffers()


class Remote:
    """Stands for a method of a Ray actor: `.remote(...)` returns at once."""

    def __init__(self, threads: ThreadPoolExecutor, function: Callable[..., Any]) -> None:
        self.threads = threads
        self.function = function

    def remote(self, *args: Any, **options: Any) -> Future[Any]:
        return self.threads.submit(self.function, *args, **options)


class Engine:
    """A receiver's endpoints as methods of an engine."""

    def __init__(self, url: str, threads: ThreadPoolExecutor) -> None:
        self.http = httpx.Client(base_url=url, timeout=300, trust_env=False)
        self.threads = threads

    def __getattr__(self, name: str) -> Remote:
        return Remote(self.threads, lambda **body: self.post(name, body))

    def post(self, name: str, body: dict[str, Any]) -> None:
        if name == "pause_generation":
            body["mode"] = "abort"
        if "dtypes" in body:
            body["dtypes"] = [str(dtype).removeprefix("torch.") for dtype in body["dtypes"]]
        self.http.post(f"/{name}", json=body).raise_for_status()


def load(checkout: Path) -> ModuleType:
    """Load the module of the update.  Raises ImportError for a checkout without it."""

    def get(refs: Any) -> Any:
        return [ref.result() for ref in refs] if isinstance(refs, list) else refs.result()

    stand_in("ray", get=get, ObjectRef=Future, _private=SimpleNamespace(services=Services))
    stand_in("ray.actor", ActorHandle=object)
    megatron = "slime.backends.megatron_utils"
    make_packages(
        checkout, "slime", "slime.utils", "slime.backends", megatron, f"{megatron}.update_weight"
    )
    stand_in("slime.utils.types", ParamInfo=object)
    stand_in("slime.utils.http_utils", _wrap_ipv6=str)
    accelerator = stand_in(
        "slime.utils.accelerator",
        current_device=lambda: "cpu",
        weight_update_backend=lambda: "gloo",
    )
    sys.modules["slime.utils"].accelerator = accelerator  # type: ignore[attr-defined]
    return importlib.import_module(f"{megatron}.update_weight.update_weight_from_distributed")


class Services:
    @staticmethod
    def get_node_ip_address() -> str:
        return "127.0.0.1"


def stand_in(name: str, **content: Any) -> ModuleType:
    module = sys.modules[name] = ModuleType(name)
    vars(module).update(content)
    return module
