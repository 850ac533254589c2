"""verl's and slime's own alignment of rollout routes, run from source checkouts, for comparison in
align.py.

Their functions query megatron-core's process-wide parallel state, which is replaced by one that
returns the sizes and ranks of a Job.  Only the modules with those functions are imported,
unchanged, not their packages.  Exceptions: verl.utils.model is a stand-in with the one required
name (a type), unless its dependencies are installed.  Without CUDA, verl's device is the CPU and
slime's pinned buffers are plain memory, which is faster.
Shapes: S tokens of a rollout, N layers of the model, dense ones included, K top-k, t rows of the
rank.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


@dataclass(frozen=True)
class Job:
    """The place of a rank."""

    num_layers: int
    num_experts: int
    chunks: tuple[tuple[int, ...], ...]
    """Indices of the MoE layers of each model chunk (VPP), among the model's `num_layers`."""
    tp_rank: int
    tp_size: int
    cp_rank: int
    cp_size: int
    sequence_parallel: bool
    pad_multiplier: int = 1


@dataclass(frozen=True)
class Peer:
    """A peer's alignment."""

    name: str
    inputs: Callable[[Sequence[np.ndarray]], Any]
    """Routes [S - 1, N, K] of a micro-batch's rollouts -> the peer's input, as its trainer gets it.
    """
    align: Callable[[Job, Sequence[Any]], list[list[Tensor]]]
    """(job, inputs) -> ids [t, K] of the routers of each micro-batch, in the peer's type; freed
    when dropped.
    """
    bounds: Callable[[Job, Sequence[int]], list[int]]
    """(job, lengths S) -> the first of T packed rows of each sequence, and T."""


def load_peers(checkouts: Sequence[Path]) -> list[Peer]:
    """Load the peers in source checkouts; prints a line on stderr for a missing one."""
    peers = []
    for checkout in checkouts:
        makers = [
            make
            for name, make in (("verl", load_verl), ("slime", load_slime))
            if (checkout / name).is_dir()
        ]
        if not makers:
            print(f"peers: {checkout} has neither verl/ nor slime/: skipped", file=sys.stderr)
        for make in makers:
            try:
                peers.append(make(checkout))
            except ImportError as error:
                print(
                    f"peers: {checkout} cannot be used: {type(error).__name__}: {error}: skipped",
                    file=sys.stderr,
                )
    return peers


@contextmanager
def parallel_state_of(job: Job) -> Iterator[None]:
    """Let megatron-core's parallel state answer for this rank, in one process without
    communication.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = SimpleNamespace(size=lambda: job.tp_size, rank=lambda: job.tp_rank)
    answers = {
        "is_initialized": True,
        "get_tensor_model_parallel_group": group,
        "get_tensor_model_parallel_world_size": job.tp_size,
        "get_tensor_model_parallel_rank": job.tp_rank,
        "get_context_parallel_world_size": job.cp_size,
        "get_context_parallel_rank": job.cp_rank,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(
                patch.object(parallel_state, name, lambda *_, answer=answer, **__: answer)
            )
        yield


def load_verl(checkout: Path) -> Peer:
    """Load align_r3_router_replay_data, build_r3_replay_mask and set_router_replay_data, which are
    called per micro-batch and model chunk.

    Raises ImportError for a checkout without them (they came in 2026).
    """
    make_packages(
        checkout, "verl", "verl.utils", "verl.utils.megatron", "verl.models", "verl.models.mcore"
    )
    if importlib.util.find_spec("tensordict") is None:
        stand_in = sys.modules["verl.utils.model"] = ModuleType("verl.utils.model")
        stand_in.CausalLMOutputForPPO = object  # type: ignore[attr-defined]
    # gives loggers a method that verl's code calls
    importlib.import_module("transformers.utils.logging")
    utils = importlib.import_module("verl.utils.megatron.router_replay_utils")
    # one warning per short sequence
    importlib.import_module("verl.models.mcore.util").logger.setLevel("ERROR")
    # its own guess is cuda
    setattr(utils, "device_name", "cuda" if torch.cuda.is_available() else "cpu")  # noqa: B010
    replay = importlib.import_module("verl.utils.megatron.router_replay_patch").RouterReplay
    if not all(
        hasattr(utils, name) for name in ("align_r3_router_replay_data", "build_r3_replay_mask")
    ):
        raise ImportError("router_replay_utils has no align_r3_router_replay_data: an older verl")

    def inputs(routes: Sequence[np.ndarray]) -> tuple[Tensor, Tensor, Tensor]:
        parts = [torch.from_numpy(ids.astype(np.int16)) for ids in routes]
        tokens = [torch.zeros(len(ids) + 1, dtype=torch.int64) for ids in routes]
        nested = [
            torch.nested.as_nested_tensor(values, layout=torch.jagged) for values in (parts, tokens)
        ]
        # one response token each is all the mask asks for
        return nested[0], nested[1], torch.ones(len(routes), 1)

    def align(job: Job, micro_batches: Sequence[Any]) -> list[list[Tensor]]:
        config = SimpleNamespace(fp8=None, num_layers=job.num_layers)
        models = [make_chunk(layers, replay) for layers in job.chunks]
        aligned = []
        with parallel_state_of(job):
            for routes, tokens, response_mask in micro_batches:
                for chunk, model in enumerate(models):
                    full = utils.align_r3_router_replay_data(routes, tokens)
                    mask = utils.build_r3_replay_mask(tokens, response_mask)
                    utils.set_router_replay_data(
                        full, None, config, chunk, replay_mask=mask, model=model
                    )
                routers = [router.router_replay for model in models for router in model]
                aligned.append([router.target_topk_idx for router in routers])
                for router in routers:  # as if the micro-batch were done: only one is in flight
                    router.clear_indices()
        replay.router_instances.clear()
        return aligned

    def bounds(job: Job, lengths: Sequence[int]) -> list[int]:
        return running(lengths, job.tp_size * job.cp_size * 2 if job.cp_size > 1 else job.tp_size)

    return Peer("verl", inputs, align, bounds)


def make_chunk(layers: Sequence[int], replay: type) -> torch.nn.ModuleList:
    """Make the object that verl walks to find a model chunk's routers."""
    routers = []
    for layer in layers:
        # only its type, number and replay object are looked at
        router = TopKRouter.__new__(TopKRouter)
        torch.nn.Module.__init__(router)
        router.layer_number, router.router_replay = layer + 1, replay()
        routers.append(router)
    return torch.nn.ModuleList(routers)


def load_slime(checkout: Path) -> Peer:
    """Load prepare_routed_experts_for_routing_replay and RoutingReplay.record, in the loop of its
    actor's fill_routing_replay.

    That loop is copied, because its module needs the complete trainer (Ray).
    """
    make_packages(
        checkout, "slime", "slime.utils", "slime.backends", "slime.backends.megatron_utils"
    )
    prepare = importlib.import_module(
        "slime.backends.megatron_utils.cp_utils"
    ).prepare_routed_experts_for_routing_replay
    module = importlib.import_module("slime.utils.routing_replay")
    replay = module.RoutingReplay
    if not torch.cuda.is_available():
        torch_unpinned = {**vars(torch), "empty_like": unpinned_empty_like}
        vars(module)["torch"] = SimpleNamespace(**torch_unpinned)

    def inputs(routes: Sequence[np.ndarray]) -> tuple[list[Tensor], list[Tensor]]:
        return (
            [torch.from_numpy(ids.astype(np.int32)) for ids in routes],
            [torch.zeros(len(ids) + 1, dtype=torch.int64) for ids in routes],
        )

    def align(job: Job, micro_batches: Sequence[Any]) -> list[list[Tensor]]:
        replays = [replay() for layers in job.chunks for _ in layers]
        with parallel_state_of(job):
            for routes, tokens in micro_batches:
                prepared = prepare(
                    routes,
                    tokens,
                    num_experts=job.num_experts,
                    data_pad_size_multiplier=job.pad_multiplier,
                    sequence_parallel=job.sequence_parallel,
                    allgather_cp=False,
                )
                for router, layer in zip(
                    replays, (x for layers in job.chunks for x in layers), strict=True
                ):
                    router.record(prepared[:, layer])
        replay.all_routing_replays.clear()
        return [
            list(ids) for ids in zip(*(router.top_indices_list for router in replays), strict=True)
        ]

    def bounds(job: Job, lengths: Sequence[int]) -> list[int]:
        starts = running(lengths, 2 * job.cp_size if job.cp_size > 1 else 1)
        return [
            *starts,
            -(-starts[-1] // (rule := job.cp_size * job.tp_size * job.pad_multiplier)) * rule,
        ]

    return Peer("slime", inputs, align, bounds)


def unpinned_empty_like(tensor: Tensor, *, pin_memory: bool = False, **settings: Any) -> Tensor:
    return torch.empty_like(tensor, **settings)


def make_packages(checkout: Path, *names: str) -> None:
    """Make packages whose modules can be imported without running their __init__, which would
    import a complete trainer.
    """
    for name in names:
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [str(checkout / name.replace(".", "/"))]


def running(lengths: Sequence[int], multiple: int) -> list[int]:
    """Return the first row of each sequence, padded to `multiple` rows, and the end of the last
    one.
    """
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] - (-length // multiple) * multiple)
    return starts
